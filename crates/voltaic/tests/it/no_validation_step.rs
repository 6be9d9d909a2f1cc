//! A fit whose module has no `validation_step`, with loaders to validate on: it warns once, and is a fit without validation.

use tempfile::TempDir;
use voltaic::callback::{EarlyStopping, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::data::Loaders;
use voltaic::optim::{LrSchedulerSpec, Optimizers, PlateauMode, ReduceLrOnPlateau, Sgd};
use voltaic::trainer::TrainerBuilder;

use crate::ddp::{FOLDER, folder_of_parent};
use crate::probe::{Events, Probe, loader, loaders, own_process, plays, silent, text_of};

type Build = fn(TrainerBuilder) -> TrainerBuilder;

const WARNING: &str = "the module has no validation_step, but there are batches for it; implement \
                       validation_step, or set limit_val_batches=0: this fit does not validate";

fn without() -> Probe {
    Probe { validate: None, ..Probe::default() }
}

/// The first validation has its hooks and no batch, and there is no other.
#[test]
fn it_validates_nothing() {
    let cases: [(&str, Build, &str); 5] = [
        ("sanity check", |t| t.max_epochs(2).limit_train_batches(2), "S0 t0* t1* e t0* t1* e"),
        (
            "without it",
            |t| t.max_epochs(2).num_sanity_val_steps(0),
            "t0* t1* t2* t3* t4* t5* V0 e t0* t1* t2* t3* t4* t5* e",
        ),
        (
            "within the epoch",
            |t| t.max_epochs(1).num_sanity_val_steps(0).val_check_interval(2),
            "t0* t1* V0 t2* t3* t4* t5* e",
        ),
        (
            "loaders are asked for again",
            |t| {
                let t = t.max_epochs(3).limit_train_batches(1).num_sanity_val_steps(0);
                t.reload_dataloaders_every_n_epochs(1_u64)
            },
            "t0* V0 e t0* e t0* e",
        ),
        ("fast_dev_run", |t| t.fast_dev_run(true), "t0* V0 e"),
    ];
    for (name, build, expected) in cases {
        let fit = |data: &mut Loaders<voltaic::Tensor>| {
            let events = Events::default();
            let mut net = without();
            build(silent().callback(events.clone())).build().unwrap().fit(&mut net, data).unwrap();
            (events.text(), net.weights())
        };
        let (text, weights) = fit(&mut loaders());
        assert_eq!(text, expected, "{name}");
        assert_eq!(weights, fit(&mut Loaders::new().train(loader(12))).1, "{name}");
    }
}

/// The warning comes once from all ranks together, of which one has no batch to validate on.
#[test]
fn it_says_so_once_on_one_rank_and_on_two() {
    for (part, ranks) in [("one", 1), ("two", 2)] {
        if plays(part) {
            let builder = silent().max_epochs(3).default_root_dir(folder_of_parent()).devices(ranks);
            let mut data = Loaders::new().train(loader(12)).val(loader(1));
            let mut net = without();
            builder.val_check_interval(1).build().unwrap().fit(&mut net, &mut data).unwrap();
            return;
        }
        let folder = TempDir::new().unwrap();
        let output = own_process(part).env(FOLDER, folder.path()).env_remove("RUST_LOG").output().unwrap();
        text_of(&output);
        let log = String::from_utf8_lossy(&output.stderr);
        assert_eq!(log.matches(WARNING).count(), 1, "{part}: {log}");
    }
}

/// What watches a metric of validation says that it is not there.
#[test]
fn what_watches_val_loss_says_what_is_missing() {
    if plays("checkpoint") {
        let dirpath = folder_of_parent();
        for every_n_train_steps in [None, Some(6)] {
            for steps in [0, 2] {
                let saver = ModelCheckpoint::new(ModelCheckpointConfig {
                    dirpath: Some(dirpath.clone()),
                    monitor: Some("val_loss".to_owned()),
                    every_n_train_steps,
                    ..ModelCheckpointConfig::default()
                });
                let builder = silent().max_epochs(1).num_sanity_val_steps(steps).enable_checkpointing(true);
                let mut trainer = builder.callback(saver.unwrap()).build().unwrap();
                trainer.fit(&mut without(), &mut loaders()).unwrap();
            }
        }
        return assert_eq!(std::fs::read_dir(&dirpath).unwrap().count(), 0);
    }
    let folder = TempDir::new().unwrap();
    let output =
        own_process("checkpoint").env(FOLDER, folder.path()).env_remove("RUST_LOG").output().unwrap();
    text_of(&output);
    let log = String::from_utf8_lossy(&output.stderr);
    let missing = "ModelCheckpoint.monitor: no metric `val_loss` has been logged";
    assert_eq!(log.matches(missing).count(), 4, "{log}");

    let builder = silent().max_epochs(2).callback(EarlyStopping::monitor("val_loss").unwrap());
    let error = builder.build().unwrap().fit(&mut without(), &mut loaders()).unwrap_err().to_string();
    assert!(error.contains("EarlyStopping.monitor: no metric `val_loss` has been logged"), "{error}");

    let plateau = || {
        let spec = LrSchedulerSpec::new(ReduceLrOnPlateau::new(PlateauMode::Min)).monitor("val_loss");
        Optimizers::new(Sgd::new(0.1)).scheduler(spec)
    };
    let mut net = Probe { optimizers: Box::new(plateau), ..without() };
    let error =
        silent().max_epochs(2).build().unwrap().fit(&mut net, &mut loaders()).unwrap_err().to_string();
    assert!(error.contains("lr_scheduler.monitor: no metric `val_loss` has been logged"), "{error}");
}
