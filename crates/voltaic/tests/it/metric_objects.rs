//! Metrics that are logged as objects: computed and reset by the trainer, over ranks, and saved in checkpoints.

use std::path::Path;
use std::sync::{Arc, Mutex};

use tempfile::TempDir;
use voltaic::callback::{LambdaCallback, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::metrics::{Auroc, ConfusionMatrix, MeanSquaredError, Metric};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{ModuleExt, Parameter};
use voltaic::optim::{Optimizers, Sgd};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::resumed;
use crate::ddp::{folder_of_parent, run_ranks};
use crate::probe::{files, plays, silent};
use crate::rng::seeded;

const CPU: tch::Device = tch::Device::Cpu;
type Pair = (Tensor, Tensor);

#[derive(Module)]
struct Scored {
    weight: Parameter,
    /// Keeps all scores.
    train_auroc: Auroc,
    /// Logged at the end of the epoch only, so that the trainer finds it in the tree alone.
    train_mse: MeanSquaredError,
    val: [Auroc; 1],
    #[module(skip)]
    learns: bool,
}

impl Scored {
    fn new(learns: bool) -> Self {
        Self {
            weight: Parameter::new(Tensor::from_slice(&[0.3_f32, -0.1])),
            train_auroc: Auroc::binary(),
            train_mse: MeanSquaredError::new(),
            val: [Auroc::binary()],
            learns,
        }
    }

    fn scores(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        Ok(x.f_mul(&self.weight)?.f_sum_dim_intlist(1, false, Kind::Float)?)
    }
}

impl LightningModule for Scored {
    type Batch = Pair;

    fn training_step(&self, (x, y): &Pair, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let scores = self.scores(x)?;
        let target = y.to_kind(Kind::Float);
        self.train_auroc.update(&scores, y)?;
        self.train_mse.update(&scores, &target)?;
        ctx.log("train_auroc", &self.train_auroc).on_epoch(true);
        Ok(scores.f_mse_loss(&target, tch::Reduction::Mean)?)
    }

    fn on_train_epoch_end(&mut self, ctx: &mut voltaic::module::HookContext) -> anyhow::Result<()> {
        ctx.log("train_mse", &self.train_mse);
        Ok(())
    }

    fn validation_step(&self, (x, y): &Pair, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.val[0].update(&self.scores(x)?, y)?;
        ctx.log("val_auroc", &self.val[0]).prog_bar(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(if self.learns { 0.1 } else { 0.0 }).into()
    }
}

/// Numbers without a pattern, and classes that go with them.
fn numbers(samples: i64) -> Pair {
    let i = Tensor::arange(samples * 2, (Kind::Double, CPU));
    let x = ((&i * 12.9898).sin() * 2.0).reshape([samples, 2]).to_kind(Kind::Float);
    let noise = (Tensor::arange(samples, (Kind::Double, CPU)) * 78.233).sin();
    let y = (x.select(1, 0).to_kind(Kind::Double) + noise).gt(0.0).to_kind(Kind::Int64);
    (x, y)
}

fn loader(samples: i64, batch_size: usize) -> DataLoader<Pair> {
    DataLoader::new(TensorDataset::new(numbers(samples)).unwrap()).batch_size(batch_size).build().unwrap()
}

fn data() -> Loaders<Pair> {
    Loaders::new().train(loader(26, 4)).val(loader(10, 3))
}

fn expected_auroc(weight: &Parameter, samples: i64) -> f64 {
    let (x, y) = numbers(samples);
    let auroc = Auroc::binary();
    auroc.update(&(x * weight.tensor()).sum_dim_intlist(1, false, Kind::Float), &y).unwrap();
    auroc.compute().unwrap().double_value(&[])
}

#[test]
fn values_are_of_the_epoch_and_of_each_step() {
    let _rng = seeded(1);
    let steps = Arc::new(Mutex::new(Vec::new()));
    let seen = steps.clone();
    let mut net = Scored::new(false);
    let of_batches: Vec<f64> = (0..7)
        .map(|batch| {
            let (x, y) = numbers(26);
            let size = if batch == 6 { 2 } else { 4 };
            let scores = net.scores(&x.narrow(0, batch * 4, size)).unwrap();
            let auroc = Auroc::binary();
            auroc.update(&scores, &y.narrow(0, batch * 4, size)).unwrap();
            auroc.compute().unwrap().double_value(&[])
        })
        .collect();
    let lambda = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        seen.lock().unwrap().push(ctx.metric("train_auroc_step").unwrap());
        Ok(())
    });
    let mut trainer = silent().max_epochs(2).callback(lambda).build().unwrap();
    trainer.fit(&mut net, &mut data()).unwrap();
    assert_eq!(
        *steps.lock().unwrap(),
        [&of_batches[..], &of_batches[..]].concat(),
        "each of its batch alone"
    );
    assert_eq!(trainer.metric("train_auroc_epoch"), Some(expected_auroc(&net.weight, 26)));
    assert_eq!(trainer.metric("val_auroc"), Some(expected_auroc(&net.weight, 10)), "not of the sanity check");
    let (x, y) = numbers(26);
    let mse = (net.scores(&x).unwrap() - y).square().mean(Kind::Float).double_value(&[]);
    assert!((trainer.metric("train_mse").unwrap() - mse).abs() < 1e-6 * mse);
    assert!(
        net.named_metrics().iter().all(|(_, metric)| metric.state().named().unwrap().is_empty()),
        "all are reset"
    );
    let metrics = trainer.validate(&mut net, &mut data()).unwrap();
    assert_eq!(metrics, [("val_auroc".to_owned(), expected_auroc(&net.weight, 10))]);
}

/// Keeps a checkpoint of each step in a folder.
fn saving_each_step(builder: TrainerBuilder, folder: &Path) -> TrainerBuilder {
    let saver = ModelCheckpoint::new(ModelCheckpointConfig {
        dirpath: Some(folder.into()),
        save_top_k: -1,
        every_n_train_steps: Some(1),
        ..ModelCheckpointConfig::default()
    });
    builder.enable_checkpointing(true).callback(saver.unwrap())
}

/// Trains two epochs of 7 batches, validating after 3 and 6; returns weights and metrics.
fn run(folder: Option<&Path>, ckpt: Option<&Path>) -> (Vec<f32>, Vec<Option<u64>>) {
    let mut builder = silent().max_epochs(2).val_check_interval(3);
    if let Some(folder) = folder {
        builder = saving_each_step(builder, folder);
    }
    let mut trainer = resumed(builder, ckpt);
    let mut net = Scored::new(true);
    trainer.fit(&mut net, &mut data()).unwrap();
    let metric = |name: &str| trainer.metric(name).map(f64::to_bits);
    let metrics = ["train_auroc_epoch", "train_auroc_step", "train_mse", "val_auroc"].map(metric);
    (Vec::try_from(net.weight.tensor()).unwrap(), metrics.to_vec())
}

#[test]
fn a_resumed_epoch_has_the_value_of_an_uninterrupted_one() {
    let _rng = seeded(1);
    let whole = run(None, None);
    assert!(whole.1.iter().all(Option::is_some), "{whole:?}");
    let folder = TempDir::new().unwrap();
    assert_eq!(run(Some(folder.path()), None), whole, "saving changes nothing");
    let checkpoints = files(folder.path());
    assert_eq!(checkpoints.len(), 14);
    for path in checkpoints {
        assert_eq!(run(None, Some(&path)), whole, "{}", path.display());
    }
    let middle = Checkpoint::load(folder.path().join("epoch=0-step=3.ckpt")).unwrap();
    let saved: Vec<(String, Vec<i64>)> =
        middle.training.unwrap().metrics.into_iter().map(|(name, t)| (name, t.size())).collect();
    let expected = [
        ("train_auroc.preds", vec![12]),
        ("train_auroc.target", vec![12]),
        ("train_mse.sum", vec![]),
        ("train_mse.total", vec![]),
    ];
    let mut saved: Vec<(&str, Vec<i64>)> = saved.iter().map(|(n, size)| (n.as_str(), size.clone())).collect();
    saved.sort();
    assert_eq!(saved, expected, "nothing of the validation that is over");
}

#[test]
fn a_failed_run_leaves_nothing_to_the_next_one() {
    let _rng = seeded(1);
    for hook in ["training", "validation"] {
        let lambda = match hook {
            "training" => LambdaCallback::new().on_train_batch_end(|ctx, _| {
                anyhow::ensure!(ctx.global_step() != 2, "no luck");
                Ok(())
            }),
            _ => LambdaCallback::new().on_validation_batch_end(|ctx, _| {
                anyhow::ensure!(ctx.batch_idx() != 1, "no luck");
                Ok(())
            }),
        };
        let mut net = Scored::new(false);
        let mut trainer = silent().max_epochs(1).num_sanity_val_steps(0).callback(lambda).build().unwrap();
        trainer.fit(&mut net, &mut data()).unwrap_err();
        let mut trainer = silent().max_epochs(1).build().unwrap();
        trainer.fit(&mut net, &mut data()).unwrap();
        assert_eq!(trainer.metric("train_auroc"), Some(expected_auroc(&net.weight, 26)), "{hook}");
        assert_eq!(trainer.metric("val_auroc"), Some(expected_auroc(&net.weight, 10)), "{hook}");
    }
}

#[test]
fn ranks_have_the_value_over_all_their_batches() {
    if plays("rank") {
        let builder = silent().default_root_dir(folder_of_parent()).accelerator("cpu").devices(2);
        let mut trainer = builder.strategy("ddp").max_epochs(1).build().unwrap();
        let mut net = Scored::new(false);
        // five samples in batches of three: the second rank has two of them, in one batch
        let mut data = Loaders::new().train(loader(24, 4)).val(loader(5, 3));
        trainer.fit(&mut net, &mut data).unwrap();
        assert_eq!(trainer.metric("train_auroc"), Some(expected_auroc(&net.weight, 24)));
        assert_eq!(trainer.metric("val_auroc"), Some(expected_auroc(&net.weight, 5)));
        // one batch for two ranks
        let metrics = trainer.validate(&mut net, &mut Loaders::new().val(loader(1, 3))).unwrap();
        println!("{} metrics of rank {}", metrics.len(), trainer.world().rank);
        assert_eq!(trainer.metric("val_auroc"), Some(0.0), "one class alone");
        return;
    }
    let folder = TempDir::new().unwrap();
    assert_contains!(run_ranks("rank", folder.path()), "1 metrics of rank 0");
    let log = std::fs::read_to_string(folder.path().join("rank_logs/rank_1.log")).unwrap();
    assert!(log.contains("1 metrics of rank 1"), "{log}");
}

#[test]
fn ranks_go_on_in_the_middle_of_an_epoch() {
    if plays("rank") {
        let folder = folder_of_parent();
        let run = |ckpt: Option<&Path>| {
            let builder = silent().default_root_dir(folder.as_path()).accelerator("cpu").devices(2);
            let mut builder = builder.strategy("ddp").max_epochs(1).limit_val_batches(0);
            if ckpt.is_none() {
                builder = saving_each_step(builder, &folder.join("saved"));
            }
            let mut trainer = resumed(builder, ckpt);
            trainer.fit(&mut Scored::new(true), &mut Loaders::new().train(loader(40, 4))).unwrap();
            ["train_auroc_epoch", "train_mse"].map(|name| trainer.metric(name).unwrap().to_bits())
        };
        let whole = run(None);
        for step in 1..=4 {
            let ckpt = folder.join(format!("saved/epoch=0-step={step}.ckpt"));
            assert_eq!(run(Some(&ckpt)), whole, "after step {step}");
        }
        return println!("equal");
    }
    let folder = TempDir::new().unwrap();
    assert_contains!(run_ranks("rank", folder.path()), "equal");
}

#[derive(Module)]
struct Mistaken {
    weight: Parameter,
    matrix: ConfusionMatrix,
    idle: MeanSquaredError,
    #[module(skip)]
    elsewhere: MeanSquaredError,
    #[module(skip)]
    mistake: &'static str,
}

lightning_module!(Mistaken, Pair, Sgd::new(0.1), |net, (x, y), ctx| {
    net.matrix.update(y, y)?;
    net.elsewhere.update(x, x)?;
    match net.mistake {
        "matrix" => drop(ctx.log("m", &net.matrix)),
        "idle" => drop(ctx.log("m", &net.idle)),
        _ => drop(ctx.log("m", &net.elsewhere)),
    }
    Ok(net.weight.f_sum(Kind::Float)?)
});

#[test]
fn mistakes_are_named() {
    for (mistake, expected) in [
        (
            "matrix",
            "log(m): the metric's value has shape [2, 2], which is not a scalar; log a number made of its",
        ),
        ("idle", "update has to be called before compute"),
        (
            "elsewhere",
            "log(m): the metric is not a part of the module, so no checkpoint would have it; make it a field",
        ),
    ] {
        let mut net = Mistaken {
            weight: Parameter::new(Tensor::ones([2], (Kind::Float, CPU))),
            matrix: ConfusionMatrix::new(2),
            idle: MeanSquaredError::new(),
            elsewhere: MeanSquaredError::new(),
            mistake,
        };
        let mut trainer = silent().max_epochs(1).build().unwrap();
        assert_error!(trainer.fit(&mut net, &mut Loaders::new().train(loader(4, 4))), expected);
    }
}

#[test]
fn metrics_are_in_the_tree_and_not_among_the_weights() {
    let net = Scored::new(true);
    let names: Vec<String> = net.named_metrics().into_iter().map(|(fqn, _)| fqn).collect();
    assert_eq!(names, ["train_auroc", "train_mse", "val.0"]);
    assert_eq!(net.state_dict().len(), 1);
    let clone = net.train_mse.clone();
    clone.update(&Tensor::from(1.0), &Tensor::from(3.0)).unwrap();
    assert_eq!(net.train_mse.compute().unwrap().double_value(&[]), 4.0, "clones share their state");
}

#[test]
fn a_step_that_updates_a_metric_runs_without_a_graph() {
    let mut net = Scored::new(false);
    let builder = silent().max_epochs(2).graph(voltaic::trainer::GraphMode::Step);
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader(24, 4))).unwrap();
    assert_contains!(trainer.graph_report().refusal.clone().unwrap(), "the step updates a metric");
    assert_eq!(trainer.metric("train_auroc"), Some(expected_auroc(&net.weight, 24)));
}
