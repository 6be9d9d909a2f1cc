//! Which checkpoint is the last one, also after copies, damage and kills; and what is on disk when it is.

use std::fs::{File, FileTimes};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use serde_json::Value;
use tempfile::TempDir;
use voltaic::callback::{LambdaCallback, LinkText, ModelCheckpoint, ModelCheckpointConfig, SaveLast};
use voltaic::checkpoint::{AsyncCheckpointIo, Checkpoint, CheckpointIo, FileCheckpointIo};
use voltaic::logger::{CsvLogger, CsvLoggerConfig, Version};
use voltaic::trainer::{Trainer, TrainerBuilder};

use crate::ddp::{FOLDER, folder_of_parent};
use crate::probe::{Probe, files, loaders, names, own_process, plays, silent, text_of};
use crate::rng::seeded;

/// Keeps a checkpoint of each second step.
fn saver(folder: &Path) -> ModelCheckpoint {
    let config = ModelCheckpointConfig {
        dirpath: Some(folder.to_path_buf()),
        filename: Some("{step}".to_owned()),
        save_top_k: -1,
        every_n_train_steps: Some(2),
        ..ModelCheckpointConfig::default()
    };
    ModelCheckpoint::new(config).unwrap()
}

fn trainer(folder: &Path, max_steps: i64) -> Trainer {
    let builder = silent().enable_checkpointing(true).max_epochs(-1).max_steps(max_steps);
    builder.callback(saver(folder)).build().unwrap()
}

fn fit(folder: &Path, max_steps: i64) {
    trainer(folder, max_steps).fit(&mut Probe::default(), &mut loaders()).unwrap();
}

/// The step from which `last` goes on, in a process that knows no checkpoints yet.
fn last_step(folder: &Path) -> Result<u64, String> {
    let mut trainer = trainer(folder, 0);
    let ended = trainer.ckpt_path("last").fit(&mut Probe::default(), &mut loaders());
    ended.map(|()| trainer.global_step()).map_err(|error| error.to_string())
}

fn set_time(path: &Path, time: SystemTime) {
    File::options().write(true).open(path).unwrap().set_times(FileTimes::new().set_modified(time)).unwrap();
}

#[test]
fn times_of_files_do_not_matter() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    fit(folder.path(), 8);
    let hour = Duration::from_secs(3600);
    for step in [2, 4, 6, 8] {
        // as after a copy in another order
        set_time(&folder.path().join(format!("step={step}.ckpt")), SystemTime::now() - hour * step);
    }
    assert_eq!(last_step(folder.path()).unwrap(), 8);
    set_time(&folder.path().join("step=2.ckpt"), SystemTime::now() + hour);
    assert_eq!(last_step(folder.path()).unwrap(), 8);
}

#[test]
fn a_run_that_begins_again_in_the_folder_has_the_last() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    fit(folder.path(), 8);
    fit(folder.path(), 4);
    assert!(names(folder.path()).contains(&"step=4-v1.ckpt".to_owned()));
    assert_eq!(last_step(folder.path()).unwrap(), 4);
}

#[test]
fn a_damaged_one_is_passed_over() {
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    fit(folder.path(), 8);
    let path = |step: u64| folder.path().join(format!("step={step}.ckpt"));
    let damage: [(u64, fn(&mut Vec<u8>)); 3] = [
        (8, |bytes| bytes.truncate(bytes.len() - 1)),
        (6, |bytes| *bytes.last_mut().unwrap() ^= 1),
        (4, |bytes| bytes.clear()),
    ];
    for (step, damage) in damage {
        let mut bytes = std::fs::read(path(step)).unwrap();
        damage(&mut bytes);
        std::fs::write(path(step), bytes).unwrap();
        assert_eq!(last_step(folder.path()).unwrap(), step - 2);
    }
    std::fs::write(path(2), "hello").unwrap();
    assert_error!(last_step(folder.path()), "not a readable checkpoint");
}

/// Calls a function after each file that is written, linked or removed.
struct AfterEach<F>(F);

impl<F: FnMut() + Send> CheckpointIo for AfterEach<F> {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        options: Option<&Value>,
    ) -> voltaic::Result<()> {
        FileCheckpointIo.save_checkpoint(checkpoint, path, options)?;
        (self.0)();
        Ok(())
    }

    fn remove_checkpoint(&mut self, path: &Path) -> voltaic::Result<()> {
        FileCheckpointIo.remove_checkpoint(path)?;
        (self.0)();
        Ok(())
    }

    fn link_checkpoint(&mut self, target: &Path, path: &Path) -> voltaic::Result<()> {
        FileCheckpointIo.link_checkpoint(target, path)?;
        (self.0)();
        Ok(())
    }
}

/// Another run saves in the folder before the first checkpoint of this one is written.
struct Overtaken(PathBuf, bool);

impl CheckpointIo for Overtaken {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        options: Option<&Value>,
    ) -> voltaic::Result<()> {
        if !std::mem::replace(&mut self.1, true) {
            text_of(&own_process("other run").env(FOLDER, &self.0).output().unwrap());
        }
        FileCheckpointIo.save_checkpoint(checkpoint, path, options)
    }
}

#[test]
fn two_runs_in_one_folder_do_not_take_the_same_names() {
    if plays("other run") {
        return fit(&folder_of_parent(), 4);
    }
    let _rng = seeded(1);
    let folder = TempDir::new().unwrap();
    let builder = silent().enable_checkpointing(true).max_epochs(-1).max_steps(4);
    let builder = builder.checkpoint_io(Overtaken(folder.path().to_path_buf(), false));
    let mut trainer = builder.callback(saver(folder.path())).build().unwrap();
    trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    drop(trainer);
    let expected = ["step=2-v1.ckpt", "step=2.ckpt", "step=4-v1.ckpt", "step=4.ckpt"];
    assert_eq!(names(folder.path()), expected);
}

#[test]
fn the_link_leads_to_a_checkpoint_at_every_moment() {
    let _rng = seeded(1);
    for is_async in [false, true] {
        let folder = TempDir::new().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (notes, last) = (Arc::clone(&seen), folder.path().join("last.ckpt"));
        let watched = AfterEach(move || {
            let is_broken = last.symlink_metadata().is_ok() && !last.exists();
            notes.lock().unwrap().push(if is_broken { "nowhere" } else { "somewhere" });
        });
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.path().to_path_buf()),
            save_last: SaveLast::Link(LinkText::Link),
            ..ModelCheckpointConfig::default()
        };
        let builder = silent().enable_checkpointing(true).max_epochs(3);
        let builder = builder.callback(ModelCheckpoint::new(config).unwrap());
        let builder = match is_async {
            true => builder.checkpoint_io(AsyncCheckpointIo::around(watched)),
            false => builder.checkpoint_io(watched),
        };
        builder.build().unwrap().fit(&mut Probe::default(), &mut loaders()).unwrap();
        assert_eq!(names(folder.path()), ["epoch=2-step=18.ckpt", "last.ckpt@"]);
        assert_eq!(*seen.lock().unwrap(), ["somewhere"; 8], "asynchronous: {is_async}");
    }
}

fn logging_to(root: &Path) -> TrainerBuilder {
    let builder = Trainer::builder().default_root_dir(root).enable_progress_bar(false);
    builder
        .enable_model_summary(false)
        .with_logger(CsvLogger::new(root).plots(false))
        .log_every_n_steps(1_u64)
}

#[test]
fn rows_are_on_disk_before_the_checkpoint_that_follows_them() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let csv = root.path().join("lightning_logs/version_0/metrics.csv");
    let folder = root.path().join("checkpoints");
    let rows = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&rows);
    let (path, saved) = (csv.clone(), folder.clone());
    let looks = LambdaCallback::new().on_train_batch_start(move |ctx, _| {
        let step = ctx.global_step();
        if step > 0 && step.is_multiple_of(2) {
            assert!(saved.join(format!("step={step}.ckpt")).exists());
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            seen.lock().unwrap().push((step, text.lines().skip(1).count()));
        }
        Ok(())
    });
    let builder =
        logging_to(root.path()).max_epochs(1).limit_val_batches(0).callback(saver(&folder)).callback(looks);
    builder.build().unwrap().fit(&mut Probe::logging(&[]), &mut loaders()).unwrap();
    let rows = rows.lock().unwrap().clone();
    assert_eq!(rows.len(), 2);
    for (step, rows) in rows {
        assert!(rows as u64 >= step, "{rows} rows are on disk with the checkpoint of step {step}");
    }
}

#[test]
fn what_killed_runs_have_left_goes_when_the_next_begins() {
    let _rng = seeded(1);
    let root = TempDir::new().unwrap();
    let saver = || ModelCheckpoint::new(ModelCheckpointConfig::default()).unwrap();
    let run = || {
        let mut trainer = logging_to(root.path()).max_epochs(1).callback(saver()).build().unwrap();
        trainer.fit(&mut Probe::default(), &mut loaders()).unwrap();
    };
    run();
    let version = root.path().join("lightning_logs/version_0");
    let own = [
        "checkpoints/.last.ckpt.aB3dEf7hIj0k.tmp",
        ".metrics.csv.aB3dEf7hIj0k.tmp",
        "checkpoints/.a.ckpt.7-0.tmp",
    ];
    let foreign = ["checkpoints/.notes.tmp", ".mine.ckpt.tmp"];
    own.iter().chain(&foreign).for_each(|name| std::fs::write(version.join(name), "x").unwrap());
    run();
    assert!(root.path().join("lightning_logs/version_1").exists());
    own.iter().for_each(|name| assert!(!version.join(name).exists(), "{name}"));
    foreign.iter().for_each(|name| assert!(version.join(name).exists(), "{name}"));
}

/// Copies the files of a folder, links as links.
fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        match std::fs::read_link(&path) {
            Ok(target) => std::os::unix::fs::symlink(target, to).unwrap(),
            Err(_) => std::fs::copy(&path, to).map(drop).unwrap(),
        }
    }
}

type Build = fn(TrainerBuilder, &dyn Fn(&str, Option<&str>, i64) -> ModelCheckpointConfig) -> TrainerBuilder;

/// Three callbacks that save at the end of each epoch; the best epochs are not the last.
fn by_epochs(
    builder: TrainerBuilder,
    saver: &dyn Fn(&str, Option<&str>, i64) -> ModelCheckpointConfig,
    save_last: SaveLast,
) -> TrainerBuilder {
    let savers = [
        saver("newest", None, 1),
        ModelCheckpointConfig { save_last, ..saver("val", Some("val_loss"), 1) },
        saver("train", Some("train_loss"), 2),
    ];
    savers.into_iter().fold(builder.max_epochs(3), |builder, config| {
        builder.callback(ModelCheckpoint::new(config).unwrap())
    })
}

/// A limit within the second epoch, which ends with its hooks and files.
fn by_steps(
    builder: TrainerBuilder,
    saver: &dyn Fn(&str, Option<&str>, i64) -> ModelCheckpointConfig,
) -> TrainerBuilder {
    let steps = ModelCheckpointConfig { every_n_train_steps: Some(4), ..saver("steps", None, -1) };
    [steps, saver("train", Some("train_loss"), -1)]
        .into_iter()
        .fold(builder.max_steps(8), |builder, config| builder.callback(ModelCheckpoint::new(config).unwrap()))
}

/// A run that writes its rows and checkpoints to one folder below `root`.
fn fit_in_folder(build: Build, root: &Path, io: impl CheckpointIo + 'static, is_resumed: bool) -> Trainer {
    const VAL_LOSSES: &[f64] = &[0.5, 0.25, 0.75];
    let logger = CsvLoggerConfig {
        version: Some(Version::Name("v".to_owned())),
        plots: false,
        ..CsvLoggerConfig::default()
    };
    let folder = root.join("lightning_logs/v");
    let builder =
        Trainer::builder().default_root_dir(root).enable_progress_bar(false).log_every_n_steps(1_u64);
    let builder = builder.enable_model_summary(false).with_logger(CsvLogger::from_config(logger, root));
    let saver = |name: &str, monitor: Option<&str>, save_top_k| ModelCheckpointConfig {
        dirpath: Some(folder.clone()),
        filename: Some(format!("{name}-{{epoch}}-{{step}}")),
        monitor: monitor.map(str::to_owned),
        save_top_k,
        ..ModelCheckpointConfig::default()
    };
    let mut trainer = build(builder, &saver).checkpoint_io(io).build().unwrap();
    if is_resumed {
        trainer.ckpt_path("last");
    }
    trainer.fit(&mut Probe::logging(VAL_LOSSES), &mut loaders()).unwrap();
    trainer
}

/// State of the callbacks that save, by name, in a checkpoint of the last step in a folder.
fn states_of(folder: &Path) -> Vec<(String, Value)> {
    let saved = files(folder).into_iter().filter(|path| path.extension().is_some_and(|end| end == "ckpt"));
    let saved = saved.map(|path| Checkpoint::load(path).unwrap());
    let json = saved.max_by_key(|saved| saved.meta.global_step).unwrap().training.unwrap().json;
    let states: Vec<(String, Value)> = serde_json::from_value(json["callbacks"].clone()).unwrap();
    states.into_iter().filter(|(key, _)| key.starts_with("ModelCheckpoint")).collect()
}

/// A process may be killed between two of the files of a moment, the first of which names the others already, and between the last
/// file of a limit within an epoch and the epoch's end.
#[test]
fn a_run_killed_between_two_files_writes_the_rest_when_it_is_resumed() {
    let _rng = seeded(1);
    let builds: [Build; 3] = [
        |builder, saver| by_epochs(builder, saver, SaveLast::Copy(true)),
        |builder, saver| by_epochs(builder, saver, SaveLast::Link(LinkText::Link)),
        |builder, saver| by_steps(builder, saver),
    ];
    for (number, build) in builds.into_iter().enumerate() {
        let (root, kept) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let folder = root.path().join("lightning_logs/v");
        let count = Arc::new(Mutex::new(0));
        let (counts, from, to) = (Arc::clone(&count), folder.clone(), kept.path().to_path_buf());
        // what is on disk, as a process that is killed then leaves it
        let keep = AfterEach(move || {
            let mut count = counts.lock().unwrap();
            copy_files(&from, &to.join(count.to_string()));
            *count += 1;
        });
        fit_in_folder(build, root.path(), keep, false);
        let (expected, states) = (files(&folder), states_of(&folder));
        let content = |path: &PathBuf| match path.extension().is_some_and(|end| end == "ckpt") {
            true => {
                format!("{:?}", Vec::<f32>::try_from(&Checkpoint::load(path).unwrap().weights[0].1).unwrap())
            }
            false => std::fs::read_to_string(path).unwrap(),
        };
        let contents: Vec<String> = expected.iter().map(content).collect();
        let count = *count.lock().unwrap();
        assert!(count >= 4, "{count}");
        for moment in 0..count {
            let at = format!("build {number}, after {moment} of {count}");
            std::fs::remove_dir_all(&folder).unwrap();
            copy_files(&kept.path().join(moment.to_string()), &folder);
            let left = files(&folder);
            fit_in_folder(build, root.path(), FileCheckpointIo, true);
            let found = files(&folder);
            let more = found.iter().filter(|path| !expected.contains(path)).collect::<Vec<_>>();
            assert!(more.iter().all(|path| left.contains(path)), "{at}: {more:?}");
            for (path, own) in expected.iter().zip(&contents) {
                assert!(found.contains(path), "{at}: {} is not among {found:?}", path.display());
                assert_eq!(content(path), *own, "{at}: {}", path.display());
            }
            assert_eq!(states_of(&folder), states, "{at}");
        }
    }
}
