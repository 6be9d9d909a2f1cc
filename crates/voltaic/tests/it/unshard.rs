//! Weights that a strategy keeps: what a parameter does while it is sharded.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use voltaic::ffi::ReleasableStorage;
use voltaic::nn::{
    BatchNorm1d, BatchNorm2d, Conv1d, Conv2d, ConvTranspose2d, Embedding, Forward, GroupNorm, LayerNorm,
    Linear, Module, ModuleExt, MultiheadAttention, Parameter, Sequential, Sharding, name_parameters,
    take_unshard_failure,
};
use voltaic::optim::{BuildOptimizer, ParamGroupSpec, Sgd};
use voltaic::precision::autocast;
use voltaic::{Device, Kind, Tensor};

use crate::compare::assert_same;

const CPU: tch::Device = tch::Device::Cpu;

/// Keeps copies of weights, and frees their memory.
#[derive(Debug, Default)]
pub struct Copies {
    kept: Mutex<HashMap<u64, (Tensor, ReleasableStorage)>>,
    pub unsharded: AtomicUsize,
    pub fails: AtomicBool,
}

impl Copies {
    /// Reshards all weights of a module.
    pub fn of(module: &dyn Module) -> Arc<Self> {
        let copies = Arc::new(Self::default());
        for parameter in module.parameters() {
            let entry = (parameter.detach().copy(), ReleasableStorage::of(parameter.leaf()));
            copies.kept.lock().unwrap().insert(parameter.id(), entry);
            parameter.attach_sharding(copies.clone()).unwrap();
            copies.reshard_now(&parameter).unwrap();
        }
        copies
    }

    pub fn reshard_now(&self, parameter: &Parameter) -> voltaic::Result<()> {
        let mut kept = self.kept.lock().unwrap();
        let (_, storage) = kept.get_mut(&parameter.id()).unwrap();
        storage.release()?;
        parameter.set_sharded(true)
    }
}

impl Sharding for Copies {
    fn unshard(&self, parameter: &Parameter) -> voltaic::Result<()> {
        if self.fails.load(Ordering::Relaxed) {
            let what = format!("rank 1 has {:?} and is gone", parameter.fqn());
            return Err(voltaic::error::ConfigError::new("copies", what, "start again").into());
        }
        self.unsharded.fetch_add(1, Ordering::Relaxed);
        let mut kept = self.kept.lock().unwrap();
        let (values, storage) = kept.get_mut(&parameter.id()).unwrap();
        storage.refill(values)?;
        parameter.set_sharded(false)
    }

    fn reshard(&self, parameter: &Parameter, is_changed: bool) -> voltaic::Result<()> {
        if is_changed {
            let values = parameter.leaf().f_detach()?.copy();
            self.kept.lock().unwrap().get_mut(&parameter.id()).unwrap().0 = values;
        }
        self.reshard_now(parameter)
    }
}

fn net() -> Sequential {
    Sequential::new().add(Linear::new(3, 4).unwrap()).add(LayerNorm::new([4]).unwrap())
}

fn copies(module: &dyn Module) -> Vec<(String, Tensor)> {
    module.state_dict().into_iter().map(|(fqn, tensor)| (fqn, tensor.copy())).collect()
}

#[test]
fn what_is_known_of_a_weight_is_known_while_it_is_sharded() {
    let net = net();
    name_parameters(&net);
    let before = copies(&net);
    let copies = Copies::of(&net);
    let (fqn, weight) = net.named_parameters().swap_remove(0);
    assert_eq!((fqn.as_str(), weight.fqn().as_deref()), ("0.weight", Some("0.weight")));
    assert_eq!((weight.size(), weight.dim(), weight.numel()), (vec![4, 3], 2, 12));
    assert_eq!((weight.kind(), weight.requires_grad(), weight.grad().defined()), (Kind::Float, true, false));
    assert_eq!((net.num_parameters(false), weight.device()), (12 + 4 + 8, CPU));
    assert_contains!(format!("{weight:?}"), "\"0.weight\"", "[4, 3]");
    assert!(weight.is_sharded() && weight.is_kept());
    assert_eq!(copies.unsharded.load(Ordering::Relaxed), 0, "nothing of this needs the values");
    // it is unsharded where its values are accessed, and stays so
    assert!(weight.equal(&before[0].1) && !weight.is_sharded());
    copies.reshard_now(&weight).unwrap();
    // a state dict lasts, and lets go of the weights
    let state = net.state_dict();
    assert!(net.parameters().iter().all(Parameter::is_sharded));
    assert_same("weights", &state, &before);
    // what is loaded is kept
    let loaded: Vec<_> = before.iter().map(|(fqn, tensor)| (fqn.clone(), tensor + 1.0)).collect();
    net.load_state_dict(&loaded, true).unwrap();
    assert!(net.parameters().iter().all(Parameter::is_sharded));
    assert_same("weights", &net.state_dict(), &loaded);
    assert!(net.load_state_dict(&loaded[1..], true).is_err());
    weight.update(|weight| Ok(weight.shallow_clone().f_zero_().map(drop)?)).unwrap();
    assert_eq!(weight.with_unsharded(|weight| Ok(weight.abs().max().double_value(&[]))).unwrap(), 0.0);
    // it cannot be moved meanwhile
    assert_error!(net.to_dtype(Kind::Double), "0.weight: its strategy keeps the values");
    assert!(weight.attach_sharding(copies.clone()).is_err() && weight.detach_sharding().is_err());
    for parameter in net.parameters() {
        parameter.try_tensor().unwrap();
        parameter.detach_sharding().unwrap();
    }
    net.to_dtype(Kind::Double).unwrap();
    assert_eq!(weight.kind(), Kind::Double);
}

#[test]
fn training_with_weights_that_are_sharded_is_the_same() {
    let (plain, sharded) = (net(), net());
    sharded.load_state_dict(&plain.state_dict(), true).unwrap();
    let copies = Copies::of(&sharded);
    let input = Tensor::arange(6, (Kind::Float, CPU)).view([2, 3]);
    let loss = |net: &Sequential| net.forward(&input).unwrap().square().mean(Kind::Float);
    let [expected, found] = [loss(&plain), loss(&sharded)];
    assert_eq!(copies.unsharded.load(Ordering::Relaxed), 4, "each once");
    assert!(found.equal(&expected));
    // freed between forward and backward, and refilled: autograd takes it for the same weight
    sharded.parameters().iter().for_each(|parameter| copies.reshard_now(parameter).unwrap());
    sharded.parameters().iter().for_each(|parameter| drop(parameter.try_tensor().unwrap().size()));
    [expected, found].iter().for_each(Tensor::backward);
    for ((fqn, expected), found) in plain.named_parameters().into_iter().zip(sharded.parameters()) {
        assert!(found.grad().equal(&expected.grad()), "{fqn}");
    }
    // an optimizer does not update what is not there
    sharded.parameters().iter().for_each(|parameter| copies.reshard_now(parameter).unwrap());
    let mut optimizer = Sgd::new(0.1).build(vec![ParamGroupSpec::new(sharded.named_parameters())]).unwrap();
    assert_error!(optimizer.step(), "0.weight is sharded", "Strategy::optimizers");
}

#[test]
fn copies_of_autocast_go_with_their_weight() {
    let net = Linear::new(3, 4).unwrap();
    let copies = Copies::of(&net);
    let input = Tensor::ones([2, 3], (Kind::Float, CPU));
    let _region = autocast(Device::Cpu, Kind::BFloat16).unwrap();
    let first = net.forward(&input).unwrap();
    net.parameters().iter().for_each(|parameter| copies.reshard_now(parameter).unwrap());
    let doubled = net.state_dict().into_iter().map(|(fqn, tensor)| (fqn, tensor * 2.0)).collect::<Vec<_>>();
    net.load_state_dict(&doubled, true).unwrap();
    let second = net.forward(&input).unwrap();
    assert!(second.equal(&(first * 2.0)), "the weights of before would be used still");
}

/// Runs a layer with each of its weights missing in turn: the strategy's error, and no panic.
fn check_missing(name: &str, module: &dyn Module, forward: &dyn Fn() -> anyhow::Result<()>) {
    name_parameters(module);
    forward().unwrap_or_else(|error| panic!("{name}: {error:#}"));
    let copies = Copies::of(module);
    for missing in module.parameters() {
        for parameter in module.parameters() {
            parameter.try_tensor().unwrap();
        }
        copies.reshard_now(&missing).unwrap();
        copies.fails.store(true, Ordering::Relaxed);
        let Err(error) = forward() else { panic!("{name} goes on without {:?}", missing.fqn()) };
        let text = format!("{error:#}");
        assert!(text.contains("rank 1 has") && text.contains("and is gone; start again"), "{name}: {text}");
        copies.fails.store(false, Ordering::Relaxed);
    }
    assert!(take_unshard_failure().is_none());
}

#[test]
fn every_layer_says_why_a_weight_cannot_be_had() {
    let ones = |size: &[i64]| Tensor::ones(size, (Kind::Float, CPU));
    let check = |name: &str, layer: &dyn Forward, input: Tensor| {
        check_missing(name, layer_of(layer), &|| layer.forward(&input).map(drop));
    };
    check("Linear", &Linear::new(3, 4).unwrap(), ones(&[2, 3]));
    check("Conv1d", &Conv1d::new(2, 3, 2).unwrap(), ones(&[1, 2, 4]));
    check("Conv2d", &Conv2d::new(2, 3, 2).unwrap(), ones(&[1, 2, 4, 4]));
    check("ConvTranspose2d", &ConvTranspose2d::new(2, 3, 2).unwrap(), ones(&[1, 2, 4, 4]));
    check("BatchNorm1d", &BatchNorm1d::new(3).unwrap(), ones(&[4, 3]));
    check("BatchNorm2d", &BatchNorm2d::new(3).unwrap(), ones(&[4, 3, 2, 2]));
    check("LayerNorm", &LayerNorm::new([3]).unwrap(), ones(&[4, 3]));
    check("GroupNorm", &GroupNorm::new(2, 4).unwrap(), ones(&[3, 4, 2]));
    check("Embedding", &Embedding::new(5, 3).unwrap(), Tensor::from_slice(&[1_i64, 2]));
    let attention = MultiheadAttention::new(4, 2).unwrap();
    let (x, other) = (ones(&[3, 1, 4]), ones(&[3, 1, 4]));
    check_missing("MultiheadAttention", &attention, &|| {
        Ok(attention.attend(&x, &x, &x, &Default::default()).map(drop)?)
    });
    let attention = MultiheadAttention::new(4, 2).unwrap();
    check_missing("MultiheadAttention of two", &attention, &|| {
        Ok(attention.attend(&x, &other, &other, &Default::default()).map(drop)?)
    });
}

fn layer_of(layer: &dyn Forward) -> &dyn Module {
    layer
}

#[test]
fn an_undefined_tensor_stands_for_what_cannot_be_had() {
    let net = Linear::new(3, 4).unwrap();
    let copies = Copies::of(&net);
    copies.fails.store(true, Ordering::Relaxed);
    assert!(!net.weight.tensor().defined());
    let error = take_unshard_failure().unwrap().to_string();
    assert!(error.contains("is gone") && take_unshard_failure().is_none(), "{error}");
    let input = Tensor::ones([2, 3], (Kind::Float, CPU));
    for result in [
        input.f_linear(&net.weight, None::<&Tensor>),
        input.f_add(&net.weight),
        input.f_matmul(&net.weight),
        net.weight.f_sum(Kind::Float),
        net.weight.f_norm(),
        Tensor::f_cat(&[net.weight.shallow_clone()], 0),
    ] {
        assert!(result.is_err(), "memory that is not there must not be read");
    }
    assert_error!(net.try_state_dict(), "is gone");
    assert!(!net.state_dict()[0].1.defined() && take_unshard_failure().is_some());
}

#[test]
fn a_capture_by_hand_refuses_a_weight_that_a_strategy_keeps() {
    let _seeded = crate::rng::seeded(1);
    let net = Sequential::new().add(Linear::new(2, 2).unwrap());
    name_parameters(&net);
    let input = Tensor::ones([1, 2], (Kind::Float, CPU));
    let copies = Copies::of(&net);
    for is_whole in [false, true] {
        if is_whole {
            net.parameters().iter().for_each(|parameter| parameter.try_tensor().map(drop).unwrap());
        } else {
            net.parameters().iter().for_each(|parameter| copies.reshard_now(parameter).unwrap());
        }
        let graph = voltaic::graph::HpuGraph::new();
        assert_error!(graph.capture(|| net.forward(&input)), "0.weight", "strategy");
        assert!(!graph.is_captured());
    }
    net.parameters().iter().for_each(|parameter| parameter.detach_sharding().unwrap());
    let graph = voltaic::graph::HpuGraph::new();
    let output = graph.capture(|| net.forward(&input)).unwrap();
    graph.replay().unwrap();
    assert!(output.equal(&net.forward(&input).unwrap()));
}
