//! What holds when code is captured and when it is replayed: interceptors of calls, autocast, grad mode, frozen weights, buffers.

use std::rc::Rc;

use voltaic::error::{Error, GraphError};
use voltaic::graph::{HpuGraph, ModuleCacher, WrapOptions, make_graphed_callables, wrap_in_hpu_graph};
use voltaic::nn::{
    BatchNorm1d, Buffer, CallInterceptor, Callable, Forward, InterceptorHandle, InterceptorLevel, Linear,
    ModuleExt, Next, intercept_calls,
};
use voltaic::precision::autocast;
use voltaic::{Device, Kind, Module, Tensor};

/// Changes what the linear layers of this thread give.
struct Scale(f64);

impl CallInterceptor for Scale {
    fn level(&self) -> InterceptorLevel {
        InterceptorLevel::Precision
    }

    fn intercepts(&self, module: &dyn Module) -> bool {
        module.downcast_ref::<Linear>().is_ok()
    }

    fn call(&self, _: &dyn Module, inputs: &[Tensor], next: &Next) -> anyhow::Result<Vec<Tensor>> {
        Ok(next.run(inputs)?.iter().map(|output| output * self.0).collect())
    }
}

fn scaled(by: f64) -> InterceptorHandle {
    intercept_calls(Rc::new(Scale(by)))
}

#[derive(Module)]
struct Net {
    first: Linear,
    last: Linear,
}

impl Net {
    fn new() -> Self {
        Self { first: Linear::new(4, 5).unwrap(), last: Linear::new(5, 3).unwrap() }
    }
}

impl Forward for Net {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        self.last.call(&self.first.call(input)?.relu())
    }
}

fn input(phase: f64) -> Tensor {
    (Tensor::arange(8, (Kind::Float, tch::Device::Cpu)) * 0.7 + phase).sin().reshape([2, 4])
}

/// Each call gives what the module's own code gives under the same interceptors.
fn assert_follows(what: &str, net: &Net, graphed: &dyn Fn(&Tensor) -> anyhow::Result<Tensor>) {
    let compare = |how: &str| {
        for phase in [0.0, 1.0, 2.0, 3.0] {
            let eager = net.forward(&input(phase)).unwrap().detach();
            let found = graphed(&input(phase)).unwrap();
            if found.requires_grad() {
                found.sum(Kind::Float).backward(); // the graph is free for the next call
            }
            assert_eq!(found.detach(), eager, "{what}: {how}");
        }
    };
    compare("as captured");
    let twice = scaled(2.0);
    compare("one is registered");
    let thrice = scaled(3.0);
    drop(twice);
    compare("another one in its place");
    drop(thrice);
    compare("none any more");
}

#[test]
fn interceptors_are_followed_by_all_graphs_of_calls() {
    let cached = ModuleCacher::new(10).wrap(Net::new());
    assert_follows("ModuleCacher", cached.module(), &|x| cached.forward(x));
    assert!(cached.stats().hits > 0, "{}", cached.stats());
    let net = Net::new();
    let graphs = ModuleCacher::new(10).inplace(&net);
    let plain = Net::new();
    plain.load_state_dict(&net.state_dict(), true).unwrap();
    assert_follows("in place", &plain, &|x| net.call(x));
    assert!(graphs.stats().hits > 0, "{}", graphs.stats());
    let one = make_graphed_callables(Net::new(), &input(0.0), 1).unwrap();
    assert_follows("make_graphed_callables", one.module(), &|x| one.forward(x));
    let wrapped =
        wrap_in_hpu_graph(Net::new(), WrapOptions { max_graphs: Some(2), ..WrapOptions::default() });
    let _no_grad = tch::no_grad_guard();
    assert_follows("wrap_in_hpu_graph", wrapped.module(), &|x| wrapped.forward(x));
    assert!(wrapped.stats().hits > 3, "graphs of interceptors that are gone make room: {}", wrapped.stats());
}

#[test]
fn a_graph_is_replayed_under_what_it_was_captured_under() {
    let net = Net::new();
    let x = input(0.0);
    let graph = HpuGraph::new();
    graph.name_weights(&net);
    let _ = graph.capture(|| net.forward(&x)).unwrap();
    graph.replay().unwrap();
    let refused = |expected: &str| {
        let error = graph.replay().unwrap_err();
        assert!(matches!(error, Error::Graph(GraphError::OtherConditions { .. })), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
        assert!(error.to_string().contains("capture another one"), "{error}");
    };
    tch::no_grad(|| refused("captured with grad, and is used without grad"));
    {
        let _bf16 = autocast(Device::Cpu, Kind::BFloat16).unwrap();
        refused("captured without autocast, and is used within autocast to");
    }
    {
        let _scaled = scaled(2.0);
        refused("under other interceptors of calls (1 were registered since, 0 are gone)");
    }
    let _ = net.last.bias.as_ref().unwrap().set_requires_grad(false);
    refused("captured while `last.bias` was trained, and is used while it is frozen");
    let _ = net.last.bias.as_ref().unwrap().set_requires_grad(true);
    graph.replay().unwrap();
}

#[test]
fn outputs_without_grad_are_the_callers() {
    let net = ModuleCacher::new(10).wrap(Net::new());
    let _no_grad = tch::no_grad_guard();
    let phases = [0.0, 1.0, 2.0, 3.0, 4.0];
    let outputs = phases.map(|phase| net.forward(&input(phase)).unwrap());
    assert!(net.stats().hits > 1);
    for (phase, output) in phases.into_iter().zip(outputs) {
        assert_eq!(output, net.module().forward(&input(phase)).unwrap(), "phase {phase}");
    }
}

#[derive(Module)]
struct Normed {
    first: Linear,
    norm: BatchNorm1d,
}

impl Forward for Normed {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        self.norm.forward(&self.first.forward(input)?)
    }
}

#[test]
fn buffers_that_were_replaced_are_found_out() {
    let mut nets =
        [(); 2].map(|()| Normed { first: Linear::new(4, 3).unwrap(), norm: BatchNorm1d::new(3).unwrap() });
    nets[1].load_state_dict(&nets[0].state_dict(), true).unwrap();
    let graphs = ModuleCacher::new(10).inplace(&nets[0]);
    let step = |nets: &[Normed; 2], phase| {
        nets[0].call(&input(phase)).unwrap().square().sum(Kind::Float).backward();
        nets[1].forward(&input(phase)).unwrap().square().sum(Kind::Float).backward();
    };
    (0..4).for_each(|phase| step(&nets, f64::from(phase)));
    assert!(graphs.stats().hits > 0, "{}", graphs.stats());
    for net in &mut nets {
        net.norm.running_mean = Some(Buffer::new(Tensor::full([3], 5.0, (Kind::Float, tch::Device::Cpu))));
    }
    (4..8).for_each(|phase| step(&nets, f64::from(phase)));
    let [graphed, eager] = nets.each_ref().map(Normed::state_dict);
    for ((name, graphed), (_, eager)) in graphed.iter().zip(&eager) {
        assert_eq!(graphed, eager, "{name}");
    }
}

/// Within one region autocast keeps its casts of weights; a replay makes them anew.
#[test]
fn weights_that_change_within_a_region_of_autocast_are_cast_again() {
    let net = ModuleCacher::new(10).wrap(Net::new());
    let _bf16 = autocast(Device::Cpu, Kind::BFloat16).unwrap();
    for phase in 0..5 {
        let found = net.forward(&input(1.0)).unwrap();
        voltaic::ffi::clear_autocast_cache().unwrap();
        let eager = net.module().forward(&input(1.0)).unwrap();
        assert_eq!(found.detach(), eager.detach(), "call {phase}");
        found.sum(Kind::Float).backward();
        let weight = &net.module().first.weight;
        weight.set_data(&(weight.tensor().detach() * 1.5)).unwrap();
        voltaic::ffi::clear_autocast_cache().unwrap();
    }
}
