//! What `last` and `best` mean, in this process and in the next.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::callback::{
    Callback, EpochStart, LambdaCallback, ModelCheckpoint, ModelCheckpointConfig, OnExceptionCheckpoint,
    OnExceptionCheckpointConfig, SaveLast, StochasticWeightAveraging, StochasticWeightAveragingConfig,
};
use voltaic::checkpoint::Checkpoint;
use voltaic::module::{LightningModule, StepContext};
use voltaic::nn::Parameter;
use voltaic::optim::{Optimizers, PerGroup, Sgd};
use voltaic::trainer::Trainer;
use voltaic::{Error, Kind, Module, Tensor};

use crate::probe::{Probe, loaders, names, silent};
use crate::rng::seeded;

/// The first epoch is the best.
const VAL_LOSSES: &[f64] = &[0.25, 0.5, 0.75];

/// A trainer as a configuration makes it, in a process of its own.
fn configured(root: &Path, config: &Value) -> Trainer {
    let mut whole = json!({
        "default_root_dir": root, "enable_progress_bar": false, "enable_model_summary": false, "max_epochs": 2,
    });
    whole.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
    Trainer::builder().config(serde_json::from_value(whole).unwrap()).build().unwrap()
}

/// Saves the best by `val_loss`, and the last.
fn savers() -> Value {
    let init_args = json!({"monitor": "val_loss", "save_last": true});
    json!([{"class_path": "ModelCheckpoint", "init_args": init_args}])
}

/// The weights that a test has with a checkpoint, or the text of its error.
fn tested(trainer: &mut Trainer, ckpt_path: &str) -> Result<Vec<f32>, String> {
    let mut net = Probe::logging(VAL_LOSSES);
    let validated = trainer.ckpt_path(ckpt_path).validate(&mut net, &mut loaders());
    validated.map(|_| net.weights()).map_err(|error| error.to_string())
}

#[test]
fn they_are_found_where_the_loggers_write() {
    let _rng = seeded(1);
    let logger = |class: &str, args: Value| json!({"class_path": class, "init_args": args});
    let loggers: [(Value, &str); 6] = [
        (json!(true), "lightning_logs/version_0"),
        (
            logger("TensorBoardLogger", json!({"name": "digits", "default_hp_metric": false})),
            "digits/version_0",
        ),
        (logger("CSVLogger", json!({"name": "digits", "version": "first"})), "digits/first"),
        (logger("JsonLinesLogger", json!({"name": ""})), "version_0"),
        (logger("CSVLogger", json!({"save_dir": "ELSEWHERE", "name": "a/b"})), "elsewhere/a/b/version_0"),
        (json!(false), ""),
    ];
    for (logger, folder) in loggers {
        let root = TempDir::new().unwrap();
        let elsewhere = json!(root.path().join("elsewhere")).to_string();
        let logger: Value =
            serde_json::from_str(&logger.to_string().replace("\"ELSEWHERE\"", &elsewhere)).unwrap();
        let logger = if logger.is_object() { json!([logger]) } else { logger };
        let config = json!({"logger": logger, "callbacks": savers()});
        let again = || configured(root.path(), &config);
        let mut net = Probe::logging(VAL_LOSSES);
        again().fit(&mut net, &mut loaders()).unwrap();
        let checkpoints = root.path().join(folder).join("checkpoints");
        assert_eq!(names(&checkpoints), ["epoch=0-step=6.ckpt", "last.ckpt"], "{logger}");
        let best = Checkpoint::load(checkpoints.join("epoch=0-step=6.ckpt")).unwrap();
        let best = Vec::<f32>::try_from(&best.weights[0].1).unwrap();
        assert_eq!(tested(&mut again(), "last").unwrap(), net.weights(), "{logger}");
        assert_eq!(tested(&mut again(), "best").unwrap(), best, "{logger}");
        let mut trial = config.clone();
        trial["fast_dev_run"] = json!(true);
        assert_eq!(tested(&mut configured(root.path(), &trial), "last").unwrap(), net.weights(), "{logger}");
        let whole = json!({"default_root_dir": root.path(), "logger": logger, "enable_progress_bar": false});
        let evaluates = Trainer::builder().config(serde_json::from_value(whole).unwrap()).without_logging();
        assert_eq!(tested(&mut evaluates.build().unwrap(), "best").unwrap(), best, "{logger}");
        let mut longer = config.clone();
        longer["max_epochs"] = json!(3);
        let mut longer = configured(root.path(), &longer);
        let mut resumed = Probe::logging(VAL_LOSSES);
        longer.ckpt_path("last").fit(&mut resumed, &mut loaders()).unwrap();
        assert_eq!(longer.global_step(), 18, "{logger}");
        assert!(resumed.weights() != net.weights());
    }
}

#[test]
fn the_best_is_what_the_newest_checkpoint_names() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let config = json!({"callbacks": savers()});
    configured(root.path(), &config).fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
    let moved = TempDir::new().unwrap();
    let to = moved.path().join("lightning_logs");
    std::fs::rename(root.path().join("lightning_logs"), &to).unwrap();
    let again = || configured(moved.path(), &config);
    let folder = to.join("version_0/checkpoints");
    let best = folder.join("epoch=0-step=6.ckpt");
    let weights = Vec::<f32>::try_from(&Checkpoint::load(&best).unwrap().weights[0].1).unwrap();
    assert_eq!(tested(&mut again(), "best").unwrap(), weights, "the folder was moved");
    std::fs::remove_file(&best).unwrap();
    assert_error!(
        tested(&mut again(), "best"),
        "epoch=0-step=6.ckpt according to",
        "last.ckpt, but that file is neither there nor beside it; give the path"
    );
    std::fs::remove_file(folder.join("last.ckpt")).unwrap();
    let weights_only = json!({"callbacks": [
        {"class_path": "ModelCheckpoint", "init_args": {"save_weights_only": true, "dirpath": folder}}
    ]});
    let mut net = Probe::logging(VAL_LOSSES);
    configured(moved.path(), &weights_only).fit(&mut net, &mut loaders()).unwrap();
    assert_eq!(tested(&mut again(), "last").unwrap(), net.weights(), "weights are all that a test needs");
    assert_error!(
        tested(&mut again(), "best"),
        "step=12.ckpt, the newest checkpoint, holds weights only and does not tell"
    );
    let error = again().ckpt_path("last").fit(&mut net, &mut loaders()).unwrap_err().to_string();
    assert!(error.contains("it holds weights only, no training state"), "{error}");
}

#[test]
fn the_best_of_a_run_is_that_of_all_its_folders() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let config = |epochs: i64| json!({"callbacks": savers(), "max_epochs": epochs});
    for epochs in 1..=3 {
        let mut trainer = configured(root.path(), &config(epochs));
        trainer.ckpt_path("last").fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
    }
    let best = root.path().join("lightning_logs/version_0/checkpoints/epoch=0-step=6.ckpt");
    let best = Vec::<f32>::try_from(&Checkpoint::load(&best).unwrap().weights[0].1).unwrap();
    assert!(root.path().join("lightning_logs/version_2/checkpoints/epoch=2-step=18.ckpt").exists());
    assert_eq!(tested(&mut configured(root.path(), &config(3)), "best").unwrap(), best);
    let moved = TempDir::new().unwrap();
    std::fs::rename(root.path().join("lightning_logs"), moved.path().join("lightning_logs")).unwrap();
    assert_eq!(tested(&mut configured(moved.path(), &config(3)), "best").unwrap(), best, "moved");
}

#[test]
fn an_evaluation_without_a_checkpoint_is_refused_and_a_fit_begins() {
    let root = TempDir::new().unwrap();
    let config = json!({"logger": [{"class_path": "CSVLogger", "init_args": {"name": "digits"}}]});
    let mut trainer = configured(root.path(), &config);
    for (ckpt_path, text) in
        [("last", "`last`, but there is no checkpoint in "), ("best", "`best`, but there is no")]
    {
        let errors: [voltaic::Result<()>; 3] = [
            trainer.ckpt_path(ckpt_path).validate(&mut Probe::default(), &mut loaders()).map(drop),
            trainer.ckpt_path(ckpt_path).test(&mut Probe::default(), &mut loaders()).map(drop),
            trainer.ckpt_path(ckpt_path).predict(&mut Probe::default(), &mut loaders()).map(drop),
        ];
        for error in errors {
            let error = error.unwrap_err();
            assert!(matches!(error, Error::Config(_)));
            let error = error.to_string();
            let looked =
                [root.path().join("digits/*/checkpoints"), root.path().join("lightning_logs/*/checkpoints")];
            let tells = looked.iter().all(|folder| error.contains(folder.to_str().unwrap()));
            assert!(
                error.contains(text) && tells && error.contains("; fit first, or give the path"),
                "{error}"
            );
        }
    }
    let mut net = Probe::logging(VAL_LOSSES);
    trainer.ckpt_path("last").fit(&mut net, &mut loaders()).unwrap();
    assert_eq!(trainer.global_step(), 12, "nothing to resume is not an error, as in Lightning");
}

#[test]
fn averaged_weights_beside_the_checkpoints_are_not_the_last() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let build = |epochs: i64| {
        let config = StochasticWeightAveragingConfig {
            swa_lrs: PerGroup::All(0.5),
            swa_epoch_start: EpochStart::Epoch(1),
            save: true,
            ..Default::default()
        };
        let swa = StochasticWeightAveraging::from_config(config).unwrap();
        let saver = ModelCheckpoint::new(ModelCheckpointConfig::default()).unwrap();
        let builder = silent().default_root_dir(root.path()).enable_checkpointing(true).max_epochs(epochs);
        builder.callback(swa).callback(saver).build().unwrap()
    };
    build(2).fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(names(&root.path().join("checkpoints")), ["epoch=1-step=12.ckpt", "swa.ckpt"]);
    let saved = Checkpoint::load(root.path().join("checkpoints/epoch=1-step=12.ckpt")).unwrap();
    let weights = tested(&mut build(2), "last").unwrap();
    assert_eq!(weights, Vec::<f32>::try_from(&saved.weights[0].1).unwrap());
    let mut longer = build(3);
    longer.ckpt_path("last").fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(longer.global_step(), 18);
}

/// A file that a failure of an earlier run has left is the last only as long as it is the newest.
#[test]
fn what_a_failure_has_left_is_the_last_while_it_is_the_newest() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let build = |fails: bool| {
        let config =
            OnExceptionCheckpointConfig { dirpath: root.path().join("failed"), ..Default::default() };
        let failing = LambdaCallback::new().on_train_batch_end(move |ctx, _| {
            anyhow::ensure!(!fails || ctx.global_step() != 3, "no luck");
            Ok(())
        });
        let builder = silent().default_root_dir(root.path()).max_epochs(1).enable_checkpointing(true);
        builder.callback(OnExceptionCheckpoint::new(config).unwrap()).callback(failing).build().unwrap()
    };
    let mut failed = Probe::default();
    assert!(build(true).fit(&mut failed, &mut loaders()).is_err());
    assert_eq!(tested(&mut build(false), "last").unwrap(), failed.weights());
    let mut net = Probe::default();
    let newer = silent().default_root_dir(root.path()).max_epochs(1).enable_checkpointing(true);
    newer.build().unwrap().fit(&mut net, &mut loaders()).unwrap();
    assert!(root.path().join("failed/on_exception.ckpt").exists());
    assert_eq!(tested(&mut build(false), "last").unwrap(), net.weights());
}

/// Brings a callback that saves.
#[derive(Module)]
struct Saving {
    weight: Parameter,
    #[module(skip)]
    folder: PathBuf,
}

impl Saving {
    fn new(folder: &Path) -> Self {
        let weight = Parameter::new(Tensor::ones([2], (Kind::Float, tch::Device::Cpu)));
        Self { weight, folder: folder.into() }
    }
}

impl LightningModule for Saving {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, _ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        Ok((batch * self.weight.tensor()).f_mean(Kind::Float)?)
    }

    fn validation_step(&self, _batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<()> {
        ctx.log("val_loss", VAL_LOSSES[ctx.current_epoch() as usize]);
        Ok(())
    }

    fn configure_callbacks(&mut self) -> anyhow::Result<Vec<Box<dyn Callback>>> {
        let config = ModelCheckpointConfig {
            dirpath: Some(self.folder.clone()),
            monitor: Some("val_loss".to_owned()),
            save_last: SaveLast::Copy(true),
            ..Default::default()
        };
        Ok(vec![Box::new(ModelCheckpoint::new(config)?)])
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        Sgd::new(0.1).into()
    }
}

#[test]
fn those_of_a_module_s_own_callback_are_found() {
    let folder = TempDir::new().unwrap();
    let build = || silent().enable_checkpointing(true).max_epochs(2).build().unwrap();
    let best = folder.path().join("epoch=0-step=6.ckpt");
    let expected = Checkpoint::load(&best).map(|_| ()).is_err();
    assert!(expected, "nothing is there yet");
    let mut trainer = build();
    let mut net = Saving::new(folder.path());
    trainer.fit(&mut net, &mut loaders()).unwrap();
    let saved = Vec::<f32>::try_from(&Checkpoint::load(&best).unwrap().weights[0].1).unwrap();
    let weights = |net: &Saving| Vec::<f32>::try_from(net.weight.detach()).unwrap();
    for mut trainer in [trainer, build()] {
        for _ in 0..2 {
            let mut other = Saving::new(folder.path());
            trainer.ckpt_path("best").validate(&mut other, &mut loaders()).unwrap();
            assert_eq!(weights(&other), saved);
            trainer.ckpt_path("last").validate(&mut other, &mut loaders()).unwrap();
            assert_eq!(weights(&other), weights(&net));
        }
    }
}

#[test]
fn callbacks_that_save_by_different_times_go_together() {
    let build = |times: [&str; 2]| {
        let saver =
            |time: &str| json!({"class_path": "ModelCheckpoint", "init_args": {"train_time_interval": time}});
        let config = json!({"callbacks": times.map(saver), "logger": false});
        Trainer::builder().config(serde_json::from_value(config).unwrap()).build()
    };
    assert!(build(["00:00:10:00", "00:02:00:00"]).is_ok());
    assert_error!(
        build(["00:00:10:00", "00:00:10:00"]),
        "train_time_interval=600s",
        "change one of the settings that this name tells"
    );
}

/// The command, with the example of docs/loggers.md.
#[test]
fn the_command_tests_what_it_has_trained() {
    let root = TempDir::new().unwrap();
    let config = root.path().join("digits.yaml");
    let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/digits");
    let text = format!(
        "trainer:
  accelerator: cpu
  max_epochs: 1
  limit_train_batches: 2
  limit_val_batches: 1
  limit_test_batches: 1
  logger:
    - class_path: TensorBoardLogger
      init_args: {{name: digits, default_hp_metric: false}}
    - class_path: CSVLogger
model: {{class_path: LeNet}}
optimizer: {{class_path: AdamW, init_args: {{lr: 0.002}}}}
data: {{class_path: MnistData, init_args: {{batch_size: 4, data_dir: {}}}}}
",
        digits.display()
    );
    std::fs::write(&config, text).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_voltaic"));
        let output = command.args(arguments).arg("--config").arg(&config).current_dir(root.path()).output();
        let output = output.unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for ckpt_path in ["--ckpt_path=last", "--ckpt_path=best"] {
        let (code, errors) = run(&["test", ckpt_path]);
        assert_eq!(code, 2, "{errors}");
        assert_contains!(&errors, "there is no checkpoint in ", "digits/*/checkpoints");
    }
    let (code, errors) = run(&["fit", "--ckpt_path=last"]);
    assert_eq!(code, 0, "{errors}");
    for verb in ["test", "validate"] {
        for ckpt_path in ["--ckpt_path=last", "--ckpt_path=best"] {
            let (code, errors) = run(&[verb, ckpt_path]);
            assert_eq!(code, 0, "{errors}");
            assert!(errors.contains(&format!("{verb} with the weights of ./digits/")), "{errors}");
        }
    }
    let (code, errors) = run(&["test", "--ckpt_path=last", "--model=Mlp"]);
    for part in [".ckpt is of a LeNet: ", "; use it with a LeNet, or give a checkpoint of a Mlp"] {
        assert!(code == 1 && errors.contains(part), "{errors}");
    }
    let (code, errors) = run(&["fit", "--ckpt_path=last", "--trainer.max_epochs=2"]);
    assert!(code == 0 && errors.contains("at global_step 2"), "{errors}");
    assert!(!errors.contains("as configured"), "{errors}");
    let others = ["--optimizer.lr=0.5", "--optimizer.betas=[0.8, 0.999]", "--optimizer.weight_decay=0.1"];
    let (code, errors) = run(&[&["fit", "--ckpt_path=last", "--trainer.max_epochs=3"], &others[..]].concat());
    let expected = "the optimizer has lr=0.002, weight_decay=0.01, betas=[0.9,0.999] of the checkpoint, not lr=0.5, \
                    weight_decay=0.1, betas=[0.8,0.999] as configured";
    assert!(code == 0 && errors.contains(expected), "{errors}");
}
