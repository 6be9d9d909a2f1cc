//! What a run leaves behind: `metrics.csv`, checkpoints and their names.

use std::path::Path;

use tempfile::TempDir;
use voltaic::Error;
use voltaic::callback::{
    EarlyStopping, EarlyStoppingConfig, LambdaCallback, LinkText, Mode, ModelCheckpoint,
    ModelCheckpointConfig, SaveLast,
};
use voltaic::checkpoint::Checkpoint;
use voltaic::data::Loaders;
use voltaic::optim::{LrSchedulerSpec, Optimizers, ReduceLrOnPlateau, Sgd};
use voltaic::trainer::{Trainer, TrainerBuilder};

use crate::checkpoints::full_checkpoint;
use crate::probe::{Probe, loader, loaders, names, silent};

/// Values of Lightning's run that the names below were taken from.
const VAL_LOSSES: &[f64] = &[0.244_215_71, 0.047_477_1, 0.007_754_15, 0.002_935_6];

fn logging_to(root: &Path) -> TrainerBuilder {
    Trainer::builder().default_root_dir(root).enable_progress_bar(false).enable_model_summary(false)
}

/// Cells of `metrics.csv`; values of metrics are replaced by `x`.
fn layout(csv: &Path) -> String {
    let text = std::fs::read_to_string(csv).unwrap();
    let mut lines = text.lines();
    let header: Vec<&str> = lines.next().unwrap().split(',').collect();
    let mut layout = header.join(",");
    for line in lines {
        let cells = line.split(',').zip(&header).map(|(cell, column)| match (*column, cell) {
            ("step" | "epoch", cell) => cell,
            (_, "") => "",
            (_, number) => {
                assert!(number.parse::<f64>().is_ok(), "{number} in {column}");
                "x"
            }
        });
        layout += &format!("\n{}", cells.collect::<Vec<_>>().join(","));
    }
    layout
}

#[test]
fn metrics_csv_has_lightnings_columns_rows_and_steps() {
    let root = TempDir::new().unwrap();
    let logger = voltaic::logger::CsvLogger::new(root.path()).plots(false);
    let builder = logging_to(root.path()).enable_checkpointing(false).with_logger(logger);
    let mut trainer = builder.max_epochs(4).log_every_n_steps(2_u64).build().unwrap();
    trainer.fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
    let mut expected = "epoch,lr_x,step,train_loss_epoch,train_loss_step,val_loss".to_owned();
    for epoch in 0..4 {
        for step in [1, 3, 5] {
            expected += &format!("\n{epoch},x,{},,x,", epoch * 6 + step);
        }
        let last = epoch * 6 + 5;
        expected += &format!("\n{epoch},,{last},,,x\n{epoch},,{last},x,,");
    }
    assert_eq!(layout(&root.path().join("lightning_logs/version_0/metrics.csv")), expected);
    let mut known = trainer.metric_names();
    known.sort();
    assert_eq!(known, ["lr_x", "train_loss", "train_loss_epoch", "train_loss_step", "val_loss"]);
    assert_eq!(trainer.metric("val_loss"), Some(0.002_935_6_f32.into()));
}

#[test]
fn log_every_n_steps_counts_optimizer_steps() {
    for (every, accumulate, expected) in
        [(1_u64, 1_u64, vec![0, 1, 2, 3, 4, 5]), (4, 1, vec![3]), (0, 1, vec![]), (1, 4, vec![0, 1])]
    {
        let root = TempDir::new().unwrap();
        let logger = voltaic::logger::CsvLogger::new(root.path()).plots(false);
        let mut trainer = logging_to(root.path())
            .enable_checkpointing(false)
            .with_logger(logger)
            .max_epochs(1)
            .log_every_n_steps(every)
            .accumulate_grad_batches(accumulate)
            .build()
            .unwrap();
        trainer.fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
        let layout = layout(&root.path().join("lightning_logs/version_0/metrics.csv"));
        let columns: Vec<&str> = layout.lines().next().unwrap().split(',').collect();
        let of_step = columns.iter().position(|column| *column == "lr_x");
        let step = columns.iter().position(|column| *column == "step").unwrap();
        let rows = layout.lines().skip(1).map(|line| line.split(',').collect::<Vec<_>>());
        let steps: Vec<i32> = rows
            .filter(|row| of_step.is_some_and(|column| !row[column].is_empty()))
            .map(|row| row[step].parse().unwrap())
            .collect();
        assert_eq!(steps, expected, "every {every} steps, {accumulate} batches each");
    }
}

#[test]
fn metrics_of_several_loaders_are_told_apart() {
    let mut net = Probe {
        validate: Some(Box::new(|_, loss, ctx| {
            ctx.log("v", ctx.dataloader_idx() as f64 + 0.5);
            Ok(loss)
        })),
        ..Probe::default()
    };
    let mut data = Loaders::new().val(loader(4)).val(loader(2));
    let mut trainer = silent().build().unwrap();
    let metrics = trainer.validate(&mut net, &mut data).unwrap();
    let expected = [("v/dataloader_idx_0", 0.5), ("v/dataloader_idx_1", 1.5)];
    assert_eq!(metrics, expected.map(|(name, value)| (name.to_owned(), value)));
    assert_eq!(trainer.metric("v/dataloader_idx_1"), Some(1.5));
}

#[test]
fn epoch_values_of_training_are_weighted_by_batch_size() {
    let mut net = Probe {
        train: Box::new(|_, loss, ctx| {
            let value = ctx.batch_idx() as f64;
            ctx.log("index", value).on_epoch(true);
            ctx.log("sum", value).on_step(false).on_epoch(true).reduce_fx(voltaic::module::ReduceFx::Sum);
            Ok(loss)
        }),
        ..Probe::default()
    };
    let mut trainer = silent().max_epochs(1).build().unwrap();
    trainer.fit(&mut net, &mut Loaders::new().train(loader(5))).unwrap();
    // batches of 2, 2 and 1 samples
    assert_eq!(trainer.metric("index_epoch"), Some(((1.0_f32 * 2.0 + 2.0) / 5.0).into()));
    assert_eq!(trainer.metric("sum"), Some(3.0));
}

/// A row of the table: name, settings, epochs and other keys of the trainer, files, best.
type Row = (
    &'static str,
    fn(&mut ModelCheckpointConfig),
    fn(TrainerBuilder) -> TrainerBuilder,
    &'static [&'static str],
    &'static str,
);

fn top_2(config: &mut ModelCheckpointConfig) {
    config.monitor = Some("val_loss".to_owned());
    config.save_top_k = 2;
}

fn all(config: &mut ModelCheckpointConfig) {
    config.save_top_k = -1;
}

fn named(config: &mut ModelCheckpointConfig, filename: &str) {
    config.filename = Some(filename.to_owned());
}

const NAMES: [Row; 17] = [
    ("default", |_| {}, |t| t, &["epoch=2-step=18.ckpt"], "epoch=2-step=18.ckpt"),
    (
        "save_top_k=-1",
        all,
        |t| t,
        &["epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt", "epoch=2-step=18.ckpt"],
        "epoch=2-step=18.ckpt",
    ),
    ("save_top_k=0", |c| c.save_top_k = 0, |t| t, &[], ""),
    (
        "top 2, max",
        |c| {
            top_2(c);
            c.mode = Mode::Max;
        },
        |t| t,
        &["epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt"],
        "epoch=0-step=6.ckpt",
    ),
    (
        "top 2, min, filename",
        |c| {
            top_2(c);
            named(c, "{epoch:02d}-{val_loss:.2f}");
        },
        |t| t,
        &["epoch=01-val_loss=0.05.ckpt", "epoch=02-val_loss=0.01.ckpt"],
        "epoch=02-val_loss=0.01.ckpt",
    ),
    (
        "no auto insert",
        |c| {
            top_2(c);
            named(c, "e{epoch}-v{val_loss:.3f}");
            c.auto_insert_metric_name = false;
        },
        |t| t,
        &["e1-v0.047.ckpt", "e2-v0.008.ckpt"],
        "e2-v0.008.ckpt",
    ),
    (
        "every 4 steps, all",
        |c| {
            all(c);
            c.every_n_train_steps = Some(4);
        },
        |t| t,
        &["epoch=0-step=4.ckpt", "epoch=1-step=12.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=16.ckpt"],
        "epoch=2-step=16.ckpt",
    ),
    (
        "every 4 steps, save_last",
        |c| {
            c.every_n_train_steps = Some(4);
            c.save_last = SaveLast::Copy(true);
        },
        |t| t,
        &["epoch=2-step=16.ckpt", "last.ckpt"],
        "epoch=2-step=16.ckpt",
    ),
    (
        "save_last link",
        |c| {
            top_2(c);
            c.save_last = SaveLast::Link(LinkText::Link);
        },
        |t| t,
        &["epoch=1-step=12.ckpt", "epoch=2-step=18.ckpt", "last.ckpt@"],
        "epoch=2-step=18.ckpt",
    ),
    ("same file name", |c| named(c, "const"), |t| t, &["const.ckpt"], "const.ckpt"),
    (
        "same file name, no counter",
        |c| {
            named(c, "const");
            c.enable_version_counter = false;
        },
        |t| t,
        &["const.ckpt"],
        "const.ckpt",
    ),
    (
        "every second epoch",
        |c| {
            all(c);
            c.every_n_epochs = Some(2);
        },
        |t| t.max_epochs(4),
        &["epoch=1-step=12.ckpt", "epoch=3-step=24.ckpt"],
        "epoch=3-step=24.ckpt",
    ),
    (
        "val_check_interval=0.5",
        all,
        |t| t.max_epochs(2).val_check_interval(0.5),
        &["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt", "epoch=1-step=9.ckpt"],
        "epoch=1-step=12.ckpt",
    ),
    (
        "weights only",
        |c| c.save_weights_only = true,
        |t| t,
        &["epoch=2-step=18.ckpt"],
        "epoch=2-step=18.ckpt",
    ),
    (
        "unknown metric in the name",
        |c| named(c, "{epoch}-{nope}"),
        |t| t,
        &["epoch=2-nope=0.ckpt"],
        "epoch=2-nope=0.ckpt",
    ),
    (
        "limit_val_batches=0",
        all,
        |t| t.max_epochs(2).limit_val_batches(0),
        &["epoch=0-step=6.ckpt", "epoch=1-step=12.ckpt"],
        "epoch=1-step=12.ckpt",
    ),
    (
        "check_val_every_n_epoch=2",
        all,
        |t| t.max_epochs(4).check_val_every_n_epoch(2),
        &["epoch=1-step=12.ckpt", "epoch=3-step=24.ckpt"],
        "epoch=3-step=24.ckpt",
    ),
];

#[test]
fn checkpoints_have_lightnings_names() {
    for (name, configure, build, expected, best) in NAMES {
        let folder = TempDir::new().unwrap();
        let mut config = ModelCheckpointConfig { dirpath: Some(folder.path().into()), ..Default::default() };
        configure(&mut config);
        let is_weights_only = config.save_weights_only;
        let builder = silent().max_epochs(3).enable_checkpointing(true);
        let mut trainer = build(builder.callback(ModelCheckpoint::new(config).unwrap())).build().unwrap();
        trainer.fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
        assert_eq!(names(folder.path()), expected, "{name}");
        let found = trainer.best_model_path().map(|path| path.file_name().unwrap().to_owned());
        assert_eq!(found.unwrap_or_default(), best, "{name}");
        for file in crate::probe::files(folder.path()) {
            assert_eq!(Checkpoint::load(&file).unwrap().training.is_none(), is_weights_only, "{name}");
        }
    }
}

#[test]
fn a_name_that_another_run_took_gets_a_version() {
    let folder = TempDir::new().unwrap();
    for _ in 0..3 {
        let config = ModelCheckpointConfig { dirpath: Some(folder.path().into()), ..Default::default() };
        let builder = silent().max_epochs(1).enable_checkpointing(true);
        let mut trainer = builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap();
        trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    }
    let expected = ["epoch=0-step=6-v1.ckpt", "epoch=0-step=6-v2.ckpt", "epoch=0-step=6.ckpt"];
    assert_eq!(names(folder.path()), expected);
}

#[test]
fn a_run_that_ends_before_its_first_validation_is_kept() {
    let folder = TempDir::new().unwrap();
    let monitor = "val_loss".to_owned();
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.path().into()),
        monitor: Some(monitor.clone()),
        ..Default::default()
    };
    let stopping = EarlyStopping::new(EarlyStoppingConfig { monitor, ..Default::default() }).unwrap();
    let optimizers = || {
        let schedule = LrSchedulerSpec::new(ReduceLrOnPlateau::default()).monitor("val_loss");
        Optimizers::new(Sgd::new(0.5)).scheduler(schedule)
    };
    let mut net = Probe { optimizers: Box::new(optimizers), ..Probe::logging(VAL_LOSSES) };
    let builder = silent().max_steps(4).num_sanity_val_steps(0).enable_checkpointing(true);
    let builder = builder.callback(ModelCheckpoint::new(config).unwrap()).callback(stopping);
    builder.build().unwrap().fit(&mut net, &mut loaders()).unwrap();
    assert_eq!(names(folder.path()), ["epoch=0-step=4.ckpt"]);
}

#[test]
fn a_run_without_validation_or_checkpoint_ends_with_its_last() {
    for (save_last, expected) in [(SaveLast::Copy(true), &["last.ckpt"][..]), (SaveLast::No, &[])] {
        let folder = TempDir::new().unwrap();
        let dirpath = Some(folder.path().into());
        let config = ModelCheckpointConfig { dirpath, save_last, ..Default::default() };
        let builder = silent().max_steps(4).check_val_every_n_epoch(None).val_check_interval(250);
        let builder = builder.enable_checkpointing(true).callback(ModelCheckpoint::new(config).unwrap());
        let mut trainer = builder.build().unwrap();
        trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
        assert_eq!(names(folder.path()), expected);
        let last = trainer.last_model_path();
        assert_eq!(
            last.map(|path| Checkpoint::load(&path).unwrap().training.is_some()),
            expected.first().map(|_| true)
        );
    }
}

#[test]
fn last_is_the_newest_checkpoint_wherever_it_goes() {
    let root = TempDir::new().unwrap();
    let elsewhere = root.path().join("elsewhere");
    let fit = |dirpath: Option<&Path>, epochs: i64, ckpt: Option<&str>| {
        let config = ModelCheckpointConfig { dirpath: dirpath.map(Into::into), ..Default::default() };
        let logger = voltaic::logger::CsvLogger::new(root.path()).plots(false);
        let builder = logging_to(root.path()).with_logger(logger).max_epochs(epochs);
        let mut trainer = builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap();
        if let Some(ckpt) = ckpt {
            trainer.ckpt_path(ckpt);
        }
        trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
        trainer.global_step()
    };
    assert_eq!(fit(None, 1, Some("last")), 6, "nothing to resume is not an error");
    assert_eq!(fit(None, 1, Some("last")), 6, "the first epoch is done");
    assert_eq!(names(&root.path().join("lightning_logs/version_1/checkpoints")).len(), 0);
    assert_eq!(fit(Some(&elsewhere), 2, Some("last")), 12);
    std::fs::write(elsewhere.join(".last.ckpt.1-1.tmp"), "half").unwrap();
    std::fs::write(elsewhere.join("notes.txt"), "none").unwrap();
    std::os::unix::fs::symlink("gone.ckpt", elsewhere.join("last.ckpt")).unwrap();
    assert_eq!(fit(Some(&elsewhere), 2, Some("last")), 12, "found in the callback's folder, and done");
    assert!(!elsewhere.join(".last.ckpt.1-1.tmp").exists(), "left by a run that was killed");
}

#[test]
fn weights_alone_cannot_be_resumed_and_say_so() {
    let folder = TempDir::new().unwrap();
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.path().into()),
        save_weights_only: true,
        ..Default::default()
    };
    let builder = silent().max_epochs(1).enable_checkpointing(true);
    let mut trainer = builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap();
    let mut net = Probe::default();
    trainer.fit(&mut net, &mut loaders()).unwrap();
    assert_error!(trainer.ckpt_path("best").fit(&mut net, &mut loaders()), "weights only", "; resume from");
    let mut other = Probe::default();
    trainer.ckpt_path("best").validate(&mut other, &mut loaders()).unwrap();
    assert_eq!(net.weights(), other.weights());
}

#[test]
fn a_checkpoint_of_ones_own_is_written_when_the_batch_is_over() {
    let root = TempDir::new().unwrap();
    let mut trainer = silent()
        .default_root_dir(root.path())
        .max_steps(3)
        .callback(LambdaCallback::new().on_train_batch_end(|ctx, _| {
            let path = ctx.facts().default_root_dir.join(format!("{}.ckpt", ctx.global_step()));
            ctx.request_checkpoint(full_checkpoint(path));
            Ok(())
        }))
        .build()
        .unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    assert_eq!(names(root.path()), ["1.ckpt", "2.ckpt", "3.ckpt"]);
    let second = Checkpoint::load(root.path().join("2.ckpt")).unwrap();
    assert_eq!(
        (second.meta.global_step, second.training.unwrap().json["progress"]["batch_idx"].as_u64()),
        (2, Some(2))
    );
}

#[test]
fn callbacks_whose_states_would_mix_are_refused() {
    let save = || ModelCheckpoint::new(ModelCheckpointConfig::default()).unwrap();
    let error = silent().enable_checkpointing(true).callback(save()).callback(save()).build();
    let Some(Error::Config(error)) = error.err() else { panic!("accepted") };
    assert_eq!(error.problems[0].key, "trainer.callbacks");
}

#[test]
fn the_checkpoint_that_a_run_goes_on_from_is_not_replaced() {
    let _rng = crate::rng::seeded(0); // a resumed run sets the random states
    let folder = TempDir::new().unwrap();
    let fit = |max_epochs: i64, ckpt: Option<&str>| {
        let config = ModelCheckpointConfig { dirpath: Some(folder.path().into()), ..Default::default() };
        let builder = silent().enable_checkpointing(true).max_epochs(max_epochs);
        let mut trainer = builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap();
        if let Some(ckpt) = ckpt {
            trainer.ckpt_path(folder.path().join(ckpt).to_str().unwrap());
        }
        trainer.fit(&mut Probe::logging(&[0.5; 8]), &mut loaders()).unwrap();
        names(folder.path())
    };
    let first = fit(1, None);
    assert_eq!(first.len(), 1);
    let then = fit(3, Some(&first[0]));
    assert!(then.len() == 2 && then.contains(&first[0]), "{then:?}"); // the one of epoch 1 was replaced
}
