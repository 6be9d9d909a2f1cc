//! Callbacks at work in a run.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use voltaic::Module;
use voltaic::Tensor;
use voltaic::callback::{
    Callback, EarlyStopping, EarlyStoppingConfig, EmaWeightAveragingConfig, LambdaCallback,
    LearningRateMonitor, LearningRateMonitorConfig, ModelCheckpoint, ModelCheckpointConfig, SaveLast,
    ThroughputMonitor, ThroughputMonitorConfig, Timer, WeightAveraging, WeightAveragingConfig,
};
use voltaic::data::Loaders;
use voltaic::logger::{CsvLogger, JsonLinesLogger, JsonLinesLoggerConfig, LoggerConfig};
use voltaic::module::{HookContext, StepContext};
use voltaic::nn::ModuleExt;
use voltaic::optim::{Interval, LrSchedulerSpec, Optimizers, Sgd, StepLr};
use voltaic::trainer::{LearningRateFinderConfig, Trainer, TrainerBuilder};

use crate::checkpoints::resumed;
use crate::probe::{Events, Probe, loaders, names, silent};
use crate::rng::seeded;

/// Columns `step` and those that begin with `lr`, of the rows that have one of them.
fn lr_rows(root: &Path) -> Vec<String> {
    let csv = std::fs::read_to_string(root.join("lightning_logs/version_0/metrics.csv")).unwrap();
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let is_lr = |index: &usize| header[*index].starts_with("lr-") || header[*index].starts_with("warm");
    let columns: Vec<usize> = (0..header.len()).filter(is_lr).collect();
    let step = header.iter().position(|name| *name == "step").unwrap();
    lines
        .filter(|row| columns.iter().any(|&column| !row[column].is_empty()))
        .map(|row| {
            let cells: Vec<String> = columns.iter().map(|&c| format!("{}={}", header[c], row[c])).collect();
            format!("{} {}", row[step], cells.join(" "))
        })
        .collect()
}

fn monitored(
    config: LearningRateMonitorConfig,
    optimizers: fn() -> Optimizers,
    build: fn(TrainerBuilder) -> TrainerBuilder,
) -> Vec<String> {
    let root = TempDir::new().unwrap();
    let mut net = Probe { optimizers: Box::new(optimizers), ..Probe::default() };
    let builder = silent().logger(true).default_root_dir(root.path()).max_epochs(2);
    let mut trainer = build(builder).callback(LearningRateMonitor::from(config)).build().unwrap();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    lr_rows(root.path())
}

#[test]
fn learning_rates_are_logged_as_often_as_they_change() {
    let by_epoch = || Optimizers::new(Sgd::new(0.5).momentum(0.25)).scheduler(StepLr::new(1, 0.5));
    let default = LearningRateMonitorConfig::default;
    assert_eq!(monitored(default(), by_epoch, |t| t), ["0 lr-SGD=0.5", "6 lr-SGD=0.25"]);
    let by_step = || {
        let schedule = LrSchedulerSpec::new(StepLr::new(2, 0.5)).interval(Interval::Step).name("warm");
        Optimizers::new(Sgd::new(0.5)).scheduler(schedule)
    };
    assert_eq!(
        monitored(default(), by_step, |t| t.log_every_n_steps(4_u64)),
        ["3 warm=0.25", "7 warm=0.0625", "11 warm=0.015625"]
    );
    let all = LearningRateMonitorConfig {
        logging_interval: Some(Interval::Epoch),
        log_momentum: true,
        log_weight_decay: true,
    };
    assert_eq!(
        monitored(all, by_epoch, |t| t.max_epochs(1)),
        ["0 lr-SGD=0.5 lr-SGD-momentum=0.25 lr-SGD-weight_decay=0"]
    );
}

#[test]
fn the_learning_rate_can_be_monitored_and_needs_a_logger() {
    let error = silent().callback(LearningRateMonitor::default()).build().err().unwrap().to_string();
    assert!(error.contains("trainer.logger: false, but LearningRateMonitor"), "{error}");
    let root = TempDir::new().unwrap();
    let mut trainer = silent()
        .logger(true)
        .default_root_dir(root.path())
        .max_epochs(1)
        .callback(LearningRateMonitor::default())
        .build()
        .unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(trainer.metric("lr-SGD"), Some(0.125));
}

/// Epochs done with these values of `val_loss`, one an epoch.
fn epochs(
    values: &'static [f64],
    config: EarlyStoppingConfig,
    build: fn(TrainerBuilder) -> TrainerBuilder,
) -> u64 {
    let config = EarlyStoppingConfig { monitor: "val_loss".to_owned(), ..config };
    let builder = silent().max_epochs(values.len() as i64).callback(EarlyStopping::new(config).unwrap());
    let mut trainer = build(builder).build().unwrap();
    trainer.fit(&mut Probe::logging(values), &mut loaders()).unwrap();
    trainer.current_epoch()
}

#[test]
fn a_run_stops_early_where_lightnings_does() {
    let values = &[1.0, 0.9, 0.95, 0.95, 0.96, 0.9, 0.9, 0.9];
    let default = EarlyStoppingConfig::default;
    assert_eq!(epochs(values, default(), |t| t), 5);
    assert_eq!(epochs(values, default(), |t| t.min_epochs(7_u64)), 7);
    assert_eq!(epochs(values, default(), |t| t.val_check_interval(0.5)), 3, "two checks an epoch");
    assert_eq!(epochs(values, EarlyStoppingConfig { patience: 9, ..default() }, |t| t), 8);
    let at_train_end = EarlyStoppingConfig { check_on_train_epoch_end: Some(true), patience: 1, ..default() };
    assert_eq!(epochs(values, at_train_end, |t| t), 3);
    assert_eq!(epochs(&[f64::NAN, 1.0], default(), |t| t), 1);
}

/// One name, logged by the steps of training and of validation: monitors see what was published last.
#[test]
fn monitors_see_the_validation_of_a_name_that_training_logs_too() {
    for on_epoch in [false, true] {
        let folder = TempDir::new().unwrap();
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.path().into()),
            monitor: Some("val_loss".to_owned()),
            filename: Some("{val_loss:.1f}".to_owned()),
            save_top_k: 3,
            save_on_train_epoch_end: Some(false),
            ..Default::default()
        };
        let mut net = Probe::logging(&[1.0, 2.0, 3.0]);
        net.train = Box::new(move |_, loss, ctx| {
            ctx.log("val_loss", 100.0 + ctx.batch_idx() as f64).on_epoch(on_epoch);
            Ok(loss)
        });
        let builder = silent().enable_checkpointing(true).max_epochs(3);
        let mut trainer = builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap();
        trainer.fit(&mut net, &mut loaders()).unwrap();
        assert_eq!(names(folder.path()), ["val_loss=1.0.ckpt", "val_loss=2.0.ckpt", "val_loss=3.0.ckpt"]);
        // the epoch's mean, if there is one, is published after the validation
        assert_eq!(trainer.metric("val_loss"), Some(if on_epoch { 102.5 } else { 3.0 }));
    }
}

/// A stop that waits for `min_epochs` is taken back by a new best value; one that was granted is not.
#[test]
fn a_stop_that_waits_is_taken_back_when_the_metric_recovers() {
    let values = &[1.0, 1.1, 1.2, 1.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9];
    let default = EarlyStoppingConfig::default;
    assert_eq!(epochs(values, default(), |t| t), 4);
    assert_eq!(epochs(values, default(), |t| t.min_epochs(5_u64)), 8, "the best value is the fifth");
    assert_eq!(epochs(values, default(), |t| t.min_steps(5 * 6 + 1_u64)), 8);
    assert_eq!(epochs(values, default(), |t| t.min_epochs(9_u64)), 9, "no new best since the eighth");
    let diverges = EarlyStoppingConfig { divergence_threshold: Some(1.15), ..default() };
    assert_eq!(epochs(values, diverges, |t| t.min_epochs(6_u64)), 8);
}

/// A run that a metric has stopped is over: resumed, it trains nothing, unless its patience has grown.
#[test]
fn a_run_that_stopped_early_is_over() {
    let folder = TempDir::new().unwrap();
    let fit = |patience: u64, ckpt: Option<&Path>| {
        let config = EarlyStoppingConfig { monitor: "val_loss".to_owned(), patience, ..Default::default() };
        let saved = ModelCheckpointConfig {
            dirpath: Some(folder.path().to_path_buf()),
            save_last: SaveLast::Copy(true),
            enable_version_counter: false,
            ..Default::default()
        };
        let builder = silent().enable_checkpointing(true).max_epochs(8);
        let builder = builder.callback(EarlyStopping::new(config).unwrap());
        let mut trainer = resumed(builder.callback(ModelCheckpoint::new(saved).unwrap()), ckpt);
        trainer.fit(&mut Probe::logging(&[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]), &mut loaders()).unwrap();
        trainer.global_step()
    };
    let last = folder.path().join("last.ckpt");
    assert_eq!(fit(3, None), 4 * 6);
    assert_eq!([fit(3, Some(&last)), fit(3, Some(&last))], [4 * 6; 2], "each requeue finds it over");
    assert_eq!(fit(5, Some(&last)), 6 * 6, "a larger patience lets it continue");
}

#[test]
fn a_metric_that_is_missing_is_named_with_those_there_are() {
    let config = EarlyStoppingConfig { monitor: "val_los".to_owned(), ..Default::default() };
    let fit_checked = |config: &EarlyStoppingConfig, val_check_interval: f64| {
        let callback = EarlyStopping::new(config.clone()).unwrap();
        let builder = silent().max_epochs(1).val_check_interval(val_check_interval);
        let mut trainer = builder.callback(callback).build().unwrap();
        trainer.fit(&mut Probe::logging(&[1.0, 1.0]), &mut loaders())
    };
    let fit = |config: &EarlyStoppingConfig| fit_checked(config, 1.0);
    let error = fit(&config).unwrap_err().to_string();
    assert!(
        error
            .starts_with("on_train_epoch_end failed in epoch 0 at global_step 6 on rank 0: in EarlyStopping"),
        "{error}"
    );
    assert!(error.contains("no metric `val_los`") && error.contains("val_loss"), "{error}");
    let error = fit_checked(&config, 0.5).unwrap_err().to_string();
    assert!(
        error.contains("at global_step 3") && error.contains("no metric `val_los`"),
        "within an epoch: {error}"
    );
    fit(&EarlyStoppingConfig { strict: false, ..config }).unwrap();
}

#[test]
fn a_timer_whose_time_is_over_ends_the_run_after_the_batch() {
    let events = Events::default();
    let timer = Timer::new(Duration::from_nanos(1));
    let builder = silent().max_epochs(3).num_sanity_val_steps(0).callback(timer).callback(events.clone());
    builder.build().unwrap().fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(events.text(), "t0* V2 e");
}

#[test]
fn callbacks_are_named_in_yaml_and_take_the_place_of_those_of_their_type() {
    let config: voltaic::trainer::TrainerConfig = serde_json::from_value(serde_json::json!({
        "callbacks": [
            {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss", "patience": 2}},
            {"class_path": "LearningRateMonitor", "init_args": {"logging_interval": "step"}},
            {"class_path": "Timer", "init_args": {"duration": "00:01:00:00"}},
        ]
    }))
    .unwrap();
    assert!(Trainer::builder().config(config).build().is_ok());
    let error = Trainer::builder()
        .config(
            serde_json::from_value(serde_json::json!({
                "callbacks": [
                    {"class_path": "EarlyStopping", "init_args": {}},
                    {"class_path": "Timer", "init_args": {"duration": "an hour"}},
                ]
            }))
            .unwrap(),
        )
        .build()
        .err()
        .unwrap()
        .to_string();
    for key in ["trainer.callbacks.0.monitor: ", "trainer.callbacks.1.duration: "] {
        assert!(error.contains(key), "{error}");
    }
}

/// The order of calls of callbacks with and without a look at what was logged.
#[derive(Clone)]
struct Order(&'static str, bool, Arc<Mutex<Vec<&'static str>>>);

impl Callback for Order {
    fn runs_after_module(&self) -> bool {
        self.1
    }

    fn on_train_start(&mut self, _ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        self.2.lock().unwrap().push(self.0);
        Ok(())
    }
}

#[test]
fn callbacks_that_look_at_metrics_run_last() {
    let calls = Arc::default();
    let mut builder = silent().max_epochs(1).limit_train_batches(1);
    for (name, is_late) in [("late", true), ("first", false), ("second", false)] {
        builder = builder.callback(Order(name, is_late, Arc::clone(&calls)));
    }
    builder.build().unwrap().fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(*calls.lock().unwrap(), ["first", "second", "late"]);
}

/// Weights after each optimizer step, from a run without averages.
fn weights_by_step() -> Vec<Vec<f64>> {
    let steps = Arc::new(Mutex::new(Vec::new()));
    let note = steps.clone();
    let lambda = LambdaCallback::new().on_train_batch_end(move |_, module| {
        let weight = &module.parameters()[0];
        note.lock().unwrap().push(Vec::<f64>::try_from(weight.detach()).unwrap());
        Ok(())
    });
    let mut trainer = silent().max_epochs(1).callback(lambda).build().unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    Arc::try_unwrap(steps)
        .map_or_else(|steps| steps.lock().unwrap().clone(), |steps| steps.into_inner().unwrap())
}

fn close(a: &[f32], b: &[f64]) {
    let is_close = a.iter().zip(b).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5);
    assert!(is_close && a.len() == b.len(), "{a:?} {b:?}");
}

#[test]
fn an_average_of_the_weights_is_what_validation_and_the_finished_model_have() {
    let steps = weights_by_step();
    let ema = EmaWeightAveragingConfig { decay: 0.75, ..Default::default() };
    let mut expected = steps[0].clone();
    for now in &steps[1..] {
        expected = expected.iter().zip(now).map(|(old, new)| 0.75 * old + 0.25 * new).collect();
    }
    let seen = Arc::new(Mutex::new(Vec::new()));
    let note = seen.clone();
    let mut net = Probe {
        validate: Some(Box::new(move |net, loss, _| {
            *note.lock().unwrap() = net.weights();
            Ok(loss)
        })),
        ..Probe::default()
    };
    let mut trainer = silent().max_epochs(1).callback(WeightAveraging::ema(ema).unwrap()).build().unwrap();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    close(&seen.lock().unwrap(), &expected);
    close(&net.weights(), &expected);

    let equal = WeightAveragingConfig { update_starting_at_step: Some(3), ..Default::default() };
    let mut net = Probe::default();
    let mut trainer = silent().max_epochs(1).callback(WeightAveraging::new(equal)).build().unwrap();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    let mean: Vec<f64> = (0..2).map(|i| steps[3..].iter().map(|now| now[i]).sum::<f64>() / 3.0).collect();
    close(&net.weights(), &mean);
    assert!(WeightAveraging::ema(EmaWeightAveragingConfig { decay: 1.5, ..Default::default() }).is_err());
}

#[test]
fn an_average_goes_on_after_a_checkpoint_which_holds_it_as_the_weights() {
    let folder = TempDir::new().unwrap();
    let run = |epochs: i64, ckpt: Option<&Path>| {
        let saver = ModelCheckpoint::new(ModelCheckpointConfig {
            dirpath: Some(folder.path().into()),
            save_top_k: -1,
            enable_version_counter: false,
            ..Default::default()
        });
        let ema =
            WeightAveraging::ema(EmaWeightAveragingConfig { decay: 0.75, ..Default::default() }).unwrap();
        let builder = silent().enable_checkpointing(true).max_epochs(epochs);
        let mut trainer = resumed(builder.callback(saver.unwrap()).callback(ema), ckpt);
        let mut net = Probe::default();
        trainer.fit(&mut net, &mut loaders()).unwrap();
        net.weights()
    };
    let whole = run(2, None);
    let after_one = run(1, None);
    let path = folder.path().join("epoch=0-step=6.ckpt");
    let saved = voltaic::checkpoint::Checkpoint::load(&path).unwrap();
    assert_eq!(Vec::<f32>::try_from(&saved.weights[0].1).unwrap(), after_one);
    assert_eq!(run(2, Some(&path)), whole);
}

#[test]
fn a_learning_rate_is_found_drawn_and_used_and_leaves_the_weights_alone() {
    let _rng = crate::rng::seeded(1);
    let root = TempDir::new().unwrap();
    let config = LearningRateFinderConfig { num_training_steps: 30, max_lr: 10.0, ..Default::default() };
    let mut net = crate::trainer::Net::new();
    let before = crate::trainer::weights(&net);
    let trainer = silent().max_epochs(1).build().unwrap();
    let found = trainer.lr_find(&mut net, &mut crate::trainer::loaders(), &config).unwrap();
    assert_eq!(crate::trainer::weights(&net), before);
    assert!(found.lrs.len() > 12 && found.lrs.windows(2).all(|pair| pair[0] <= pair[1]), "{found:?}");
    let trainer = silent().max_epochs(1).accumulate_grad_batches(2_u64).build().unwrap();
    let by_window = trainer.lr_find(&mut net, &mut crate::trainer::loaders(), &config).unwrap();
    assert!(
        by_window.lrs.len() > 12 && by_window.lrs.windows(2).all(|pair| pair[0] < pair[1]),
        "{by_window:?}"
    );
    assert!(
        by_window.losses[0] < 0.75 * found.losses[0],
        "each is half of a window's: {by_window:?} {found:?}"
    );
    let suggestion = found.suggestion().unwrap();
    assert!(found.lrs.contains(&suggestion));
    found.plot(&root.path().join("lr.png")).unwrap();
    assert!(std::fs::read(root.path().join("lr.png")).unwrap().starts_with(b"\x89PNG"));

    let config = serde_json::json!({
        "max_epochs": 1, "enable_progress_bar": false, "enable_model_summary": false, "logger": true,
        "default_root_dir": root.path(),
    });
    let finder = LearningRateFinderConfig { num_training_steps: 30, ..Default::default() };
    let rates = crate::probe::LearningRates::default();
    let builder = Trainer::builder()
        .config(serde_json::from_value(config).unwrap())
        .callbacks([finder])
        .callback(rates.clone());
    let mut trainer = builder.build().unwrap();
    trainer.fit(&mut net, &mut crate::trainer::loaders()).unwrap();
    let rates = rates.0.lock().unwrap();
    assert!(rates[0] != 1e-2 && rates.iter().all(|rate| *rate == rates[0]), "{rates:?}");
    assert_eq!(trainer.found_lr(), Some(rates[0]));
    assert!(trainer.log_dir().join("lr_find.png").exists());
}

#[test]
fn throughput_of_validation_test_and_prediction_is_told_in_a_row_each() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let config = ThroughputMonitorConfig { window_size: 2, ..Default::default() };
    let mut trainer = silent()
        .default_root_dir(root.path())
        .logger(LoggerConfig::JsonLines(JsonLinesLoggerConfig::default()))
        .log_every_n_steps(3_u64)
        .max_epochs(2)
        .callback(ThroughputMonitor::new(config).unwrap())
        .build()
        .unwrap();
    let mut net = Probe::default();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    trainer.validate(&mut net, &mut loaders()).unwrap();
    let rows = json_rows(trainer.log_dir());
    let told = |name: &str| told(&rows, name);
    assert_eq!(told("train/batches"), [(2, 3.0), (5, 6.0), (8, 9.0), (11, 12.0)]);
    // two batches of two samples, after each epoch and by itself; not in the sanity check
    let steps = [5, 11, 12];
    assert_eq!(told("validate/batches"), steps.map(|step| (step, 2.0)));
    assert_eq!(told("validate/samples"), steps.map(|step| (step, 4.0)));
    let rates = told("validate/device/samples_per_sec");
    assert!(rates.len() == 3 && rates.iter().all(|(_, rate)| *rate > 0.0), "{rows:?}");
    let (train, validate) = (told("train/time"), told("validate/time"));
    assert!(train.windows(2).all(|pair| pair[0].1 < pair[1].1) && validate.iter().all(|(_, s)| *s > 0.0));
}

/// Lightning 2.6 writes these rows: `log_every_n_steps=2`, 7 batches an epoch.
#[test]
fn throughput_has_a_row_for_a_window_of_accumulated_batches() {
    let _rng = seeded(1);
    let rows = metrics_of(&mut Probe::default(), |builder| {
        let config = ThroughputMonitorConfig { window_size: 2, ..Default::default() };
        builder.accumulate_grad_batches(3_u64).callback(ThroughputMonitor::new(config).unwrap())
    });
    assert_eq!(told(&rows, "train/batches"), [(1, 6.0), (3, 10.0), (5, 14.0)]);
}

/// A module that logs its own `epoch` has it in place of the trainer's.
#[test]
fn an_epoch_that_is_logged_keeps_its_value() {
    let _rng = seeded(1);
    let train = |_: &Probe, loss: Tensor, ctx: &mut StepContext| {
        ctx.log("epoch", ctx.batch_idx() as f64 / 4.0);
        Ok(loss)
    };
    let mut net = Probe { train: Box::new(train), ..Probe::default() };
    let rows = metrics_of(&mut net, |builder| builder);
    let expected = [(1, 0.25), (3, 0.75), (5, 1.25), (7, 0.0), (9, 0.5), (11, 1.0), (13, 1.5)];
    assert_eq!(told(&rows, "epoch"), expected);
}

/// The rows of two epochs of 7 batches, one in two steps; those of metrics.csv are the same.
fn metrics_of(net: &mut Probe, build: fn(TrainerBuilder) -> TrainerBuilder) -> Vec<serde_json::Value> {
    let root = TempDir::new().unwrap();
    let builder = silent().default_root_dir(root.path()).log_every_n_steps(2_u64);
    let builder = builder.with_logger(JsonLinesLogger::new(root.path()));
    let builder = builder.with_logger(CsvLogger::new(root.path().join("csv")).plots(false));
    let mut trainer = build(builder.max_epochs(2)).build().unwrap();
    trainer.fit(net, &mut Loaders::new().train(crate::probe::loader(14))).unwrap();
    let rows = json_rows(trainer.log_dir());
    let mut csv =
        csv::Reader::from_path(root.path().join("csv/lightning_logs/version_0/metrics.csv")).unwrap();
    let columns = csv.headers().unwrap().clone();
    for (record, row) in csv.records().map(Result::unwrap).zip(&rows) {
        for (name, cell) in columns.iter().zip(&record) {
            assert_eq!(cell.parse().ok(), row[name].as_f64(), "{name} in {row}");
        }
    }
    rows
}

fn json_rows(folder: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Steps and values of a metric.
fn told(rows: &[serde_json::Value], name: &str) -> Vec<(u64, f64)> {
    rows.iter().filter_map(|row| Some((row["step"].as_u64()?, row[name].as_f64()?))).collect()
}

#[test]
fn checkpoints_by_time_at_a_failure_and_beside_those_of_other_runs() {
    let save = |folder: &Path, change: fn(&mut ModelCheckpointConfig), fails: bool| {
        let mut config = ModelCheckpointConfig { dirpath: Some(folder.into()), ..Default::default() };
        change(&mut config);
        let lambda = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
            anyhow::ensure!(!fails || ctx.global_step() != 2, "no luck");
            Ok(())
        });
        let builder = silent().enable_checkpointing(true).max_epochs(1).callback(lambda);
        let mut trainer = builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap();
        let result = trainer.fit(&mut Probe::default(), &mut loaders());
        assert_eq!(result.is_err(), fails);
        names(folder)
    };
    let folder = TempDir::new().unwrap();
    let by_time = |c: &mut ModelCheckpointConfig| {
        c.train_time_interval = Some(Duration::from_nanos(1).into());
        c.save_top_k = -1;
    };
    assert_eq!(save(folder.path(), by_time, false).len(), 6, "after each batch");
    let folder = TempDir::new().unwrap();
    let on_exception = |c: &mut ModelCheckpointConfig| {
        c.save_on_exception = true;
        c.save_last = SaveLast::Copy(true);
    };
    assert_eq!(save(folder.path(), on_exception, true), ["epoch=0-step=2.ckpt", "last.ckpt"]);
    assert_eq!(
        save(folder.path(), |c| c.save_last = SaveLast::Copy(true), false),
        ["epoch=0-step=2.ckpt", "epoch=0-step=6.ckpt", "last-v1.ckpt", "last.ckpt"]
    );
    // a failure evicts none of the best, and a bad score keeps it from nothing
    for monitor in [None, Some("val_loss".to_owned())] {
        let folder = TempDir::new().unwrap();
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.path().into()),
            save_on_exception: true,
            monitor,
            ..Default::default()
        };
        let fails = LambdaCallback::new().on_train_batch_end(|ctx, _| {
            anyhow::ensure!(ctx.global_step() != 14, "no luck");
            Ok(())
        });
        let builder = silent().enable_checkpointing(true).max_epochs(3).callback(fails);
        let mut trainer = builder.callback(ModelCheckpoint::new(config.clone()).unwrap()).build().unwrap();
        trainer.fit(&mut Probe::logging(&[1.0, 2.0, 3.0]), &mut loaders()).unwrap_err();
        let best = if config.monitor.is_some() { "epoch=0-step=6.ckpt" } else { "epoch=1-step=12.ckpt" };
        assert_eq!(names(folder.path()), [best, "epoch=2-step=14.ckpt"]);
    }
    let error = ModelCheckpoint::new(ModelCheckpointConfig {
        every_n_epochs: Some(1),
        train_time_interval: Some("00:00:01:00".into()),
        ..Default::default()
    });
    assert_error!(error, "ModelCheckpoint.every_n_epochs: set together with train_time_interval");
}
