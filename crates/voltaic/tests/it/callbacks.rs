//! Callbacks at work in a run.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use voltaic::Module;
use voltaic::callback::{
    Callback, EarlyStopping, EarlyStoppingConfig, LearningRateMonitor, LearningRateMonitorConfig, Timer,
};
use voltaic::module::HookContext;
use voltaic::optim::{Interval, LrSchedulerSpec, Optimizers, Sgd, StepLr};
use voltaic::trainer::{Trainer, TrainerBuilder};

use crate::probe::{Events, Probe, loaders, silent};

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

#[test]
fn a_metric_that_is_missing_is_named_with_those_there_are() {
    let config = EarlyStoppingConfig { monitor: "val_los".to_owned(), ..Default::default() };
    let fit = |config: &EarlyStoppingConfig| {
        let callback = EarlyStopping::new(config.clone()).unwrap();
        let mut trainer = silent().max_epochs(1).callback(callback).build().unwrap();
        trainer.fit(&mut Probe::logging(&[1.0]), &mut loaders())
    };
    let error = fit(&config).unwrap_err().to_string();
    assert!(
        error
            .starts_with("on_train_epoch_end failed in epoch 0 at global_step 6 on rank 0: in EarlyStopping"),
        "{error}"
    );
    assert!(error.contains("no metric `val_los`") && error.contains("val_loss"), "{error}");
    fit(&EarlyStoppingConfig { strict: false, ..config }).unwrap();
}

#[test]
fn a_timer_whose_time_is_over_ends_the_run_after_the_batch() {
    let events = Events::default();
    let timer = Timer::new(Duration::from_nanos(1));
    let builder = silent().max_epochs(3).num_sanity_val_steps(0).callback(timer).callback(events.clone());
    builder.build().unwrap().fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(events.text(), "t0* e");
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
    assert!(error.contains("EarlyStopping.monitor") && error.contains("Timer.duration"), "{error}");
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
