//! Training on the emulated HPU gives the bits that training on the CPU gives.

use tch::{COptimizer, Kind, TchError, Tensor};
use voltaic::models::{Gpt, GptConfig, LeNet, LeNetConfig, Mlp, MlpConfig, ResNet18, ResNet18Config};
use voltaic::nn::{Forward, ModuleExt, set_training};
use voltaic::optim::{AdamW, Optimizer, Optimizers, Sgd};
use voltaic::precision::{OpLists, autocast, reset_op_lists, set_op_lists};
use voltaic::{Device, Module, ffi};

use crate::support::{CPU, HPU, start};

type MakeOptimizer = fn(&dyn Module) -> Box<dyn Step>;

struct Task<M> {
    net: fn() -> M,
    batch: fn() -> (Tensor, Tensor),
    loss: fn(&M, &Tensor, &Tensor) -> Tensor,
}

const STEPS: u64 = 20;

/// What a training loop asks of an optimizer.
trait Step {
    fn step(&mut self);
}

impl Step for Box<dyn Optimizer> {
    fn step(&mut self) {
        (**self).step().unwrap();
    }
}

/// libtorch's own C++ optimizers, which are not fused: each operator is called by itself.
impl Step for COptimizer {
    fn step(&mut self) {
        COptimizer::step(self).unwrap();
    }
}

fn of_voltaic(optimizers: Optimizers, net: &dyn Module) -> Box<dyn Step> {
    Box::new(optimizers.build(net).unwrap().remove(0).optimizer)
}

fn not_fused(optimizer: Result<COptimizer, TchError>, net: &dyn Module) -> Box<dyn Step> {
    let mut optimizer = optimizer.unwrap();
    for parameter in net.parameters() {
        optimizer.add_parameters(parameter.tensor(), 0).unwrap();
    }
    Box::new(optimizer)
}

const OPTIMIZERS: [(&str, MakeOptimizer); 4] = [
    ("sgd", |net| of_voltaic(Sgd::new(0.05).momentum(0.9).into(), net)),
    ("adamw", |net| of_voltaic(AdamW::new(1e-3).weight_decay(0.1).into(), net)),
    ("adamw with amsgrad", |net| of_voltaic(AdamW::new(1e-3).amsgrad(true).into(), net)),
    ("adamw, not fused", |net| not_fused(COptimizer::adamw(1e-3, 0.9, 0.999, 0.1, 1e-8, false), net)),
];

/// A network on a device.
struct Side<M> {
    net: M,
    optimizer: Box<dyn Step>,
    device: Device,
    place: tch::Device,
}

impl<M: Module> Task<M> {
    fn side(&self, device: Device, optimizer: MakeOptimizer) -> Side<M> {
        ffi::manual_seed(11).unwrap();
        let mut net = (self.net)();
        net.to_device(device).unwrap();
        set_training(&mut net, true);
        let optimizer = optimizer(net.as_dyn());
        Side { net, optimizer, device, place: if device == Device::Cpu { CPU } else { HPU } }
    }

    /// Forward, backward and the optimizer's step; gives the loss.
    fn step(&self, side: &mut Side<M>, step: u64, dtype: Option<Kind>) -> Tensor {
        ffi::manual_seed(100 + step).unwrap();
        let (x, y) = (self.batch)();
        // dropout draws from the device's own generator, which after this is where the CPU's is
        ffi::manual_seed(200 + step).unwrap();
        let region = dtype.map(|dtype| autocast(side.device, dtype).unwrap());
        let loss = (self.loss)(&side.net, &x.to_device(side.place), &y.to_device(side.place));
        drop(region);
        for parameter in side.net.parameters() {
            ffi::clear_grads([parameter.tensor()]).unwrap();
        }
        loss.backward();
        side.optimizer.step();
        loss
    }

    /// Losses and gradients of each step, and all weights and buffers after it, are the same bits.
    fn check(&self, what: &str) {
        for (name, optimizer) in OPTIMIZERS {
            self.check_with(what, name, optimizer, None);
        }
        // the CPU by the HPU's lists
        set_op_lists(Device::Cpu, &OpLists::hpu()).unwrap();
        self.check_with(what, "adamw and bf16 autocast", OPTIMIZERS[1].1, Some(Kind::BFloat16));
        reset_op_lists(Device::Cpu).unwrap();
    }

    fn check_with(&self, what: &str, name: &str, optimizer: MakeOptimizer, dtype: Option<Kind>) {
        let copied = ffi::hpu_copied_outputs();
        let [mut cpu, mut hpu] = [Device::Cpu, Device::Hpu(0)].map(|device| self.side(device, optimizer));
        let first = cpu.net.parameters()[0].tensor().copy();
        for step in 0..STEPS {
            let (cpu_loss, hpu_loss) = (self.step(&mut cpu, step, dtype), self.step(&mut hpu, step, dtype));
            let place = |part: &str| format!("{part} of {what} with {name} at step {step}");
            assert_same_bits(&cpu_loss, &hpu_loss, &place("loss"));
            let grads = cpu.net.parameters().into_iter().zip(hpu.net.parameters());
            for (cpu, hpu) in grads {
                assert!(cpu.grad().defined(), "{what}");
                assert_same_bits(&cpu.grad(), &hpu.grad(), &place("gradient"));
            }
            let states = cpu.net.state_dict().into_iter().zip(hpu.net.state_dict());
            for ((fqn, cpu), (_, hpu)) in states {
                assert_same_bits(&cpu, &hpu, &place(&fqn));
            }
        }
        assert!(!first.equal(cpu.net.parameters()[0].tensor()), "{what} with {name} does not train");
        assert_eq!(ffi::hpu_copied_outputs(), copied, "{what} with {name} copied results");
    }
}

fn assert_same_bits(cpu: &Tensor, hpu: &Tensor, what: &str) {
    let hpu = hpu.to_device(CPU);
    let bits = |tensor: &Tensor| match tensor.kind() {
        Kind::Float => tensor.view_dtype(Kind::Int),
        Kind::BFloat16 => tensor.view_dtype(Kind::Int16),
        _ => tensor.shallow_clone(),
    };
    assert!(cpu.kind() == hpu.kind() && bits(cpu).equal(&bits(&hpu)), "{what} differs");
}

fn digits(batch: i64) -> (Tensor, Tensor) {
    let images = Tensor::rand([batch, 1, 28, 28], (Kind::Float, CPU));
    (images, Tensor::randint(10, [batch], (Kind::Int64, CPU)))
}

fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Tensor {
    logits.cross_entropy_loss::<Tensor>(labels, None, tch::Reduction::Mean, -100, 0.0)
}

fn classify<M: Forward>(net: &M, x: &Tensor, y: &Tensor) -> Tensor {
    cross_entropy(&net.forward(x).unwrap(), y)
}

#[test]
fn an_mlp_trains_to_the_same_bits() {
    let _rng = start();
    Task {
        net: || Mlp::new(MlpConfig { hidden_features: 32, ..MlpConfig::default() }).unwrap(),
        batch: || digits(8),
        loss: classify,
    }
    .check("mlp");
}

#[test]
fn lenet_trains_to_the_same_bits() {
    let _rng = start();
    Task { net: || LeNet::new(LeNetConfig::default()).unwrap(), batch: || digits(4), loss: classify }
        .check("lenet");
}

#[test]
fn resnet18_trains_to_the_same_bits() {
    let _rng = start();
    Task {
        net: || ResNet18::new(ResNet18Config { width: 16, ..ResNet18Config::default() }).unwrap(),
        batch: || {
            let images = Tensor::rand([2, 3, 32, 32], (Kind::Float, CPU));
            (images, Tensor::randint(10, [2], (Kind::Int64, CPU)))
        },
        loss: classify,
    }
    .check("resnet18");
}

#[test]
fn gpt_tiny_with_dropout_trains_to_the_same_bits() {
    let _rng = start();
    Task {
        net: || Gpt::new(GptConfig { vocab_size: 65, dropout: 0.1, ..GptConfig::tiny() }).unwrap(),
        batch: || {
            let tokens = Tensor::randint(65, [2, 65], (Kind::Int64, CPU));
            (tokens.narrow(1, 0, 64), tokens.narrow(1, 1, 64))
        },
        loss: |net, x, y| net.loss(x, y).unwrap(),
    }
    .check("gpt-tiny");
}
