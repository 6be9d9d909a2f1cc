//! Arguments of the trainer: the table of docs/trainer_arguments.md, and what the less common ones do.

use std::path::Path;
use std::time::Duration;

use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::json;
use tempfile::TempDir;
use voltaic::Error;
use voltaic::callback::{
    GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint, ModelCheckpointConfig,
    OnExceptionCheckpoint, OnExceptionCheckpointConfig,
};
use voltaic::data::{DataLoader, Dataset, Loaders, Sampler, TensorDataset};
use voltaic::trainer::{Deterministic, Trainer, TrainerBuilder, TrainerConfig, WarnText};
use voltaic::{Kind, Tensor};

use crate::checkpoints::resumed;
use crate::probe::{Events, Probe, Step, loader, loaders, names, own_process, plays, silent, text_of};

/// `Trainer.__init__` of Lightning 2.6.6.
const LIGHTNING: &str = "accelerator strategy devices num_nodes precision logger callbacks fast_dev_run max_epochs \
    min_epochs max_steps min_steps max_time limit_train_batches limit_val_batches limit_test_batches \
    limit_predict_batches overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps \
    log_every_n_steps enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches \
    gradient_clip_val gradient_clip_algorithm deterministic benchmark inference_mode use_distributed_sampler profiler \
    detect_anomaly barebones plugins sync_batchnorm reload_dataloaders_every_n_epochs default_root_dir \
    enable_autolog_hparams model_registry";

#[test]
fn the_table_names_every_argument_of_lightning_and_every_key() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/trainer_arguments.md");
    let text = std::fs::read_to_string(path).unwrap();
    let row = |key: &str| text.lines().find(|line| line.starts_with(&format!("| `{key}` |")));
    let config = serde_json::to_value(TrainerConfig::default()).unwrap();
    let keys = config.as_object().unwrap();
    for key in LIGHTNING.split_whitespace() {
        let row = row(key).unwrap_or_else(|| panic!("no row for {key}"));
        let verdicts = ["same", "different", "more", "see", "not applicable"];
        assert!(verdicts.iter().any(|verdict| row.contains(&format!("| {verdict}"))), "{row}");
    }
    for key in keys.keys() {
        assert!(row(key).is_some(), "no row for {key}");
    }
}

fn events(build: impl FnOnce(TrainerBuilder) -> TrainerBuilder) -> String {
    let events = Events::default();
    let builder = silent().num_sanity_val_steps(0).max_epochs(1).callback(events.clone());
    build(builder).build().unwrap().fit(&mut Probe::default(), &mut loaders()).unwrap();
    events.text()
}

#[test]
fn validation_by_time_and_the_end_of_all_time() {
    let always = Duration::from_nanos(1);
    assert_eq!(events(|t| t.val_check_interval(always).limit_train_batches(2)), "t0* V2 t1* V2 e");
    assert_eq!(events(|t| t.val_check_interval(Duration::from_secs(3600))), "t0* t1* t2* t3* t4* t5* e");
    assert_eq!(events(|t| t.max_time(always)), "t0* V2 e", "the last weights are validated");
    assert_error!(
        silent().max_time("an hour").build(),
        "trainer.max_time: `an hour` is not a length of time; write DD:HH:MM:SS"
    );
}

#[test]
fn overfitting_sees_the_same_batches_in_each_epoch() {
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let note = seen.clone();
    let mut net = Probe {
        train: Box::new(move |_, loss, _| {
            note.lock().unwrap().push(loss.detach().double_value(&[]));
            Ok(loss)
        }),
        optimizers: Box::new(|| voltaic::optim::Sgd::new(0.0).into()),
        ..Probe::default()
    };
    let x = Tensor::arange(24, (Kind::Float, tch::Device::Cpu)).reshape([12, 2]);
    let shuffled =
        DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(2).shuffle(true).build().unwrap();
    let events = Events::default();
    let builder =
        silent().num_sanity_val_steps(0).max_epochs(2).overfit_batches(2_u64).callback(events.clone());
    builder.build().unwrap().fit(&mut net, &mut Loaders::new().train(shuffled).val(loader(8))).unwrap();
    assert_eq!(events.text(), "t0* t1* V2 e t0* t1* V2 e");
    let seen = seen.lock().unwrap();
    assert_eq!(seen[..2], seen[2..]);
    assert_eq!(seen[0], (0.0 + 1.0 + 2.0 + 3.0) / 2.0, "the first samples, in order");
}

/// Samples that are drawn, as random crops and transforms are.
struct Drawn;

impl Dataset for Drawn {
    type Batch = Tensor;

    fn len(&self) -> usize {
        12
    }

    fn batch(&self, indices: &[usize], rng: &mut StdRng) -> anyhow::Result<Tensor> {
        let values: Vec<f32> = indices.iter().flat_map(|_| [rng.random(), rng.random()]).collect();
        Ok(Tensor::f_from_slice(&values)?.f_view([-1, 2])?)
    }
}

/// An order of its own in each epoch, without saying so.
#[derive(Debug)]
struct Turning;

impl Sampler for Turning {
    fn num_samples(&self) -> usize {
        12
    }

    fn indices(&self, _seed: u64, epoch: u64) -> anyhow::Result<Vec<usize>> {
        Ok((0..12).map(|i| (i + epoch as usize) % 12).collect())
    }
}

/// The loss of each batch of training (first) and validation, of three epochs that learn nothing.
fn losses_of_epochs(
    build: fn(TrainerBuilder) -> TrainerBuilder,
    loader: &DataLoader<Tensor>,
) -> (Vec<f64>, Vec<f64>) {
    let seen = [(); 2].map(|()| std::sync::Arc::new(std::sync::Mutex::new(Vec::new())));
    let [train, val] = seen.clone().map(|seen| {
        let step: Box<Step> = Box::new(move |_, loss, _| {
            seen.lock().unwrap().push(loss.detach().double_value(&[]));
            Ok(loss)
        });
        step
    });
    let optimizers = Box::new(|| voltaic::optim::Sgd::new(0.0).into());
    let mut net = Probe { train, validate: Some(val), optimizers, ..Probe::default() };
    let mut trainer = build(silent().num_sanity_val_steps(0).max_epochs(3)).build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader.clone()).val(loader.clone())).unwrap();
    let [train, val] = seen.map(|seen| seen.lock().unwrap().clone());
    (train, val)
}

#[test]
fn overfitting_sees_the_same_batches_whatever_the_data_set_draws() {
    let drawn = |workers| DataLoader::new(Drawn).batch_size(2).num_workers(workers).build().unwrap();
    for loader in [drawn(0), drawn(2)] {
        let (train, val) = losses_of_epochs(|t| t.overfit_batches(2_u64), &loader);
        for seen in [train, val] {
            assert_eq!((seen.len(), &seen[..2], &seen[..2]), (6, &seen[2..4], &seen[4..]));
            assert_ne!(seen[0], seen[1]);
        }
        let (train, _) = losses_of_epochs(|t| t.limit_train_batches(2), &loader);
        assert_ne!(train[..2], train[2..4], "without overfit_batches each epoch draws");
    }
    let x = Tensor::arange(24, (Kind::Float, tch::Device::Cpu)).reshape([12, 2]);
    let turning =
        DataLoader::new(TensorDataset::new(x).unwrap()).batch_size(2).sampler(Turning).build().unwrap();
    let (train, _) = losses_of_epochs(|t| t.overfit_batches(0.5), &turning);
    assert_eq!((train.len(), &train[..3], &train[..3]), (9, &train[3..6], &train[6..]));
}

#[test]
fn barebones_switches_everything_off_and_refuses_what_asks_for_it() {
    let root = TempDir::new().unwrap();
    let mut trainer =
        Trainer::builder().barebones(true).default_root_dir(root.path()).max_epochs(1).build().unwrap();
    trainer.fit(&mut Probe::logging(&[0.5]), &mut loaders()).unwrap();
    assert!(names(root.path()).is_empty());
    assert!(trainer.metric_names().is_empty());
    let error = Trainer::builder()
        .barebones(true)
        .fast_dev_run(true)
        .detect_anomaly(true)
        .num_sanity_val_steps(1)
        .log_every_n_steps(1_u64)
        .logger(true)
        .enable_checkpointing(true)
        .enable_progress_bar(true)
        .enable_model_summary(true)
        .build()
        .err()
        .unwrap()
        .to_string();
    let keys = "fast_dev_run detect_anomaly num_sanity_val_steps log_every_n_steps logger enable_checkpointing \
                enable_progress_bar enable_model_summary";
    for key in keys.split_whitespace() {
        assert!(error.contains(&format!("trainer.{key}: is set beside barebones=true")), "{error}");
    }
}

#[test]
fn what_lightning_writes_down_of_a_trainer_is_read() {
    // the keys whose default is null there, as `fit --print_config` of LightningCLI prints them
    let nulls = "precision logger callbacks max_epochs min_epochs min_steps max_time limit_train_batches \
                 limit_val_batches limit_test_batches limit_predict_batches val_check_interval num_sanity_val_steps \
                 log_every_n_steps enable_checkpointing enable_progress_bar enable_model_summary gradient_clip_val \
                 gradient_clip_algorithm deterministic benchmark profiler plugins default_root_dir";
    let section: serde_json::Map<_, _> =
        nulls.split_whitespace().map(|key| (key.to_owned(), serde_json::Value::Null)).collect();
    let config: TrainerConfig = serde_json::from_value(section.clone().into()).unwrap();
    assert_eq!(config, TrainerConfig::default());
    let root = TempDir::new().unwrap();
    let path = root.path().join("config.yaml");
    std::fs::write(&path, json!({"trainer": section}).to_string()).unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .args(["fit", "--print_config=skip_default", "--config", path.to_str().unwrap()])
        .args(["--model=LeNet", "--data=MnistData", "--trainer.callbacks+=LearningRateMonitor"])
        .output()
        .unwrap();
    assert!(text_of(&output).contains("LearningRateMonitor"));
}

#[test]
fn a_timer_or_a_warning_takes_the_place_of_a_number_of_epochs() {
    let epochs = |builder: TrainerBuilder| {
        let stop = LambdaCallback::new().on_fit_start(|ctx, _| {
            ctx.request_stop(format!("{:?}", ctx.facts().max_epochs));
            Ok(())
        });
        let seen = std::sync::Arc::new(std::sync::Mutex::new(None));
        let note = seen.clone();
        let look = LambdaCallback::new().on_fit_end(move |ctx, _| {
            *note.lock().unwrap() = ctx.facts().max_epochs;
            Ok(())
        });
        let mut trainer = builder.callback(stop).callback(look).build().unwrap();
        trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
        *seen.lock().unwrap()
    };
    assert_eq!(epochs(silent()), Some(1000));
    assert_eq!(epochs(silent().callback(voltaic::callback::Timer::new(Duration::from_secs(60)))), None);
    assert_eq!(epochs(silent().max_time("00:00:01:00")), None);
}

#[test]
fn a_mistake_in_overfit_batches_is_told_of_its_own_key() {
    let mut trainer = silent().max_epochs(1).overfit_batches(0.01).build().unwrap();
    assert_error!(trainer.fit(&mut Probe::default(), &mut loaders()), "trainer.overfit_batches: 0.01 of");
}

#[test]
fn an_anomaly_is_named_by_the_operation_that_made_it() {
    type Step = crate::probe::Step;
    let cases: [(&str, &str, Box<Step>); 4] = [
        (
            "the loss is not finite in epoch 0 at global_step 0: no operation made it of finite tensors",
            "or a constant, as in `loss * NAN`; look at",
            Box::new(|_, loss, _| Ok(loss * f64::NAN)),
        ),
        (
            "the loss is not finite in epoch 0 at global_step 0",
            "aten::log (NaN)",
            Box::new(|_, loss, _| Ok((loss.detach() * 0.0 - 1.0).log() * 0.0 + loss)),
        ),
        (
            "the gradient of weight is not finite",
            "in SqrtBackward0",
            Box::new(|net, loss, _| Ok((net.weight.tensor() * 0.0).sqrt().sum(Kind::Float) + loss)),
        ),
        // a mask is not an anomaly
        (
            "the loss is not finite",
            "aten::div (NaN)",
            Box::new(|net, loss, _| {
                let masked = net.weight.tensor().masked_fill(&net.weight.tensor().ge(0.0), f64::NEG_INFINITY);
                let zero = masked.exp().sum(Kind::Float);
                Ok(loss + &zero / &zero)
            }),
        ),
    ];
    for (what, operation, train) in cases {
        let mut trainer = silent().max_epochs(1).detect_anomaly(true).build().unwrap();
        let error = trainer.fit(&mut Probe { train, ..Probe::default() }, &mut loaders()).unwrap_err();
        assert!(matches!(error, Error::Anomaly { .. }), "{error}");
        assert_contains!(error.to_string(), what, operation);
    }
    let mut trainer = silent().max_epochs(1).detect_anomaly(true).build().unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
}

#[test]
fn evaluation_is_in_inference_mode_unless_told_otherwise() {
    for (inference_mode, expected) in [(true, true), (false, false)] {
        let mut net = Probe {
            validate: Some(Box::new(move |net, loss, _| {
                let made = net.weight.tensor() * 2.0;
                assert!(!made.requires_grad());
                assert_eq!(made.is_inference(), expected);
                Ok(loss)
            })),
            ..Probe::default()
        };
        let mut trainer = silent().inference_mode(inference_mode).build().unwrap();
        trainer.validate(&mut net, &mut loaders()).unwrap();
    }
    let mut net = Probe {
        validate: Some(Box::new(|net, loss, _| {
            assert!(!(net.weight.tensor() * 2.0).is_inference(), "never within fit");
            Ok(loss)
        })),
        ..Probe::default()
    };
    silent().max_epochs(1).build().unwrap().fit(&mut net, &mut loaders()).unwrap();
}

#[test]
fn determinism_is_a_switch_of_the_process() {
    if !plays("deterministic") {
        text_of(&own_process("deterministic").output().unwrap());
        return;
    }
    use voltaic::ffi::{DeterministicMode, deterministic};
    let set = |value: Deterministic| {
        silent().deterministic(value).build().unwrap();
        deterministic().unwrap()
    };
    assert_eq!(set(true.into()), DeterministicMode::Error);
    silent().build().unwrap();
    assert_eq!(deterministic().unwrap(), DeterministicMode::Error, "not touched unless set");
    assert_eq!(set(Deterministic::Warn(WarnText::Warn)), DeterministicMode::Warn);
    assert_eq!(set(false.into()), DeterministicMode::Off);
    let config: TrainerConfig = serde_json::from_value(json!({"deterministic": "warn"})).unwrap();
    assert_eq!(config.deterministic, Some(Deterministic::Warn(WarnText::Warn)));
}

#[test]
fn accumulation_changes_with_the_epoch() {
    let schedule = || GradientAccumulationScheduler::new([(1, 2), (2, 4)]).unwrap();
    assert_eq!(
        events(|t| t.max_epochs(3).limit_val_batches(0).callback(schedule())),
        "t0* t1* t2* t3* t4* t5* e t0 t1* t2 t3* t4 t5* e t0 t1 t2 t3* t4 t5* e"
    );
    let error = silent().accumulate_grad_batches(2_u64).callback(schedule()).max_epochs(1).build().unwrap();
    assert_error!(
        { error }.fit(&mut Probe::default(), &mut loaders()),
        "trainer.accumulate_grad_batches=2 beside GradientAccumulationScheduler"
    );
}

#[test]
fn closures_run_at_hooks_and_a_failure_leaves_a_checkpoint() {
    let folder = TempDir::new().unwrap();
    let saver = || {
        let config = OnExceptionCheckpointConfig {
            dirpath: folder.path().into(),
            ..OnExceptionCheckpointConfig::default()
        };
        OnExceptionCheckpoint::new(config).unwrap()
    };
    let failing = LambdaCallback::new().on_train_batch_end(|ctx, _| {
        anyhow::ensure!(ctx.global_step() != 4, "no luck");
        Ok(())
    });
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let (saved, failed) = (seen.clone(), seen.clone());
    let noting = LambdaCallback::new()
        .on_save_checkpoint(move |_, checkpoint| {
            saved.lock().unwrap().push(format!("saved {}", checkpoint.meta.global_step));
            Ok(())
        })
        .on_exception(move |_, error| failed.lock().unwrap().push(format!("{error}")[..28].to_owned()));
    let mut trainer =
        silent().max_epochs(1).callback(saver()).callback(failing).callback(noting).build().unwrap();
    let error = trainer.fit(&mut Probe::default(), &mut loaders()).unwrap_err().to_string();
    assert!(
        error.starts_with(
            "on_train_batch_end failed in epoch 0 at global_step 4 on rank 0: in LambdaCallback: no"
        ),
        "{error}"
    );
    assert_eq!(*seen.lock().unwrap(), ["on_train_batch_end failed in", "saved 4"]);
    assert_eq!(names(folder.path()), ["on_exception.ckpt"]);
    let loaded = std::sync::Arc::new(std::sync::Mutex::new(0));
    let note = loaded.clone();
    let events = Events::default();
    let mut trainer = silent()
        .max_epochs(1)
        .num_sanity_val_steps(0)
        .callback(saver())
        .callback(LambdaCallback::new().on_load_checkpoint(move |checkpoint| {
            *note.lock().unwrap() = checkpoint.meta.global_step;
            Ok(())
        }))
        .callback(events.clone())
        .build()
        .unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(events.text(), "t4* t5* V2 e", "without being told, as in Lightning");
    assert_eq!(*loaded.lock().unwrap(), 4);
    assert!(names(folder.path()).is_empty(), "a run that ends well needs it no more");
}

/// At the end of an epoch, and within one.
#[test]
fn a_run_that_fails_after_its_last_step_is_resumed_with_what_follows_it() {
    for (place, steps) in [("validation", 6), ("validation", 3), ("epoch", 6)] {
        let root = TempDir::new().unwrap();
        let fit = |fails: bool, ckpt: Option<&Path>, events: &Events| {
            let config = ModelCheckpointConfig {
                dirpath: Some(root.path().into()),
                monitor: Some("val_loss".to_owned()),
                save_on_exception: true,
                ..Default::default()
            };
            let hooks = LambdaCallback::new().on_train_epoch_end(move |_, _| {
                anyhow::ensure!(!fails || place != "epoch", "it fails here");
                Ok(())
            });
            let builder = silent()
                .enable_checkpointing(true)
                .max_steps(steps)
                .val_check_interval(3)
                .num_sanity_val_steps(0);
            let builder = builder.callback(ModelCheckpoint::new(config).unwrap());
            let mut trainer = resumed(builder.callback(hooks).callback(events.clone()), ckpt);
            let mut net = Probe {
                validate: Some(Box::new(move |_, loss, ctx| {
                    ctx.log("val_loss", &loss);
                    let is_last = ctx.global_step() as i64 == steps;
                    anyhow::ensure!(!fails || !is_last || place != "validation", "it fails here");
                    Ok(loss)
                })),
                ..Probe::default()
            };
            (trainer.fit(&mut net, &mut loaders()).is_ok(), trainer.best_model_path())
        };
        assert!(!fit(true, None, &Events::default()).0);
        let left = root.path().join(format!("epoch=0-step={steps}.ckpt"));
        let (events, again) = (Events::default(), if place == "epoch" { "e" } else { "V2 e" });
        let (ended, best) = fit(false, Some(&left), &events);
        assert!(ended && best.is_some(), "{place} after step {steps}: {best:?}");
        assert_eq!(events.text(), again, "{place} after step {steps}");
    }
}

#[test]
fn a_run_that_a_signal_ends_is_saved_and_goes_on() {
    if !plays("signal") {
        text_of(&own_process("signal").output().unwrap());
        return;
    }
    let raise = || signal_hook::low_level::raise(signal_hook::consts::SIGTERM);
    let whole = {
        let mut net = Probe::default();
        silent().max_epochs(2).build().unwrap().fit(&mut net, &mut loaders()).unwrap();
        net.weights()
    };
    for in_validation in [false, true] {
        let root = TempDir::new().unwrap();
        let trainer = || {
            let builder = silent().max_epochs(2).num_sanity_val_steps(0).default_root_dir(root.path());
            builder.save_on_signal(true)
        };
        let mut net = Probe {
            train: Box::new(move |_, loss, ctx| {
                if !in_validation && ctx.global_step() == 7 {
                    raise()?;
                }
                Ok(loss)
            }),
            validate: Some(Box::new(move |_, loss, ctx| {
                if in_validation && ctx.batch_idx() == 0 {
                    raise()?;
                }
                Ok(loss)
            })),
            ..Probe::default()
        };
        let error = trainer().build().unwrap().fit(&mut net, &mut loaders()).unwrap_err();
        assert!(matches!(error, Error::Interrupted { signal: "SIGTERM", .. }), "{error}");
        let path = root.path().join("checkpoints/on_signal.ckpt");
        let events = Events::default();
        let mut net = Probe::default();
        let mut second = trainer().callback(events.clone()).build().unwrap();
        second.ckpt_path(path.to_str().unwrap()).fit(&mut net, &mut loaders()).unwrap();
        let rest = if in_validation { "V2 e t0* t1* t2* t3* t4* t5* V2 e" } else { "t2* t3* t4* t5* V2 e" };
        assert_eq!(events.text(), rest);
        assert_eq!(net.weights(), whole);
    }
}
