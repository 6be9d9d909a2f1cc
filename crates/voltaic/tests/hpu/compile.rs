//! Compiled modules and training steps: what the code computes, with fewer passes over memory.

use tch::{Kind, Reduction, Tensor};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::{Buckets, CompileBackend, CompileConfig, CompileOptions, Compiler, HpuGraph, PlanStats};
use voltaic::models::{Gpt, GptConfig};
use voltaic::module::LightningModule;
use voltaic::nn::{Callable, Forward, Linear, ModuleExt};
use voltaic::precision::autocast;
use voltaic::trainer::{GraphReport, Trainer, TrainerBuilder, seed_everything};
use voltaic::{Module, ffi};

use crate::graph_pitfalls::log_of;
use crate::process::{own_process, plays, text_of};
use crate::support::{CPU, HPU, same_bits, start};

/// What is compiled.
pub(crate) type Function = fn(&Tensor) -> Tensor;

/// A function of a tensor as a module.
#[derive(Module)]
pub(crate) struct Code {
    #[module(skip)]
    pub(crate) code: Function,
}

impl Forward for Code {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok((self.code)(x))
    }
}

/// The largest difference, as a part of the largest number.
pub(crate) fn distance(own: &Tensor, expected: &Tensor) -> f64 {
    let wide = |tensor: &Tensor| tensor.detach().to_device(CPU).to_kind(Kind::Double);
    let (own, expected) = (wide(own), wide(expected));
    assert_eq!(own.size(), expected.size());
    let largest = |tensor: &Tensor| tensor.abs().max().double_value(&[]);
    largest(&(own - &expected)) / largest(&expected).max(1e-30)
}

/// What each number of a result counts in a loss.
pub(crate) fn factors(y: &Tensor) -> Tensor {
    let numbers = Tensor::arange(y.numel() as i64, (Kind::Float, CPU)).sin().to_kind(y.kind());
    numbers.to_device(y.device()).view_as(y)
}

/// Calls `code` compiled and not, on inputs of `size`, with gradients; gives the plan of both passes.
fn check(what: &str, code: Function, size: &[i64], kind: Kind, tolerance: f64) -> Vec<PlanStats> {
    check_with(what, CompileOptions::default(), code, size, kind, tolerance)
}

/// The same with options.
pub(crate) fn check_with(
    what: &str,
    options: CompileOptions,
    code: Function,
    size: &[i64],
    kind: Kind,
    tolerance: f64,
) -> Vec<PlanStats> {
    let mut plans = Vec::new();
    for device in [CPU, HPU] {
        let net = Compiler::new("hpu_backend").unwrap().options(options).wrap(Code { code });
        for step in 0..4 {
            let input = || {
                ffi::manual_seed(step).unwrap();
                Tensor::randn(size, (Kind::Float, CPU))
                    .to_device(device)
                    .to_kind(kind)
                    .set_requires_grad(true)
            };
            let run = |call: &dyn Fn(&Tensor) -> Tensor| {
                let x = input();
                ffi::manual_seed(step + 50).unwrap();
                let y = call(&x);
                (&y * factors(&y)).sum(Kind::Float).backward();
                (y.detach(), x.grad())
            };
            let (own, expected) = (run(&|x| net.forward(x).unwrap()), run(&code));
            assert_eq!(own.0.kind(), expected.0.kind(), "{what}");
            let distances = [distance(&own.0, &expected.0), distance(&own.1, &expected.1)];
            assert!(distances.iter().all(|d| *d <= tolerance), "{what} on {device:?}: {distances:?}");
        }
        assert_eq!((net.stats().hits, net.refusal()), (2, None), "{what}");
        plans = net.plan_stats();
    }
    plans
}

fn two_kinds(what: &str, code: Function, size: &[i64]) -> Vec<PlanStats> {
    check(what, code, size, Kind::BFloat16, 8e-2);
    check(what, code, size, Kind::Float, 1e-6)
}

#[test]
fn chains_of_operators_run_as_one() {
    let _rng = start();
    let gelu = |x: &Tensor| (x * 0.5 + 1.0).gelu("tanh") * x.tanh() - x;
    for (what, code, forward) in [
        ("arithmetic", (|x| (x * 3.0 + x) / 2.0 - x) as Function, 1),
        ("activations", gelu, 1),
        ("gelu and sigmoid", |x| x.gelu("none").sigmoid().relu() * 2.0, 1),
        ("casts", |x| (x.to_kind(Kind::BFloat16) * 2.0).to_kind(Kind::Float) + x, 1),
        ("a mean", |x| (x * 2.0 - x) / (x.abs().mean(x.kind()) + 1.0), 3),
        ("a view within", |x| (x * 2.0).view([-1]).tanh().view_as(x) + x, 1),
        ("a row", |x| (x + x.narrow(0, 0, 1).contiguous()) * x.narrow(0, 1, 1).contiguous() * 2.0, 3),
    ] {
        for size in [[3, 5], [70, 1000]] {
            let plans = two_kinds(what, code, &size);
            assert!(plans[0].num_fused >= 2, "{what}: {plans:?}");
            assert!(plans[0].num_calls <= forward + usize::from(what == "a mean"), "{what}: {plans:?}");
        }
    }
}

/// The norm of the last dimension, with a weight and a bias that are rows of the input.
fn norm(x: &Tensor, of: &Tensor) -> Tensor {
    let row = |at| of.narrow(0, at, 1).reshape([-1]);
    x.layer_norm([x.size()[1]], Some(row(0)), Some(row(1)), 1e-3, false)
}

#[test]
fn norms_and_softmax_run_as_one_with_what_is_around_them() {
    let _rng = start();
    for (what, code, fused) in [
        ("a sum, a norm and a cast", (|x| norm(&(x * 2.0 + x), x).to_kind(Kind::Float) - x) as Function, 4),
        (
            "a norm without weights",
            |x| (x * 2.0).layer_norm::<Tensor>([x.size()[1]], None, None, 1e-3, false),
            2,
        ),
        ("a norm of all", |x| (x * 2.0).layer_norm::<Tensor>(x.size(), None, None, 1e-3, false) + x, 3),
        ("softmax", |x| (x * 2.0).softmax(-1, x.kind()) * x, 3),
        ("log_softmax", |x| (x * 2.0).log_softmax(1, x.kind()).tanh(), 3),
        ("two of them", |x| norm(&(x * 2.0).softmax(-1, x.kind()), x).relu(), 4),
    ] {
        for size in [[2, 5], [70, 33], [40, if what == "a norm of all" { 70 } else { 700 }]] {
            let plans = two_kinds(what, code, &size);
            assert_eq!((plans[0].num_fused, plans[0].num_calls), (fused, 1), "{what}: {plans:?}");
            assert!(plans[1].num_fused >= 2, "{what}: {plans:?}");
        }
    }
    // softmax of columns is libtorch's, and so are rows that the first caches do not hold
    for (what, code, size) in [
        ("columns", (|x| (x * 2.0).softmax(0, x.kind()) * 3.0) as Function, [70, 33]),
        ("long rows", |x| (x * 2.0).softmax(1, x.kind()) * 3.0, [2, 40_000]),
    ] {
        let plans = check(what, code, &size, Kind::Float, 2e-6);
        assert_eq!((plans[0].num_fused, plans[0].num_calls), (0, 3), "{what}: {plans:?}");
    }
}

/// The loss of some classes, one of them ignored.
fn loss(x: &Tensor, reduction: Reduction) -> Tensor {
    let classes = Tensor::arange(x.size()[0], (Kind::Int64, x.device())).remainder(x.size()[1]);
    let classes = classes.masked_fill(&classes.eq(1), -100);
    (x * 2.0).cross_entropy_loss::<Tensor>(&classes, None, reduction, -100, 0.0)
}

#[test]
fn losses_by_classes_have_their_gradients_in_chains() {
    let _rng = start();
    for (what, code, calls) in [
        ("mean", (|x| loss(x, Reduction::Mean) * x) as Function, 3),
        ("sum", |x| loss(x, Reduction::Sum) * x, 3),
        ("each", |x| loss(x, Reduction::None).unsqueeze(1) * x, 4),
    ] {
        for size in [[2, 5], [70, 33], [40, 700]] {
            let plans = two_kinds(what, code, &size);
            assert_eq!((plans[0].num_fused, plans[1].num_calls), (2, calls), "{what}: {plans:?}");
        }
    }
}

#[test]
fn chains_write_over_what_is_read_for_the_last_time() {
    let _rng = start();
    let dead: Function = |x| (x.detach().erf() * 2.0 + 1.0).erf() + x;
    let alive: Function = |x| {
        let first = x.detach().erf();
        (&first * 2.0 + 1.0).erf() + first + x
    };
    if plays("not in place") {
        assert_eq!(check("dead", dead, &[9, 70], Kind::Float, 1e-6)[0].num_in_place, 0);
        return;
    }
    text_of(&own_process("not in place").env("PT_HPU_DISABLE_in_place", "1").output().unwrap());
    for (what, code, count) in [("dead", dead, 1), ("alive", alive, 0)] {
        let plans = two_kinds(what, code, &[9, 70]);
        assert_eq!(plans[0].num_in_place, count, "{what}: {plans:?}");
    }
}

/// Attention of two heads, of query, key and value that are parts of one tensor; the query counts so often in the result.
fn attention(x: &Tensor, queries: f64) -> Tensor {
    let size = x.size();
    let heads = |part: &Tensor| part.view([size[0], size[1], 2, -1]).transpose(1, 2);
    let parts: Vec<Tensor> = x.chunk(3, 2).iter().map(heads).collect();
    let [q, k, v] = &parts[..] else { unreachable!() };
    let out = Tensor::scaled_dot_product_attention(q, k, v, None::<Tensor>, 0.0, true, None, false);
    let out = if queries > 0.0 { out + q * queries } else { out };
    out.transpose(1, 2).reshape([size[0], size[1], -1])
}

#[test]
fn gradients_of_attention_are_written_where_they_are_concatenated() {
    let _rng = start();
    let packed: Function = |x| attention(&(x * 0.5), 0.0).tanh();
    if plays("concatenated") {
        assert_eq!(check("packed", packed, &[2, 6, 24], Kind::Float, 1e-5)[1].num_joined, 0);
        return;
    }
    text_of(&own_process("concatenated").env("PT_HPU_DISABLE_concatenations", "1").output().unwrap());
    let kept: Function = |x| attention(x, 0.0).tanh();
    let read_twice: Function = |x| attention(&(x * 0.5), 2.0).tanh();
    for (what, code, count) in [("packed", packed, 1), ("kept", kept, 0), ("read twice", read_twice, 0)] {
        for (kind, tolerance) in [(Kind::Float, 1e-5), (Kind::BFloat16, 8e-2)] {
            let plans = check(what, code, &[2, 6, 24], kind, tolerance);
            assert_eq!(plans[1].num_joined, count, "{what}: {plans:?}");
        }
    }
}

#[test]
fn a_gpt_has_its_norms_and_casts_in_chains() {
    let _rng = start();
    let config = GptConfig { vocab_size: 65, block_size: 16, n_layer: 2, ..GptConfig::tiny() };
    // sums with norms; in bfloat16 also casts, and the gradient of the last norm, to which nothing is added
    for (precise, fused) in [(true, [10, 8]), (false, [15, 20])] {
        let gpt = Gpt::new(config.clone()).unwrap();
        let compiled = voltaic::compile(&gpt, "hpu_backend").unwrap();
        for _ in 0..3 {
            let tokens = Tensor::randint(65, [4, 16], (Kind::Int64, CPU));
            let region = (!precise).then(|| autocast(voltaic::Device::Cpu, Kind::BFloat16).unwrap());
            let logits = gpt.call(&tokens).unwrap();
            drop(region);
            logits.sum(Kind::Float).backward();
        }
        let plans = compiled.plan_stats();
        let counts = [0, 1].map(|pass| plans[pass].num_fused);
        assert_eq!((counts, plans[1].num_joined), (fused, 2), "{precise}: {plans:?}");
    }
}

#[test]
fn dropout_masks_are_those_of_the_code() {
    let _rng = start();
    let plans = two_kinds("dropout", |x| x.gelu("none").dropout(0.3, true) * 2.0 + x, &[40, 50]);
    assert!(plans.iter().all(|plan| plan.num_fused >= 2), "{plans:?}");
}

#[test]
fn writes_and_views_keep_their_order() {
    let _rng = start();
    let cases: [(&str, Function); 8] = [
        ("a write before the last read", |x| {
            let mut y = x * 2.0;
            let first = &y + 1.0;
            _ = y.g_mul_(&x.detach().sigmoid());
            &first * 3.0 + y
        }),
        ("a write to a part", |x| {
            let y = x.detach() * 2.0;
            let z = &y * 3.0;
            _ = y.narrow(1, 1, 2).g_add_scalar_(5.0);
            (&y + z) * x
        }),
        ("a write to what is transposed", |x| {
            let y = x.detach() + 2.0;
            let z = &y * 2.0;
            _ = y.transpose(0, 1).g_mul_(&x.detach().transpose(0, 1));
            z * &y + x
        }),
        ("a write to itself, shifted", |x| {
            let y = x.detach() * 1.5;
            let other = y.narrow(0, 1, 2) * 2.0;
            _ = y.narrow(0, 0, 2).g_add_(&other);
            x * &y + &y
        }),
        ("a part of a chain is read by a sum", |x| {
            let y = x * 2.0;
            let total = y.sum(x.kind());
            (&y + 1.0) * total
        }),
        ("strides", |x| {
            let y = (x * 2.0).transpose(0, 1);
            (&y + 1.0) * y.tanh()
        }),
        ("a column that repeats", |x| (x * 2.0) * x.narrow(1, 0, 1) + x),
        ("the input is written", |x| {
            let mut copy = x.detach();
            _ = copy.g_add_scalar_(1.0);
            (&copy * 2.0 + x) * 0.5
        }),
    ];
    for (what, code) in cases {
        two_kinds(what, code, &[4, 4]);
    }
}

#[test]
fn equal_results_are_computed_once_unless_something_changes_in_between() {
    let _rng = start();
    // what follows reads both before the second one is no longer needed
    let twice: Function = |x| {
        let y = x.detach();
        let first = y.erf();
        let second = y.erf();
        first.softmax(-1, x.kind()) * second.softmax(0, x.kind()) + first.exp() + x
    };
    let plans = check("twice", twice, &[6, 7], Kind::Float, 1e-6);
    assert_eq!(plans[0].num_merged, 1, "{plans:?}");
    let changed: Function = |x| {
        let y = x.detach() * 2.0;
        let first = y.erf();
        _ = y.narrow(0, 0, 1).g_add_scalar_(1.0);
        let second = y.erf();
        first.softmax(-1, x.kind()) * second.softmax(0, x.kind()) + first.exp() + x
    };
    let written: Function = |x| {
        let first = x.detach().erf();
        let mut second = x.detach().erf();
        _ = second.g_mul_scalar_(2.0);
        first.softmax(-1, x.kind()) * second.softmax(0, x.kind()) + first.exp() + x
    };
    let random: Function = |x| {
        let noise = || x.detach().rand_like().erf();
        noise().softmax(-1, x.kind()) * noise().softmax(0, x.kind()) + x
    };
    for (what, code) in [("changed", changed), ("written", written), ("random", random)] {
        let plans = check(what, code, &[6, 7], Kind::Float, 1e-6);
        assert_eq!(plans[0].num_merged, 0, "{what}: {plans:?}");
    }
}

#[test]
fn passes_can_be_left_out() {
    let _rng = start();
    let chain: Function = |x| (x * 3.0 + x) / 2.0 - x;
    if plays("without") {
        let plans = check("without", chain, &[3, 5], Kind::Float, 0.0);
        assert_eq!((plans[0].num_fused, plans[0].num_calls), (0, 4), "{plans:?}");
        return;
    }
    text_of(&own_process("without").env("PT_HPU_DISABLE_fuse_elementwise", "1").output().unwrap());
    let plans = check("with", chain, &[3, 5], Kind::Float, 1e-6);
    assert_eq!((plans[0].num_fused, plans[0].num_calls), (4, 1), "{plans:?}");
    // graphs by hand replay what was recorded
    let (graph, x) = (HpuGraph::new(), Tensor::ones([3, 5], (Kind::Float, CPU)));
    drop(graph.capture(|| Ok(chain(&x))).unwrap());
    assert_eq!(graph.stats().next().unwrap().num_fused, 0);
}

#[test]
fn options_choose_the_passes_and_win_over_the_environment() {
    let _rng = start();
    // each pass has something to do; nothing that is recorded is done in place
    let code: Function = |x| {
        let y = attention(&(x * 0.5), 0.0);
        let fixed = x.detach();
        let (first, second) = (fixed.erf(), fixed.erf());
        let dead = (fixed.erf() * 2.0 + 1.0).erf();
        y.tanh()
            + (first.softmax(-1, x.kind()) * second.softmax(0, x.kind()) + first.exp() + dead).narrow(2, 0, 8)
    };
    let counts = |options: CompileOptions| {
        let plans = check_with("options", options, code, &[2, 6, 24], Kind::Float, 1e-5);
        let sum = |count: fn(&PlanStats) -> usize| plans.iter().map(count).sum::<usize>() > 0;
        [
            sum(|plan| plan.num_merged),
            sum(|plan| plan.num_joined),
            sum(|plan| plan.num_fused),
            sum(|plan| plan.num_in_place),
        ]
    };
    let (none, (on, off)) = (CompileOptions::default(), (Some(true), Some(false)));
    if plays("recorded") {
        assert_eq!(counts(none), [false; 4]);
        assert_eq!(counts(CompileOptions { use_compiled_recipes: on, ..none }), [true; 4]);
        return;
    }
    if plays("not in place") {
        assert_eq!(counts(none), [true, true, true, false]);
        assert_eq!(counts(CompileOptions { in_place: on, ..none }), [true; 4]);
        return;
    }
    text_of(&own_process("recorded").env("PT_HPU_COMPILE_USE_RECIPES", "0").output().unwrap());
    text_of(&own_process("not in place").env("PT_HPU_REINPLACE_ADD", "0").output().unwrap());
    assert_eq!(counts(none), [true; 4]);
    for (options, expected) in [
        (CompileOptions { use_compiled_recipes: off, ..none }, [false; 4]),
        (CompileOptions { common_subexpressions: off, ..none }, [false, true, true, true]),
        (CompileOptions { concatenations: off, ..none }, [true, false, true, true]),
        (CompileOptions { fuse_elementwise: off, ..none }, [true, true, false, false]),
        (CompileOptions { in_place: off, ..none }, [true, true, true, false]),
        (CompileOptions { reinplace_add: off, ..none }, [true, true, true, false]),
        (CompileOptions { reinplace_add: off, in_place: on, ..none }, [true; 4]),
    ] {
        assert_eq!(counts(options), expected, "{options:?}");
    }
}

#[test]
fn what_is_written_to_an_input_is_seen_by_the_caller() {
    let _rng = start();
    let code: Function = |x| {
        _ = x.shallow_clone().g_add_scalar_(1.0);
        x * 2.0
    };
    let hidden: Function = |x| {
        _ = x.detach().g_add_scalar_(1.0);
        x * 2.0
    };
    let buckets = || Buckets { dim: 0, sizes: vec![4] };
    for device in [CPU, HPU] {
        let compiler = || Compiler::new("hpu_backend").unwrap();
        for (compiler, rows) in [(compiler(), 4), (compiler().buckets(buckets()), 3)] {
            let net = compiler.wrap(Code { code });
            for mode in ["grad", "no_grad", "inference"] {
                let _no_grad = (mode == "no_grad").then(tch::no_grad_guard);
                let _inference = (mode == "inference").then(|| ffi::InferenceMode::enter().unwrap());
                for call in 0..4 {
                    let x = Tensor::randn([rows, 5], (Kind::Float, CPU)).to_device(device);
                    let (before, y) = (x.copy(), net.forward(&x).unwrap());
                    assert_eq!(x, &before + 1.0, "call {call} on {device:?}, {mode}");
                    assert_eq!(y, (before + 1.0) * 2.0, "call {call} on {device:?}, {mode}");
                }
            }
            assert!(net.refusal().is_none() && net.stats().hits >= 4, "{}", net.stats());
        }
        for (compiler, rows) in [(compiler(), 4), (compiler().buckets(buckets()), 3)] {
            // a write that autograd does not know of: as by the code, a backward pass that needs what was there fails
            let net = compiler.wrap(Code { code: hidden });
            for _ in 0..4 {
                let leaf = Tensor::ones([rows, 5], (Kind::Float, device)).set_requires_grad(true);
                let square = &leaf * &leaf;
                let y = net.forward(&leaf).unwrap();
                assert_eq!(leaf.detach(), leaf.full_like(2.0));
                y.sum(Kind::Float).backward();
                assert_eq!(leaf.grad(), leaf.full_like(2.0));
                let error = square.sum(Kind::Float).f_backward().unwrap_err().to_string();
                assert!(error.contains("modified by an inplace operation"), "{error}");
            }
            assert!(net.refusal().is_none() && net.stats().hits == 2, "{}", net.stats());
        }
        // one that is part of a history: as usual
        for (compiler, rows) in [(compiler(), 4), (compiler().buckets(buckets()), 3)] {
            let net = compiler.wrap(Code { code });
            for _ in 0..3 {
                let leaf = Tensor::ones([rows, 5], (Kind::Float, device)).set_requires_grad(true);
                let x = &leaf * 3.0;
                let y = net.forward(&x).unwrap();
                (x * y).sum(Kind::Float).backward();
                // (3 a + 1) * 2 (3 a + 1), at a = 1
                assert_eq!(leaf.grad(), leaf.full_like(4.0 * 4.0 * 3.0));
            }
            assert!(net.refusal().unwrap().contains("what it writes to input 0 requires grad"));
            // with buckets the code writes to a copy of the leaf
            if rows == 3 {
                let leaf = Tensor::ones([rows, 5], (Kind::Float, device)).set_requires_grad(true);
                let error = net.forward(&leaf).unwrap_err().to_string();
                assert!(error.contains("a leaf Variable that requires grad"), "{error}");
            }
        }
    }
}

/// Reads two inputs; with `writes`, adds 1 to the first one in place before that.
#[derive(Module)]
struct Shifts {
    #[module(skip)]
    writes: bool,
}

impl Callable<(Tensor, Tensor)> for Shifts {
    type Output = Tensor;

    fn forward_with(&self, (a, b): &(Tensor, Tensor)) -> anyhow::Result<Tensor> {
        if self.writes {
            _ = a.shallow_clone().f_add_scalar_(1.0)?;
        }
        Ok(a.f_mul_scalar(2.0)?.f_add(&b.f_tanh()?)?)
    }
}

#[test]
fn inputs_that_share_memory_see_what_is_written_to_one_of_them() {
    let _rng = start();
    let numbers = |rows: i64| Tensor::randn([rows, 6], (Kind::Float, CPU));
    type Inputs = fn(&Tensor) -> (Tensor, Tensor);
    let all: [(&str, Inputs); 3] = [
        ("apart", |x| (x.copy(), x.copy())),
        ("the same", |x| (x.shallow_clone(), x.shallow_clone())),
        ("parts that overlap", |x| (x.narrow(0, 0, 3), x.narrow(0, 1, 3))),
    ];
    for device in [CPU, HPU] {
        for buckets in [None, Some(Buckets { dim: 0, sizes: vec![8] })] {
            for writes in [false, true] {
                let compiler = Compiler::new("hpu_backend").unwrap();
                let compiler = match &buckets {
                    Some(buckets) => compiler.buckets(buckets.clone()),
                    None => compiler,
                };
                let net = compiler.wrap(Shifts { writes });
                for (what, inputs) in all.iter().cycle().take(15) {
                    let y = numbers(4).to_device(device);
                    let x = y.copy();
                    let expected = net.module().call(&inputs(&y)).unwrap();
                    let own = net.call(&inputs(&x)).unwrap();
                    assert!(distance(&own, &expected) <= 1e-6, "{what}, writes {writes} on {device:?}");
                    assert!(
                        same_bits(&x, &y),
                        "{what}, writes {writes} on {device:?}: what is written is seen"
                    );
                }
                let stats = net.stats();
                let graphs = if writes { 1 } else { 3 };
                assert_eq!((net.refusal(), stats.num_graphs), (None, graphs), "writes {writes}: {stats}");
                assert!(stats.hits >= 2, "{stats}");
            }
        }
    }
}

#[test]
fn options_forbid_the_fallback_of_modules() {
    let _rng = start();
    let code: Function = |x| x.masked_select(&x.gt(0.0));
    let x = Tensor::ones([3, 5], (Kind::Float, CPU));
    for fallback in [None, Some(true), Some(false)] {
        let options = CompileOptions { use_eager_fallback: fallback, ..CompileOptions::default() };
        let net = Compiler::new("hpu_backend").unwrap().options(options).wrap(Code { code });
        let called = net.forward(&x);
        match fallback {
            Some(false) => {
                assert_error!(called, "aten::masked_select");
            }
            _ => assert_eq!(called.unwrap().numel(), 15),
        }
    }
}

#[test]
fn backends_have_their_names_and_the_one_for_inference_no_gradients() {
    let _rng = start();
    let message = Compiler::new("hpu_backnd").unwrap_err().to_string();
    assert_eq!(message, "compile: there is no backend `hpu_backnd`; did you mean hpu_backend");
    assert_error!(Compiler::new("inductor"), "aot_hpu_training_backend, aot_hpu_inference_backend");
    let net = Linear::new(4, 2).unwrap();
    let x = Tensor::ones([3, 4], (Kind::Float, CPU));
    let compiled = voltaic::compile(&net, "aot_hpu_inference_backend").unwrap();
    assert_error!(net.call(&x), "Linear is called with grad, and aot_hpu_inference_backend");
    let expected = x.linear(net.weight.leaf(), net.bias.as_ref().map(|bias| bias.leaf()));
    tch::no_grad(|| {
        for _ in 0..3 {
            assert_eq!(net.call(&x).unwrap(), expected);
        }
    });
    assert_eq!(compiled.stats().hits, 1);
}

#[test]
fn shapes_beyond_the_limit_run_as_usual_and_that_is_said_once() {
    let _rng = start();
    let net = Linear::new(4, 2).unwrap();
    let compiled = voltaic::compile(&net, "hpu_backend").unwrap();
    let log = log_of(|| {
        for batch in (1..=10).cycle().take(40) {
            net.call(&Tensor::ones([batch, 4], (Kind::Float, CPU))).unwrap().sum(Kind::Float).backward();
        }
    });
    let stats = compiled.stats();
    assert_eq!((stats.num_graphs, stats.misses, stats.hits, stats.uncached), (8, 8, 16, 8), "{stats}");
    assert_eq!(log.matches("Linear was compiled for 8 kinds of calls").count(), 1, "{log}");
}

/// The losses of a fit, the weights after it, and what graphs did.
fn fit<M: LightningModule<Batch = (Tensor, Tensor)>>(
    make: fn() -> M,
    data: &(Tensor, Tensor),
    configure: &dyn Fn(TrainerBuilder) -> TrainerBuilder,
) -> (Vec<(String, Tensor)>, GraphReport) {
    let root = tempfile::tempdir().unwrap();
    ffi::manual_seed(11).unwrap();
    let mut net = make();
    seed_everything(3).unwrap();
    let dataset = TensorDataset::new((data.0.shallow_clone(), data.1.shallow_clone())).unwrap();
    let loader = DataLoader::new(dataset).batch_size(4).build().unwrap();
    let builder = Trainer::builder()
        .devices(1)
        .default_root_dir(root.path())
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .enable_checkpointing(false)
        .max_epochs(1);
    let mut trainer = configure(builder).build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader)).unwrap();
    (net.state_dict(), trainer.graph_report().clone())
}

#[test]
fn a_run_is_compiled_with_the_options_of_its_configuration() {
    let _rng = start();
    let gpt =
        || Gpt::new(GptConfig { vocab_size: 65, block_size: 16, n_layer: 1, ..GptConfig::tiny() }).unwrap();
    let tokens = || Tensor::randint(65, [22, 16], (Kind::Int64, CPU));
    let data = (tokens(), tokens());
    let options = CompileOptions { use_compiled_recipes: Some(false), ..CompileOptions::default() };
    for accelerator in ["cpu", "hpu"] {
        let with = |compile: Option<CompileConfig>| {
            fit(gpt, &data, &|builder| {
                let builder = builder.accelerator(accelerator).max_epochs(4);
                match compile {
                    Some(compile) => builder.compile(compile),
                    None => builder,
                }
            })
        };
        let (eager, _) = with(None);
        let standard = CompileConfig::from(CompileBackend::HpuBackend);
        let (_, report) = with(Some(standard));
        assert_eq!((report.refusal, report.graphs), (None, 2), "batches of 4 and of 2");
        let (recorded, report) = with(Some(CompileConfig { options, recompile_limit: Some(1), ..standard }));
        assert_eq!((&report.refusal, report.graphs), (&None, 1));
        assert!(report.replayed_steps > 0 && report.eager_steps >= 4, "{report:?}");
        for ((name, own), (_, expected)) in recorded.iter().zip(&eager) {
            assert_eq!(own, expected, "{accelerator}: {name}");
        }
    }
}

#[test]
fn a_compiled_run_trains_to_the_weights_of_one_without() {
    let _rng = start();
    let gpt = || {
        let config =
            GptConfig { vocab_size: 65, block_size: 16, n_layer: 2, dropout: 0.1, ..GptConfig::tiny() };
        Gpt::new(config).unwrap()
    };
    let tokens = || Tensor::randint(65, [40, 16], (Kind::Int64, CPU));
    let data = (tokens(), tokens());
    for accelerator in ["cpu", "hpu"] {
        for (precision, tolerance) in [("32-true", 1e-4), ("bf16-mixed", 3e-2)] {
            let with = |compiles: bool| {
                fit(gpt, &data, &|builder| {
                    let builder = builder.accelerator(accelerator).precision(precision);
                    match compiles {
                        true => builder.compile(voltaic::graph::CompileBackend::HpuBackend),
                        false => builder,
                    }
                })
            };
            let ((eager, _), (compiled, report)) = (with(false), with(true));
            assert_eq!((report.refusal, report.update_refusal), (None, None));
            assert_eq!((report.replayed_steps, report.replayed_updates), (5, 3), "{accelerator} {precision}");
            for ((name, own), (_, expected)) in compiled.iter().zip(&eager) {
                let distance = distance(own, expected);
                assert!(distance <= tolerance, "{accelerator} {precision}: {name} is off by {distance}");
            }
        }
    }
}
