//! Profilers at work in a run.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::callback::{LambdaCallback, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::data::{DataLoader, DataModule, Loaders};
use voltaic::error::Result;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::Parameter;
use voltaic::optim::{Optimizers, Sgd, StepLr};
use voltaic::profiler::{ProfiledRun, Profiler, SimpleProfilerConfig};
use voltaic::trainer::TrainerBuilder;
use voltaic::{Error, Kind, Module, Tensor};

use crate::probe::{Probe, loader, loaders, names, own_process, plays, silent, text_of};
use crate::rng::seeded;

/// Notes calls by action, without the types of those that do them, and checks that actions are nested.
#[derive(Default, Clone)]
struct Notes(Arc<Mutex<Noted>>);

#[derive(Default)]
struct Noted {
    running: Vec<String>,
    calls: BTreeMap<String, u64>,
    runs: Vec<ProfiledRun>,
    described: usize,
}

impl Notes {
    fn take(&self) -> BTreeMap<String, u64> {
        let mut noted = self.0.lock().unwrap();
        assert!(noted.running.is_empty(), "{:?} still run", noted.running);
        std::mem::take(&mut noted.calls)
    }
}

/// `[Callback]ModelCheckpoint{..}.setup` as `[Callback].setup`.
fn without_type(action: &str) -> String {
    match (action.split_once(']'), action.rsplit_once('.')) {
        (Some((owner, _)), Some((_, hook))) if !action.starts_with("[_") => format!("{owner}].{hook}"),
        _ => action.to_owned(),
    }
}

impl Profiler for Notes {
    fn setup(&mut self, run: &ProfiledRun) -> Result<()> {
        self.0.lock().unwrap().runs.push(run.clone());
        Ok(())
    }

    fn start(&mut self, action: &str) -> Result<()> {
        self.0.lock().unwrap().running.push(action.to_owned());
        Ok(())
    }

    fn stop(&mut self, action: &str) -> Result<()> {
        let mut noted = self.0.lock().unwrap();
        assert_eq!(noted.running.pop().as_deref(), Some(action));
        *noted.calls.entry(without_type(action)).or_default() += 1;
        Ok(())
    }

    fn describe(&mut self) -> Result<()> {
        self.0.lock().unwrap().described += 1;
        Ok(())
    }
}

/// The module of the fixture.
#[derive(Module)]
struct Net {
    weight: Parameter,
}

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok(batch.f_mul(&self.weight)?.f_sum(Kind::Float)?)
    }

    fn validation_step(&self, _batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<()> {
        Ok(())
    }

    fn test_step(&self, _batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<()> {
        Ok(())
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Ok(Optimizers::new(Sgd::new(0.1)).scheduler(StepLr::new(1, 0.5)))
    }
}

/// The data of the fixture.
struct Data;

impl DataModule for Data {
    type Batch = Tensor;

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Tensor>>> {
        Ok(Some(loader(6)))
    }

    fn val_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Tensor>>> {
        Ok(vec![loader(4)])
    }

    fn test_dataloader(&mut self) -> anyhow::Result<Vec<DataLoader<Tensor>>> {
        Ok(vec![loader(4)])
    }
}

/// What Lightning calls differently, or its strategies do and ours have no need for.
const LIGHTNING_ONLY: [&str; 7] = [
    "[Strategy].on_test_end",
    "[Strategy].on_test_start",
    "[Strategy].on_train_batch_start",
    "[Strategy].on_train_end",
    "[Strategy].on_train_start",
    "[Strategy].on_validation_end",
    "[Strategy].on_validation_start",
];

#[test]
fn the_actions_of_lightning_are_profiled_and_as_often() {
    let _rng = seeded(1);
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/profilers/actions.json")).unwrap();
    let notes = Notes::default();
    let folder = TempDir::new().unwrap();
    let saver = ModelCheckpoint::new(ModelCheckpointConfig {
        dirpath: Some(folder.path().into()),
        ..ModelCheckpointConfig::default()
    });
    let mut trainer = silent()
        .enable_checkpointing(true)
        .max_epochs(2)
        .accumulate_grad_batches(2_u64)
        .callback(saver.unwrap())
        .with_profiler(notes.clone())
        .build()
        .unwrap();
    let mut net = Net { weight: Parameter::new(Tensor::ones([2], (Kind::Float, tch::Device::Cpu))) };
    trainer.fit(&mut net, &mut Data).unwrap();
    let in_fit = notes.take();
    trainer.test(&mut net, &mut Data).unwrap();
    let in_test = notes.take();
    for (stage, own) in [("fit", &in_fit), ("test", &in_test)] {
        let differences: Vec<String> = fixture[stage]
            .as_object()
            .unwrap()
            .iter()
            .filter(|(action, calls)| {
                own.get(*action) != calls.as_u64().as_ref() && !LIGHTNING_ONLY.contains(&action.as_str())
            })
            .map(|(action, calls)| format!("{action}: {calls} calls, here {:?}", own.get(action)))
            .collect();
        assert!(differences.is_empty(), "{stage}: {differences:#?}");
    }
    let own_only: Vec<&str> = in_fit
        .keys()
        .filter(|action| !fixture["fit"].as_object().unwrap().contains_key(*action))
        .map(String::as_str)
        .collect();
    assert_eq!(
        own_only,
        [
            "[LightningDataModule].on_after_batch_transfer",
            "[LightningDataModule].on_before_batch_transfer",
            "[LightningDataModule].prepare_data",
            "[LightningDataModule].transfer_batch_to_device",
            "[LightningModule].backward",
            "[LightningModule].configure_model",
            "[LightningModule].on_sanity_check_end",
            "[LightningModule].on_sanity_check_start",
            "[LightningModule].on_validation_model_train",
            "[LightningModule].prepare_data",
        ]
    );
    let noted = notes.0.lock().unwrap();
    assert_eq!(noted.described, 2);
    assert_eq!(noted.runs.iter().map(|run| run.stage.as_str()).collect::<Vec<_>>(), ["fit", "test"]);
}

fn fitted(build: impl FnOnce(TrainerBuilder) -> TrainerBuilder) -> voltaic::trainer::Trainer {
    let mut net = Probe {
        train: Box::new(|_, loss, ctx| {
            let _action = ctx.profile("my part")?;
            Ok(loss)
        }),
        ..Probe::default()
    };
    let mut trainer = build(silent().max_epochs(1)).build().unwrap();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    trainer
}

#[test]
fn reports_go_to_files_by_stage_and_add_up() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let config =
        SimpleProfilerConfig { filename: Some("perf".to_owned()), ..SimpleProfilerConfig::default() };
    let mut trainer = fitted(|t| t.default_root_dir(root.path()).profiler(config));
    trainer.validate(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(names(root.path()), ["fit-perf.txt", "validate-perf.txt"]);
    let report = std::fs::read_to_string(root.path().join("fit-perf.txt")).unwrap();
    assert!(report.starts_with("FIT Profiler Report\n\n---"), "{report}");
    let row = |report: &str, action: &str| -> Vec<String> {
        let line = report.lines().find(|line| line.contains(&format!("  {action} "))).expect(action);
        line.split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    for (action, calls) in [
        ("run_training_batch", "6"),
        ("my part", "6"),
        ("[Strategy]single_device.training_step", "6"),
        ("[LightningModule]Probe.on_train_start", "1"),
        ("[LightningDataModule]Loaders.setup", "1"),
    ] {
        assert_eq!(row(&report, action)[3], calls, "{report}");
    }
    let report = std::fs::read_to_string(root.path().join("validate-perf.txt")).unwrap();
    assert!(report.starts_with("VALIDATE Profiler Report"), "{report}");
    assert_eq!(row(&report, "run_training_batch")[3], "6", "those of fit are still counted");
    assert!(trainer.profiler_summary().unwrap().contains("[_EvaluationLoop].val_next"));
    assert!(fitted(|t| t).profiler_summary().is_none());
}

#[test]
fn the_advanced_profiler_tells_what_is_within() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let config = json!({
        "profiler": {"class_path": "AdvancedProfiler", "init_args": {"dirpath": root.path(), "dump_stats": true}},
        "max_epochs": 1, "logger": false, "enable_checkpointing": false, "enable_progress_bar": false,
        "enable_model_summary": false,
    });
    fitted(|t| t.config(serde_json::from_value(config).unwrap()));
    assert_eq!(names(root.path()), ["fit.json", "fit.txt"]);
    let report = std::fs::read_to_string(root.path().join("fit.txt")).unwrap();
    assert!(report.contains("|    run_training_batch "), "within the epoch: {report}");
    assert!(report.contains("|        my part "), "within the step, within the batch: {report}");
    let dump = std::fs::read_to_string(root.path().join("fit.json")).unwrap();
    let dump: Vec<Value> = serde_json::from_str(&dump).unwrap();
    let at = |action: &str| dump.iter().position(|node| node["action"] == action).expect(action);
    let number = |action: &str, key: &str| dump[at(action)][key].as_f64().unwrap();
    let (batch, step) = (at("run_training_batch"), at("[Strategy]single_device.training_step"));
    assert!(batch < step && dump[step]["depth"].as_u64() == Some(2), "{dump:#?}");
    for node in &dump {
        let [own, total, min, mean, p50, max] =
            ["own_s", "total_s", "min_s", "mean_s", "p50_s", "max_s"].map(|key| node[key].as_f64().unwrap());
        assert!(own <= total && min <= mean && mean <= max && min <= p50 && p50 <= max, "{node}");
    }
    assert_eq!(number("my part", "num_calls"), 6.0);
    let inner = number("[Strategy]single_device.training_step", "total_s");
    assert!(number("run_training_batch", "own_s") <= number("run_training_batch", "total_s") - inner);
}

#[test]
fn a_run_that_fails_is_reported_and_the_next_one_profiled() {
    let _rng = seeded(1);
    let notes = Notes::default();
    let fails = Arc::new(Mutex::new(true));
    let hook = fails.clone();
    let lambda = LambdaCallback::new().on_train_batch_end(move |_, _| {
        anyhow::ensure!(!*hook.lock().unwrap(), "no luck");
        Ok(())
    });
    let mut trainer = silent().max_epochs(1).callback(lambda).with_profiler(notes.clone()).build().unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap_err();
    assert_eq!(notes.take()["run_training_batch"], 1);
    assert_eq!(notes.0.lock().unwrap().described, 1);
    *fails.lock().unwrap() = false;
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(notes.take()["run_training_batch"], 6);

    // your own action that runs already is a mistake of the step
    let mut net = Probe {
        train: Box::new(|_, loss, ctx| {
            let _outer = ctx.profile("mine")?;
            let _inner = ctx.profile("mine")?;
            Ok(loss)
        }),
        ..Probe::default()
    };
    let mut trainer = silent().max_epochs(1).profiler("simple").build().unwrap();
    let error = trainer.fit(&mut net, &mut loaders()).unwrap_err();
    assert!(matches!(error, Error::Hook { hook: "training_step", .. }));
    assert!(error.to_string().contains("cannot start `mine`, which has already started"), "{error}");
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let error = |build: fn(TrainerBuilder) -> TrainerBuilder| {
        build(silent()).build().err().expect("refused").to_string()
    };
    let unknown = error(|t| t.profiler("kineto"));
    assert!(unknown.contains("trainer.profiler: there is no profiler `kineto`; use simple"), "{unknown}");
    let twice = error(|t| t.profiler("simple").with_profiler(Notes::default()));
    assert!(twice.contains("trainer.profiler: is set, but the builder was given a profiler too"), "{twice}");
    let bare = error(|t| t.barebones(true).profiler("simple"));
    assert!(bare.contains("trainer.profiler: is set beside barebones=true"), "{bare}");
    let own = error(|t| t.barebones(true).with_profiler(Notes::default()));
    assert!(own.contains("trainer.profiler: is set beside barebones=true"), "{own}");
}

#[test]
fn without_a_file_the_report_goes_to_standard_error() {
    if plays("printer") {
        fitted(|t| t.profiler("simple"));
        return;
    }
    let output = own_process("printer").output().unwrap();
    text_of(&output);
    assert_contains!(String::from_utf8_lossy(&output.stderr), "FIT Profiler Report", "run_training_epoch");
}

#[test]
fn each_rank_has_a_report() {
    if plays("rank") {
        let folder = crate::ddp::folder_of_parent();
        let config = SimpleProfilerConfig {
            dirpath: Some(folder.clone()),
            filename: Some("p".to_owned()),
            ..SimpleProfilerConfig::default()
        };
        let builder = silent().default_root_dir(folder).accelerator("cpu").devices(2).strategy("ddp");
        let mut trainer = builder.max_epochs(1).profiler(config).build().unwrap();
        trainer.fit(&mut Probe::default(), &mut Loaders::new().train(loader(12)).val(loader(4))).unwrap();
        return;
    }
    let folder = TempDir::new().unwrap();
    crate::ddp::run_ranks("rank", folder.path());
    let found = names(folder.path());
    assert!(
        ["fit-p-0.txt", "fit-p-1.txt"].iter().all(|file| found.iter().any(|name| name == file)),
        "{found:?}"
    );
    let report = std::fs::read_to_string(folder.path().join("fit-p-1.txt")).unwrap();
    assert!(report.contains("[Strategy]ddp.backward"), "{report}");
}

#[test]
fn the_command_line_names_profilers_and_their_settings() {
    let folder = TempDir::new().unwrap();
    let fit = |arguments: &[&str]| {
        let fit = "fit --model=LeNet --data=MnistData --data.batch_size=8 --trainer.max_steps=2 \
            --trainer.limit_val_batches=0 --trainer.logger=false --trainer.enable_checkpointing=false";
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"))
            .args(fit.split_whitespace().chain(arguments.iter().copied()))
            .current_dir(folder.path())
            .env("OMP_NUM_THREADS", "1")
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (succeeded, printed) = fit(&["--trainer.profiler=simple"]);
    assert!(succeeded && printed.contains("FIT Profiler Report"), "{printed}");
    let class = ["--trainer.profiler=AdvancedProfiler", "--trainer.profiler.filename=p"];
    let (succeeded, printed) = fit(&[class[0], class[1], "--trainer.profiler.line_count_restriction=3"]);
    assert!(succeeded && !printed.contains("Profiler Report"), "{printed}");
    let report = std::fs::read_to_string(folder.path().join("fit-p.txt")).unwrap();
    assert!(report.contains("  run_training_epoch") && report.contains("\n3 of "), "{report}");
    let (succeeded, printed) = fit(&["--trainer.profiler=simpel"]);
    assert!(
        !succeeded && printed.contains("there is no profiler `simpel`; use simple, advanced, pytorch or hpu"),
        "{printed}"
    );
    for class in ["HPUProfiler", "lightning_habana.pytorch.profiler.profiler.HPUProfiler"] {
        let class = format!("--trainer.profiler={class}");
        let arguments =
            ["--trainer.accelerator=hpu", &class, "--trainer.profiler.filename=h", "--trainer.max_steps=6"];
        let (succeeded, printed) = fit(&arguments);
        assert!(succeeded, "{printed}");
        let report = std::fs::read_to_string(folder.path().join("fit-h.txt")).unwrap();
        assert!(report.contains("aten::convolution") && report.contains("HPU total"), "{report}");
        std::fs::remove_file(folder.path().join("fit-h.txt")).unwrap();
    }
}

#[test]
fn habanas_own_profiler_excludes_ours() {
    let run = |value: &str, profiler: &str| {
        let fit = "fit --model=LeNet --data=MnistData --trainer.max_steps=1 --trainer.limit_val_batches=0 \
            --trainer.logger=false --trainer.enable_checkpointing=false";
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"))
            .args(fit.split_whitespace().chain([profiler]))
            .current_dir(TempDir::new().unwrap().path())
            .envs([("OMP_NUM_THREADS", "1"), ("HABANA_PROFILE", value)])
            .output()
            .unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (succeeded, printed) = run("1", "--trainer.profiler=hpu");
    let refusal = "trainer.profiler (from command line): HABANA_PROFILE is `1`; `HABANA_PROFILE` should not be set \
                   when using `HPUProfiler`; unset it, or set it to profile_api_light";
    assert!(!succeeded && printed.contains(refusal), "{printed}");
    assert!(run("profile_api_light", "--trainer.profiler=hpu").0);
    assert!(run("1", "--trainer.profiler=simple").0);
}
