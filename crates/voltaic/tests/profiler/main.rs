//! Traces of libtorch's profiler. A binary of its own: libtorch has one profiler per process.

#![allow(clippy::unwrap_used, clippy::panic, missing_docs, reason = "a test that panics has failed")]

#[macro_use]
#[path = "../support/assert_error.rs"]
mod assert_error;

mod hpu;
mod kernels;
mod long;
mod readers;
#[path = "../support/silent.rs"]
mod silent;
mod stages;
mod threads;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;
use tempfile::TempDir;
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::lightning::{LightningModule, StepContext};
use voltaic::nn::{Callable, Linear};
use voltaic::optim::{AdamW, Optimizers};
use voltaic::profiler::{HpuProfiler, ProfilerSchedule, PyTorchProfiler, PyTorchProfilerConfig};
use voltaic::trainer::{Trainer, TrainerBuilder};
use voltaic::{Kind, Module, Tensor};

use silent::silent;

static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two layers, and ranges of its own.
#[derive(Module)]
struct Net {
    first: Linear,
    second: Linear,
    #[module(skip)]
    profiler: Option<PyTorchProfiler>,
    #[module(skip)]
    named: Option<(HpuProfiler, &'static str)>,
}

impl Net {
    fn new(profiler: Option<PyTorchProfiler>) -> Self {
        Self {
            first: Linear::new(8, 16).unwrap(),
            second: Linear::new(16, 4).unwrap(),
            profiler,
            named: None,
        }
    }

    /// With a range of this name around the step.
    fn named(profiler: HpuProfiler, name: &'static str) -> Self {
        Self { named: Some((profiler, name)), ..Self::new(None) }
    }

    fn loss(&self, x: &Tensor) -> anyhow::Result<Tensor> {
        let _named = self.named.as_ref().map(|(profiler, name)| profiler.profile(name)).transpose()?;
        let _outer = self.profiler.as_ref().map(|profiler| profiler.profile("loss")).transpose()?;
        let hidden = self.first.call(x)?.f_relu()?;
        let _inner = self.profiler.as_ref().map(|profiler| profiler.profile("second")).transpose()?;
        Ok(self.second.call(&hidden)?.f_square()?.f_mean(Kind::Float)?)
    }
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.loss(batch)
    }

    fn validation_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<()> {
        self.loss(batch).map(drop)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(AdamW::new(1e-3).into())
    }
}

fn loaders(batches: i64) -> Loaders<Tensor> {
    let loader = || {
        let data = Tensor::randn([batches * 2, 8], (Kind::Float, tch::Device::Cpu));
        DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(2).build().unwrap()
    };
    Loaders::new().train(loader()).val(loader())
}

fn trainer(folder: &Path) -> TrainerBuilder {
    silent().accelerator("cpu").default_root_dir(folder).num_sanity_val_steps(0).max_epochs(1)
}

fn config(folder: &Path) -> PyTorchProfilerConfig {
    PyTorchProfilerConfig {
        dirpath: Some(folder.to_owned()),
        filename: Some("perf".to_owned()),
        row_limit: None,
        with_flops: true,
        ..PyTorchProfilerConfig::default()
    }
}

/// The complete events of a trace.
fn events(path: &Path) -> Vec<Value> {
    let trace: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let all = trace["traceEvents"].as_array().unwrap();
    all.iter().filter(|event| event["ph"] == "X").cloned().collect()
}

fn count(events: &[Value], name: &str) -> usize {
    events.iter().filter(|event| event["name"] == name).count()
}

fn traces_in(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_trace_has_the_operators_of_the_recorded_steps() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let profiler = PyTorchProfiler::new(&config(folder.path())).unwrap();
    let mut net = Net::new(Some(profiler.clone()));
    let mut trainer =
        trainer(folder.path()).limit_val_batches(0).with_profiler(profiler.clone()).build().unwrap();
    trainer.fit(&mut net, &mut loaders(8)).unwrap();

    let traces = profiler.traces();
    assert_eq!(traces.len(), 1, "{:?}", traces_in(folder.path()));
    let name = traces[0].file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("fit-perf-run_training_batch.") && name.ends_with(".pt.trace.json"), "{name}");
    let events = events(&traces[0]);
    for (name, times) in [
        ("aten::linear", 2 * 3),
        ("aten::addmm", 2 * 3),
        ("aten::_fused_adamw_", 3),
        ("aten::relu", 3),
        ("[pl][profile]loss", 3),
        ("[pl][profile]second", 3),
        ("[pl][profile]run_training_batch", 3),
        ("[pl][profile][Strategy]single_device.training_step", 3),
        ("[pl][profile][module]Linear: first", 3),
        ("ProfilerStep#2", 1),
        ("ProfilerStep#3", 1),
        ("ProfilerStep#4", 1),
        ("ProfilerStep#5", 0),
    ] {
        assert_eq!(count(&events, name), times, "{name}");
    }

    let report = std::fs::read_to_string(folder.path().join("fit-perf.txt")).unwrap();
    let row = report.lines().find(|line| line.trim_start().starts_with("aten::addmm")).unwrap();
    assert_eq!(row.split_whitespace().nth(6), Some("6"), "{report}");
    // 2 x (2x8x16 + 2x16x4) for each of 3 steps, of which half are of each layer
    assert!(row.contains(&format!("{:.3}", 3.0 * 2.0 * (256.0 + 128.0) / 1e6)), "{row}");
    assert!(trainer.profiler_summary().unwrap().contains("aten::addmm"));
}

#[test]
fn a_repeating_schedule_writes_a_trace_for_each_cycle() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let schedule = Some(ProfilerSchedule { skip_first: 1, wait: 0, warmup: 1, active: 1, repeat: 2 });
    let profiler =
        PyTorchProfiler::new(&PyTorchProfilerConfig { schedule, ..config(folder.path()) }).unwrap();
    let mut trainer = trainer(folder.path()).with_profiler(profiler.clone()).build().unwrap();
    trainer.fit(&mut Net::new(None), &mut loaders(7)).unwrap();
    let traces = profiler.traces();
    let steps: Vec<(bool, usize)> = traces
        .iter()
        .map(|path| {
            let is_training = path.to_str().unwrap().contains("run_training_batch");
            (is_training, count(&events(path), "aten::linear"))
        })
        .collect();
    assert_eq!(steps, [(true, 2), (true, 2), (false, 2), (false, 2)]);
}

#[test]
fn validation_before_and_within_training_does_not_keep_its_steps_from_being_recorded() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let profiler = PyTorchProfiler::new(&config(folder.path())).unwrap();
    let builder = trainer(folder.path()).num_sanity_val_steps(2).val_check_interval(4_u64);
    let mut trainer = builder.with_profiler(profiler.clone()).build().unwrap();
    trainer.fit(&mut Net::new(None), &mut loaders(8)).unwrap();
    let steps: Vec<(usize, usize, Vec<String>)> = profiler
        .traces()
        .iter()
        .map(|path| events(path))
        .map(|events| {
            let names = events.iter().filter_map(|event| event["name"].as_str());
            let mut steps: Vec<String> =
                names.filter_map(|name| name.strip_prefix("ProfilerStep").map(str::to_owned)).collect();
            steps.sort();
            (count(&events, "aten::_fused_adamw_"), count(&events, "aten::linear"), steps)
        })
        .collect();
    // two training steps until validation cuts them off, three of validation, the third training step; no step is
    // open but has not begun
    let named = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
    let expected = [(2, 4, named(&["#2", "#3"])), (0, 6, named(&["#2", "#3", "#4"])), (1, 2, named(&["#4"]))];
    assert_eq!(steps, expected);
}

#[test]
fn the_last_step_of_a_short_validation_ends_with_it() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let profiler = PyTorchProfiler::new(&config(folder.path())).unwrap();
    let builder = trainer(folder.path()).limit_train_batches(1).limit_val_batches(3);
    let mut trainer = builder.with_profiler(profiler.clone()).build().unwrap();
    trainer.fit(&mut Net::new(None), &mut loaders(3)).unwrap();
    let traces = profiler.traces();
    let validation = traces.iter().find(|path| path.to_str().unwrap().contains("validation_step")).unwrap();
    let events = events(validation);
    let find =
        |name: &str| events.iter().find(|event| event["name"].as_str().unwrap().ends_with(name)).unwrap();
    let span = |event: &Value| {
        let begins = event["ts"].as_f64().unwrap();
        (begins, begins + event["dur"].as_f64().unwrap())
    };
    let (step, work) = (span(find("ProfilerStep#2")), span(find(".validation_step")));
    assert!(step.0 <= work.0 && work.1 <= step.1, "{step:?} {work:?}");
    assert!(step.1 <= span(find("on_validation_epoch_end")).0, "{step:?}");
    assert_eq!(count(&events, "ProfilerStep#3"), 0);
}

#[test]
fn a_run_that_is_too_short_for_the_default_schedule_is_recorded_all_the_same() {
    let _alone = alone();
    for (batches, recorded) in [(1, 1), (2, 2), (3, 1), (4, 2), (5, 3), (6, 3)] {
        let folder = TempDir::new().unwrap();
        let profiler = PyTorchProfiler::new(&config(folder.path())).unwrap();
        let mut trainer =
            trainer(folder.path()).limit_val_batches(0).with_profiler(profiler.clone()).build().unwrap();
        trainer.fit(&mut Net::new(None), &mut loaders(batches)).unwrap();
        assert_eq!(profiler.traces().len(), 1, "{batches}");
        assert_eq!(count(&events(&profiler.traces()[0]), "aten::_fused_adamw_"), recorded, "{batches}");
    }
}

#[test]
fn a_schedule_that_is_longer_than_the_run_writes_nothing() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let schedule = Some(ProfilerSchedule { wait: 100, ..ProfilerSchedule::default() });
    let profiler =
        PyTorchProfiler::new(&PyTorchProfilerConfig { schedule, ..config(folder.path()) }).unwrap();
    let mut trainer = trainer(folder.path()).with_profiler(profiler.clone()).build().unwrap();
    trainer.fit(&mut Net::new(None), &mut loaders(3)).unwrap();
    assert!(profiler.traces().is_empty());
    assert_eq!(traces_in(folder.path()), Vec::<String>::new());
}

#[test]
fn wrong_use_has_an_error() {
    let _alone = alone();
    let folder = TempDir::new().unwrap();
    let profiler = PyTorchProfiler::new(&config(folder.path())).unwrap();
    assert_error!(profiler.stop("mine"), "cannot stop `mine`, which was never started");
    profiler.start("mine").unwrap();
    assert_error!(profiler.start("mine"), "cannot start `mine`, which has already started");
    profiler.stop("mine").unwrap();
    let unknown = PyTorchProfilerConfig { sort_by_key: Some("cuda".into()), ..config(folder.path()) };
    let error = PyTorchProfiler::new(&unknown).unwrap_err().to_string();
    assert!(error.contains("`cuda` is not a column of the table; use one of cpu_time_total"), "{error}");

    let blocked = folder.path().join("file");
    std::fs::write(&blocked, "").unwrap();
    let profiler = PyTorchProfiler::new(&config(&blocked)).unwrap();
    let mut trainer = trainer(folder.path()).with_profiler(profiler).build().unwrap();
    assert_error!(trainer.fit(&mut Net::new(None), &mut loaders(6)), "cannot create", "file");
    // a folder that is there, but takes no files
    let profiler = PyTorchProfiler::new(&config(Path::new("/proc"))).unwrap();
    let mut trainer = super_trainer(folder.path(), &profiler);
    assert_error!(trainer.fit(&mut Net::new(None), &mut loaders(6)), "cannot write to", "/proc");
    // the one that failed does not keep the next from recording
    let profiler = PyTorchProfiler::new(&config(folder.path())).unwrap();
    let mut trainer = super_trainer(folder.path(), &profiler);
    trainer.fit(&mut Net::new(None), &mut loaders(6)).unwrap();
    assert_eq!(profiler.traces().len(), 2); // of training and of validation
}

fn super_trainer(folder: &Path, profiler: &PyTorchProfiler) -> Trainer {
    trainer(folder).with_profiler(profiler.clone()).build().unwrap()
}
