//! A resumed run equals the uninterrupted one in all that it keeps beside weights: schedules, callbacks, averages, logged
//! values. What is stopped, limited or broken off here goes on where it was.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;
use voltaic::callback::{
    EarlyStopping, EarlyStoppingConfig, EmaWeightAveragingConfig, LambdaCallback, ModelCheckpoint,
    ModelCheckpointConfig, OnExceptionCheckpoint, OnExceptionCheckpointConfig, SaveLast,
    StochasticWeightAveraging, StochasticWeightAveragingConfig, WeightAveraging, WeightAveragingConfig,
};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::Loaders;
use voltaic::nn::ModuleExt;
use voltaic::optim::{AdamW, Interval, LrSchedulerSpec, Optimizers, PlateauMode, ReduceLrOnPlateau};
use voltaic::trainer::{GraphMode, TrainerBuilder, seed_everything};
use voltaic::{Error, Tensor};

use crate::checkpoints::{full_checkpoint, resumed};
use crate::probe::{Probe, files, loaders, names, silent};
use crate::resume::Net;
use crate::rng::seeded;
use crate::trainer::{Losses, loader};

type Build = fn(TrainerBuilder) -> TrainerBuilder;

/// One way to train: 3 epochs of 7 batches, validated on 2.
#[derive(Clone, Copy)]
struct Case {
    optimizers: fn() -> Optimizers,
    build: Build,
}

/// Losses of the batches, and the checkpoint of the end.
struct Run {
    losses: Vec<u64>,
    end: Checkpoint,
    weights: Vec<(String, Tensor)>,
    result: voltaic::Result<()>,
}

impl Case {
    fn fit(&self, build: impl FnOnce(TrainerBuilder) -> TrainerBuilder, ckpt: Option<&Path>) -> Run {
        // nothing may depend on the seed of a process that resumes
        seed_everything(if ckpt.is_some() { 99 } else { 3 }).unwrap();
        let root = TempDir::new().unwrap();
        let path = root.path().join("end.ckpt");
        let end = path.clone();
        let at_the_end = LambdaCallback::new().on_train_epoch_end(move |ctx, _| {
            if Some(ctx.current_epoch() + 1) == ctx.facts().max_epochs {
                ctx.request_checkpoint(full_checkpoint(end.clone()));
            }
            Ok(())
        });
        let losses = Losses::default();
        let builder = (self.build)(silent().default_root_dir(root.path()).num_sanity_val_steps(1));
        let builder = build(builder.max_epochs(3)).callback(losses.clone()).callback(at_the_end);
        let mut trainer = resumed(builder, ckpt);
        let mut net = Net::new(self.optimizers);
        let mut data = Loaders::new().train(loader(26, true)).val(loader(6, false));
        let result = trainer.fit(&mut net, &mut data);
        let end = if path.exists() { Checkpoint::load(&path).unwrap() } else { Checkpoint::default() };
        Run { losses: losses.take(), end, weights: net.state_dict(), result }
    }

    /// Stops a run by `stop`, goes on from what it has saved last, and compares with a run that was not stopped.
    fn check(&self, name: &str, stop: impl FnOnce(TrainerBuilder) -> TrainerBuilder, steps: usize) {
        let whole = self.fit(|t| t, None);
        let folder = TempDir::new().unwrap();
        let first = self.fit(|t| stop(saving(t, folder.path(), |_| {})), None);
        first.result.unwrap();
        assert_eq!(first.losses.len(), steps, "{name}");
        let resumed = self.fit(|t| t, Some(&folder.path().join("last.ckpt")));
        resumed.same_as(&whole, name);
        assert_eq!(steps + resumed.losses.len(), whole.losses.len(), "{name}: no batch is left out");
    }
}

/// Saves all checkpoints, and `last.ckpt`.
fn saving(
    builder: TrainerBuilder,
    folder: &Path,
    change: impl FnOnce(&mut ModelCheckpointConfig),
) -> TrainerBuilder {
    let mut config = ModelCheckpointConfig {
        dirpath: Some(folder.into()),
        save_top_k: -1,
        save_last: SaveLast::Copy(true),
        ..Default::default()
    };
    change(&mut config);
    builder.enable_checkpointing(true).callback(ModelCheckpoint::new(config).unwrap())
}

fn on_exception(folder: &Path) -> OnExceptionCheckpoint {
    let config = OnExceptionCheckpointConfig { dirpath: folder.into(), ..Default::default() };
    OnExceptionCheckpoint::new(config).unwrap()
}

/// The training state, without what belongs to the files and the seed of the process.
fn state_of(checkpoint: &Checkpoint) -> Value {
    let mut json = checkpoint.training.as_ref().expect("a full checkpoint").json.clone();
    json.as_object_mut().unwrap().remove("seed");
    let callbacks = json["callbacks"].as_array_mut().unwrap();
    callbacks.retain(|callback| {
        let key = callback[0].as_str().unwrap();
        !key.starts_with("ModelCheckpoint") && !key.starts_with("Timer")
    });
    json
}

fn tensors_of(checkpoint: &Checkpoint) -> Vec<(String, Tensor)> {
    let training = checkpoint.training.as_ref().unwrap();
    let lists = [&checkpoint.weights, &training.callbacks, &training.metrics, &training.grads, &training.rng];
    let mut all: Vec<(String, Tensor)> = lists
        .into_iter()
        .chain(&training.optimizers)
        .enumerate()
        .flat_map(|(i, list)| list.iter().map(move |(name, t)| (format!("{i}.{name}"), t.shallow_clone())))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn same_tensors(own: &[(String, Tensor)], other: &[(String, Tensor)], name: &str) {
    let names = |list: &[(String, Tensor)]| list.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(own), names(other), "{name}");
    for ((tensor, own), (_, other)) in own.iter().zip(other) {
        assert!(own.equal(other), "{name}: {tensor} differs");
    }
}

impl Run {
    fn same_as(&self, whole: &Self, name: &str) {
        assert!(self.result.is_ok(), "{name}: {:?}", self.result);
        let from = whole.losses.len() - self.losses.len();
        assert_eq!(self.losses, whole.losses[from..], "{name}");
        assert_eq!(state_of(&self.end), state_of(&whole.end), "{name}");
        same_tensors(&tensors_of(&self.end), &tensors_of(&whole.end), name);
        same_tensors(&self.weights, &whole.weights, name);
    }
}

fn by_epoch() -> Optimizers {
    let schedule = ReduceLrOnPlateau::new(PlateauMode::Max).patience(0).factor(0.5);
    Optimizers::new(AdamW::new(1e-2)).scheduler(LrSchedulerSpec::new(schedule).monitor("train_loss"))
}

fn by_step() -> Optimizers {
    let schedule = ReduceLrOnPlateau::new(PlateauMode::Max).patience(0).factor(0.9);
    let spec = LrSchedulerSpec::new(schedule).monitor("train_loss").interval(Interval::Step);
    Optimizers::new(AdamW::new(1e-2)).scheduler(spec)
}

fn ema(change: impl FnOnce(&mut EmaWeightAveragingConfig)) -> WeightAveraging {
    let mut config = EmaWeightAveragingConfig { decay: 0.75, ..Default::default() };
    change(&mut config);
    WeightAveraging::ema(config).unwrap()
}

fn patient(monitor: &str) -> EarlyStopping {
    let config = EarlyStoppingConfig {
        monitor: monitor.to_owned(),
        patience: 100,
        mode: voltaic::callback::Mode::Max,
        strict: false,
        ..Default::default()
    };
    EarlyStopping::new(config).unwrap()
}

/// All that counts ends of epochs.
fn counting(builder: TrainerBuilder) -> TrainerBuilder {
    let averaging = ema(|config| {
        config.update_every_n_steps = 2;
        config.update_starting_at_epoch = Some(0);
    });
    builder.callback(averaging).callback(patient("train_loss"))
}

/// An average of the last epochs, with validation in the middle of each.
fn stochastic(builder: TrainerBuilder) -> TrainerBuilder {
    let config = StochasticWeightAveragingConfig {
        swa_lrs: voltaic::optim::PerGroup::All(0.01),
        swa_epoch_start: voltaic::callback::EpochStart::Epoch(2),
        ..Default::default()
    };
    let averaging = StochasticWeightAveraging::from_config(config).unwrap();
    builder.callback(averaging).callback(patient("val_loss")).val_check_interval(3)
}

/// Asks to stop after so many batches, as a timer does.
fn stop_after(batches: u64) -> LambdaCallback {
    LambdaCallback::new().on_train_batch_end(move |ctx, _| {
        if ctx.progress().total_batches == batches {
            ctx.request_stop("the time is over");
        }
        Ok(())
    })
}

#[test]
fn after_a_stop_or_a_limit_within_an_epoch() {
    let _rng = seeded(1);
    for optimizers in [by_epoch as fn() -> Optimizers, by_step] {
        for build in [counting as Build, |t| counting(t).check_val_every_n_epoch(2)] {
            let case = Case { optimizers, build };
            for step in [1, 6, 7, 9, 14] {
                case.check(&format!("max_steps={step}"), |t| t.max_steps(step), step as usize);
                let stop = stop_after(step as u64);
                case.check(&format!("a stop after {step}"), |t| t.callback(stop), step as usize);
            }
        }
    }
    let graphs: Build = |t| counting(t).graph(GraphMode::Step);
    Case { optimizers: by_epoch, build: graphs }.check("graphs", |t| t.max_steps(9), 9);
}

#[test]
fn after_a_stop_by_validation_and_within_a_window() {
    let _rng = seeded(1);
    let by_validation = || {
        LambdaCallback::new().on_validation_end(|ctx, _| {
            if ctx.global_step() == 10 {
                ctx.request_stop("good enough");
            }
            Ok(())
        })
    };
    for build in [stochastic as Build, |t| counting(t).val_check_interval(3)] {
        let case = Case { optimizers: || AdamW::new(1e-2).into(), build };
        for step in [2, 3, 7, 8, 10, 14] {
            case.check(&format!("a stop after {step}"), |t| t.callback(stop_after(step)), step as usize);
        }
        case.check("a limit", |t| t.max_steps(10), 10); // where it saves
        case.check("a stop by validation", |t| t.callback(by_validation()), 10);
    }
    let windows: Build = |t| counting(t).accumulate_grad_batches(2_u64);
    for optimizers in [by_epoch as fn() -> Optimizers, by_step] {
        let case = Case { optimizers, build: windows };
        case.check("in a window", |t| t.callback(stop_after(3)), 3);
        case.check("after a window", |t| t.callback(stop_after(4)), 4);
        case.check("windows", |t| t.max_steps(5), 9);
    }
}

type Fail = fn(LambdaCallback) -> LambdaCallback;

/// Where a validation fails in the second epoch.
const PLACES: [Fail; 3] = [
    |lambda| {
        lambda.on_validation_batch_start(|ctx, _| {
            anyhow::ensure!(ctx.current_epoch() == 0 || ctx.batch_idx() == 0, "no luck");
            Ok(())
        })
    },
    |lambda| {
        lambda.on_validation_batch_end(|ctx, _| {
            anyhow::ensure!(ctx.current_epoch() == 0, "no luck");
            Ok(())
        })
    },
    |lambda| {
        lambda.on_validation_end(|ctx, _| {
            anyhow::ensure!(ctx.current_epoch() == 0, "no luck");
            Ok(())
        })
    },
];

#[test]
fn after_a_failure_in_a_validation_that_sees_the_average() {
    let _rng = seeded(1);
    let equal: Build = |t| t.callback(WeightAveraging::new(WeightAveragingConfig::default()));
    let without_buffers: Build =
        |t| t.callback(ema(|config| config.use_buffers = false)).val_check_interval(3);
    let windows: Build = |t| t.callback(ema(|_| {})).accumulate_grad_batches(2_u64).val_check_interval(3);
    for build in [equal, without_buffers, windows] {
        for optimizers in [by_epoch as fn() -> Optimizers, by_step] {
            let case = Case { optimizers, build };
            let whole = case.fit(|t| t, None);
            for (number, fail) in PLACES.iter().enumerate() {
                let folder = TempDir::new().unwrap();
                let failing = fail(LambdaCallback::new());
                let failed = case.fit(|t| t.callback(failing).callback(on_exception(folder.path())), None);
                assert!(failed.result.is_err());
                let path = folder.path().join("on_exception.ckpt");
                let saved = Checkpoint::load(&path).unwrap();
                assert!(!saved.callback_tensors("WeightAveraging.current.").is_empty(), "place {number}");
                case.fit(|t| t, Some(&path)).same_as(&whole, &format!("place {number}"));
            }
        }
    }
}

#[test]
fn the_weights_of_a_checkpoint_that_was_tested_stay_out_of_the_next_fit() {
    let folder = TempDir::new().unwrap();
    let averaged = |folder: Option<&Path>| {
        let builder = silent().max_epochs(1).callback(ema(|_| {}));
        builder_of(builder, folder).build().unwrap()
    };
    averaged(Some(folder.path())).fit(&mut Probe::default(), &mut loaders()).unwrap();
    let (mut expected, mut net) = (Probe::default(), Probe::default());
    averaged(None).fit(&mut expected, &mut loaders()).unwrap();
    let mut trainer = averaged(None);
    let path = folder.path().join("last.ckpt");
    trainer.ckpt_path(path.to_str().unwrap()).validate(&mut Probe::default(), &mut loaders()).unwrap();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    assert_eq!(net.weights(), expected.weights());
}

fn builder_of(builder: TrainerBuilder, folder: Option<&Path>) -> TrainerBuilder {
    match folder {
        Some(folder) => saving(builder, folder, |_| {}),
        None => builder,
    }
}

/// The last checkpoint of a run that saves when training ends, from which a longer run goes on.
#[test]
fn after_the_end_of_training() {
    let _rng = seeded(1);
    let builds: [Build; 3] = [
        |t| t.callback(ema(|_| {})),
        stochastic,
        |t| t.callback(ema(|config| config.update_starting_at_epoch = Some(0))).val_check_interval(3),
    ];
    for (number, build) in builds.into_iter().enumerate() {
        let case = Case { optimizers: || AdamW::new(1e-2).into(), build };
        let whole = case.fit(|t| t, None);
        let folder = TempDir::new().unwrap();
        let never = |config: &mut ModelCheckpointConfig| config.every_n_train_steps = Some(1000);
        case.fit(|t| saving(t, folder.path(), never).max_epochs(2), None).result.unwrap();
        assert_eq!(names(folder.path()), ["last.ckpt"]);
        let resumed = case.fit(|t| t, Some(&folder.path().join("last.ckpt")));
        assert_eq!(resumed.losses.len(), 7);
        resumed.same_as(&whole, &format!("build {number}"));
        // nothing is left to train, but training has not ended, or its end is to be done again
        let folder = TempDir::new().unwrap();
        case.fit(|t| saving(t, folder.path(), |_| {}), None).result.unwrap();
        let last_epoch = |path: &std::path::PathBuf| path.to_str().unwrap().contains("epoch=2");
        let saved: Vec<_> = files(folder.path()).into_iter().filter(last_epoch).collect();
        assert!(!saved.is_empty());
        for path in saved.into_iter().chain([folder.path().join("last.ckpt")]) {
            let resumed = case.fit(|t| t, Some(&path));
            resumed.result.unwrap();
            same_tensors(
                &resumed.weights,
                &whole.weights,
                &format!("build {number} from {}", path.display()),
            );
        }
    }
}

/// A stop that `min_steps` holds back is in the checkpoint.
#[test]
fn a_stop_that_waits_for_the_minimum_is_kept() {
    let _rng = seeded(1);
    let case = Case { optimizers: by_step, build: |t| t.min_steps(12_u64) };
    let folder = TempDir::new().unwrap();
    let every_4 = |config: &mut ModelCheckpointConfig| config.every_n_train_steps = Some(4);
    let whole = case.fit(|t| saving(t.callback(stop_after(3)), folder.path(), every_4), None);
    assert_eq!(whole.losses.len(), 12);
    for path in files(folder.path()).into_iter().filter(|path| !path.ends_with("last.ckpt")) {
        let step = Checkpoint::load(&path).unwrap().meta.global_step;
        // one that was saved when the stop was granted is resumed by somebody who wants more
        let left = if step == 12 { 9 } else { 12 - step as usize };
        assert_eq!(case.fit(|t| t, Some(&path)).losses.len(), left, "from step {step}");
    }
}

/// A validation that goes on in a resumed run saves what it is asked to, under the right name, and may end the run.
#[test]
fn a_validation_that_is_resumed_saves_and_stops() {
    let _rng = seeded(1);
    let build: Build = |t| t.val_check_interval(5);
    let case = Case { optimizers: by_step, build };
    let whole = case.fit(|t| t, None);
    for (number, fail) in PLACES[..2].iter().enumerate() {
        for by_steps in [false, true] {
            let (failed, saved) = (TempDir::new().unwrap(), TempDir::new().unwrap());
            let change = |config: &mut ModelCheckpointConfig| {
                config.every_n_train_steps = by_steps.then_some(12);
                config.monitor = Some("val_loss".to_owned());
                config.save_on_exception = true;
            };
            let failing = fail(LambdaCallback::new());
            let first = |t: TrainerBuilder| {
                saving(t, failed.path(), change).callback(failing).callback(on_exception(failed.path()))
            };
            assert!(case.fit(first, None).result.is_err());
            let path = failed.path().join("on_exception.ckpt");
            let resumed = case.fit(|t| saving(t, saved.path(), change), Some(&path));
            assert_eq!(resumed.losses.len(), 9);
            resumed.same_as(&whole, &format!("place {number}"));
            let expected: &[u64] = if by_steps { &[12] } else { &[12, 19] };
            let found = steps_by_name(saved.path());
            assert_eq!(found, expected, "place {number}, {:?}", names(saved.path()));
            for (step, file) in found.iter().zip(files(saved.path())) {
                let own = Checkpoint::load(&file).unwrap();
                assert_eq!(own.meta.global_step, *step, "{}", file.display());
                case.fit(|t| t, Some(&file)).same_as(&whole, &format!("from step {step}"));
            }
            // a run that such a validation ends
            let stop = LambdaCallback::new().on_validation_end(|ctx, _| {
                if !ctx.is_sanity_check() {
                    ctx.request_stop("good enough");
                }
                Ok(())
            });
            let folder = TempDir::new().unwrap();
            let stopped = case.fit(|t| saving(t, folder.path(), change).callback(stop), Some(&path));
            assert_eq!(stopped.losses.len(), 0, "it ends at once");
            let last = folder.path().join("last.ckpt");
            case.fit(|t| t, Some(&last)).same_as(&whole, "from where it was stopped");
        }
    }
}

/// The steps that the names of checkpoints tell.
fn steps_by_name(folder: &Path) -> Vec<u64> {
    let step = |name: String| name.split_once("step=")?.1.strip_suffix(".ckpt")?.parse().ok();
    names(folder).into_iter().filter_map(step).collect()
}

/// What a run that failed has left stays whole until it is used.
#[test]
fn a_refused_resume_and_a_short_trial_leave_the_checkpoint_of_a_failure_alone() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("on_exception.ckpt");
    let run = |build: Build, fails: bool| -> Result<Vec<u64>, Error> {
        let case = Case { optimizers: by_step, build };
        let failing = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
            anyhow::ensure!(!fails || ctx.batch_idx() < 3, "no luck");
            Ok(())
        });
        let run = case.fit(|t| t.callback(failing).callback(on_exception(folder.path())), None);
        run.result.map(|()| run.losses)
    };
    assert!(run(|t| t, true).is_err());
    let saved = std::fs::read(&path).unwrap();
    let refused: [Build; 3] = [
        |t| t.limit_train_batches(5),
        |t| t.precision("bf16-true").limit_train_batches(6),
        |t| {
            t.optimizer(
                serde_json::from_value(serde_json::json!({"class_path": "Adam", "init_args": {"lr": 0.1}}))
                    .unwrap(),
                None,
            )
        },
    ];
    for build in refused {
        assert!(run(build, false).is_err());
        assert!(std::fs::read(&path).unwrap() == saved, "a refused run has changed it");
    }
    for fails in [true, false] {
        let trial = run(|t| t.fast_dev_run(5_u64), fails);
        assert_eq!(trial.as_ref().map_or(0, Vec::len), if fails { 0 } else { 5 }, "{trial:?}");
        assert!(std::fs::read(&path).unwrap() == saved, "a trial has changed it");
    }
    assert_eq!(run(|t| t, false).unwrap().len(), 21 - 4);
    assert!(!path.exists(), "it was used");
}
