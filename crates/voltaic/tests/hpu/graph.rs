//! `trainer.graph`: replayed steps give the bits of steps that run, on the CPU and on emulated HPUs.

use std::cell::Cell;
use std::fs;

use tch::{Kind, Tensor};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::models::{Classifier, Gpt, GptConfig, LeNet, LeNetConfig, ResNet18, ResNet18Config};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::cross_entropy;
use voltaic::nn::{Dropout, Forward, Linear, ModuleExt, Sequential};
use voltaic::optim::{AdamW, ExponentialLr, Interval, LrSchedulerSpec, Optimizers, Sgd};
use voltaic::trainer::{GraphMode, GraphReport, Trainer, TrainerBuilder, seed_everything};
use voltaic::{Module, ffi};

use crate::support::{CPU, bits, start};

pub(crate) type Pair = (Tensor, Tensor);
type Configure = fn(TrainerBuilder) -> TrainerBuilder;

/// All that a run leaves behind.
pub(crate) struct Outcome {
    pub(crate) metrics: String,
    pub(crate) weights: Vec<(String, Vec<u8>)>,
    pub(crate) report: GraphReport,
}

pub(crate) fn fit<M: LightningModule<Batch = Pair>>(
    make: fn() -> M,
    data: &Pair,
    batch: usize,
    configure: Configure,
    (accelerator, graph): (&str, GraphMode),
) -> Outcome {
    let root = tempfile::tempdir().unwrap();
    ffi::manual_seed(11).unwrap();
    let mut net = make();
    seed_everything(3).unwrap();
    let dataset = TensorDataset::new((data.0.shallow_clone(), data.1.shallow_clone())).unwrap();
    let loader = DataLoader::new(dataset).batch_size(batch).shuffle(true).build().unwrap();
    let builder = Trainer::builder()
        .accelerator(accelerator)
        .devices(1)
        .default_root_dir(root.path())
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .enable_checkpointing(false)
        .log_every_n_steps(1_u64)
        .graph(graph);
    let mut trainer = configure(builder).build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader)).unwrap();
    Outcome {
        metrics: fs::read_to_string(root.path().join("lightning_logs/version_0/metrics.csv")).unwrap(),
        weights: net.state_dict().into_iter().map(|(fqn, tensor)| (fqn, bits(&tensor))).collect(),
        report: trainer.graph_report().clone(),
    }
}

/// Runs eagerly and by graphs on both devices; gives the reports of the graphed runs.
fn check<M: LightningModule<Batch = Pair>>(
    what: &str,
    make: fn() -> M,
    data: &Pair,
    batch: usize,
    configure: Configure,
) -> Vec<GraphReport> {
    ["cpu", "hpu"]
        .map(|accelerator| {
            let eager = fit(make, data, batch, configure, (accelerator, GraphMode::Off));
            let run = |mode| {
                let graphed = fit(make, data, batch, configure, (accelerator, mode));
                assert_eq!(eager.metrics, graphed.metrics, "{what} on {accelerator} by {mode}");
                for ((fqn, eager), (_, graphed)) in eager.weights.iter().zip(&graphed.weights) {
                    assert!(eager == graphed, "{what} on {accelerator} by {mode}: {fqn} differs");
                }
                assert_eq!(graphed.report.refusal, None, "{what} on {accelerator} by {mode}");
                graphed.report
            };
            let by_step = run(GraphMode::Step);
            assert!(by_step.replayed_steps > 0, "{what} on {accelerator}: {by_step:?}");
            assert!(by_step.replayed_updates > 0, "{what} on {accelerator}: {by_step:?}");
            if accelerator == "hpu" {
                let by_modules = run(GraphMode::Modules);
                let (module, stats) = &by_modules.modules[0];
                assert!(stats.hits > 0 && stats.uncached == 0, "{what}: {module}: {stats}");
            }
            by_step
        })
        .into()
}

pub(crate) fn digits(samples: i64) -> Pair {
    ffi::manual_seed(1).unwrap();
    (
        Tensor::rand([samples, 1, 28, 28], (Kind::Float, CPU)),
        Tensor::randint(10, [samples], (Kind::Int64, CPU)),
    )
}

fn text(samples: i64) -> Pair {
    ffi::manual_seed(1).unwrap();
    let tokens = Tensor::randint(65, [samples, 33], (Kind::Int64, CPU));
    (tokens.narrow(1, 0, 32), tokens.narrow(1, 1, 32))
}

/// A classifier with dropout, and a schedule that changes the learning rate at each step.
#[derive(Module)]
struct Scheduled {
    net: Sequential,
}

impl Scheduled {
    fn new() -> Self {
        let net = Sequential::new()
            .add(voltaic::nn::Flatten::default())
            .add(Linear::new(784, 16).unwrap())
            .add(Dropout::new(0.4).unwrap())
            .add(Linear::new(16, 10).unwrap());
        Self { net }
    }
}

impl LightningModule for Scheduled {
    type Batch = Pair;

    fn training_step(&self, (x, y): &Pair, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = cross_entropy(&ctx.graphed(&self.net, x)?, y)?;
        ctx.log("train_loss", &loss).on_epoch(true);
        ctx.log("twice", &loss * 2.0);
        ctx.log("first pixel", x.flatten(0, -1).narrow(0, 300, 1)); // a view of the batch
        Ok(loss)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        let schedule = LrSchedulerSpec::new(ExponentialLr::new(0.97)).interval(Interval::Step);
        Ok(Optimizers::new(AdamW::new(1e-2)).scheduler(schedule))
    }
}

#[test]
fn dropout_schedules_clipping_accumulation_and_odd_batches_compose() {
    let _rng = start();
    let data = digits(8 * 5 + 3);
    let reports = check("scheduled", Scheduled::new, &data, 8, |t| {
        t.max_epochs(20).gradient_clip_val(0.5).accumulate_grad_batches(2_u64)
    });
    // batches of 8 and of 3, which open or close a window
    assert!(reports.iter().all(|report| report.graphs >= 3), "{reports:?}");
}

#[test]
fn lenet_is_replayed_for_a_hundred_steps() {
    let _rng = start();
    let make = || Classifier::new(LeNet::new(LeNetConfig::default()).unwrap());
    let reports = check("lenet", make, &digits(8 * 20), 8, |t| t.max_epochs(5));
    assert!(reports.iter().all(|report| report.replayed_steps == 95), "{reports:?}");
    assert!(reports.iter().all(|report| report.replayed_updates == 93), "{reports:?}");
}

#[test]
fn autocast_is_replayed() {
    let _rng = start();
    let make = || Classifier::new(LeNet::new(LeNetConfig::default()).unwrap());
    check("bf16-mixed", make, &digits(4 * 10), 4, |t| t.max_epochs(3).precision("bf16-mixed"));
    check("16-mixed", Scheduled::new, &digits(4 * 10), 4, |t| {
        t.max_epochs(3).precision("16-mixed").gradient_clip_val(1.0)
    });
}

#[test]
fn resnet18_is_replayed_for_a_hundred_steps() {
    let _rng = start();
    ffi::manual_seed(1).unwrap();
    let images = Tensor::rand([20, 3, 16, 16], (Kind::Float, CPU));
    let data = (images, Tensor::randint(10, [20], (Kind::Int64, CPU)));
    let make = || {
        let config = ResNet18Config { width: 16, ..ResNet18Config::default() };
        Classifier::new(ResNet18::new(config).unwrap())
    };
    check("resnet18", make, &data, 2, |t| t.max_epochs(10));
}

#[test]
fn gpt_tiny_with_dropout_is_replayed_for_a_hundred_steps() {
    let _rng = start();
    let make = || {
        let config =
            GptConfig { vocab_size: 65, block_size: 32, n_layer: 2, dropout: 0.1, ..GptConfig::tiny() };
        Gpt::new(config).unwrap()
    };
    check("gpt-tiny", make, &text(40), 2, |t| t.max_epochs(5).gradient_clip_val(1.0));
    check("gpt-tiny in bf16", make, &text(20), 2, |t| t.max_epochs(2).precision("bf16-mixed"));
}

/// What a training step does that a graph cannot.
#[derive(Clone, Copy)]
enum Flaw {
    ReadsBack,
    DependsOnData,
    Counts,
    AsksForStep,
}

#[derive(Module)]
struct Flawed {
    first: Linear,
    #[module(skip)]
    flaw: Flaw,
    #[module(skip)]
    calls: Cell<i64>,
}

fn flawed(flaw: Flaw) -> Flawed {
    Flawed { first: Linear::new(784, 10).unwrap(), flaw, calls: Cell::new(0) }
}

lightning_module!(Flawed, Pair, Sgd::new(0.01), |net, (x, y), ctx| {
    let logits = net.first.forward(&x.flatten(1, -1))?;
    let loss = cross_entropy(&logits, y)?;
    ctx.log("train_loss", &loss);
    net.calls.set(net.calls.get() + 1);
    Ok(match net.flaw {
        Flaw::ReadsBack if logits.sum(Kind::Float).double_value(&[]) > 0.0 => loss * 2.0,
        Flaw::ReadsBack => loss,
        Flaw::DependsOnData => loss + logits.masked_select(&logits.gt(0.0)).sum(Kind::Float),
        Flaw::Counts => loss * net.calls.get() as f64,
        Flaw::AsksForStep => loss * (ctx.global_step() + 1) as f64,
    })
});

#[test]
fn what_cannot_be_captured_is_named_and_runs_as_usual() {
    let _rng = start();
    type Make = fn() -> Flawed;
    let cases: [(Make, &[&str]); 4] = [
        (
            || flawed(Flaw::ReadsBack),
            &["aten::_local_scalar_dense in or after `first`", "read back to the host"],
        ),
        (|| flawed(Flaw::DependsOnData), &["aten::masked_select in or after `first`", "depends on data"]),
        (|| flawed(Flaw::Counts), &["not static", "aten::mul.Scalar in or after `first`", "was 4 and is 5"]),
        (|| flawed(Flaw::AsksForStep), &["ctx.global_step()"]),
    ];
    for (make, expected) in cases {
        for accelerator in ["cpu", "hpu"] {
            let data = digits(8);
            let run = |graph| fit(make, &data, 1, |t| t.max_epochs(1), (accelerator, graph));
            let (eager, graphed) = (run(GraphMode::Off), run(GraphMode::Step));
            let refusal = graphed.report.refusal.as_deref().unwrap_or_default();
            assert!(expected.iter().all(|part| refusal.contains(part)), "{accelerator}: {refusal}");
            assert_eq!(graphed.report.replayed_steps, 0);
            assert!(eager.weights == graphed.weights, "{accelerator}: {refusal}");
        }
    }
}
