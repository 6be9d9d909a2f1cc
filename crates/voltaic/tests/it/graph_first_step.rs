//! Optimizers that are captured at their very first step, as Habana's page on HPU graphs prints it: replays go on from
//! the state that the first step made.

use tch::{Device, Kind, Tensor};
use voltaic::graph::{HpuGraph, graph};
use voltaic::nn::{Forward, Linear, ModuleExt, Relu, Sequential};
use voltaic::optim::{Adam, AdamW, Optimizer, Optimizers, Sgd};

/// Numbers that look random, of the same size whatever other tests draw.
fn waves(size: &[i64], phase: i64, kind: Kind) -> Tensor {
    let numel: i64 = size.iter().product();
    let waves = (Tensor::arange(numel, (Kind::Float, Device::Cpu)) * 1.7 + phase as f64).sin();
    waves.reshape(size).to_kind(kind)
}

struct Side {
    net: Sequential,
    optimizer: Box<dyn Optimizer>,
    input: Tensor,
    target: Tensor,
    loss: Tensor,
}

impl Side {
    fn new(optimizers: Optimizers, kind: Kind) -> Self {
        let net =
            Sequential::new().add(Linear::new(12, 8).unwrap()).add(Relu).add(Linear::new(8, 3).unwrap());
        for (index, parameter) in net.parameters().iter().enumerate() {
            // zeros of both signs among them
            let values = waves(&parameter.size(), index as i64, Kind::Float) * 0.3;
            parameter.set_data(&values.where_self(&values.abs().gt(0.05), &(&values * 0.0))).unwrap();
        }
        net.to_dtype(kind).unwrap();
        let optimizer = optimizers.build(&net).unwrap().remove(0).optimizer;
        let (input, target) = (waves(&[6, 12], 0, kind), waves(&[6, 3], 1, kind));
        Self { net, optimizer, input, target, loss: Tensor::new() }
    }

    fn feed(&mut self, step: i64) {
        let kind = self.input.kind();
        self.input.copy_(&waves(&[6, 12], 3 * step, kind));
        self.target.copy_(&waves(&[6, 3], 5 * step, kind));
    }

    fn step(&mut self) {
        let output = self.net.forward(&self.input).unwrap();
        self.loss = (output - &self.target).square().mean(Kind::Float);
        self.loss.backward();
        self.optimizer.step().unwrap();
    }

    fn bits(&self) -> Vec<(String, Vec<u8>)> {
        let state = self.optimizer.state_dict().tensors.into_iter();
        let state = self.net.state_dict().into_iter().chain(state);
        state.chain([("loss".to_owned(), self.loss.detach())]).map(|(name, t)| (name, bytes(&t))).collect()
    }
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = tensor.contiguous();
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

/// Steps in eager mode, and as many of which the first is captured and the others are replayed.
fn compare(what: &str, eager: &mut Side, graphed: &mut Side, steps: i64) {
    let g = HpuGraph::new();
    for step in 0..steps {
        eager.feed(step);
        eager.optimizer.zero_grad().unwrap();
        eager.step();
        graphed.feed(step);
        if step == 0 {
            graphed.optimizer.zero_grad().unwrap();
            let capture = graph(&g).unwrap();
            graphed.step();
            capture.end().unwrap();
        } else {
            g.replay().unwrap();
        }
        assert_eq!(eager.bits(), graphed.bits(), "{what}: step {step}");
    }
}

fn check(what: &str, kind: Kind, optimizers: impl Fn() -> Optimizers) {
    compare(what, &mut Side::new(optimizers(), kind), &mut Side::new(optimizers(), kind), 10);
}

#[test]
fn every_optimizer_can_be_captured_at_its_first_step() {
    let float = Kind::Float;
    check("SGD", float, || Sgd::new(0.1).weight_decay(0.01).into());
    check("SGD with momentum", float, || Sgd::new(0.1).momentum(0.9).into());
    check("SGD with dampening", float, || Sgd::new(0.1).momentum(0.9).dampening(0.3).maximize(true).into());
    check("SGD with Nesterov momentum", float, || Sgd::new(0.1).momentum(0.9).nesterov(true).into());
    check("Adam", float, || Adam::new(1e-2).weight_decay(0.1).into());
    check("AdamW", float, || AdamW::new(1e-2).into());
    check("AdamW with amsgrad", float, || AdamW::new(1e-2).amsgrad(true).maximize(true).into());
    check("AdamW in bfloat16", Kind::BFloat16, || AdamW::new(1e-2).into());
    check("AdamW with master weights", Kind::BFloat16, || AdamW::new(1e-2).master_weights(true).into());
    check("SGD with master weights", Kind::BFloat16, || {
        Sgd::new(0.1).momentum(0.9).dampening(0.1).master_weights(true).into()
    });
}

/// Some parameters have momentum before the capture, and others get theirs in it.
#[test]
fn a_parameter_that_is_new_to_the_optimizer_is_captured_beside_older_ones() {
    let optimizers = || Optimizers::from(Sgd::new(0.1).momentum(0.9).dampening(0.3));
    let (mut eager, mut graphed) =
        (Side::new(optimizers(), Kind::Float), Side::new(optimizers(), Kind::Float));
    for side in [&mut eager, &mut graphed] {
        side.optimizer.zero_grad().unwrap();
        let _ = side.net.parameters()[0].tensor().set_requires_grad(false);
        side.step();
        let _ = side.net.parameters()[0].tensor().set_requires_grad(true);
        side.optimizer.zero_grad().unwrap();
    }
    compare("two ages", &mut eager, &mut graphed, 5);
}
