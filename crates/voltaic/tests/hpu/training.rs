//! Training on the emulated HPU gives the bits that training on the CPU gives.

use tch::{Kind, Tensor};
use voltaic::models::{Gpt, GptConfig, LeNet, Mlp, ResNet18};
use voltaic::nn::{Forward, ModuleExt, set_training};
use voltaic::optim::{AdamW, Optimizer, Optimizers, Sgd};
use voltaic::{Device, Module, ffi};

use crate::support::{bits, start};

/// Losses, gradients and weights of a few steps, as bytes.
type Trace = Vec<Vec<u8>>;

struct Task<M> {
    net: fn() -> M,
    batch: fn() -> (Tensor, Tensor),
    loss: fn(&M, &Tensor, &Tensor) -> Tensor,
    steps: usize,
}

impl<M: Module> Task<M> {
    fn run(&self, device: Device, optimizers: Optimizers) -> Trace {
        ffi::manual_seed(11).unwrap();
        let mut net = (self.net)();
        net.to_device(device).unwrap();
        set_training(&mut net, true);
        let mut optimizer = optimizers.build(&net).unwrap().remove(0).optimizer;
        ffi::manual_seed(12).unwrap();
        let place = match device {
            Device::Hpu(index) => tch::Device::Cuda(64 + index),
            _ => tch::Device::Cpu,
        };
        let mut trace = Trace::new();
        for step in 0..self.steps {
            let batch_rng = ffi::rng_state(0, 0).unwrap();
            ffi::manual_seed(100 + step as u64).unwrap();
            let (x, y) = (self.batch)();
            let _ = batch_rng;
            let loss = (self.loss)(&net, &x.to_device(place), &y.to_device(place));
            optimizer.zero_grad().unwrap();
            loss.backward();
            trace.push(bits(&loss));
            trace.extend(net.parameters().iter().map(|p| bits(&p.grad())));
            optimizer.step().unwrap();
        }
        trace.extend(net.parameters().iter().map(|p| bits(p.tensor())));
        trace.extend(net.buffers().iter().map(|b| bits(b.tensor())));
        trace
    }

    fn check(&self, what: &str) {
        let optimizers: [(&str, fn() -> Optimizers); 3] = [
            ("sgd", || Sgd::new(0.05).momentum(0.9).into()),
            ("adamw", || AdamW::new(1e-3).weight_decay(0.1).into()),
            ("adamw with amsgrad", || AdamW::new(1e-3).amsgrad(true).into()),
        ];
        for (name, optimizer) in optimizers {
            let copied = ffi::hpu_copied_outputs();
            let cpu = self.run(Device::Cpu, optimizer());
            let hpu = self.run(Device::Hpu(0), optimizer());
            assert!(cpu == hpu, "{what} with {name}: first difference at {:?}", first_difference(&cpu, &hpu));
            assert_ne!(cpu[0], cpu[cpu.len() / 2], "{what} does train");
            assert_eq!(ffi::hpu_copied_outputs(), copied, "{what} with {name} copied results");
        }
    }
}

fn first_difference(a: &Trace, b: &Trace) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

fn digits(batch: i64) -> (Tensor, Tensor) {
    let on_cpu = |kind| (kind, tch::Device::Cpu);
    (Tensor::rand([batch, 1, 28, 28], on_cpu(Kind::Float)), Tensor::randint(10, [batch], on_cpu(Kind::Int64)))
}

#[test]
fn an_mlp_trains_to_the_same_bits() {
    let _rng = start();
    let task = Task {
        net: || Mlp::new(&[784, 32, 10]).unwrap(),
        batch: || digits(8),
        loss: |net, x, y| {
            net.forward(x).unwrap().cross_entropy_loss::<Tensor>(y, None, tch::Reduction::Mean, -100, 0.0)
        },
        steps: 4,
    };
    task.check("mlp");
}
