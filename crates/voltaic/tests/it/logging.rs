//! Rules of `ctx.log` that show in the loggers' files; rows are those of Lightning 2.6.6.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tempfile::TempDir;
use voltaic::callback::LambdaCallback;
use voltaic::data::{DataLoader, DataModule, Loaders};
use voltaic::logger::CsvLogger;
use voltaic::module::{Hook, LightningModule, StepContext};
use voltaic::optim::Optimizers;
use voltaic::trainer::TrainerBuilder;
use voltaic::{Module, Tensor};

use crate::probe::{Probe, loader, loaders, silent};

fn csv(root: &TempDir, version: u64) -> String {
    let path = root.path().join(format!("lightning_logs/version_{version}/metrics.csv"));
    std::fs::read_to_string(path).unwrap()
}

fn trainer(root: &TempDir) -> TrainerBuilder {
    let logger = CsvLogger::new(root.path()).plots(false);
    silent().max_epochs(2).log_every_n_steps(2_u64).with_logger(logger)
}

fn net() -> Probe {
    Probe {
        validate: Some(Box::new(|_, loss, ctx| {
            let value = (ctx.batch_idx() + 10 * ctx.dataloader_idx()) as f64;
            ctx.log("v", value).on_step(true).on_epoch(true);
            ctx.log("w", ctx.batch_idx() as f64).on_step(true).on_epoch(false);
            Ok(loss)
        })),
        ..Probe::default()
    }
}

#[test]
fn values_of_validation_steps_have_rows_of_their_own() {
    let root = TempDir::new().unwrap();
    trainer(&root)
        .build()
        .unwrap()
        .fit(&mut net(), &mut Loaders::new().train(loader(8)).val(loader(6)))
        .unwrap();
    let expected = "epoch,step,v_epoch,v_step,w\n\
        ,0,,0,0\n,1,,1,1\n,2,,2,2\n0,3,1,,\n\
        ,3,,0,0\n,4,,1,1\n,5,,2,2\n1,7,1,,\n";
    assert_eq!(csv(&root, 0).trim_end(), expected.trim_end());
}

#[test]
fn values_of_several_loaders_have_the_loader_last() {
    let root = TempDir::new().unwrap();
    let mut data = Loaders::new().val(loader(4)).val(loader(4));
    let metrics = trainer(&root).build().unwrap().validate(&mut net(), &mut data).unwrap();
    let expected = [("v_epoch/dataloader_idx_0", 0.5), ("v_epoch/dataloader_idx_1", 10.5)];
    assert_eq!(metrics, expected.map(|(name, value)| (name.to_owned(), value)));
    let expected = "epoch,step,v_epoch/dataloader_idx_0,v_epoch/dataloader_idx_1,v_step/dataloader_idx_0,\
        v_step/dataloader_idx_1,w/dataloader_idx_0,w/dataloader_idx_1\n\
        ,0,,,0,,0,\n,1,,,1,,1,\n,0,,,,10,,0\n,1,,,,11,,1\n0,0,0.5,10.5,,,,\n";
    assert_eq!(csv(&root, 0).trim_end(), expected.trim_end());
}

#[test]
fn a_value_without_its_loader_is_of_all_loaders() {
    let mut net = Probe {
        validate: Some(Box::new(|_, loss, ctx| {
            ctx.log("v", ctx.dataloader_idx() as f64).add_dataloader_idx(false);
            Ok(loss)
        })),
        ..Probe::default()
    };
    let mut data = Loaders::new().val(loader(4)).val(loader(12));
    let metrics = silent().build().unwrap().validate(&mut net, &mut data).unwrap();
    assert_eq!(metrics, [("v".to_owned(), 0.75)]);
}

#[test]
fn a_value_called_step_takes_the_place_of_the_step() {
    let root = TempDir::new().unwrap();
    let mut net = Probe {
        validate: Some(Box::new(|_, loss, ctx| {
            ctx.log("v", 0.5);
            ctx.log("step", (100 + ctx.current_epoch()) as f64);
            Ok(loss)
        })),
        ..Probe::default()
    };
    let mut data = Loaders::new().train(loader(8)).val(loader(4));
    trainer(&root).build().unwrap().fit(&mut net, &mut data).unwrap();
    assert_eq!(csv(&root, 0).trim_end(), "epoch,step,v\n0,100,0.5\n1,101,0.5");
}

/// Data with hyper-parameters.
struct Data(Loaders<Tensor>, Value);

impl DataModule for Data {
    type Batch = Tensor;

    fn hyper_parameters(&self) -> Value {
        self.1.clone()
    }

    fn train_dataloader(&mut self) -> anyhow::Result<Option<DataLoader<Tensor>>> {
        self.0.train_dataloader()
    }
}

#[derive(Module)]
struct Net(Probe);

impl LightningModule for Net {
    type Batch = Tensor;

    fn training_step(&self, batch: &Tensor, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        self.0.training_step(batch, ctx)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.0.configure_optimizers()
    }

    fn hyper_parameters(&self) -> Value {
        json!({"width": 2, "seed": 1})
    }
}

#[test]
fn hyper_parameters_of_module_and_data_are_joined() {
    let root = TempDir::new().unwrap();
    let fit = |data: Value, autolog: bool| {
        let mut data = Data(Loaders::new().train(loader(4)), data);
        let mut trainer = trainer(&root).max_epochs(1).enable_autolog_hparams(autolog).build().unwrap();
        trainer.fit(&mut Net(Probe::default()), &mut data).map_err(|error| error.to_string())
    };
    fit(json!({"samples": 4, "seed": 1}), true).unwrap();
    let path = root.path().join("lightning_logs/version_0/hparams.yaml");
    assert_eq!(std::fs::read_to_string(path).unwrap(), "width: 2\nseed: 1\nsamples: 4\n");
    assert_error!(
        fit(json!({"seed": 2}), true),
        "hyper_parameters: `seed` is 1 in the module and 2 in the data module; use"
    );
    fit(json!({"seed": 2}), false).unwrap();
}

/// The mean of the epoch, not the loss of its last batch: it decides about early stopping, checkpoints and schedules.
#[test]
fn at_the_end_of_an_epoch_a_metric_has_the_value_of_the_epoch() {
    let (seen, losses) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let (of_hook, of_step) = (seen.clone(), losses.clone());
    let watch = LambdaCallback::new().on(Hook::OnTrainEpochEnd, move |ctx, _| {
        of_hook.lock().unwrap().push(ctx.metric("loss").unwrap());
        Ok(())
    });
    let mut probe = Probe {
        train: Box::new(move |_, loss, ctx| {
            of_step.lock().unwrap().push(loss.double_value(&[]));
            ctx.log("loss", &loss).on_epoch(true);
            Ok(loss)
        }),
        ..Probe::default()
    };
    let mut trainer = silent().max_epochs(2).callback(watch).build().unwrap();
    trainer.fit(&mut probe, &mut loaders()).unwrap();
    let losses = losses.lock().unwrap();
    let means: Vec<f64> = losses.chunks(6).map(|epoch| epoch.iter().sum::<f64>() / 6.0).collect();
    for (seen, mean) in seen.lock().unwrap().iter().zip(&means) {
        assert!((seen - mean).abs() < 1e-5, "{seen} is not {mean}");
    }
    assert_eq!(means.len(), 2);
}

/// The key of a logged value is (hook, name), and the later hook has the public name: what Lightning 2.6.6 gives for the same calls.
#[test]
fn a_name_that_two_hooks_log_is_that_of_the_later_hook() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let of_hook = seen.clone();
    let watch = LambdaCallback::new()
        .on(Hook::OnValidationEpochEnd, |ctx, _| {
            ctx.log("val_loss", 100.0);
            ctx.log("v", 100.0);
            Ok(())
        })
        .on(Hook::OnTrainEpochEnd, move |ctx, _| {
            let names = ["val_loss", "v", "v_epoch", "x"];
            of_hook.lock().unwrap().push(names.map(|name| ctx.metric(name)));
            ctx.log("x", 100.0);
            Ok(())
        });
    let mut net = Probe {
        train: Box::new(|_, loss, ctx| {
            ctx.log("x", 0.5).on_step(false).on_epoch(true);
            Ok(loss)
        }),
        validate: Some(Box::new(|_, loss, ctx| {
            ctx.log("val_loss", 0.5);
            ctx.log("v", 0.5).on_step(true).on_epoch(true);
            Ok(loss)
        })),
        ..Probe::default()
    };
    let root = TempDir::new().unwrap();
    let mut trainer = trainer(&root).callback(watch).build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader(8)).val(loader(4))).unwrap();
    let expected = [Some(100.0), Some(100.0), Some(0.5), Some(0.5)];
    assert_eq!(*seen.lock().unwrap(), [expected, expected]);
    assert_eq!(trainer.metric("x"), Some(100.0));
    let rows = csv(&root, 0);
    let header: Vec<&str> = rows.lines().next().unwrap().split(',').collect();
    assert_eq!(header, ["epoch", "step", "v", "v_epoch", "v_step", "val_loss", "x"]);
    assert!(rows.lines().any(|row| row == "1,7,100,0.5,,100,"), "{rows}");
    assert!(rows.lines().any(|row| row == "1,7,,,,,100"), "{rows}");
}
