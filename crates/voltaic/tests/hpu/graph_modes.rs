//! The ways of the specification to train and to test by graphs, on real digits: each gives the bits of a run without.

use std::fs;
use std::path::{Path, PathBuf};

use tch::{Kind, Tensor};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, Mnist, MnistSplit};
use voltaic::graph::{
    GraphedCallable, GraphedModule, HpuGraph, ModuleCacher, StaticTensor, WrapOptions,
    make_graphed_callables, wrap_in_hpu_graph,
};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::functional::{accuracy, cross_entropy};
use voltaic::nn::{Flatten, Forward, Linear, ModuleExt, Relu, Sequential};
use voltaic::optim::{AdamW, LrSchedulerSpec, Optimizers, StepLr};
use voltaic::precision::autocast;
use voltaic::trainer::{Trainer, TrainerBuilder};
use voltaic::{Device, Module, ffi};

use crate::process::{own_process, text_of};
use crate::support::{CPU, bits, start};

const BATCH: i64 = 200;

pub fn perceptron(device: Device) -> Sequential {
    ffi::manual_seed(7).unwrap();
    let net = Sequential::new()
        .add(Flatten::default())
        .add(Linear::new(784, 128).unwrap())
        .add(Relu)
        .add(Linear::new(128, 10).unwrap());
    net.to_device(device).unwrap();
    net
}

/// Its rate changes while a graph is replayed.
pub fn optimizers() -> Optimizers {
    let schedule = LrSchedulerSpec::new(StepLr::new(2, 0.5)).interval(voltaic::optim::Interval::Step);
    Optimizers::new(AdamW::new(1e-2)).scheduler(schedule)
}

/// Trains and tests any network in the plain way.
#[derive(Module)]
struct Plain<N: Forward> {
    net: N,
}

fn plain<N: Forward>(net: N) -> Plain<N> {
    Plain { net }
}

fn log_test(ctx: &mut StepContext, logits: &Tensor, y: &Tensor) -> anyhow::Result<()> {
    ctx.log("test_loss", cross_entropy(logits, y)?);
    ctx.log("test_acc", accuracy(logits, y)?);
    Ok(())
}

impl<N: Forward> LightningModule for Plain<N> {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let loss = cross_entropy(&self.net.forward(x)?, y)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn test_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        log_test(ctx, &self.net.forward(x)?, y)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(optimizers())
    }
}

/// Captures by hand and replays: the whole training step with its optimizer, and the test step.
#[derive(Module)]
struct ByHand {
    net: Sequential,
    g: HpuGraph,
    x: StaticTensor,
    y: StaticTensor,
    logits: StaticTensor,
    loss: StaticTensor,
}

fn by_hand(device: Device) -> ByHand {
    ByHand {
        net: perceptron(device),
        g: HpuGraph::new(),
        x: StaticTensor::rand([BATCH, 1, 28, 28], device).unwrap(),
        y: StaticTensor::randint(10, [BATCH], device).unwrap(),
        logits: StaticTensor::default(),
        loss: StaticTensor::default(),
    }
}

impl LightningModule for ByHand {
    type Batch = (Tensor, Tensor);

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let before = ctx.global_step();
        self.x.copy_(x)?;
        self.y.copy_(y)?;
        if self.g.is_captured() {
            self.g.replay()?;
        } else {
            self.g.capture(|| {
                ctx.optimizer(0)?.zero_grad()?;
                let loss = cross_entropy(&self.net.forward(&self.x.get())?, &self.y.get())?;
                ctx.manual_backward(&loss)?;
                ctx.optimizer(0)?.step()?;
                self.loss.set(&loss)?;
                Ok(())
            })?;
        }
        assert_eq!(ctx.global_step(), before + 1, "a replayed step of an optimizer is one");
        ctx.lr_scheduler_step(0, None)?;
        ctx.log("train_loss", self.loss.get());
        Ok(ctx.no_loss())
    }

    fn test_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.x.copy_(x)?;
        self.y.copy_(y)?;
        if ctx.batch_idx() == 0 {
            self.g.capture(|| Ok(self.logits.set(&self.net.forward(&self.x.get())?)?))?;
        } else {
            self.g.replay()?;
        }
        log_test(ctx, &self.logits.get(), &self.y.get())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(optimizers())
    }
}

fn loader(split: MnistSplit) -> DataLoader<(Tensor, Tensor)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/digits");
    let digits = Mnist::open(&folder, split).unwrap();
    DataLoader::new(digits).batch_size(BATCH as usize).drop_last(true).build().unwrap()
}

/// Two epochs of six steps.
fn trainer(root: &Path) -> TrainerBuilder {
    Trainer::builder()
        .accelerator("hpu")
        .devices(1)
        .default_root_dir(root)
        .max_epochs(2)
        .limit_train_batches(6)
        .limit_test_batches(4)
        .log_every_n_steps(1_u64)
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .enable_checkpointing(false)
}

/// What a fit leaves behind.
#[derive(Debug, PartialEq)]
pub struct Trained {
    /// The rows of its metrics: epoch, step and loss.
    pub rows: Vec<String>,
    pub weights: Vec<Vec<u8>>,
    pub global_step: u64,
}

/// How a fit is set up beside its module.
pub type Configure = fn(TrainerBuilder) -> TrainerBuilder;

pub fn run<M: LightningModule<Batch = (Tensor, Tensor)>>(
    make: impl FnOnce(Device) -> M,
    root: &Path,
    configure: Configure,
    ckpt: Option<&Path>,
) -> voltaic::Result<(Trained, M)> {
    let mut trainer = configure(trainer(root)).build()?;
    let mut module = make(trainer.device());
    if let Some(ckpt) = ckpt {
        trainer.ckpt_path(ckpt.to_str().unwrap());
    }
    let mut data = Loaders::new().train(loader(MnistSplit::Train));
    trainer.fit(&mut module, &mut data)?;
    if ckpt.is_none() {
        trainer.save_checkpoint(&mut module, &mut data, root.join("end.ckpt"), None)?;
    }
    let rows = if trainer.is_global_zero() {
        let metrics = fs::read_to_string(trainer.log_dir().join("metrics.csv")).unwrap();
        metrics.lines().skip(1).map(str::to_owned).collect()
    } else {
        Vec::new()
    };
    let weights = module.state_dict().iter().map(|(_, tensor)| bits(tensor)).collect();
    Ok((Trained { rows, weights, global_step: trainer.global_step() }, module))
}

pub fn fit<M: LightningModule<Batch = (Tensor, Tensor)>>(
    make: impl FnOnce(Device) -> M,
    configure: Configure,
) -> Trained {
    run(make, tempfile::tempdir().unwrap().path(), configure, None).unwrap().0
}

fn without_graphs(device: Device) -> Plain<Sequential> {
    plain(perceptron(device))
}

/// Captured within autocast or not.
fn callable(device: Device, casts: bool) -> Plain<GraphedCallable<Sequential, Tensor>> {
    let sample = Tensor::rand([BATCH, 1, 28, 28], (Kind::Float, CPU)).to_device(device.into());
    let _casting = casts.then(|| autocast(device, Kind::BFloat16).unwrap());
    plain(make_graphed_callables(perceptron(device), &sample, 1).unwrap())
}

fn cached(device: Device) -> Plain<GraphedModule<Sequential>> {
    plain(ModuleCacher::new(10).wrap(perceptron(device)))
}

/// Replays of the forward pass and the backward pass.
fn replays(module: &Plain<GraphedCallable<Sequential, Tensor>>) -> Vec<u64> {
    module.net.replay_stats().iter().map(|stats| stats.replays).collect()
}

fn wrapped(device: Device) -> Plain<GraphedModule<Sequential>> {
    let options = WrapOptions { disable_tensor_cache: true, ..WrapOptions::default() };
    plain(wrap_in_hpu_graph(perceptron(device), options))
}

/// Loss and accuracy over four batches.
fn test<M: LightningModule<Batch = (Tensor, Tensor)>>(
    make: impl FnOnce(Device) -> M,
    configure: Configure,
) -> Vec<(String, f64)> {
    let root = tempfile::tempdir().unwrap();
    let mut trainer = configure(trainer(root.path())).build().unwrap();
    let mut module = make(trainer.device());
    let metrics = trainer.test(&mut module, &mut Loaders::new().test(loader(MnistSplit::Test))).unwrap();
    metrics.into_iter().collect()
}

#[test]
fn training_is_the_same_in_all_modes() {
    let _rng = start();
    let configures: [Configure; 2] = [|t| t, |t| t.precision("bf16-mixed")];
    let mut seen: Vec<Trained> = Vec::new();
    for (is_mixed, configure) in [false, true].into_iter().zip(configures) {
        let without = fit(without_graphs, configure);
        assert_eq!((without.rows.len(), without.global_step), (12, 12), "{:?}", without.rows);
        assert!(seen.iter().all(|other| other.rows != without.rows), "the precision has an effect");
        assert!(without == fit(by_hand, configure), "captured and replayed by hand");
        for casts in [false, true] {
            let root = tempfile::tempdir().unwrap();
            let (trained, module) =
                run(|device| callable(device, casts), root.path(), configure, None).unwrap();
            assert!(without == trained, "make_graphed_callables, captured with autocast: {casts}");
            // under another autocast than that of the capture the code runs
            assert_eq!(replays(&module), if casts == is_mixed { [12, 12] } else { [0, 0] });
        }
        assert!(without == fit(cached, configure), "ModuleCacher");
        seen.push(without);
    }
}

/// Stops a fit after four of twelve steps, and resumes it.
pub fn resume<M: LightningModule<Batch = (Tensor, Tensor)>>(make: impl Fn(Device) -> M) -> Trained {
    let root = tempfile::tempdir().unwrap();
    let ckpt = root.path().join("end.ckpt");
    run(&make, root.path(), |t| t.max_steps(4), None).unwrap();
    assert_eq!(Checkpoint::load(&ckpt).unwrap().meta.global_step, 4, "max_steps counts replays");
    run(&make, root.path(), |t| t, Some(&ckpt)).unwrap().0
}

#[test]
fn a_resumed_run_is_the_same_in_all_modes() {
    let _rng = start();
    let without = fit(without_graphs, |t| t);
    let modes = [
        ("without graphs", resume(without_graphs)),
        ("by hand", resume(by_hand)),
        ("make_graphed_callables", resume(|device| callable(device, false))),
        ("ModuleCacher", resume(cached)),
    ];
    for (mode, resumed) in modes {
        assert_eq!((&resumed.rows[..], resumed.global_step), (&without.rows[4..], 12), "{mode}");
        assert!(resumed.weights == without.weights, "{mode}");
    }
}

const FOLDER: &str = "VOLTAIC_TEST_FOLDER";

/// In a process that [`run_ranks`] has started, or a rank of it: the folder for its files.
pub fn folder_of_ranks() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Runs a test again in a process of its own, which may start ranks: they are this binary with the same arguments.
/// Returns what it printed; it must end well.
pub fn run_ranks() -> String {
    let folder = tempfile::tempdir().unwrap();
    text_of(&own_process("ranks").env(FOLDER, folder.path()).output().unwrap())
}

/// What a graph replays calls no hooks of gradients, which is how ranks average them: a whole step by hand is refused.
#[test]
fn two_ranks_do_the_same_in_the_modes_that_leave_backward_to_the_trainer() {
    let Some(folder) = folder_of_ranks() else {
        let text = run_ranks();
        assert!(text.contains("losses [\"0,0,"), "rank 0 has trained: {text}");
        return;
    };
    let two: Configure = |t| t.devices(2);
    let (without, _) = run(without_graphs, &folder.join("without"), two, None).unwrap();
    let (graphed, module) =
        run(|device| callable(device, false), &folder.join("callable"), two, None).unwrap();
    assert!(without == graphed, "make_graphed_callables");
    assert_eq!(replays(&module), [12, 12]);
    let (graphed, module) = run(cached, &folder.join("cached"), two, None).unwrap();
    assert!(without == graphed, "ModuleCacher");
    assert_eq!((module.net.stats().misses, module.net.stats().hits), (1, 10));
    let Err(error) = run(by_hand, &folder.join("by_hand"), two, None) else { panic!("by hand") };
    let expected = ["a hook of a gradient ran", "several ranks", "graphs of modules"];
    assert!(expected.iter().all(|words| error.to_string().contains(words)), "{error}");

    let without = test(without_graphs, two);
    assert_eq!(without, test(by_hand, two), "a test captured by hand");
    assert_eq!(without, test(wrapped, two), "wrap_in_hpu_graph");
    println!("losses {:?}", graphed.rows);
}

#[test]
fn testing_is_the_same_in_all_modes() {
    let _rng = start();
    let configures: [Configure; 2] = [|t| t, |t| t.precision("bf16-mixed")];
    let mut seen = Vec::new();
    for configure in configures {
        let without = test(without_graphs, configure);
        assert_eq!(without.len(), 2, "{without:?}");
        assert_eq!(without, test(by_hand, configure), "captured and replayed by hand");
        assert_eq!(without, test(wrapped, configure), "wrap_in_hpu_graph");
        assert!(!seen.contains(&without), "the precision has an effect");
        seen.push(without);
    }
}
