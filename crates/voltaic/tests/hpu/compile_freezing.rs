//! What a compiled module computes of its weights once, and when it computes that again.

use std::sync::{Arc, Mutex};

use tch::{Kind, Tensor};
use voltaic::callback::{EmaWeightAveragingConfig, WeightAveraging};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::graph::{CompileBackend, CompileConfig, CompileOptions, Compiler, HpuGraph};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{Forward, Linear, ModuleExt};
use voltaic::optim::{AdamW, BuildOptimizer, Optimizers, ParamGroupSpec, Sgd};
use voltaic::precision::autocast;
use voltaic::trainer::{Trainer, seed_everything};
use voltaic::{Device, Module, ffi};

use crate::compile::{Code, Function, check_with, distance};
use crate::process::{own_process, plays, text_of};
use crate::support::{CPU, HPU, same_bits, start};

/// With an error for what cannot be captured.
pub const FREEZES: CompileOptions = CompileOptions { use_graph_freezing: Some(true), ..NONE };
const NONE: CompileOptions = CompileOptions {
    use_eager_fallback: Some(false),
    use_compiled_recipes: None,
    use_graph_freezing: None,
    reinplace_add: None,
    common_subexpressions: None,
    constant_folding: None,
    concatenations: None,
    fuse_elementwise: None,
    recomputation: None,
    in_place: None,
};

/// Computes its weight and its bias from what it stores.
#[derive(Module)]
struct Computed {
    fc: Linear,
}

impl Computed {
    fn new() -> Self {
        Self { fc: Linear::new(6, 5).unwrap() }
    }

    fn on(device: Device) -> Self {
        let net = Self::new();
        net.to_device(device).unwrap();
        net
    }

    fn weight(&self) -> Tensor {
        self.fc.weight.leaf().shallow_clone()
    }

    fn bias(&self) -> Tensor {
        self.fc.bias.as_ref().unwrap().leaf().shallow_clone()
    }
}

impl Forward for Computed {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let weight = self.weight().f_mul_scalar(2.0)?.f_tanh()?.f_transpose(0, 1)?.f_contiguous()?;
        Ok(x.f_matmul(&weight)?.f_add(&self.bias().f_exp()?)?.f_relu()?)
    }
}

fn input(device: tch::Device) -> Tensor {
    Tensor::randn([3, 6], (Kind::Float, CPU)).to_device(device)
}

fn devices() -> [(Device, tch::Device); 2] {
    [(Device::Cpu, CPU), (Device::Hpu(0), HPU)]
}

#[test]
fn what_depends_on_weights_alone_is_computed_once_where_nothing_has_gradients() {
    let _rng = start();
    if plays("frozen by the environment") {
        let net = Compiler::new("hpu_backend").unwrap().wrap(Computed::new());
        tch::no_grad(|| (0..3).for_each(|_| _ = net.forward(&input(CPU)).unwrap()));
        assert_eq!(net.plan_stats()[0].num_frozen, 4);
        return;
    }
    let frozen = own_process("frozen by the environment").env("PT_HPU_COMPILE_GRAPH_FREEZE", "1").output();
    text_of(&frozen.unwrap());
    let recorded = CompileOptions { use_compiled_recipes: Some(false), ..FREEZES };
    for (device, place) in devices() {
        // of multiplication, tanh, the copy and exp
        for (options, has_grad, expected) in
            [(FREEZES, false, 4), (NONE, false, 0), (recorded, false, 0), (FREEZES, true, 0)]
        {
            let net = Compiler::new("hpu_backend").unwrap().options(options).wrap(Computed::on(device));
            let _no_grad = (!has_grad).then(tch::no_grad_guard);
            for call in 0..5 {
                let x = input(place);
                let (own, eager) = (net.forward(&x).unwrap(), net.module().forward(&x).unwrap());
                assert!(distance(&own, &eager) <= 1e-6, "call {call} on {device}");
                if has_grad {
                    own.sum(Kind::Float).backward();
                }
            }
            let plans = net.plan_stats();
            assert_eq!(plans[0].num_frozen, expected, "{options:?} {plans:?}");
            assert_eq!(net.stats().hits, 3);
            if expected == 4 {
                assert!(plans[0].num_calls <= 3, "a product, an addition and relu: {plans:?}");
            }
        }
    }
}

#[test]
fn what_depends_on_nothing_is_computed_once_with_gradients_too() {
    let _rng = start();
    let code: Function = |x| {
        let places = Tensor::arange(x.size()[1], (Kind::Float, x.device()));
        let mask = Tensor::ones([4, 4], (Kind::Bool, x.device())).tril(0);
        // what is written, what is random and what is the result itself are not constant
        let mut counts = Tensor::zeros([4, 4], (Kind::Float, x.device()));
        _ = counts.g_add_(&x.detach());
        let noise = Tensor::rand([4, 4], (Kind::Float, x.device()));
        (x.masked_fill(&mask.logical_not(), 0.5) * places.cos() + counts + noise) * x
    };
    let off = CompileOptions { constant_folding: Some(false), ..NONE };
    for (options, expected) in [(NONE, 3), (off, 0)] {
        let plans = check_with("constants", options, code, &[4, 4], Kind::Float, 1e-6);
        assert_eq!(
            plans[0].num_frozen, expected,
            "ones, tril and not; arange is written to memory that was made before it: {plans:?}"
        );
    }
    let result: Function = |x| Tensor::ones([4, 4], (Kind::Float, x.device())).tril(0) + x.detach() * 0.0 + x;
    let net = Compiler::new("hpu_backend")
        .unwrap()
        .wrap(Code { code: |x| Tensor::eye(x.size()[0], (Kind::Float, CPU)) });
    let mut results = Vec::new();
    for _ in 0..4 {
        let y = net.forward(&input(CPU)).unwrap();
        assert_eq!(y, Tensor::eye(3, (Kind::Float, CPU)));
        results.push(y);
        _ = results.last_mut().unwrap().g_add_scalar_(1.0); // the caller's alone
    }
    _ = check_with("a result", NONE, result, &[4, 4], Kind::Float, 1e-6);
}

/// Steps of an optimizer on the weights of a module.
fn train(net: &Computed, optimizer: &dyn BuildOptimizer) {
    let mut optimizer = optimizer.build(vec![ParamGroupSpec::new(net.named_parameters())]).unwrap();
    for _ in 0..2 {
        let x = Tensor::ones([3, 6], (Kind::Float, net.weight().device()));
        net.forward(&x).unwrap().square().sum(Kind::Float).backward();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
}

/// Other values for a tensor.
fn others(like: &Tensor) -> Tensor {
    like.detach().randn_like() * 0.3
}

/// Ways to change the weights of a module.
type Change = fn(&Computed);

const CHANGES: [(&str, Change); 9] = [
    ("a copy", |net| tch::no_grad(|| net.weight().copy_(&others(&net.weight())))),
    ("a state dict", |net| {
        net.load_state_dict(&Computed::on(Device::of(&net.weight()).unwrap()).state_dict(), true).unwrap();
    }),
    ("a detached part", |net| _ = net.weight().detach().narrow(0, 1, 2).g_add_scalar_(0.5)),
    ("the bias alone", |net| _ = net.bias().detach().g_add_scalar_(0.5)),
    ("an optimizer", |net| train(net, &AdamW::new(0.1))),
    ("another one", |net| train(net, &Sgd { momentum: 0.9, ..Sgd::new(0.1) })),
    ("other tensors", |net| net.fc.weight.set_data(&others(&net.weight())).unwrap()),
    ("memory that was released", |net| {
        let values = others(&net.weight());
        let mut storage = ffi::ReleasableStorage::of(&net.weight());
        storage.release().unwrap();
        storage.refill(&values).unwrap();
    }),
    ("memory that is written again", |net| {
        let values = others(&net.weight());
        ffi::ReleasableStorage::of(&net.weight()).refill(&values).unwrap();
    }),
];

#[test]
fn changed_weights_are_seen_by_the_next_call() {
    let _rng = start();
    for (device, place) in devices() {
        for inference in [false, true] {
            let net = Compiler::new("hpu_backend").unwrap().options(FREEZES).wrap(Computed::on(device));
            let check = |what: &str, calls: usize| {
                let _no_grad = tch::no_grad_guard();
                let _inference = inference.then(|| ffi::InferenceMode::enter().unwrap());
                for call in 0..calls {
                    let x = input(place);
                    let (own, eager) = (net.forward(&x).unwrap(), net.module().forward(&x).unwrap());
                    assert!(distance(&own, &eager) <= 1e-6, "call {call} after {what} on {device}");
                }
            };
            check("nothing", 4);
            for (what, change) in CHANGES {
                change(net.module());
                check(what, 4); // more than a capture and its check, should the tensors be other ones
            }
            // replays write below autograd: a graph by hand, and one of a step of an optimizer
            let (graph, factor) = (HpuGraph::new(), Tensor::from(1.5_f32));
            graph.capture(|| Ok(net.module().weight().detach().f_mul_(&factor)?)).map(drop).unwrap();
            check("a capture", 2);
            for _ in 0..3 {
                graph.replay().unwrap();
                check("a replay", 2);
            }
            assert!(net.stats().hits > 30 && net.plan_stats()[0].num_frozen == 4, "{}", net.stats());
        }
    }
}

#[test]
fn frozen_results_are_kept_until_weights_change() {
    let _rng = start();
    let net = Compiler::new("hpu_backend").unwrap().options(FREEZES).wrap(Computed::new());
    let _no_grad = tch::no_grad_guard();
    let x = input(CPU);
    let before: Vec<Tensor> = (0..4).map(|_| net.forward(&x).unwrap()).collect();
    // a write that nothing counts is what tells that they are kept
    let mut hidden = net.module().weight().data();
    _ = hidden.g_add_scalar_(1.0);
    assert!(same_bits(&net.forward(&x).unwrap(), &before[3]));
    net.clear_cache();
    for _ in 0..4 {
        assert!(distance(&net.forward(&x).unwrap(), &net.module().forward(&x).unwrap()) <= 1e-6);
    }
    assert!(!same_bits(&net.forward(&x).unwrap(), &before[3]));
}

/// Draws before and after what depends on its weight alone, and from that itself.
#[derive(Module)]
struct Noisy {
    net: Computed,
}

impl Forward for Noisy {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let before = x.f_rand_like()?;
        let frozen = self.net.weight().f_tanh()?;
        let drawn = frozen.f_sigmoid()?.f_bernoulli()?; // of weights alone, and yet another one each time
        let weight = frozen.f_mul(&drawn)?.f_transpose(0, 1)?;
        let y = x.f_add(&before)?.f_matmul(&weight)?;
        Ok(y.f_add(&y.f_randn_like()?)?.f_dropout(0.5, true)?)
    }
}

#[test]
fn frozen_graphs_draw_random_numbers_in_their_order() {
    let _rng = start();
    for (device, place) in devices() {
        let net =
            Compiler::new("hpu_backend").unwrap().options(FREEZES).wrap(Noisy { net: Computed::on(device) });
        let _no_grad = tch::no_grad_guard();
        for call in 0..9 {
            if call % 3 == 2 {
                net.module().net.weight().copy_(&others(&net.module().net.weight()));
            }
            let x = input(place);
            let drawn = |code: &dyn Fn(&Tensor) -> anyhow::Result<Tensor>| {
                ffi::manual_seed(call).unwrap();
                (code(&x).unwrap(), x.rand_like())
            };
            let (own, expected) = (drawn(&|x| net.forward(x)), drawn(&|x| net.module().forward(x)));
            assert!(distance(&own.0, &expected.0) <= 1e-6, "call {call} on {device}");
            assert!(same_bits(&own.1, &expected.1), "call {call} on {device}: what is drawn next");
        }
        let plans = net.plan_stats();
        assert_eq!(
            (plans[0].num_frozen, net.stats().hits),
            (1, 7),
            "tanh; not what is drawn from: {plans:?}"
        );
    }
}

#[test]
fn casts_of_weights_by_autocast_are_frozen() {
    let _rng = start();
    for (device, place) in devices() {
        let net = Compiler::new("hpu_backend").unwrap().options(FREEZES).wrap({
            let fc = Linear::new(64, 48).unwrap();
            fc.to_device(device).unwrap();
            fc
        });
        let _no_grad = tch::no_grad_guard();
        for step in 0..6 {
            let x = Tensor::randn([3, 64], (Kind::Float, CPU)).to_device(place);
            if step == 4 {
                net.module().weight.leaf().shallow_clone().copy_(&others(net.module().weight.leaf()));
            }
            let _region = autocast(device, Kind::BFloat16).unwrap();
            let (own, eager) = (net.forward(&x).unwrap(), net.module().forward(&x).unwrap());
            assert!(distance(&own, &eager) <= 3e-2, "step {step} on {device}");
        }
        let plans = net.plan_stats();
        assert_eq!(plans[0].num_frozen, 2, "of weight and bias: {plans:?}");
    }
}

/// A weight that is stored in fewer bits than it is read in.
#[derive(Module)]
struct Narrow {
    fc: Linear,
}

impl Forward for Narrow {
    fn forward(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(x.f_matmul(&self.fc.weight.tensor().f_to_kind(Kind::Float)?)?)
    }
}

#[test]
fn what_would_take_more_memory_than_the_weights_is_not_kept() {
    let _rng = start();
    let narrow = Narrow { fc: Linear::new(300, 300).unwrap() };
    narrow.to_dtype(Kind::BFloat16).unwrap();
    let net = Compiler::new("hpu_backend").unwrap().options(FREEZES).wrap(narrow);
    tch::no_grad(|| {
        (0..3).for_each(|_| _ = net.forward(&Tensor::ones([2, 300], (Kind::Float, CPU))).unwrap());
    });
    assert_eq!(net.plan_stats()[0].num_frozen, 0);
}

/// Trains by a compiled step; evaluates and predicts by compiled calls.
#[derive(Module)]
struct Fitted {
    net: Computed,
    #[module(skip)]
    seen: Arc<Mutex<Vec<f64>>>,
}

impl LightningModule for Fitted {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, _: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok((self.net.forward(x)? - y).square().mean(Kind::Float))
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        let loss = (ctx.graphed(&self.net, x)? - y).square().mean(Kind::Float);
        self.seen.lock().unwrap().push(loss.double_value(&[]));
        Ok(())
    }

    fn predict_step(&self, (x, _): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        ctx.graphed(&self.net, x)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(AdamW::new(0.1).into())
    }
}

/// The losses of validation in a fit, then predictions with its weights and with others.
fn fitted(accelerator: &str, precision: &'static str, averages: bool, compiles: bool) -> Vec<f64> {
    let root = tempfile::tempdir().unwrap();
    ffi::manual_seed(11).unwrap();
    let mut net = Fitted { net: Computed::new(), seen: Arc::default() };
    let data = (Tensor::randn([20, 6], (Kind::Float, CPU)), Tensor::randn([20, 5], (Kind::Float, CPU)));
    seed_everything(3).unwrap();
    let loader = || {
        let data = TensorDataset::new((data.0.shallow_clone(), data.1.shallow_clone())).unwrap();
        DataLoader::new(data).batch_size(4).build().unwrap()
    };
    let mut builder = Trainer::builder()
        .accelerator(accelerator)
        .devices(1)
        .precision(precision)
        .default_root_dir(root.path())
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .enable_checkpointing(false)
        .max_epochs(3);
    if averages {
        let config = EmaWeightAveragingConfig { decay: 0.5, ..Default::default() };
        builder = builder.callback(WeightAveraging::ema(config).unwrap());
    }
    if compiles {
        builder = builder
            .compile(CompileConfig { options: FREEZES, ..CompileConfig::from(CompileBackend::HpuBackend) });
    }
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader()).val(loader())).unwrap();
    if compiles {
        let report = trainer.graph_report();
        assert!(report.replayed_steps > 0 && report.replayed_updates > 0, "{report:?}");
    }
    let mut seen = net.seen.lock().unwrap().clone();
    let mut predict = |net: &mut Fitted| {
        let predicted = trainer.predict(net, &mut Loaders::new().predict(loader())).unwrap();
        seen.extend(predicted[0].iter().map(|batch| batch.square().sum(Kind::Float).double_value(&[])));
    };
    predict(&mut net);
    net.load_state_dict(&Fitted { net: Computed::new(), seen: Arc::default() }.state_dict(), true).unwrap();
    predict(&mut net);
    seen
}

#[test]
fn evaluation_within_and_after_a_fit_has_the_weights_of_now() {
    let _rng = start();
    for (accelerator, precision, averages) in [
        ("cpu", "32-true", false),
        ("cpu", "32-true", true),
        ("cpu", "bf16-mixed", true),
        ("hpu", "32-true", true),
    ] {
        let what = format!("{accelerator} {precision} {averages}");
        let [own, eager] = [true, false].map(|compiles| fitted(accelerator, precision, averages, compiles));
        assert_eq!(own.len(), eager.len());
        let tolerance = if precision == "32-true" { 1e-4 } else { 5e-2 };
        for (at, (own, eager)) in own.iter().zip(&eager).enumerate() {
            assert!((own - eager).abs() <= tolerance * eager.abs(), "{what} {at}: {own} and {eager}");
        }
    }
}
