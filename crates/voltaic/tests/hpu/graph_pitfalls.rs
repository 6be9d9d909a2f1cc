//! What graphs must not do: stand for code that has changed, write to the caller's tensors, or keep memory that was given
//! away.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use voltaic::accelerator::memory_stats;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::{
    Callable, HpuGraph, ModuleCacher, WrapOptions, graph, make_graphed_callables, wrap_in_hpu_graph,
};
use voltaic::nn::{Conv2d, Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, Sgd};
use voltaic::trainer::{GraphMode, Trainer};
use voltaic::{Device, Module, ffi};

use crate::process::{own_process, plays, text_of};
use crate::silent::silent;
use crate::support::{CPU, HPU, bits, start};

fn rand(size: &[i64]) -> Tensor {
    Tensor::rand(size, (Kind::Float, CPU))
}

/// Multiplies by how often it was called, which is a number of the host or a tensor made from such numbers.
#[derive(Module)]
struct Counts {
    fc: Linear,
    #[module(skip)]
    calls: Cell<usize>,
    /// Elements of the tensor; a plain number if there are none.
    elements: usize,
    /// The count ends here.
    limit: usize,
}

impl Counts {
    fn new(elements: usize, limit: usize) -> Self {
        ffi::manual_seed(3).unwrap();
        Self { fc: Linear::new(4, 8).unwrap(), calls: Cell::new(0), elements, limit }
    }
}

impl Forward for Counts {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        self.calls.set((self.calls.get() + 1).min(self.limit));
        let factor = self.calls.get() as f32;
        let hidden = self.fc.forward(input)?;
        if self.elements == 0 {
            return Ok(hidden.f_mul_scalar(f64::from(factor))?);
        }
        let factors = Tensor::from_slice(&vec![factor; self.elements]).f_to_device(input.device())?;
        Ok(hidden.f_mul(&factors.f_narrow(0, 0, 8)?)?)
    }
}

#[test]
fn numbers_of_the_host_that_change_are_found_out() {
    let _rng = start();
    for elements in [0, 8, 5000] {
        let (eager, cached) = (Counts::new(elements, 9), ModuleCacher::new(4).wrap(Counts::new(elements, 9)));
        let wrapped = wrap_in_hpu_graph(Counts::new(elements, 9), WrapOptions::default());
        for call in 0..6 {
            let input = rand(&[3, 4]);
            let expected = eager.forward(&input).unwrap();
            assert_eq!(bits(&expected), bits(&cached.forward(&input).unwrap()), "{elements}, call {call}");
            let _no_grad = tch::no_grad_guard();
            assert_eq!(bits(&expected), bits(&wrapped.forward(&input).unwrap()), "{elements}, call {call}");
        }
        for refusal in [cached.refusal(), wrapped.refusal()] {
            assert!(refusal.as_ref().is_some_and(|why| why.contains("not static")), "{refusal:?}");
        }
        let callable = make_graphed_callables(Counts::new(elements, 9), &rand(&[3, 4]), 1);
        assert_error!(callable, "not static");
    }
}

#[test]
fn graphs_that_are_given_up_are_there_for_backward_passes_to_come() {
    let _rng = start();
    let inputs: Vec<Tensor> = (0..5).map(|_| rand(&[3, 4])).collect();
    let run = |net: &dyn Forward| {
        // the second call differs from the first one, and the fourth from the third, before any backward pass
        let losses = inputs.iter().map(|input| net.forward(input).unwrap().square().sum(Kind::Float));
        let losses: Vec<Tensor> = losses.collect();
        let others: Vec<Tensor> = (0..50).map(|_| rand(&[3, 8]) * f64::NAN).collect();
        losses.iter().for_each(Tensor::backward);
        drop(others);
        let module: &dyn Module = net;
        module.parameters().iter().map(|parameter| bits(&parameter.grad())).collect::<Vec<_>>()
    };
    let cached = ModuleCacher::new(4).wrap(Counts::new(0, 9));
    assert_eq!(run(&Counts::new(0, 9)), run(&cached));
    assert!(cached.refusal().is_some_and(|why| why.contains("not static")));
}

/// Goes one of two ways from call to call, or by what its input holds.
#[derive(Module)]
struct Branches {
    fc: Linear,
    #[module(skip)]
    calls: Cell<usize>,
    reads_input: bool,
}

impl Forward for Branches {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = self.fc.forward(input)?;
        self.calls.set(self.calls.get() + 1);
        let is_first_way = match self.reads_input {
            true => input.f_sum(Kind::Float)?.f_double_value(&[])? > 0.0,
            false => self.calls.get().is_multiple_of(2),
        };
        Ok(if is_first_way { hidden.f_relu()? } else { hidden.f_tanh()? })
    }
}

#[test]
fn control_flow_within_a_module_is_found_out_and_runs_as_usual() {
    let _rng = start();
    for (reads_input, reason) in [(false, "not static"), (true, "_local_scalar_dense")] {
        let make = || {
            ffi::manual_seed(3).unwrap();
            Branches { fc: Linear::new(4, 8).unwrap(), calls: Cell::new(0), reads_input }
        };
        let (eager, cached) = (make(), ModuleCacher::new(4).wrap(make()));
        for call in 0..6 {
            let input = rand(&[3, 4]) - f64::from(call % 2);
            let output = cached.forward(&input).unwrap();
            assert_eq!(bits(&eager.forward(&input).unwrap()), bits(&output), "call {call}");
            output.sum(Kind::Float).backward();
        }
        assert!(cached.refusal().is_some_and(|why| why.contains(reason)), "{:?}", cached.refusal());
        assert_eq!(cached.stats().hits, 0);
    }
}

/// A host tensor that is made again in each call, and always the same, is a constant; autograd keeps it for the backward
/// pass.
#[test]
fn constants_that_are_made_again_are_no_hindrance() {
    let _rng = start();
    for elements in [0, 8, 5000] {
        let (eager, cached) = (Counts::new(elements, 1), ModuleCacher::new(4).wrap(Counts::new(elements, 1)));
        for _ in 0..5 {
            let input = rand(&[3, 4]);
            let run = |net: &dyn Forward| {
                let output = net.forward(&input).unwrap();
                output.square().sum(Kind::Float).backward();
                let module: &dyn Module = net;
                (bits(&output.detach()), bits(&module.parameters()[0].grad()))
            };
            assert_eq!(run(&eager), run(&cached), "{elements}");
        }
        assert_eq!(cached.refusal(), None);
        let stats = cached.stats();
        assert_eq!((stats.misses, stats.checks, stats.hits, stats.uncached), (1, 1, 3, 0), "{stats}");
    }
}

/// A network whose step makes a large tensor of the host from a number that changes.
#[derive(Module)]
struct Schedule {
    fc: Linear,
    #[module(skip)]
    step: Cell<u32>,
    elements: usize,
}

lightning_module!(Schedule, (Tensor, Tensor), Sgd::new(0.1), |net, (x, y), _| {
    net.step.set(net.step.get() + 1);
    let weights = vec![1.0 / net.step.get() as f32; net.elements];
    let weights = Tensor::from_slice(&weights).f_to_device(x.device())?;
    let error = net.fc.forward(x)?.f_sub(y)?.f_mul(&weights.f_narrow(0, 0, 2)?)?;
    Ok(error.f_square()?.f_mean(Kind::Float)?)
});

pub fn regression() -> DataLoader<(Tensor, Tensor)> {
    ffi::manual_seed(11).unwrap();
    DataLoader::new(TensorDataset::new((rand(&[40, 3]), rand(&[40, 2]))).unwrap())
        .batch_size(4)
        .build()
        .unwrap()
}

pub fn trainer(device: Device, graph: GraphMode) -> Trainer {
    silent()
        .accelerator(if device == Device::Cpu { "cpu" } else { "hpu" })
        .devices(1)
        .max_epochs(2)
        .graph(graph)
        .build()
        .unwrap()
}

#[test]
fn a_step_that_makes_other_tensors_of_the_host_is_not_replayed() {
    let _rng = start();
    for device in [Device::Cpu, Device::Hpu(0)] {
        for elements in [2, 5000] {
            let run = |graph| {
                ffi::manual_seed(1).unwrap();
                let mut net = Schedule { fc: Linear::new(3, 2).unwrap(), step: Cell::new(0), elements };
                let mut trainer = trainer(device, graph);
                trainer.fit(&mut net, &mut Loaders::new().train(regression())).unwrap();
                let weights = net.state_dict().iter().map(|(_, tensor)| bits(tensor)).collect::<Vec<_>>();
                (weights, trainer.graph_report().clone())
            };
            let ((eager, _), (graphed, report)) = (run(GraphMode::Off), run(GraphMode::Step));
            assert!(eager == graphed, "{elements} on {device}: {report:?}");
            assert!(report.refusal.as_ref().is_some_and(|why| why.contains("other values")), "{report:?}");
        }
    }
}

/// Packs sequences: how much comes out depends on their lengths.
#[derive(Module)]
struct Packs {
    fc: Linear,
}

impl Callable<(Tensor, Tensor)> for Packs {
    type Output = Tensor;

    fn forward_with(&self, (input, lengths): &(Tensor, Tensor)) -> anyhow::Result<Tensor> {
        let (packed, _) = self.fc.forward(input)?.f_internal_pack_padded_sequence(lengths, true)?;
        Ok(packed)
    }
}

#[test]
fn shapes_that_depend_on_data_run_without_a_graph() {
    let _rng = start();
    let make = || {
        ffi::manual_seed(3).unwrap();
        Packs { fc: Linear::new(4, 2).unwrap() }
    };
    let (eager, cached) = (make(), ModuleCacher::new(4).wrap(make()));
    let wrapped = wrap_in_hpu_graph(make(), WrapOptions::default());
    for lengths in [[5, 3, 2], [5, 3, 2], [5, 5, 4], [4, 1, 1]] {
        let args = (rand(&[3, 5, 4]), Tensor::from_slice(&lengths.map(i64::from)));
        let expected = eager.call(&args).unwrap();
        assert_eq!(bits(&expected), bits(&cached.call(&args).unwrap()), "{lengths:?}");
        let _no_grad = tch::no_grad_guard();
        assert_eq!(bits(&expected), bits(&wrapped.call(&args).unwrap()), "{lengths:?}");
    }
    assert!(cached.refusal().unwrap().contains("_pack_padded_sequence"), "{:?}", cached.refusal());
}

/// The connectionist temporal classification of libtorch reads lengths on the host.
#[derive(Module)]
struct Ctc;

impl Callable<(Tensor, Tensor, Tensor, Tensor)> for Ctc {
    type Output = Tensor;

    fn forward_with(&self, args: &(Tensor, Tensor, Tensor, Tensor)) -> anyhow::Result<Tensor> {
        let (logits, targets, input_lengths, target_lengths) = args;
        let log_probs = logits.f_log_softmax(2, Kind::Float)?;
        let reduction = tch::Reduction::Sum;
        Ok(Tensor::f_ctc_loss_tensor(
            &log_probs,
            targets,
            input_lengths,
            target_lengths,
            0,
            reduction,
            false,
        )?)
    }
}

#[test]
fn lengths_that_are_read_on_the_host_run_without_a_graph() {
    let _rng = start();
    let cached = ModuleCacher::new(4).wrap(Ctc);
    for lengths in [[6, 5], [6, 5], [4, 6]] {
        let targets = Tensor::randint_low(1, 5, [2, 3], (Kind::Int64, CPU));
        let input_lengths = Tensor::from_slice(&lengths.map(i64::from));
        let args = (rand(&[6, 2, 5]), targets, input_lengths, Tensor::from_slice(&[3_i64, 2]));
        assert_eq!(bits(&Ctc.call(&args).unwrap()), bits(&cached.call(&args).unwrap()));
    }
    assert!(cached.refusal().unwrap().contains("reads lengths"), "{:?}", cached.refusal());
}

/// Changes its input in place.
#[derive(Module)]
struct InPlace;

impl Forward for InPlace {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        Ok(input.shallow_clone().f_relu_()?.f_mul_scalar(2.0)?)
    }
}

#[test]
fn the_callers_tensor_is_not_written_to() {
    let _rng = start();
    for device in [CPU, HPU] {
        let net = wrap_in_hpu_graph(InPlace, WrapOptions::default());
        let _no_grad = tch::no_grad_guard();
        for call in 0..4 {
            let input = (rand(&[3, 4]) - 0.5).to_device(device);
            let before = bits(&input);
            let output = net.forward(&input).unwrap();
            assert_eq!(before, bits(&input), "call {call}");
            assert_eq!(bits(&output), bits(&(input.relu() * 2.0)), "call {call}");
        }
        assert_eq!(net.stats().hits, 2);
    }
}

#[test]
fn inputs_of_another_layout_have_graphs_of_their_own() {
    let _rng = start();
    for device in [Device::Cpu, Device::Hpu(0)] {
        let make = || {
            ffi::manual_seed(3).unwrap();
            let net = Conv2d::new(8, 16, 3).unwrap();
            net.to_device(device).unwrap();
            net
        };
        let eager = make();
        let cached = ModuleCacher::new(8).wrap(make());
        let callable = make_graphed_callables(make(), &layouts(device)[0], 0).unwrap();
        for round in 0..3 {
            for (layout, input) in layouts(device).iter().enumerate() {
                let expected = eager.forward(input).unwrap();
                let run = |net: &dyn Forward| {
                    let output = net.forward(input).unwrap();
                    output.square().sum(Kind::Float).backward();
                    assert_eq!(output.stride(), expected.stride(), "layout {layout}, round {round}");
                    bits(&output.detach())
                };
                assert_eq!(bits(&expected), run(&cached), "layout {layout}, round {round} on {device}");
                assert_eq!(bits(&expected), run(&callable), "layout {layout}, round {round} on {device}");
            }
        }
        let stats = cached.stats();
        assert_eq!((stats.misses, stats.checks, stats.hits, stats.uncached), (4, 4, 4, 3), "{stats}");
    }
}

/// The same shape: contiguous, channels last, with gaps, expanded, and of windows that overlap.
fn layouts(device: Device) -> Vec<Tensor> {
    let device = if device == Device::Cpu { CPU } else { HPU };
    let dense = rand(&[2, 8, 10, 10]).to_device(device);
    let last = rand(&[2, 10, 10, 8]).to_device(device).permute([0, 3, 1, 2]);
    let gaps = rand(&[2, 8, 12, 20]).to_device(device).slice(3, 0, 20, 2).narrow(2, 1, 10);
    let expanded = rand(&[1, 8, 10, 10]).to_device(device).expand([2, 8, 10, 10], false);
    let overlapping = rand(&[4000]).to_device(device).as_strided([2, 8, 10, 10], [500, 50, 5, 1], 0);
    vec![dense, last, gaps, expanded, overlapping]
}

#[test]
fn outputs_that_are_given_away_leave_no_memory_behind() {
    let _rng = start();
    let hpu = Device::Hpu(0);
    let make = |disable_tensor_cache| {
        ffi::manual_seed(3).unwrap();
        let net = Linear::new(64, 1024).unwrap();
        net.to_device(hpu).unwrap();
        wrap_in_hpu_graph(net, WrapOptions { disable_tensor_cache, ..WrapOptions::default() })
    };
    let in_use = || memory_stats(hpu).unwrap().in_use;
    let input = rand(&[256, 64]).to_device(HPU);
    let _no_grad = tch::no_grad_guard();
    let bytes = 256 * 1024 * 4;
    let mut after = [0; 2];
    for (index, disable) in [false, true].into_iter().enumerate() {
        let net = make(disable);
        let eager = bits(&net.module().forward(&input).unwrap());
        let before = in_use();
        for call in 0..4 {
            let output = net.forward(&input).unwrap();
            assert_eq!(eager, bits(&output), "call {call}");
            let with = in_use();
            drop(output);
            let freed = with - in_use();
            let expected = if disable || call == 1 { bytes } else { 0 };
            assert!(freed >= expected && freed < expected + 4096, "call {call}: {freed} bytes");
        }
        after[index] = in_use() - before;
        // two replays give two tensors
        let (first, second) = (net.forward(&input).unwrap(), net.forward(&(&input * 2.0)).unwrap());
        assert_eq!(disable, bits(&first) == eager);
        drop((first, second));
    }
    assert!(after[0] >= after[1] + bytes, "{after:?} bytes with the outputs kept and given away");
}

/// What each replay gives away, and what it does not: outputs of one memory, one that is the input, and a weight.
#[derive(Module)]
struct Several {
    fc: Linear,
}

impl Callable<(Tensor, Tensor)> for Several {
    type Output = (Tensor, Tensor, Tensor, Tensor);

    fn forward_with(&self, (x, y): &(Tensor, Tensor)) -> anyhow::Result<Self::Output> {
        let hidden = self.fc.forward(x)?;
        let view = hidden.f_narrow(1, 1, 1)?;
        Ok((hidden, view, y.f_transpose(0, 1)?, self.fc.weight.f_detach()?))
    }
}

#[test]
fn each_output_that_is_given_away_is_a_tensor_of_its_own() {
    let _rng = start();
    for device in [CPU, HPU] {
        ffi::manual_seed(3).unwrap();
        let net = Several { fc: Linear::new(4, 2).unwrap() };
        net.to_device(Device::of(&rand(&[1]).to_device(device)).unwrap()).unwrap();
        let net =
            wrap_in_hpu_graph(net, WrapOptions { disable_tensor_cache: true, ..WrapOptions::default() });
        let _no_grad = tch::no_grad_guard();
        let mut given: Vec<(Vec<Tensor>, Vec<Vec<u8>>)> = Vec::new();
        for _ in 0..4 {
            let args = (rand(&[3, 4]).to_device(device), rand(&[2, 5]).to_device(device));
            let (a, b, c, d) = net.call(&args).unwrap();
            let (e, f, g, h) = net.module().call(&args).unwrap();
            let (outputs, expected) = (vec![a, b, c, d], vec![bits(&e), bits(&f), bits(&g), bits(&h)]);
            for (tensors, expected) in given.iter().chain([&(outputs, expected)]) {
                let now: Vec<_> = tensors.iter().map(bits).collect();
                assert!(now == *expected);
            }
            let (a, b, c, d) = net.call(&args).unwrap();
            given.push((vec![a, b, c, d], vec![bits(&e), bits(&f), bits(&g), bits(&h)]));
        }
    }
}

/// The block of the specification: captured at the very first batch, with the optimizer's step inside.
#[derive(Module)]
struct AsPrinted {
    fc: Linear,
    #[module(skip)]
    state: RefCell<(HpuGraph, Tensor, Tensor, Tensor)>,
    captures: bool,
}

lightning_module!(AsPrinted, (Tensor, Tensor), manual(AdamW::new(1e-2)), |net, (x, y), ctx| {
    let (g, static_x, static_y, static_loss) = &mut *net.state.borrow_mut();
    let is_first = ctx.batch_idx() == 0 && ctx.current_epoch() == 0;
    if !is_first {
        static_x.copy_(x);
        static_y.copy_(y);
    }
    if net.captures && !is_first {
        g.replay()?;
        return Ok(static_loss.shallow_clone());
    }
    ctx.optimizer(0)?.zero_grad()?;
    let capture = if net.captures { Some(graph(g)?) } else { None };
    let loss = net.fc.forward(static_x)?.f_sub(static_y)?.f_square()?.f_mean(Kind::Float)?;
    ctx.manual_backward(&loss)?;
    ctx.optimizer(0)?.step()?;
    *static_loss = loss.f_detach()?;
    drop(loss);
    capture.map_or(Ok(()), voltaic::graph::CaptureGuard::end)?;
    Ok(static_loss.shallow_clone())
});

#[test]
fn the_printed_block_trains_as_without_a_graph() {
    let _rng = start();
    for device in [Device::Cpu, Device::Hpu(0)] {
        let run = |captures| {
            ffi::manual_seed(1).unwrap();
            let on = if device == Device::Cpu { CPU } else { HPU };
            let state =
                (HpuGraph::new(), rand(&[4, 3]).to_device(on), rand(&[4, 2]).to_device(on), Tensor::new());
            let mut net = AsPrinted { fc: Linear::new(3, 2).unwrap(), state: RefCell::new(state), captures };
            trainer(device, GraphMode::Off).fit(&mut net, &mut Loaders::new().train(regression())).unwrap();
            let loss = bits(&net.state.borrow().3);
            (loss, net.state_dict().iter().map(|(_, tensor)| bits(tensor)).collect::<Vec<_>>())
        };
        assert!(run(false) == run(true), "on {device}");
    }
}

/// What is logged on this thread while `f` runs.
pub(crate) fn log_of(f: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Log {
        fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(text);
            Ok(text.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
    tracing::subscriber::with_default(subscriber, f);
    String::from_utf8(log.0.lock().unwrap().clone()).unwrap()
}

#[test]
fn an_option_without_effect_says_so() {
    let _rng = start();
    let log = log_of(|| {
        let options = WrapOptions { asynchronous: true, ..WrapOptions::default() };
        drop(wrap_in_hpu_graph(Linear::new(3, 2).unwrap(), options));
        drop(wrap_in_hpu_graph(Linear::new(3, 2).unwrap(), WrapOptions::default()));
    });
    assert_eq!(log.matches("asynchronous=true has no effect").count(), 1, "{log}");
}

#[test]
fn graphs_of_modules_that_no_step_calls_are_warned_of() {
    let _rng = start();
    let log = log_of(|| {
        let mut net = Schedule { fc: Linear::new(3, 2).unwrap(), step: Cell::new(0), elements: 2 };
        trainer(Device::Cpu, GraphMode::Modules)
            .fit(&mut net, &mut Loaders::new().train(regression()))
            .unwrap();
    });
    assert_eq!(log.matches("no step called a module by ctx.graphed").count(), 1, "{log}");
}

#[test]
fn libtorch_warns_of_nothing_in_a_replay() {
    let _rng = start();
    if !plays("replays") {
        let output = own_process("replays").output().unwrap();
        text_of(&output);
        let log = String::from_utf8_lossy(&output.stderr);
        return assert!(!log.contains("resized"), "the loss is made larger at first, then smaller: {log}");
    }
    for device in [CPU, HPU] {
        let [x, y] = [rand(&[4, 3]).to_device(device), rand(&[4, 3]).to_device(device)];
        let (graph, loss) = (HpuGraph::new(), Tensor::zeros([], (Kind::Float, device)));
        let capture = || -> anyhow::Result<()> {
            loss.shallow_clone().copy_(&x.f_mul_scalar(2.0)?.f_mse_loss(&y, tch::Reduction::Mean)?);
            Ok(())
        };
        graph.capture(capture).unwrap();
        _ = x.shallow_clone().fill_(0.25);
        graph.replay().unwrap();
        assert_eq!(loss, (&x * 2.0).mse_loss(&y, tch::Reduction::Mean));
    }
}
