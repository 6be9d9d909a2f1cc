//! Modules whose forward and backward passes are graphs: bit for bit what the modules do.

use tch::{Kind, Tensor};
use voltaic::graph::{
    Buckets, Callable, GraphedModule, ModuleCacher, TensorTuple, make_graphed_callables, mark_step,
    metric_global, reset_metrics,
};
use voltaic::models::{Gpt, GptConfig, LeNet, LeNetConfig, ResNet18, ResNet18Config};
use voltaic::nn::{BatchNorm1d, Dropout, Forward, Linear, ModuleExt, Relu, Sequential};
use voltaic::optim::{AdamW, Optimizer, Optimizers};
use voltaic::precision::autocast;
use voltaic::{Device, Module, ffi};

use crate::support::{CPU, HPU, bits, start};

fn tch(device: Device) -> tch::Device {
    if device == Device::Cpu { CPU } else { HPU }
}

fn rand(size: &[i64], device: Device) -> Tensor {
    Tensor::rand(size, (Kind::Float, CPU)).to_device(tch(device))
}

fn mlp() -> Sequential {
    Sequential::new()
        .add(Linear::new(12, 16).unwrap())
        .add(BatchNorm1d::new(16).unwrap())
        .add(Relu)
        .add(Dropout::new(0.3).unwrap())
        .add(Linear::new(16, 4).unwrap())
}

fn optimizer(net: &dyn Module) -> Box<dyn Optimizer> {
    let optimizers: Optimizers = AdamW::new(1e-2).into();
    optimizers.build(net).unwrap().remove(0).optimizer
}

/// What some training steps leave behind: losses, gradients of the inputs, weights, statistics.
type Trace = Vec<Vec<u8>>;

/// Trains on batches of these sizes; each is the loss of `call`.
fn train<M: Forward>(net: &M, device: Device, inputs: &[Tensor]) -> Trace {
    let mut optimizer = optimizer(net.as_dyn());
    let mut trace = Trace::new();
    for (step, input) in inputs.iter().enumerate() {
        let floats = input.is_floating_point();
        let input = if floats { input.copy().set_requires_grad(true) } else { input.shallow_clone() };
        let region = (step % 3 == 2).then(|| autocast(device, Kind::BFloat16).unwrap());
        let loss = net.forward(&input).unwrap().to_kind(Kind::Float).square().mean(Kind::Float);
        drop(region);
        optimizer.zero_grad().unwrap();
        loss.backward();
        optimizer.step().unwrap();
        trace.push(bits(&loss.detach()));
        if floats {
            trace.push(bits(&input.grad()));
        }
    }
    trace.extend(net.state_dict().into_iter().map(|(_, tensor)| bits(&tensor)));
    trace
}

fn check<M: Forward>(what: &str, make: fn() -> M, inputs: fn(i64, Device) -> Tensor, batches: &[i64]) {
    for device in [Device::Cpu, Device::Hpu(0)] {
        ffi::manual_seed(5).unwrap();
        let inputs: Vec<Tensor> = batches.iter().map(|&batch| inputs(batch, device)).collect();
        let run = |net: &dyn Fn(M) -> (Trace, u64)| {
            ffi::manual_seed(7).unwrap();
            let module = make();
            module.to_device(device).unwrap();
            net(module)
        };
        let (eager, _) = run(&|net| (train(&net, device, &inputs), 0));
        let (cached, hits) = run(&|net| {
            let net = ModuleCacher::new(10).wrap(net);
            let trace = train(&net, device, &inputs);
            assert_eq!(net.refusal(), None, "{what}");
            assert_eq!(net.stats().uncached, 0, "{what}: {}", net.stats());
            (trace, net.stats().hits)
        });
        assert!(hits > 0, "{what}");
        assert_eq!(eager.len(), cached.len());
        for (index, (eager, cached)) in eager.iter().zip(&cached).enumerate() {
            assert!(eager == cached, "{what} on {device}: result {index} of {} steps", inputs.len());
        }
    }
}

#[test]
fn cached_modules_train_to_the_same_bits() {
    let _rng = start();
    check("mlp", mlp, |batch, device| rand(&[batch, 12], device), &[8, 8, 5, 8, 5, 3, 8, 8, 5, 5, 3, 8]);
    let lenet = || LeNet::new(LeNetConfig::default()).unwrap();
    check("lenet", lenet, |batch, device| rand(&[batch, 1, 28, 28], device), &[4, 4, 2, 4, 2, 4]);
    let resnet = || ResNet18::new(ResNet18Config::default()).unwrap();
    check("resnet18", resnet, |batch, device| rand(&[batch, 3, 16, 16], device), &[2, 2, 2, 2, 2, 2]);
    let gpt = || {
        let config =
            GptConfig { vocab_size: 65, block_size: 16, n_layer: 2, dropout: 0.1, ..GptConfig::tiny() };
        Gpt::new(config).unwrap()
    };
    let tokens =
        |batch, device: Device| Tensor::randint(65, [batch, 16], (Kind::Int64, CPU)).to_device(tch(device));
    check("gpt", gpt, tokens, &[2, 2, 2, 3, 2, 3]);
}

#[test]
fn two_calls_before_one_backward_pass_get_two_graphs() {
    let _rng = start();
    let run = |net: &dyn Forward| -> Vec<Vec<u8>> {
        ffi::manual_seed(3).unwrap();
        for _ in 0..4 {
            let (a, b) = (rand(&[8, 12], Device::Cpu), rand(&[8, 12], Device::Cpu));
            let distance = net.forward(&a).unwrap() - net.forward(&b).unwrap();
            distance.square().mean(Kind::Float).backward(); // gradients add up
        }
        let module: &dyn Module = net;
        module.parameters().iter().map(|p| bits(&p.grad())).collect()
    };
    let make = || {
        ffi::manual_seed(1).unwrap();
        mlp()
    };
    let cached = ModuleCacher::new(10).wrap(make());
    assert_eq!(run(&make()), run(&cached));
    assert_eq!((cached.stats().misses, cached.stats().hits, cached.stats().uncached), (2, 5, 0));
    assert_eq!(cached.stats().checks, 1, "the second call runs the code once more");
    let full = ModuleCacher::new(1).wrap(make());
    assert_eq!(run(&make()), run(&full));
    assert_eq!(
        (full.stats().misses, full.stats().checks, full.stats().hits, full.stats().uncached),
        (1, 1, 3, 3)
    );
    // one that never gets its backward pass gives its graph back
    for _ in 0..3 {
        drop(cached.forward(&rand(&[8, 12], Device::Cpu)).unwrap());
    }
    assert_eq!((cached.stats().misses, cached.stats().hits), (2, 8));
}

#[test]
fn a_backward_pass_that_comes_too_late_is_an_error() {
    let _rng = start();
    let net = ModuleCacher::new(1).wrap(mlp());
    let forward = || net.forward(&rand(&[8, 12], Device::Cpu)).unwrap().sum(Kind::Float);
    drop(forward());
    drop(forward()); // both captures are the same: from now on there are replays
    let loss = forward();
    let weight = [net.parameters()[0].tensor().shallow_clone()];
    Tensor::run_backward(&[&loss], &weight, true, false);
    drop(forward());
    let error = Tensor::f_run_backward(&[&loss], &weight, true, false).unwrap_err().to_string();
    assert!(error.contains("Sequential was replayed again before its backward pass"), "{error}");
}

#[test]
fn frozen_and_moved_weights_are_found_out() {
    let _rng = start();
    let net = ModuleCacher::new(10).wrap(mlp());
    let forward = || net.forward(&rand(&[8, 12], Device::Cpu)).unwrap().sum(Kind::Float);
    forward().backward();
    forward().backward();
    let _ = net.parameters()[0].set_requires_grad(false);
    let before = net.parameters()[0].grad().copy();
    forward().backward();
    assert!(net.parameters()[0].grad().equal(&before), "a frozen weight gets no gradient");
    let _ = net.parameters()[0].set_requires_grad(true);
    forward().backward();
    assert!(!net.parameters()[0].grad().equal(&before));
    assert_eq!((net.stats().misses, net.stats().checks, net.stats().hits), (2, 1, 1));
    net.to_dtype(Kind::Double).unwrap();
    let output = net.forward(&rand(&[8, 12], Device::Cpu).to_kind(Kind::Double)).unwrap();
    assert_eq!(output.kind(), Kind::Double);
}

/// Takes what is positive.
#[derive(Module)]
struct Positive {
    first: Linear,
}

impl Forward for Positive {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = self.first.forward(input)?;
        Ok(hidden.masked_select(&hidden.gt(0.0)))
    }
}

#[test]
fn a_module_that_cannot_be_captured_trains_as_usual() {
    let _rng = start();
    let make = || {
        ffi::manual_seed(1).unwrap();
        Positive { first: Linear::new(4, 3).unwrap() }
    };
    let cached = ModuleCacher::new(10).wrap(make());
    let run = |net: &dyn Forward| {
        ffi::manual_seed(2).unwrap();
        let mut bytes = Vec::new();
        for _ in 0..3 {
            let input = rand(&[5, 4], Device::Cpu).set_requires_grad(true);
            net.forward(&input).unwrap().sum(Kind::Float).backward();
            let module: &dyn Module = net;
            bytes.extend([bits(&input.grad()), bits(&module.parameters()[0].grad())]);
        }
        bytes
    };
    assert_eq!(run(&make()), run(&cached));
    assert!(cached.refusal().unwrap().contains("aten::masked_select"), "{:?}", cached.refusal());
    assert_eq!((cached.stats().misses, cached.stats().uncached), (1, 2));
}

/// The spec's example: the output of the first module goes to the second or the third.
#[derive(Module)]
struct ControlFlow {
    first: GraphedModule<Sequential>,
    second: GraphedModule<Dropout>,
    third: GraphedModule<Relu>,
}

#[test]
fn dynamic_control_flow_goes_between_graphs() {
    let _rng = start();
    let run = |max_graphs| {
        ffi::manual_seed(4).unwrap();
        let cacher = ModuleCacher::new(max_graphs);
        let net = ControlFlow {
            first: cacher.wrap(mlp()),
            second: cacher.wrap(Dropout::new(0.0).unwrap()),
            third: cacher.wrap(Relu),
        };
        let mut optimizer = optimizer(&net);
        let mut losses = Vec::new();
        for step in 0..10 {
            optimizer.zero_grad().unwrap();
            let hidden = net.first.forward(&rand(&[8, 12], Device::Cpu)).unwrap();
            let output =
                if step % 3 == 0 { net.second.forward(&hidden) } else { net.third.forward(&hidden) }.unwrap();
            let loss = output.square().mean(Kind::Float);
            loss.backward();
            optimizer.step().unwrap();
            losses.push(bits(&loss.detach()));
        }
        let hits = [net.first.stats().hits, net.second.stats().hits, net.third.stats().hits];
        (losses, hits)
    };
    let (eager, none) = run(0);
    let (graphed, hits) = run(10);
    assert_eq!(eager, graphed);
    assert_eq!((none, hits), ([0, 0, 0], [8, 2, 4]));
}

/// The spec's example: a shape that depends on data between two modules.
#[test]
fn dynamic_operators_go_between_two_mark_steps() {
    let _rng = start();
    let run = |max_graphs| {
        ffi::manual_seed(4).unwrap();
        let cacher = ModuleCacher::new(max_graphs);
        let (first, second) = (cacher.wrap(mlp()), cacher.wrap(Relu));
        let mut optimizer = optimizer(&first);
        let mut losses = Vec::new();
        for _ in 0..10 {
            optimizer.zero_grad().unwrap();
            let hidden = first.forward(&rand(&[8, 12], Device::Cpu)).unwrap();
            mark_step().unwrap();
            let negative = hidden.index(&[Some(hidden.lt(0.0))]);
            mark_step().unwrap();
            let loss = second.forward(&(-negative)).unwrap().square().mean(Kind::Float);
            loss.backward();
            optimizer.step().unwrap();
            losses.push(bits(&loss.detach()));
        }
        (losses, first.stats())
    };
    let (eager, _) = run(0);
    let (graphed, stats) = run(10);
    assert_eq!(eager, graphed);
    assert_eq!((stats.misses, stats.checks, stats.hits), (1, 1, 8));
}

#[test]
fn recompilations_are_counted_and_buckets_avoid_them() {
    let _rng = start();
    let sizes = [8, 7, 6, 8, 5, 3, 4, 1, 8, 2];
    let run = |cacher: ModuleCacher| {
        ffi::manual_seed(4).unwrap();
        let net = cacher.wrap(Linear::new(12, 4).unwrap());
        reset_metrics();
        let outputs: Vec<_> = sizes
            .iter()
            .map(|&batch| {
                let output = net.forward(&rand(&[batch, 12], Device::Cpu)).unwrap();
                output.square().sum(Kind::Float).backward();
                output.size()
            })
            .collect();
        let compilations = metric_global("graph_compilation").unwrap()[0].1;
        (outputs, net.stats(), compilations)
    };
    let (outputs, stats, compilations) = run(ModuleCacher::new(100));
    assert_eq!((stats.misses, stats.recompilations[&0]), (8, 7));
    assert_eq!(compilations, 16.0, "forward and backward of each shape");
    let (padded, stats, _) = run(ModuleCacher::new(100).buckets(Buckets { dim: 0, sizes: vec![4, 8] }));
    assert_eq!(outputs, padded);
    assert_eq!((stats.misses, stats.checks, stats.hits), (2, 2, 6));
}

#[test]
fn the_least_used_graph_makes_room() {
    let _rng = start();
    let net = ModuleCacher::new(2).use_lfu(true).wrap(mlp());
    for batch in [2, 3, 3, 4, 4, 4, 2, 3, 4] {
        net.forward(&rand(&[batch, 12], Device::Cpu)).unwrap().sum(Kind::Float).backward();
    }
    // 4 takes the place of 2 when it comes for the second time
    let stats = net.stats();
    assert_eq!((stats.misses, stats.hits, stats.uncached, stats.evictions), (3, 2, 2, 1), "{stats}");
}

/// Two inputs and two outputs, one of which has no gradient.
#[derive(Module)]
struct Compare {
    left: Linear,
    right: Linear,
}

impl Callable<(Tensor, Tensor)> for Compare {
    type Output = (Tensor, Tensor);

    fn forward_with(&self, (left, right): &(Tensor, Tensor)) -> anyhow::Result<(Tensor, Tensor)> {
        let sum = self.left.forward(left)? * self.right.forward(right)?;
        let best = sum.argmax(1, false);
        Ok((sum, best))
    }
}

fn compare() -> Compare {
    ffi::manual_seed(1).unwrap();
    Compare { left: Linear::new(4, 3).unwrap(), right: Linear::new(5, 3).unwrap() }
}

#[test]
fn callables_take_and_give_tuples() {
    let _rng = start();
    let sample = || (rand(&[6, 4], Device::Cpu), rand(&[6, 5], Device::Cpu));
    let graphed = make_graphed_callables(compare(), &sample(), 2).unwrap();
    let cached = ModuleCacher::new(2).wrap(compare());
    let eager = compare();
    for _ in 0..3 {
        let args = sample();
        let results = [eager.call(&args).unwrap(), graphed.call(&args).unwrap(), cached.call(&args).unwrap()];
        let results = results.map(|(sum, best)| {
            sum.square().sum(Kind::Float).backward();
            (bits(&sum.detach()), bits(&best))
        });
        assert_eq!(results[0], results[1]);
        assert_eq!(results[0], results[2]);
    }
    let grads = |net: &dyn Module| net.parameters().iter().map(|p| bits(&p.grad())).collect::<Vec<_>>();
    assert_eq!(grads(&eager), grads(&graphed));
    assert_eq!(grads(&eager), grads(&cached));
    assert!(<(Tensor, Tensor)>::from_tensors(vec![]).is_err());
}

#[test]
fn a_graphed_callable_trains_to_the_same_bits_and_keeps_to_its_sample() {
    let _rng = start();
    for device in [Device::Cpu, Device::Hpu(0)] {
        ffi::manual_seed(5).unwrap();
        let inputs: Vec<Tensor> = (0..6).map(|_| rand(&[8, 12], device)).collect();
        let make = || {
            ffi::manual_seed(7).unwrap();
            let net = mlp();
            net.to_device(device).unwrap();
            net
        };
        let run = |net: &dyn Fn(Sequential) -> Trace| net(make());
        let step = |net: &dyn Forward| -> Trace {
            let module: &dyn Module = net;
            let mut optimizer = optimizer(module);
            let mut trace = Trace::new();
            for input in &inputs {
                optimizer.zero_grad().unwrap();
                let loss = net.forward(input).unwrap().square().mean(Kind::Float);
                loss.backward();
                optimizer.step().unwrap();
                trace.push(bits(&loss.detach()));
            }
            trace.extend(module.state_dict().into_iter().map(|(_, tensor)| bits(&tensor)));
            trace
        };
        let eager = run(&|net| step(&net));
        let graphed = run(&|net| {
            // statistics, gradients and random numbers are as if nothing had run
            let net = make_graphed_callables(net, &inputs[0], 3).unwrap();
            step(&net)
        });
        assert!(eager == graphed, "on {device}");

        let mut net = make_graphed_callables(make(), &inputs[0], 0).unwrap();
        assert_error!(net.forward(&inputs[0].narrow(0, 0, 5)), "input 0 is Float[5, 12]", "Float[8, 12]");
        assert_error!(net.forward(&inputs[0].to_kind(Kind::Int64)), "input 0 is Int64[8, 12]");
        net.eval();
        let output = net.forward(&inputs[0].narrow(0, 0, 5)).unwrap();
        assert_eq!(output.size(), [5, 4], "in the other mode the module's own code runs");
    }
}

#[test]
fn a_module_that_gives_back_its_input_passes_gradients_on() {
    let _rng = start();
    let net = ModuleCacher::new(2).wrap(Dropout::new(0.0).unwrap());
    for step in 0..3 {
        let input = rand(&[2, 3], Device::Cpu).set_requires_grad(true);
        let output = net.forward(&input).unwrap();
        assert!(output.detach().equal(&input.detach()), "step {step}");
        (&output * &output).sum(Kind::Float).backward();
        assert!(input.grad().equal(&(&input.detach() * 2.0)), "step {step}: {} for {input}", input.grad());
    }
    assert_eq!((net.stats().misses, net.stats().checks, net.stats().hits), (1, 1, 1));
}
