//! Checkpoints when things go badly: `kill -9` at any moment, a full disk.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use tempfile::TempDir;
use voltaic::callback::{LambdaCallback, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::{AsyncCheckpointIo, Checkpoint, CheckpointIo};
use voltaic::error::Result;
use voltaic::trainer::PluginConfig;
use voltaic::{Kind, Tensor};

use crate::heavy::{BALLAST, Heavy, saver};
use crate::probe::{files, loaders, names, own_process, own_thread, plays, silent, text_of};

const KILLS: usize = 20;
const LANES: usize = 2;
/// So many kills have to hit a file half written.
const HITS: usize = 3;
const FOLDER: &str = "VOLTAIC_TEST_FOLDER";
/// Checkpoints are written while training goes on.
const ASYNC: &str = "VOLTAIC_TEST_ASYNC";

fn train_until_killed(folder: &Path) {
    let mut builder = silent().enable_checkpointing(true).limit_val_batches(0).max_epochs(-1);
    if std::env::var_os(ASYNC).is_some() {
        builder = builder.plugins(vec![PluginConfig::AsyncCheckpointIo]);
    }
    let mut trainer = builder
        .callback(LambdaCallback::new().on_train_start(|ctx, _| {
            println!("starts at {}", ctx.global_step());
            Ok(())
        }))
        .callback(saver(folder))
        .build()
        .unwrap();
    trainer.ckpt_path("last").fit(&mut Heavy::new(), &mut loaders()).unwrap();
}

/// Starts a training process; returns it and the step it starts at.
fn start(folder: &Path, is_async: bool) -> (Child, u64) {
    let mut child = own_process("trainer")
        .env(FOLDER, folder)
        .envs(is_async.then_some((ASYNC, "1")))
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let step = lines.map_while(Result::ok).find_map(|line| line.split_once("starts at ")?.1.parse().ok());
    (child, step.expect("the run starts"))
}

/// Steps of the checkpoints that are there; each has to load completely.
fn saved_steps(folder: &Path) -> Vec<u64> {
    let checkpoints = files(folder).into_iter().filter(|path| path.extension().is_some_and(|e| e == "ckpt"));
    let steps = checkpoints.map(|path| {
        let checkpoint = Checkpoint::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let training = checkpoint.training.expect("a full checkpoint");
        assert_eq!((checkpoint.weights[0].1.numel(), training.optimizers[0].len()), (BALLAST as usize, 3));
        let step = checkpoint.meta.global_step;
        // one learning rate a step, whatever the gradient: the weights are of that very step
        assert_eq!(training.json["progress"]["global_step"].as_u64(), Some(step));
        step
    });
    steps.collect()
}

/// With `VOLTAIC_TEST_ALL=1` more.
fn kills() -> usize {
    if std::env::var_os("VOLTAIC_TEST_ALL").is_some() { 5 * KILLS } else { KILLS }
}

/// Kills and resumes one run again and again; returns how many kills hit a file half written.
fn lane(seed: u64, is_async: bool) -> usize {
    let folder = TempDir::new().unwrap();
    let mut rng = StdRng::seed_from_u64(seed);
    let mut hits = 0;
    let mut newest = 0;
    let mut longest = 60_000;
    let mut round = 0;
    // on a busy machine a save takes longer, and it takes more kills to hit some
    while round < kills() / LANES || (hits < HITS / LANES + 1 && round < 4 * kills() / LANES) {
        round += 1;
        let (mut child, started_at) = start(folder.path(), is_async);
        // two files of one moment may be of two neighbouring steps
        assert!(started_at + 1 >= newest, "round {round}: {started_at} after {newest}");
        std::thread::sleep(Duration::from_micros(rng.random_range(0..longest)));
        child.kill().unwrap();
        child.wait().unwrap();
        hits += usize::from(names(folder.path()).iter().any(|name| name.ends_with(".tmp")));
        let saved = saved_steps(folder.path()).into_iter().max().unwrap_or(0);
        assert!(saved >= newest, "round {round}: {saved} after {newest}");
        if saved == newest {
            longest = (2 * longest).min(4_000_000);
        }
        newest = saved;
        assert!(names(folder.path()).len() <= 3, "leftovers add up: {:?}", names(folder.path()));
    }
    assert!(newest > kills() as u64 / 4, "only {newest} steps were done");
    hits
}

#[test]
fn a_killed_run_leaves_whole_checkpoints_and_goes_on() {
    if plays("trainer") {
        return train_until_killed(&PathBuf::from(std::env::var_os(FOLDER).unwrap()));
    }
    let started = Instant::now();
    let lanes: Vec<_> = (0..LANES as u64)
        .map(|seed| own_thread().spawn(move || lane(seed, seed % 2 == 1)).unwrap())
        .collect();
    let hits: usize = lanes.into_iter().map(|lane| lane.join().unwrap()).sum();
    println!("{hits} kills hit a file half written, {:.1} s", started.elapsed().as_secs_f64());
    assert!(hits >= HITS, "only {hits} kills hit a save, which shows little");
}

/// Writes half of each checkpoint after the first, tells the parent, and waits for its end.
struct Halting {
    saves: usize,
}

impl CheckpointIo for Halting {
    fn save_checkpoint(&mut self, checkpoint: &Checkpoint, path: &Path, _: Option<&Value>) -> Result<()> {
        self.saves += 1;
        if self.saves == 1 {
            return checkpoint.save(path);
        }
        voltaic::checkpoint::write_atomically(path, |writer| {
            writer.write_all(&vec![0; 1 << 16])?;
            writer.flush()?;
            println!("half of {}", path.file_name().unwrap().display());
            loop {
                std::thread::park();
            }
        })
    }
}

#[test]
fn a_run_killed_while_it_writes_beside_training_keeps_the_old_checkpoint() {
    if plays("async trainer") {
        let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
        let saver = ModelCheckpoint::new(ModelCheckpointConfig {
            dirpath: Some(folder),
            every_n_train_steps: Some(2),
            ..Default::default()
        });
        let builder = silent().enable_checkpointing(true).limit_val_batches(0).max_epochs(1);
        let io = AsyncCheckpointIo::around(Halting { saves: 0 });
        let step = LambdaCallback::new().on_train_batch_start(|ctx, _| {
            println!("training at {}", ctx.global_step());
            Ok(())
        });
        let mut trainer = builder.callback(step).callback(saver.unwrap()).checkpoint_io(io).build().unwrap();
        trainer.fit(&mut Heavy::new(), &mut loaders()).unwrap();
        return;
    }
    let folder = TempDir::new().unwrap();
    let mut command = own_process("async trainer");
    let mut child = command.env(FOLDER, folder.path()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    // the second checkpoint is of step 4; training goes on to the third, which has to wait
    let mut seen = (false, false);
    for line in lines {
        seen.0 |= line.contains("half of epoch=0-step=4.ckpt");
        seen.1 |= line.contains("training at 5");
        if seen == (true, true) {
            break;
        }
    }
    assert_eq!(seen, (true, true), "it trained while it wrote");
    child.kill().unwrap();
    child.wait().unwrap();
    let left = names(folder.path());
    assert!(left.contains(&"epoch=0-step=2.ckpt".to_owned()), "{left:?}");
    assert!(left.iter().all(|name| name == "epoch=0-step=2.ckpt" || name.ends_with(".tmp")), "{left:?}");
    assert_eq!(saved_steps(folder.path()), [2]);
    // and a run goes on from it
    let mut trainer = silent().limit_val_batches(0).max_epochs(1).build().unwrap();
    trainer.ckpt_path(folder.path().join("epoch=0-step=2.ckpt").to_str().unwrap());
    trainer.fit(&mut Heavy::new(), &mut loaders()).unwrap();
    assert_eq!(trainer.global_step(), 6);
}

/// Saves a small checkpoint, then one that does not fit.
fn fill_up(folder: &Path, expected: &str) {
    let path = folder.join("a.ckpt");
    let checkpoint = |elements: i64| Checkpoint {
        weights: vec![("w".to_owned(), Tensor::ones([elements], (Kind::Float, tch::Device::Cpu)))],
        ..Checkpoint::default()
    };
    checkpoint(10).save(&path).unwrap();
    let error = checkpoint(1 << 20).save(&path).expect_err("it does not fit").to_string();
    assert!(error.contains(".a.ckpt.") && error.contains(expected), "{error}");
    assert_eq!(Checkpoint::load(&path).unwrap().weights[0].1.numel(), 10, "the old one stays");
    assert_eq!(names(folder), ["a.ckpt"]);
    // the same from within a run
    let mut trainer =
        silent().enable_checkpointing(true).limit_val_batches(0).callback(saver(folder)).build().unwrap();
    let error = trainer.fit(&mut Heavy::new(), &mut loaders()).expect_err("it does not fit");
    assert!(matches!(&error, voltaic::Error::Io { .. }) && error.to_string().contains(expected), "{error}");
    assert_eq!(names(folder), ["a.ckpt"]);
    println!("the disk was full");
}

#[test]
fn a_full_disk_is_explained_and_the_old_file_stays() {
    if plays("full disk") {
        return fill_up(
            &PathBuf::from(std::env::var_os(FOLDER).unwrap()),
            "; free some disk space, or choose",
        );
    }
    let folder = TempDir::new().unwrap();
    let test = own_process("full disk");
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c"]);
    command.arg(r#"mount -t tmpfs -o size=300k tmpfs "$0" && exec "$@""#).arg(folder.path());
    command.arg(test.get_program()).args(test.get_args()).env(FOLDER, folder.path());
    command.envs(test.get_envs().filter_map(|(key, value)| Some((key, value?))));
    let output = command.output();
    match output {
        Ok(output) if String::from_utf8_lossy(&output.stdout).contains("running 1 test") => {
            assert!(text_of(&output).contains("the disk was full"));
        }
        // the next test shows the same with a limit on the size of files
        refused => println!("skipped: this system lets nobody mount a small disk: {refused:?}"),
    }
}

#[test]
fn a_file_beyond_the_size_limit_is_explained_and_the_old_file_stays() {
    if plays("size limit") {
        return fill_up(
            &PathBuf::from(std::env::var_os(FOLDER).unwrap()),
            "; raise the limit on the size of files",
        );
    }
    let folder = TempDir::new().unwrap();
    let test = own_process("size limit");
    let mut command = Command::new("sh");
    command.args(["-c", r#"trap "" XFSZ; ulimit -f 400; exec "$@""#]).arg0("sh").arg("sh");
    command.arg(test.get_program()).args(test.get_args()).env(FOLDER, folder.path());
    command.envs(test.get_envs().filter_map(|(key, value)| Some((key, value?))));
    assert!(text_of(&command.output().unwrap()).contains("the disk was full"));
}
