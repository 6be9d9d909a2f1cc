//! Interceptors of calls: they nest, and one that recomputes its segment in backward leaves every gradient as it was.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use voltaic::ffi::{GradHook, at_backward_end, autograd_function, tensor_hook};
use voltaic::graph::{ModuleCacher, make_graphed_callables};
use voltaic::nn::{
    CallInterceptor, Callable, Dropout, Forward, InterceptorHandle, InterceptorLevel, Linear, Module,
    ModuleExt, ModuleHooks, MultiheadAttention, Next, Parameter, Sequential, intercept_calls,
};
use voltaic::precision::autocast;
use voltaic::{Device, Kind, Tensor};

use crate::checkpoint::{Checkpoint, Gradients};
use crate::rng::seeded;

const CPU: (Kind, tch::Device) = (Kind::Float, tch::Device::Cpu);
const WAYS: [Gradients; 2] = [Gradients::Outer, Gradients::Nested];

type Log = Rc<RefCell<Vec<String>>>;

struct Noting {
    name: &'static str,
    level: InterceptorLevel,
    log: Log,
}

impl CallInterceptor for Noting {
    fn level(&self) -> InterceptorLevel {
        self.level
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        is_block(module)
    }

    fn call(&self, _: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        self.log.borrow_mut().push(format!("{} begins", self.name));
        let outputs = next.run(inputs)?;
        self.log.borrow_mut().push(format!("{} ends", self.name));
        Ok(outputs)
    }
}

fn noting(log: &Log, name: &'static str, level: InterceptorLevel) -> InterceptorHandle {
    intercept_calls(Rc::new(Noting { name, level, log: log.clone() }))
}

#[derive(Module)]
struct Block {
    first: Linear,
    second: Linear,
}

impl Block {
    fn new() -> Self {
        Self { first: Linear::new(4, 6).unwrap(), second: Linear::new(6, 4).unwrap() }
    }
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(x + self.second.call(&self.first.call(x)?.f_tanh()?)?)
    }
}

fn is_block(module: &dyn Module) -> bool {
    module.downcast_ref::<Block>().is_ok()
}

fn is_linear(module: &dyn Module) -> bool {
    module.downcast_ref::<Linear>().is_ok()
}

#[test]
fn interceptors_nest_by_level_and_the_last_one_outside() {
    use InterceptorLevel::{Activations, Graph, Precision};
    let _seeded = seeded(1);
    let net = Block::new();
    let x = Tensor::ones([2, 4], CPU);
    let all = [("fp8", Precision), ("one graph", Graph), ("checkpoint", Activations), ("other graph", Graph)];
    for first in 0..all.len() {
        let order: Vec<_> = all.iter().cycle().skip(first).take(all.len()).collect();
        let log = Log::default();
        let mut handles: Vec<_> = order.iter().map(|(name, level)| noting(&log, name, *level)).collect();
        let place = |name| order.iter().position(|(known, _)| *known == name);
        let graphs = if place("one graph") < place("other graph") {
            ["other graph", "one graph"]
        } else {
            ["one graph", "other graph"]
        };
        let outside_in = ["checkpoint", graphs[0], graphs[1], "fp8"];
        let begins = outside_in.iter().map(|name| format!("{name} begins"));
        let expected: Vec<String> =
            begins.chain(outside_in.iter().rev().map(|name| format!("{name} ends"))).collect();
        let _ = net.call(&x).unwrap();
        assert_eq!(log.take(), expected, "{order:?}");
        handles.pop();
        let _ = net.call(&x).unwrap();
        assert_eq!(log.take().len(), 2 * (all.len() - 1), "the handle of one was dropped");
    }
    let log = Log::default();
    let handle = noting(&log, "graph", Graph);
    let hooks = ModuleHooks::new();
    let own = Arc::new(Mutex::new(Vec::new()));
    let kept = own.clone();
    let _ = hooks.register_forward_pre_hook("", move |_, _| {
        kept.lock().unwrap().push("before");
        Ok(())
    });
    let _ = hooks.within(&net, || net.call(&x)).unwrap().unwrap();
    assert_eq!((own.lock().unwrap().len(), log.borrow().len()), (1, 2));
    drop(handle);
    let _ = net.call(&x).unwrap();
    assert_eq!(log.borrow().len(), 2);
}

/// Gradients of a few steps, with the backward pass in the scope of the module's tree.
fn gradients(net: &impl Forward, hooks: &ModuleHooks, steps: usize) -> Vec<Tensor> {
    net.parameters().iter().for_each(|parameter| parameter.shallow_clone().zero_grad());
    for step in 0..steps {
        let x = crate::ddp::numbers(&[3, 4], step as f64);
        let run = || net.call(&x).unwrap().square().mean(Kind::Float).backward();
        hooks.within(net, run).unwrap();
    }
    net.parameters().iter().map(|parameter| parameter.grad().copy()).collect()
}

fn tower() -> Sequential {
    let _seeded = seeded(3);
    Sequential::new().add(Linear::new(4, 4).unwrap()).add(Block::new()).add(Block::new())
}

#[test]
fn a_recomputed_segment_has_the_same_gradients() {
    let net = tower();
    let none = ModuleHooks::new();
    let plain = gradients(&net, &none, 3);
    for (gradients_by, segment) in
        WAYS.into_iter().flat_map(|way| [(way, is_block as fn(&_) -> _), (way, is_linear)])
    {
        let checkpoint = Rc::new(Checkpoint::new(gradients_by, segment));
        let _handle = intercept_calls(checkpoint.clone());
        assert_eq!(gradients(&net, &none, 3), plain, "{gradients_by:?}");
        // blocks, or linear layers
        let segments = if segment(&Block::new()) { 2 } else { 5 };
        assert_eq!(checkpoint.recomputed(), 3 * segments);
    }
    // one within the other
    for way in WAYS {
        let (outer, inner) =
            (Rc::new(Checkpoint::new(way, is_block)), Rc::new(Checkpoint::new(way, is_linear)));
        let _handles = [intercept_calls(outer.clone()), intercept_calls(inner.clone())];
        assert_eq!(gradients(&net, &none, 1), gradients(&tower(), &none, 1), "{way:?}");
        assert!(outer.recomputed() > 0 && inner.recomputed() > 0);
    }
}

#[test]
fn a_graph_is_within_a_checkpoint_whichever_came_first() {
    let net = tower();
    let none = ModuleHooks::new();
    let plain = gradients(&net, &none, 6);
    let block = net.named_children()[1].1.downcast_ref::<Block>().unwrap();
    for (way, graph_first) in WAYS.into_iter().flat_map(|way| [(way, true), (way, false)]) {
        let checkpoint = Rc::new(Checkpoint::new(way, is_block));
        // what a call without grad gives is kept for longer than until the next one
        let cacher = ModuleCacher::new(10).disable_tensor_cache(true);
        let early = graph_first.then(|| cacher.inplace(block));
        let _handle = intercept_calls(checkpoint.clone());
        let graphs = early.unwrap_or_else(|| cacher.inplace(block));
        assert_eq!(gradients(&net, &none, 6), plain, "{way:?} {graph_first}");
        let stats = graphs.stats();
        assert_eq!(graphs.refusal(), None);
        // of each step a forward pass without grad, and its recomputation with grad
        assert_eq!((stats.num_graphs, stats.misses, stats.checks, stats.hits), (2, 2, 2, 8));
        assert_eq!(checkpoint.recomputed(), 12);
    }
}

#[test]
fn a_wrapper_is_recomputed_as_the_module_that_it_wraps() {
    let _seeded = seeded(5);
    let sample = crate::ddp::numbers(&[3, 4], 0.0);
    let block = Block::new();
    let plain = gradients(&block, &ModuleHooks::new(), 2);
    let graphed = make_graphed_callables(block, &sample, 1).unwrap();
    for way in WAYS {
        let checkpoint = Rc::new(Checkpoint::new(way, is_block));
        let _handle = intercept_calls(checkpoint.clone());
        assert_eq!(gradients(&graphed, &ModuleHooks::new(), 2), plain);
        assert_eq!(checkpoint.recomputed(), 2);
    }
}

#[test]
fn what_cannot_be_recomputed_is_an_error() {
    let _seeded = seeded(1);
    let net = Block::new();
    let x = Tensor::ones([2, 4], CPU);
    let _handle = intercept_calls(Rc::new(Checkpoint::new(Gradients::Outer, |module| {
        is_block(module) || module.downcast_ref::<MultiheadAttention>().is_ok()
    })));
    let loss = net.call(&x).unwrap().sum(Kind::Float);
    assert_error!(loss.f_backward(), "Block cannot be run again", "ModuleHooks::within");
    let attention = MultiheadAttention::new(4, 2).unwrap();
    let x = Tensor::ones([1, 2, 4], CPU);
    assert_error!(
        attention.attend(&x, &x, &x, &voltaic::nn::AttentionMask::default()),
        "a call of MultiheadAttention with several inputs cannot be run again"
    );
}

/// A function whose gradient runs a backward pass so deep within others.
fn nested(x: &Tensor, depth: usize, log: &Arc<Mutex<Vec<String>>>) -> Tensor {
    let output = x.detach();
    let log = log.clone();
    autograd_function([x], std::slice::from_ref(&output), move |grads| {
        let note = |what: &str| log.lock().unwrap().push(format!("{what} {depth}"));
        let inner = Tensor::ones([1], CPU).set_requires_grad(true);
        let value = tch::with_grad(|| match depth {
            1 => &inner * 2.0,
            _ => nested(&(&inner * 2.0), depth - 1, &log),
        });
        let own = log.clone();
        let in_pass = tch::with_grad(|| &value * 1.0);
        tensor_hook(&in_pass, move |_| {
            own.lock().unwrap().push(format!("in pass {depth}"));
            let own = own.clone();
            at_backward_end(move || {
                own.lock().unwrap().push(format!("end of {depth}"));
                Ok(())
            })?;
            Ok(None)
        })?;
        tch::with_grad(|| in_pass.sum(Kind::Float)).f_backward()?;
        note("over");
        Ok(vec![Some(grads[0].shallow_clone())])
    })
    .unwrap();
    output
}

#[test]
fn a_backward_pass_within_another_does_not_end_it() {
    for depth in 1..4 {
        let log = Arc::new(Mutex::new(Vec::new()));
        let leaf = Tensor::ones([1], CPU).set_requires_grad(true);
        let before = &leaf * 3.0;
        let own = log.clone();
        tensor_hook(&before, move |_| {
            own.lock().unwrap().push("outer".to_owned());
            Ok(None)
        })
        .unwrap();
        nested(&(&before * 1.0), depth, &log).sum(Kind::Float).backward();
        let inside = (1..=depth).rev().map(|depth| format!("in pass {depth}"));
        let over = (1..=depth).map(|depth| format!("over {depth}"));
        let ends = (1..=depth).rev().map(|depth| format!("end of {depth}"));
        let expected: Vec<_> = inside.chain(over).chain(["outer".to_owned()]).chain(ends).collect();
        assert_eq!(*log.lock().unwrap(), expected);
    }
    assert_error!(at_backward_end(|| Ok(())), "no backward pass is in progress");
}

#[test]
fn a_gradient_is_complete_once_though_a_part_of_the_module_is_recomputed() {
    let net = tower();
    for way in WAYS {
        let _handle = intercept_calls(Rc::new(Checkpoint::new(way, is_block)));
        let told = Arc::new(Mutex::new(vec![0; net.parameters().len()]));
        let hook = |(index, parameter): (usize, Parameter)| {
            let told = told.clone();
            let count = move || {
                told.lock().unwrap()[index] += 1;
                Ok(())
            };
            GradHook::register(parameter.leaf(), count).unwrap()
        };
        let hooks: Vec<_> = net.parameters().into_iter().enumerate().map(hook).collect();
        gradients(&net, &ModuleHooks::new(), 2);
        drop(hooks);
        assert!(told.lock().unwrap().iter().all(|times| *times == 2), "{way:?}: {told:?}");
    }
}

/// Autocast and random numbers of the forward pass belong to what runs again, and are as they were afterwards.
#[test]
fn a_recomputed_segment_has_the_autocast_and_the_random_numbers_of_its_forward_pass() {
    let _seeded = seeded(9);
    let layer = || Linear::new(16, 16).unwrap();
    let block = Sequential::new().add(layer()).add(Dropout::new(0.5).unwrap()).add(layer());
    let net = Sequential::new().add(block);
    let step = || {
        voltaic::ffi::manual_seed(4).unwrap();
        net.parameters().iter().for_each(|parameter| parameter.leaf().shallow_clone().zero_grad());
        let x = crate::ddp::numbers(&[8, 16], 0.0).set_requires_grad(true);
        let out = {
            let _bf16 = autocast(Device::Cpu, Kind::BFloat16).unwrap();
            net.call(&x).unwrap()
        };
        assert_eq!(out.kind(), Kind::BFloat16);
        let _ = Tensor::rand([1], CPU); // between the two passes
        ModuleHooks::new().within(&net, || out.sum(Kind::Float).backward()).unwrap();
        let grads = net.parameters().into_iter().map(|parameter| parameter.grad().copy());
        let mut found: Vec<Tensor> = grads.chain([x.grad()]).collect();
        found.push(Tensor::rand([4], CPU));
        found
    };
    let plain = step();
    for way in WAYS {
        let is_segment = |module: &dyn Module| module.named_children().len() == 3;
        let checkpoint = Rc::new(Checkpoint::new(way, is_segment));
        let _handle = intercept_calls(checkpoint.clone());
        assert_eq!(step(), plain, "{way:?}");
        assert_eq!(checkpoint.recomputed(), 1);
    }
}
