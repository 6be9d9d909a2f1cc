//! A resumed run equals the uninterrupted one bit for bit, wherever the checkpoint was written.

use std::path::Path;

use tempfile::TempDir;
use voltaic::callback::{
    LambdaCallback, ModelCheckpoint, ModelCheckpointConfig, OnExceptionCheckpoint,
    OnExceptionCheckpointConfig,
};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::{BatchNorm1d, Dropout, Forward, Linear, ModuleExt, Parameter};
use voltaic::optim::{
    Adam, AdamW, CosineAnnealingLr, Interval, LrSchedulerSpec, OneCycleLr, Optimizers, PlateauMode,
    ReduceLrOnPlateau, Sgd, StepLr,
};
use voltaic::precision::GradScaler;
use voltaic::trainer::{TrainerBuilder, seed_everything};
use voltaic::{Kind, Module, Tensor};

use crate::checkpoints::resumed;
use crate::probe::{LearningRates, files, has_hpu, names, silent};
use crate::rng::seeded;
use crate::trainer::{Losses, loader, loaders};

/// Dropout, so that a wrong random state shows, and a parameter that only every other batch uses.
#[derive(Module)]
pub struct Net {
    odd: Parameter,
    fc1: Linear,
    bn: BatchNorm1d,
    dropout: Dropout,
    fc2: Linear,
    #[module(skip)]
    optimizers: fn() -> Optimizers,
}

impl Net {
    pub fn new(optimizers: fn() -> Optimizers) -> Self {
        Self {
            odd: Parameter::new(Tensor::ones([3], (Kind::Float, tch::Device::Cpu))),
            fc1: Linear::new(8, 16).unwrap(),
            bn: BatchNorm1d::new(16).unwrap(),
            dropout: Dropout::new(0.3).unwrap(),
            fc2: Linear::new(16, 1).unwrap(),
            optimizers,
        }
    }

    fn loss(&self, x: &Tensor, y: &Tensor) -> anyhow::Result<Tensor> {
        let hidden = self.dropout.forward(&self.bn.forward(&self.fc1.forward(x)?)?.relu())?;
        Ok(self.fc2.forward(&hidden)?.f_mse_loss(y, tch::Reduction::Mean)?)
    }
}

impl LightningModule for Net {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        let mut loss = self.loss(x, y)?;
        if ctx.batch_idx() % 2 == 1 {
            loss += self.odd.tensor().square().sum(Kind::Float) * 0.1;
        }
        ctx.log("train_loss", &loss).on_epoch(true);
        ctx.log("batches", 1.0).on_step(false).on_epoch(true).reduce_fx(voltaic::module::ReduceFx::Sum);
        Ok(loss)
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", self.loss(x, y)?);
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok((self.optimizers)())
    }
}

/// One way to train and to save.
#[derive(Clone, Copy)]
struct Case {
    optimizers: fn() -> Optimizers,
    num_workers: usize,
    build: fn(TrainerBuilder) -> TrainerBuilder,
    save: fn(&mut ModelCheckpointConfig),
}

const CASE: Case = Case {
    optimizers: || AdamW::new(1e-2).into(),
    num_workers: 0,
    build: |trainer| trainer,
    save: |config| config.every_n_train_steps = Some(1),
};

/// All that two runs are compared by.
#[derive(Debug, PartialEq)]
struct Trace {
    losses: Vec<u64>,
    learning_rates: Vec<f64>,
    weights: Vec<f32>,
    metrics: Vec<Option<u64>>,
    global_step: u64,
    grad_scaler: Option<GradScaler>,
}

impl Trace {
    /// This trace without what happened before the last `batches` batches.
    fn tail(&self, batches: usize) -> Self {
        let from = self.losses.len() - batches;
        Self {
            losses: self.losses[from..].to_vec(),
            learning_rates: self.learning_rates[from..].to_vec(),
            weights: self.weights.clone(),
            metrics: self.metrics.clone(),
            global_step: self.global_step,
            grad_scaler: self.grad_scaler.clone(),
        }
    }
}

impl Case {
    /// Trains 3 epochs of 7 batches unless `build` says otherwise.
    fn fit(
        &self,
        build: impl FnOnce(TrainerBuilder) -> TrainerBuilder,
        folder: Option<&Path>,
        ckpt: Option<&Path>,
    ) -> Trace {
        // nothing may depend on the seed of a process that resumes
        seed_everything(if ckpt.is_some() { 99 } else { 3 }).unwrap();
        let mut net = Net::new(self.optimizers);
        let (losses, learning_rates) = (Losses::default(), LearningRates::default());
        let mut builder = (self.build)(silent().max_epochs(3).num_sanity_val_steps(1))
            .callback(losses.clone())
            .callback(learning_rates.clone());
        if let Some(folder) = folder {
            let mut config =
                ModelCheckpointConfig { dirpath: Some(folder.into()), save_top_k: -1, ..Default::default() };
            (self.save)(&mut config);
            builder = builder.enable_checkpointing(true).callback(ModelCheckpoint::new(config).unwrap());
        }
        let mut trainer = resumed(build(builder), ckpt);
        let mut data = Loaders::new().train(self.train_loader()).val(loader(6, false));
        trainer.fit(&mut net, &mut data).unwrap();
        let metric = |name: &str| trainer.metric(name).map(f64::to_bits);
        Trace {
            losses: losses.take(),
            learning_rates: std::mem::take(&mut learning_rates.0.lock().unwrap()),
            weights: net
                .state_dict()
                .iter()
                .flat_map(|(_, t)| Vec::<f32>::try_from(t.flatten(0, -1).to_kind(Kind::Float)).unwrap())
                .collect(),
            metrics: ["train_loss_epoch", "val_loss", "batches"].map(metric).to_vec(),
            global_step: trainer.global_step(),
            grad_scaler: trainer.grad_scaler().cloned(),
        }
    }

    fn train_loader(&self) -> DataLoader<(Tensor, Tensor)> {
        let x = Tensor::arange(26 * 8, (Kind::Float, tch::Device::Cpu)).sin().reshape([26, 8]);
        let y = x.sum_dim_intlist(1, true, Kind::Float);
        let loader = DataLoader::new(TensorDataset::new((x, y)).unwrap()).batch_size(4).shuffle(true);
        loader.num_workers(self.num_workers).build().unwrap()
    }

    /// Resumes from each checkpoint of a run, which has to have written `expected` many.
    fn check(&self, expected: usize) {
        let _rng = seeded(1);
        let whole = self.fit(|t| t, None, None);
        let folder = TempDir::new().unwrap();
        assert_eq!(whole, self.fit(|t| t, Some(folder.path()), None), "saving changes nothing");
        let checkpoints = files(folder.path());
        assert_eq!(checkpoints.len(), expected, "{:?}", names(folder.path()));
        for path in checkpoints {
            self.check_from(&path, &whole);
        }
    }

    fn check_from(&self, path: &Path, whole: &Trace) {
        let resumed = self.fit(|t| t, None, Some(path));
        assert_eq!(resumed, whole.tail(resumed.losses.len()), "{}", path.display());
    }
}

fn every(steps: u64) -> impl Fn(&mut ModelCheckpointConfig) {
    move |config| config.every_n_train_steps = Some(steps)
}

#[test]
fn after_any_step_with_adamw() {
    CASE.check(21);
}

#[test]
fn after_an_epoch_with_sgd_and_a_schedule_by_epoch() {
    let optimizers = || {
        Optimizers::new(Sgd::new(0.05).momentum(0.9).nesterov(true).weight_decay(0.01))
            .scheduler(StepLr::new(1, 0.5))
    };
    Case { optimizers, save: |config| config.every_n_epochs = Some(1), ..CASE }.check(3);
    Case { optimizers, save: |config| every(5)(config), ..CASE }.check(4);
}

#[test]
fn with_adam_amsgrad_a_schedule_by_step_and_accumulation() {
    Case {
        optimizers: || {
            let schedule = LrSchedulerSpec::new(CosineAnnealingLr::new(9)).interval(Interval::Step);
            Optimizers::new(Adam::new(1e-2).amsgrad(true)).scheduler(schedule)
        },
        build: |trainer| trainer.accumulate_grad_batches(3_u64),
        ..CASE
    }
    .check(9);
}

#[test]
fn with_loader_threads_one_cycle_and_clipping() {
    Case {
        optimizers: || {
            let schedule = LrSchedulerSpec::new(OneCycleLr::new(0.02, 21)).interval(Interval::Step);
            Optimizers::new(AdamW::new(1e-2)).scheduler(schedule)
        },
        num_workers: 2,
        build: |trainer| trainer.gradient_clip_val(0.5),
        save: |config| every(4)(config),
    }
    .check(5);
}

#[test]
fn within_an_accumulation_window_after_validation() {
    // validation after 5 of 7 batches, windows of 2: batch 5 has opened a window
    for (optimizers, num_workers) in [
        ((|| AdamW::new(1e-2).into()) as fn() -> Optimizers, 2),
        (|| Adam::new(1e-2).into(), 0),
        (|| Sgd::new(0.05).momentum(0.9).into(), 0),
    ] {
        Case {
            optimizers,
            num_workers,
            build: |trainer| trainer.accumulate_grad_batches(2_u64).val_check_interval(5),
            save: |config| config.every_n_epochs = Some(1),
        }
        .check(3);
    }
}

fn plateau() -> LrSchedulerSpec {
    let schedule = ReduceLrOnPlateau::new(PlateauMode::Max).patience(0).factor(0.5);
    LrSchedulerSpec::new(schedule).monitor("val_loss")
}

#[test]
fn with_a_plateau_schedule_that_is_stepped_after_the_hooks_that_save() {
    Case {
        optimizers: || Optimizers::new(AdamW::new(1e-2)).scheduler(plateau()),
        save: |config| config.every_n_epochs = Some(1),
        ..CASE
    }
    .check(3);
    Case {
        optimizers: || {
            Optimizers::new(AdamW::new(1e-2)).scheduler(plateau().interval(Interval::Step).frequency(2))
        },
        build: |trainer| trainer.check_val_every_n_epoch(None).val_check_interval(2),
        save: |config| every(2)(config),
        ..CASE
    }
    .check(10);
}

#[test]
fn a_run_that_a_step_limit_cut_short_goes_on_in_its_epoch() {
    let _rng = seeded(1);
    let case = Case { save: |config| config.every_n_epochs = Some(1), ..CASE };
    let whole = case.fit(|t| t, None, None);
    for limit in [1, 6, 7, 8, 10, 20] {
        let folder = TempDir::new().unwrap();
        let first = case.fit(|t| t.max_steps(limit), Some(folder.path()), None);
        assert_eq!((first.losses.len() as i64, first.global_step as i64), (limit, limit));
        let newest = files(folder.path())
            .into_iter()
            .find(|path| path.to_str().is_some_and(|name| name.ends_with(&format!("step={limit}.ckpt"))));
        case.check_from(&newest.expect("saved at the end"), &whole);
    }
}

#[test]
fn another_batch_size_within_an_epoch_is_refused() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    let case = Case { save: |config| every(3)(config), ..CASE };
    case.fit(|t| t.max_epochs(1), Some(folder.path()), None);
    let path = folder.path().join("epoch=0-step=3.ckpt");
    let mut net = Net::new(case.optimizers);
    let mut trainer = silent().max_epochs(1).limit_train_batches(6).build().unwrap();
    let error = trainer.ckpt_path(path.to_str().unwrap()).fit(&mut net, &mut loaders()).unwrap_err();
    let expected =
        "was written at batch 3 of an epoch of 7 batches of 4, this run has 6 batches of 4; use the same";
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn a_checkpoint_beyond_the_last_epoch_is_refused() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    let case = Case { save: |config| config.every_n_epochs = Some(1), ..CASE };
    case.fit(|t| t, Some(folder.path()), None);
    let path = folder.path().join("epoch=2-step=21.ckpt");
    let fit = |max_epochs: i64| {
        let mut trainer = silent().max_epochs(max_epochs).build().unwrap();
        trainer.ckpt_path(path.to_str().unwrap()).fit(&mut Net::new(case.optimizers), &mut loaders())
    };
    assert_error!(fit(1), "trainer.max_epochs: 1, but ", "is of epoch 2, counted from 0");
    fit(2).unwrap(); // nothing is left to do, as in Lightning
}

/// Every optimizer, in float32 on the CPU and in `16-mixed` on an emulated HPU, whose first steps are left out because the scaled loss overflows.
#[test]
fn after_any_step_with_every_optimizer_and_precision() {
    if !has_hpu() {
        return;
    }
    let optimizers: [fn() -> Optimizers; 5] = [
        || Sgd::new(0.02).into(),
        || Sgd::new(0.02).momentum(0.9).nesterov(true).weight_decay(0.01).into(),
        || Adam::new(1e-2).into(),
        || Adam::new(1e-2).amsgrad(true).weight_decay(0.01).into(),
        || AdamW::new(1e-2).into(),
    ];
    for optimizers in optimizers {
        Case { optimizers, ..CASE }.check(21);
        let scaled =
            Case { optimizers, build: |trainer| trainer.accelerator("hpu").precision("16-mixed"), ..CASE };
        scaled.check(21);
        let scaler = {
            let _rng = seeded(1);
            scaled.fit(|t| t, None, None).grad_scaler.unwrap()
        };
        let halved = 65536.0 * 0.5_f64.powi(scaler.num_skipped_steps() as i32);
        assert!(scaler.num_skipped_steps() > 0 && scaler.get_scale() == halved, "{scaler:?}");
        Case {
            optimizers,
            build: |trainer| trainer.accelerator("hpu").precision("16-mixed").accumulate_grad_batches(2_u64),
            ..CASE
        }
        .check(12);
    }
}

/// A run that failed at any hook of an epoch goes on where it was, with every optimizer; in `16-mixed` the first steps
/// are left out, so that some of the places are between steps that were done and steps that were not.
#[test]
fn after_a_failure_at_any_place() {
    if !has_hpu() {
        return;
    }
    let _rng = seeded(1);
    let optimizers: [fn() -> Optimizers; 4] = [
        || Sgd::new(0.02).momentum(0.9).into(),
        || Adam::new(1e-2).amsgrad(true).into(),
        || AdamW::new(1e-2).into(),
        || Optimizers::new(AdamW::new(1e-2)).scheduler(StepLr::new(1, 0.5)),
    ];
    let builds: [fn(TrainerBuilder) -> TrainerBuilder; 2] = [
        |trainer| trainer.accumulate_grad_batches(2_u64).val_check_interval(3),
        |trainer| {
            trainer
                .accumulate_grad_batches(2_u64)
                .val_check_interval(3)
                .accelerator("hpu")
                .precision("16-mixed")
        },
    ];
    for optimizers in optimizers {
        for build in builds {
            let case = Case { optimizers, build, ..CASE };
            let whole = case.fit(|t| t, None, None);
            for (place, fail) in places() {
                check_failure(&case, &whole, place, fail);
            }
        }
    }
}

type Fail = fn(LambdaCallback) -> LambdaCallback;

/// Hooks at which a run fails, in the middle.
fn places() -> [(&'static str, Fail); 11] {
    [
        ("before zero_grad", |lambda| {
            lambda.on_before_zero_grad(|ctx, _| match ctx.progress().total_batches {
                9 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("before backward", |lambda| {
            lambda.on_before_backward(|ctx, _| match ctx.progress().total_batches {
                10 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("after backward", |lambda| {
            lambda.on_after_backward(|ctx, _| match ctx.progress().total_batches {
                10 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("before the optimizer step", |lambda| {
            lambda.on_before_optimizer_step(|ctx, _| match ctx.progress().total_batches {
                10 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("before a batch", |lambda| {
            lambda.on_train_batch_start(|ctx, _| match ctx.progress().total_batches {
                10 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("after a batch", |lambda| {
            lambda.on_train_batch_end(|ctx, _| match ctx.progress().total_batches {
                11 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("within validation", |lambda| {
            lambda.on_validation_batch_start(|ctx, _| match (ctx.global_step(), ctx.batch_idx()) {
                (5, 1) => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("after validation", |lambda| {
            lambda.on_validation_end(|ctx, _| match ctx.global_step() {
                5 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("before an epoch", |lambda| {
            lambda.on_train_epoch_start(|ctx, _| match ctx.current_epoch() {
                2 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("before validation", |lambda| {
            lambda.on_validation_start(|ctx, _| match ctx.global_step() {
                5 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
        ("after an epoch", |lambda| {
            lambda.on_train_epoch_end(|ctx, _| match ctx.current_epoch() {
                1 => anyhow::bail!("no luck"),
                _ => Ok(()),
            })
        }),
    ]
}

fn check_failure(case: &Case, whole: &Trace, place: &str, fail: Fail) {
    let folder = TempDir::new().unwrap();
    let config = OnExceptionCheckpointConfig { dirpath: folder.path().into(), ..Default::default() };
    let failing = std::panic::catch_unwind(|| {
        let saver = OnExceptionCheckpoint::new(config).unwrap();
        case.fit(|t| t.callback(fail(LambdaCallback::new())).callback(saver), None, None)
    });
    assert!(failing.is_err(), "{place}: it fails");
    let path = folder.path().join("on_exception.ckpt");
    let resumed = case.fit(|t| t, None, Some(&path));
    assert_eq!(resumed, whole.tail(resumed.losses.len()), "{place}");
    assert!(resumed.losses.len() < whole.losses.len(), "{place}");
}
