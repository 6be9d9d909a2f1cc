//! Graphs: what is replayed is bit for bit what would have run.

use std::cell::Cell;

use tch::{Device, Kind, Reduction, Tensor};
use voltaic::error::{Error, GraphError};
use voltaic::graph::{
    Buckets, HpuGraph, StaticTensor, WrapOptions, graph, mark_step, metric_global, reset_metrics, scope,
    wrap_in_hpu_graph,
};
use voltaic::nn::{Forward, Linear, Module, ModuleExt, Parameter, Relu, Sequential};
use voltaic::optim::{AdamW, Optimizer, Optimizers};

fn rand(size: &[i64]) -> Tensor {
    Tensor::rand(size, (Kind::Float, Device::Cpu))
}

fn labels(batch: i64) -> Tensor {
    Tensor::randint(10, [batch], (Kind::Int64, Device::Cpu))
}

fn cross_entropy(logits: &Tensor, labels: &Tensor) -> Tensor {
    logits.cross_entropy_loss::<Tensor>(labels, None, Reduction::Mean, -100, 0.0)
}

/// Numbers that look random: other tests draw from the generators meanwhile.
fn waves(size: &[i64], phase: i64) -> Tensor {
    let numel: i64 = size.iter().product();
    (Tensor::arange(numel, (Kind::Float, Device::Cpu)) * 1.7 + phase as f64).sin().reshape(size)
}

fn mlp() -> Sequential {
    Sequential::new().add(Linear::new(64, 64).unwrap()).add(Relu).add(Linear::new(64, 10).unwrap())
}

/// A network with its optimizer, its placeholders and its loss.
struct Side {
    net: Sequential,
    optimizer: Box<dyn Optimizer>,
    x: Tensor,
    y: Tensor,
    loss: Tensor,
}

impl Side {
    fn new() -> Self {
        let net = mlp();
        for (index, parameter) in net.parameters().iter().enumerate() {
            parameter.set_data(&(waves(&parameter.size(), index as i64) * 0.2)).unwrap();
        }
        let optimizers: Optimizers = AdamW::new(1e-2).into();
        let optimizer = optimizers.build(&net).unwrap().remove(0).optimizer;
        Self { net, optimizer, x: rand(&[8, 64]), y: labels(8), loss: Tensor::new() }
    }

    fn step(&mut self) {
        self.optimizer.zero_grad().unwrap();
        self.loss = cross_entropy(&self.net.forward(&self.x).unwrap(), &self.y);
        self.loss.backward();
        self.optimizer.step().unwrap();
    }

    /// As usual three times, captured once, replayed from then on.
    fn step_by(&mut self, whole_step: &HpuGraph, step: i64) {
        match step {
            0..3 => self.step(),
            3 => {
                let capture = graph(whole_step).unwrap();
                self.step();
                capture.end().unwrap();
            }
            _ => whole_step.replay().unwrap(),
        }
    }

    /// The same inputs for the same `step`.
    fn feed(&mut self, step: i64) {
        self.x.copy_(&waves(&[8, 64], step + 1));
        self.y.copy_(&Tensor::arange_start(step, step + 8, (Kind::Int64, Device::Cpu)).fmod(10));
    }

    fn state(&self) -> Vec<Tensor> {
        let mut state: Vec<Tensor> = self.net.state_dict().into_iter().map(|(_, tensor)| tensor).collect();
        state.extend(self.optimizer.state_dict().tensors.into_iter().map(|(_, tensor)| tensor));
        state.push(self.loss.detach());
        state
    }
}

fn assert_same_bits(a: &[Tensor], b: &[Tensor], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (index, (a, b)) in a.iter().zip(b).enumerate() {
        let bits =
            |t: &Tensor| if t.kind() == Kind::Float { t.view_dtype(Kind::Int) } else { t.shallow_clone() };
        assert!(bits(a).equal(&bits(b)), "{what}: tensor {index}: {a} and {b}");
    }
}

#[test]
fn a_whole_training_step_is_replayed_to_the_same_bits() {
    let (mut eager, mut graphed) = (Side::new(), Side::new());
    let whole_step = HpuGraph::new();
    whole_step.name_weights(&graphed.net);
    for step in 0..40 {
        eager.feed(step);
        eager.step();
        graphed.feed(step);
        graphed.step_by(&whole_step, step);
        assert_same_bits(&eager.state(), &graphed.state(), &format!("step {step}"));
    }
    let recorded = whole_step.graphs().next().unwrap();
    assert_contains!(recorded.to_string(), "aten::addmm", ":0.weight", "aten::_fused_adamw_", "# view");
    assert!(recorded.to_dot().starts_with("digraph"));
    assert_eq!(recorded.op_counts()["aten::_fused_adamw_"], 1);
    let stats = whole_step.stats().next().unwrap();
    assert!(stats.num_calls < stats.num_nodes && stats.arena_bytes < stats.unshared_bytes, "{stats:?}");
}

#[test]
fn a_captured_optimizer_follows_a_schedule() {
    let (mut eager, mut graphed) = (Side::new(), Side::new());
    let whole_step = HpuGraph::new();
    for step in 0..10 {
        for side in [&mut eager, &mut graphed] {
            side.feed(step);
            side.optimizer.param_groups_mut()[0].lr = 0.01 / (step + 1) as f64;
        }
        eager.step();
        graphed.optimizer.prepare_replay().unwrap().unwrap();
        graphed.step_by(&whole_step, step);
        assert_same_bits(&eager.state(), &graphed.state(), &format!("step {step}"));
    }
    let before = graphed.optimizer.prepare_replay().unwrap();
    graphed.optimizer.param_groups_mut()[0].weight_decay = 0.5;
    assert!(graphed.optimizer.prepare_replay().unwrap() > before);
}

#[test]
fn a_replay_takes_no_memory() {
    let mut side = Side::new();
    let whole_step = HpuGraph::new();
    side.step();
    whole_step.capture_begin().unwrap();
    side.step();
    whole_step.capture_end().unwrap();
    for _ in 0..5 {
        whole_step.replay().unwrap();
    }
    let stats = whole_step.replay_stats().next().unwrap();
    assert_eq!((stats.replays, stats.moved_results, stats.pool_blocks), (5, 0, 0));
}

#[test]
fn a_closure_is_captured_and_replayed_from_a_shared_reference() {
    let (input, output) =
        (StaticTensor::rand([4, 3], voltaic::Device::Cpu).unwrap(), StaticTensor::default());
    let weight = Parameter::new(rand(&[3]));
    let g = HpuGraph::new();
    let error = input.copy_(&rand(&[1, 3])).unwrap_err().to_string();
    assert!(error.contains("Float[1, 3]") && error.contains("Float[4, 3]"), "no broadcast: {error}");
    assert_error!(output.copy_(&rand(&[4])), "not there yet");
    let captured: anyhow::Result<()> = g.capture(|| anyhow::bail!("the code fails"));
    assert_eq!(captured.unwrap_err().to_string(), "the code fails");
    assert!(!voltaic::graph::is_capturing() && !g.is_captured(), "the capture is abandoned");
    let step = || {
        let loss = input.get().f_mul(weight.tensor())?.f_square()?.f_sum(Kind::Float)?;
        output.set(&loss)?;
        assert!(matches!(g.replay(), Err(Error::Graph(GraphError::CaptureInProgress { .. }))), "of itself");
        Ok(loss.requires_grad())
    };
    assert!(g.capture(step).unwrap(), "what the code returns");
    assert!(g.is_captured() && !output.get().requires_grad(), "a result is kept without its history");
    for _ in 0..2 {
        let other = rand(&[4, 3]);
        input.copy_(&other.to_kind(Kind::Double)).unwrap(); // another dtype is cast
        g.replay().unwrap();
        let expected = (other * weight.tensor()).square().sum(Kind::Float).detach();
        assert_eq!(output.get(), expected);
    }
    g.reset();
    assert!(!g.is_captured());
}

#[test]
fn in_place_changes_are_made_again() {
    let mut x = Tensor::ones([2], (Kind::Float, Device::Cpu));
    let add_one = HpuGraph::new();
    add_one.capture_begin().unwrap();
    let _ = x.g_add_scalar_(1.0);
    add_one.capture_end().unwrap();
    assert_eq!(x.double_value(&[0]), 2.0, "a capture runs what it records");
    add_one.replay().unwrap();
    assert_eq!(x.double_value(&[1]), 3.0);
}

#[test]
fn numbers_from_the_host_are_constants_of_the_graph() {
    let x = Tensor::ones([3], (Kind::Float, Device::Cpu));
    let g = HpuGraph::new();
    g.capture_begin().unwrap();
    let y = &x * Tensor::from_slice(&[1.0_f32, 2.0, 3.0]);
    g.capture_end().unwrap();
    x.shallow_clone().copy_(&Tensor::full([3], 2.0, (Kind::Float, Device::Cpu)));
    g.replay().unwrap();
    assert_eq!(Vec::<f32>::try_from(&y).unwrap(), [2.0, 4.0, 6.0]);
}

#[test]
fn parts_between_two_mark_steps_are_graphs_of_their_own() {
    let mut x = rand(&[4]);
    let g = HpuGraph::new();
    g.capture_begin().unwrap();
    let y = &x + 1.0;
    mark_step().unwrap();
    let z = &y * 2.0;
    g.capture_end().unwrap();
    assert_eq!(g.graphs().count(), 2);
    x.copy_(&Tensor::zeros([4], (Kind::Float, Device::Cpu)));
    g.replay().unwrap();
    assert_eq!(z.double_value(&[3]), 2.0);
}

#[test]
fn inputs_can_be_given_anew_without_a_copy() {
    let x = rand(&[2, 3]);
    let g = HpuGraph::new();
    g.capture_begin().unwrap();
    g.mark_user_inputs(&[&x]).unwrap();
    let y = x.transpose(0, 1) * 2.0;
    g.capture_end().unwrap();
    let other = rand(&[2, 3]);
    g.replay_with(&[&other]).unwrap();
    assert_eq!(y, other.transpose(0, 1) * 2.0);
    let strided = rand(&[3, 2]).transpose(0, 1);
    g.replay_with(&[&strided]).unwrap();
    assert_eq!(y, strided.transpose(0, 1) * 2.0);
    assert_error!(g.replay_with(&[&rand(&[3, 3])]), "Float[3, 3]", "Float[2, 3]");
    assert_error!(g.replay_with(&[&other.to_kind(Kind::Double)]), "Double[2, 3]");
    assert!(g.replay_with(&[]).is_err());
}

/// Two layers, and something in between.
fn between(f: impl Fn(&Tensor) -> Tensor) -> String {
    let net = [Linear::new(4, 4).unwrap(), Linear::new(4, 4).unwrap()];
    let g = HpuGraph::new();
    g.name_weights(&Sequential::new());
    let holder = Holder { first: net.into_iter().next().unwrap() };
    g.name_weights(&holder);
    g.capture_begin().unwrap();
    let hidden = holder.first.forward(&rand(&[2, 4])).unwrap();
    let result = f(&hidden);
    let message = g.capture_end().unwrap_err().to_string();
    drop(result);
    assert!(g.replay().unwrap_err().to_string().contains("holds nothing"));
    message
}

#[derive(Module)]
struct Holder {
    first: Linear,
}

#[test]
fn what_cannot_be_replayed_is_named_with_its_layer() {
    let message = between(|hidden| {
        let sum = hidden.sum(Kind::Float).double_value(&[]);
        hidden * sum
    });
    assert_contains!(&message, "aten::_local_scalar_dense in or after `first`", "read back to the host");
    let message = between(|hidden| hidden.masked_select(&hidden.gt(0.0)));
    assert!(message.contains("aten::masked_select") && message.contains("depends on data"), "{message}");
    let message = between(|hidden| hidden.index(&[Some(hidden.gt(0.0))]));
    assert!(message.contains("aten::index.Tensor") && message.contains("depends on data"), "{message}");
    let message = between(|hidden| {
        assert_eq!(Vec::<f32>::try_from(hidden.reshape([-1])).unwrap().len(), 8);
        hidden.shallow_clone()
    });
    assert!(message.contains("read back to the host"), "{message}");
    let message = between(|hidden| {
        let _outer = scope("head");
        let _inner = scope("gate");
        hidden.nonzero()
    });
    assert!(message.contains("in head.gate"), "{message}");
}

#[test]
fn gathering_by_fixed_indices_is_static() {
    let (x, rows) = (rand(&[4, 3]), Tensor::from_slice(&[2_i64, 0]));
    let g = HpuGraph::new();
    g.capture_begin().unwrap();
    let y = x.index(&[Some(&rows)]);
    g.capture_end().unwrap();
    x.shallow_clone().copy_(&rand(&[4, 3]));
    g.replay().unwrap();
    assert_eq!(y, x.index_select(0, &rows));
}

#[test]
fn mistakes_in_the_order_of_calls_are_errors() {
    let outer = HpuGraph::new();
    let inner = HpuGraph::new();
    assert!(outer.capture_end().unwrap_err().to_string().contains("without capture_begin"));
    outer.capture_begin().unwrap();
    assert_error!(inner.capture_begin(), "while a graph is being captured");
    assert!(outer.replay().unwrap_err().to_string().contains("while a graph is being captured"));
    outer.reset();
    assert!(outer.replay().unwrap_err().to_string().contains("holds nothing"));
    inner.capture_begin().unwrap();
    inner.capture_end().unwrap();
    inner.replay().unwrap();
}

#[test]
fn a_capture_ends_with_a_panic_too() {
    let g = HpuGraph::new();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _capture = graph(&g).unwrap();
        panic!("on purpose");
    }));
    assert!(result.is_err() && !voltaic::graph::is_capturing());
}

#[test]
fn tensors_that_are_gone_are_missed() {
    let g = HpuGraph::new();
    let x = rand(&[4]);
    g.capture_begin().unwrap();
    let y = &x + 1.0;
    g.capture_end().unwrap();
    drop(x);
    assert_error!(g.replay(), "aten::add", "is gone");
    drop(y);

    let holder = Holder { first: Linear::new(4, 4).unwrap() };
    let input = rand(&[2, 4]);
    g.reset();
    g.name_weights(&holder);
    g.capture_begin().unwrap();
    let _output = holder.first.forward(&input).unwrap();
    g.capture_end().unwrap();
    g.replay().unwrap();
    holder.to_dtype(Kind::Double).unwrap();
    assert_error!(g.replay(), "`first.weight`", "capture again");
}

#[test]
fn a_graph_can_be_replayed_on_another_thread() {
    let x = rand(&[8]);
    let calls = Cell::new(0);
    let g = HpuGraph::new();
    g.capture_begin().unwrap();
    calls.set(calls.get() + 1);
    let y = x.sin() + x.cos();
    g.capture_end().unwrap();
    x.shallow_clone().copy_(&rand(&[8]));
    let g = std::thread::spawn(move || {
        g.replay().unwrap();
        g
    })
    .join()
    .unwrap();
    g.replay().unwrap();
    assert_eq!((y, calls.get()), (x.sin() + x.cos(), 1));
}

#[derive(Module)]
struct Flexible {
    first: Linear,
}

impl Forward for Flexible {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        Ok(self.first.forward(input)?.relu())
    }
}

fn flexible() -> Flexible {
    Flexible { first: Linear::new(4, 3).unwrap() }
}

#[test]
fn a_wrapped_module_gives_what_the_module_gives() {
    let net =
        wrap_in_hpu_graph(flexible(), WrapOptions { disable_tensor_cache: true, ..WrapOptions::default() });
    assert_eq!(net.named_parameters()[0].0, "first.weight");
    let _no_grad = tch::no_grad_guard();
    reset_metrics();
    for round in 0..3 {
        for batch in [2, 5, 7] {
            let input = waves(&[batch, 4], round + batch);
            assert_eq!(net.forward(&input).unwrap(), net.module().forward(&input).unwrap());
        }
    }
    let stats = net.stats();
    assert_eq!((stats.num_graphs, stats.misses, stats.hits, stats.uncached), (3, 3, 3, 0));
    assert_eq!(stats.checks, 3, "each kind of call is captured twice");
    assert_eq!(stats.recompilations.into_iter().collect::<Vec<_>>(), [(0, 2)]);
    let value = |name, tag| metric_global(name).unwrap().into_iter().find(|(t, _)| t == tag).unwrap().1;
    assert_eq!(value("graph_compilation", "TotalNumber"), 3.0);
    assert!(value("graph_compilation", "TotalTime") >= value("graph_compilation", "AvgTime"));
    assert_eq!((value("recipe_cache", "TotalHit"), value("recipe_cache", "TotalMiss")), (3.0, 3.0));
    assert_error!(metric_global("no_such"), "Metric with given name (no_such) doesn't exist");

    let kept = net.forward(&waves(&[2, 4], 1)).unwrap();
    let before = kept.copy();
    let _ = net.forward(&waves(&[2, 4], 9)).unwrap();
    assert_eq!(kept, before, "each output is a tensor of its own");
    net.module().to_dtype(Kind::Double).unwrap();
    let input = waves(&[2, 4], 3).to_kind(Kind::Double);
    assert_eq!(net.forward(&input).unwrap().kind(), Kind::Double);
}

#[test]
fn a_full_cache_and_calls_with_grad_run_as_usual() {
    let net = wrap_in_hpu_graph(flexible(), WrapOptions { max_graphs: Some(1), ..WrapOptions::default() });
    assert!(net.forward(&waves(&[2, 4], 0)).unwrap().requires_grad());
    let _no_grad = tch::no_grad_guard();
    for batch in [2, 3, 2, 2] {
        let _ = net.forward(&waves(&[batch, 4], 0)).unwrap();
    }
    let stats = net.stats();
    assert_eq!((stats.num_graphs, stats.misses, stats.hits, stats.uncached), (1, 1, 1, 2));
    assert!(stats.to_string().contains("Total forwards executed: 5"), "{stats}");
    net.clear_cache();
    assert_eq!(net.stats().num_graphs, 0);
}

#[test]
fn inputs_are_padded_to_few_shapes() {
    let buckets = Some(Buckets { dim: 0, sizes: vec![4, 8] });
    let net = wrap_in_hpu_graph(flexible(), WrapOptions { buckets, ..WrapOptions::default() });
    let _no_grad = tch::no_grad_guard();
    for batch in [1, 2, 3, 4, 5, 6, 7, 8, 9] {
        let input = waves(&[batch, 4], batch);
        let (output, expected) = (net.forward(&input).unwrap(), net.module().forward(&input).unwrap());
        assert_eq!(output.size(), [batch, 3]);
        assert!(output.allclose(&expected, 1e-5, 1e-6, false), "batch {batch}");
    }
    assert_eq!(net.stats().num_graphs, 3, "4, 8, and 9 as it is");
}

#[derive(Module)]
struct Dynamic {
    first: Linear,
}

impl Forward for Dynamic {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = self.first.forward(input)?;
        Ok(hidden.masked_select(&hidden.gt(0.0)))
    }
}

#[test]
fn a_module_that_cannot_be_captured_runs_as_usual() {
    let net = wrap_in_hpu_graph(Dynamic { first: Linear::new(4, 3).unwrap() }, WrapOptions::default());
    let _no_grad = tch::no_grad_guard();
    for step in 0..3 {
        let input = waves(&[6, 4], step);
        assert_eq!(net.forward(&input).unwrap(), net.module().forward(&input).unwrap());
    }
    assert!(net.refusal().unwrap().contains("aten::masked_select in or after `first`"));
    let fallback = metric_global("cpu_fallback").unwrap();
    assert!(fallback.iter().any(|(tag, count)| tag == "FallbackOps.aten::masked_select" && *count >= 1.0));
}

#[test]
fn static_parts_are_graphs_with_a_dynamic_part_between_them() {
    let first = wrap_in_hpu_graph(flexible(), WrapOptions::default());
    let second = wrap_in_hpu_graph(Relu, WrapOptions { max_graphs: Some(10), ..WrapOptions::default() });
    let _no_grad = tch::no_grad_guard();
    for step in 0..4 {
        let input = waves(&[6, 4], step);
        let hidden = first.forward(&input).unwrap();
        mark_step().unwrap();
        let chosen = hidden.masked_select(&hidden.gt(0.1));
        mark_step().unwrap();
        let output = second.forward(&chosen).unwrap();
        let hidden = first.module().forward(&input).unwrap();
        assert_eq!(output, hidden.masked_select(&hidden.gt(0.1)).relu());
    }
    assert_eq!((first.stats().misses, first.stats().checks, first.stats().hits), (1, 1, 2));
}
