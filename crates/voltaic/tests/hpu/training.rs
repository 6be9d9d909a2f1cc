//! Training on the emulated HPU gives the bits that training on the CPU gives.

use tch::{Kind, Tensor};
use voltaic::models::{Gpt, GptConfig, LeNet, LeNetConfig, Mlp, MlpConfig, ResNet18, ResNet18Config};
use voltaic::nn::{Forward, ModuleExt, set_training};
use voltaic::optim::{AdamW, Optimizers, Sgd};
use voltaic::{Device, Module, ffi};

use crate::support::{CPU, HPU, bits, start};

/// Losses, gradients and weights of a few steps, as bytes.
type Trace = Vec<Vec<u8>>;
type MakeOptimizers = fn() -> Optimizers;

struct Task<M> {
    net: fn() -> M,
    batch: fn() -> (Tensor, Tensor),
    loss: fn(&M, &Tensor, &Tensor) -> Tensor,
}

const STEPS: u64 = 4;

impl<M: Module> Task<M> {
    fn run(&self, device: Device, optimizers: Optimizers) -> Trace {
        ffi::manual_seed(11).unwrap();
        let mut net = (self.net)();
        net.to_device(device).unwrap();
        set_training(&mut net, true);
        let mut optimizer = optimizers.build(&net).unwrap().remove(0).optimizer;
        let place = if device == Device::Cpu { CPU } else { HPU };
        let mut trace = Trace::new();
        for step in 0..STEPS {
            ffi::manual_seed(100 + step).unwrap();
            let (x, y) = (self.batch)();
            // dropout draws from the device's own generator, which after this is where the CPU's is
            ffi::manual_seed(200 + step).unwrap();
            let loss = (self.loss)(&net, &x.to_device(place), &y.to_device(place));
            optimizer.zero_grad().unwrap();
            loss.backward();
            trace.push(bits(&loss));
            trace.extend(net.parameters().iter().map(|p| bits(&p.grad())));
            optimizer.step().unwrap();
        }
        trace.extend(net.state_dict().iter().map(|(_, tensor)| bits(tensor)));
        trace
    }

    fn check(&self, what: &str) {
        let optimizers: [(&str, MakeOptimizers); 3] = [
            ("sgd", || Sgd::new(0.05).momentum(0.9).into()),
            ("adamw", || AdamW::new(1e-3).weight_decay(0.1).into()),
            ("adamw with amsgrad", || AdamW::new(1e-3).amsgrad(true).into()),
        ];
        for (name, optimizer) in optimizers {
            let copied = ffi::hpu_copied_outputs();
            let cpu = self.run(Device::Cpu, optimizer());
            let hpu = self.run(Device::Hpu(0), optimizer());
            let first_difference = cpu.iter().zip(&hpu).position(|(cpu, hpu)| cpu != hpu);
            assert_eq!(first_difference, None, "{what} with {name}");
            assert_eq!(cpu.len(), hpu.len());
            let num_per_step = (cpu.len() - 1) / STEPS as usize;
            assert!(num_per_step > 2 && cpu.iter().all(|bytes| !bytes.is_empty()));
            assert_eq!(ffi::hpu_copied_outputs(), copied, "{what} with {name} copied results");
        }
    }
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
fn a_small_resnet_trains_to_the_same_bits() {
    let _rng = start();
    Task {
        net: || {
            let config = ResNet18Config { width: 4, in_channels: 1, ..ResNet18Config::default() };
            ResNet18::new(config).unwrap()
        },
        batch: || digits(2),
        loss: classify,
    }
    .check("resnet");
}

#[test]
fn a_small_gpt_with_dropout_trains_to_the_same_bits() {
    let _rng = start();
    Task {
        net: || {
            let config = GptConfig {
                vocab_size: 32,
                block_size: 16,
                n_layer: 2,
                n_head: 2,
                n_embd: 16,
                dropout: 0.1,
                bias: true,
            };
            Gpt::new(config).unwrap()
        },
        batch: || {
            let tokens = Tensor::randint(32, [2, 17], (Kind::Int64, CPU));
            (tokens.narrow(1, 0, 16), tokens.narrow(1, 1, 16))
        },
        loss: |net, x, y| net.loss(x, y).unwrap(),
    }
    .check("gpt");
}
