//! Folders that all ranks write beside training: when they are whole, what fails, and kills at any moment.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use voltaic::callback::{Callback, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::checkpoint::{AsyncCheckpointIo, Checkpoint, CheckpointIo, FileCheckpointIo};
use voltaic::data::{DataLoader, Loaders, TensorDataset};
use voltaic::distributed::ProcessGroup;
use voltaic::module::HookContext;
use voltaic::trainer::{PluginConfig, TrainerBuilder};
use voltaic::{Kind, Module, Result, Tensor};

use crate::heavy::{BALLAST, Heavy, LR, saver};
use crate::models::{Kernels, Small, loaders};
use crate::ranks::{STAGES, assert_same, folder_of_rank, process, runs_all, silent, weights};
use crate::shards::{SaveAfter, assert_alike, sorted, staged};

/// Batches that have begun.
static BEGUN: AtomicUsize = AtomicUsize::new(0);

struct Counts;

impl Callback for Counts {
    fn on_train_batch_start(&mut self, _: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
        BEGUN.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Writes nothing before so many batches have begun.
struct WaitsFor(usize);

impl CheckpointIo for WaitsFor {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        options: Option<&serde_json::Value>,
    ) -> Result<()> {
        FileCheckpointIo.save_checkpoint(checkpoint, path, options)
    }

    fn save_shards(
        &mut self,
        checkpoint: &Checkpoint,
        ranks: &ProcessGroup,
        path: &Path,
        options: Option<&serde_json::Value>,
    ) -> Result<()> {
        let begun = Instant::now();
        while BEGUN.load(Ordering::SeqCst) < self.0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "training waits for the checkpoint");
            std::thread::sleep(Duration::from_millis(1));
        }
        FileCheckpointIo.save_shards(checkpoint, ranks, path, options)
    }
}

/// What is written later, while the weights change, is the state of the moment that it was asked for.
fn trains_on(ranks: usize, folder: &Path) {
    for stage in STAGES {
        let path = |name: &str| folder.join(format!("{stage}-{name}.ckpt"));
        let run = |name: &str, builder: TrainerBuilder| {
            let mut trainer =
                builder.max_epochs(1).callback(SaveAfter(1, path(name))).callback(Counts).build().unwrap();
            let group = trainer.world().group().unwrap().clone();
            BEGUN.store(0, Ordering::SeqCst);
            trainer.fit(&mut Kernels::new(), &mut loaders(12 * ranks as i64)).unwrap();
            group.barrier().unwrap();
            Checkpoint::load(path(name)).unwrap()
        };
        let expected = run("at-once", staged(ranks, stage, folder));
        let io = AsyncCheckpointIo::around(WaitsFor(5)); // two batches before, three after
        let own = run("later", staged(ranks, stage, folder).checkpoint_io(io));
        assert_eq!(own.meta.global_step, expected.meta.global_step);
        assert_alike(stage, &own, &expected);
        // weights alone become a file, which rank 0 writes from the shards of all
        let config = ModelCheckpointConfig {
            dirpath: Some(folder.join(format!("{stage}-weights"))),
            filename: Some("weights".to_owned()),
            save_weights_only: true,
            ..Default::default()
        };
        let saver = ModelCheckpoint::new(config).unwrap();
        let builder = staged(ranks, stage, folder).plugins(vec![PluginConfig::AsyncCheckpointIo]);
        let mut trainer = builder.enable_checkpointing(true).callback(saver).max_epochs(1).build().unwrap();
        let mut net = Small::new();
        trainer.fit(&mut net, &mut loaders(24)).unwrap();
        if trainer.is_global_zero() {
            let saved = Checkpoint::load(folder.join(format!("{stage}-weights/weights.ckpt"))).unwrap();
            assert_same(stage, &sorted(saved.weights), &sorted(weights(&net)));
        }
        trainer.world().barrier().unwrap();
    }
}

on_ranks_tests! {
    two_ranks_train_while_they_save: 2, trains_on;
    #[ignore = "a long form, which make stress runs"]
    three_ranks_train_while_they_save: 3, trains_on;
}

/// Once the first checkpoint is there, files of the last rank may not grow beyond some bytes.
struct Full(PathBuf);

fn limit_files(bytes: &str) {
    let pid = std::process::id().to_string();
    let status = Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={bytes}:")]).status();
    assert!(status.unwrap().success());
}

impl Callback for Full {
    fn on_train_batch_start(&mut self, ctx: &mut HookContext, _: &mut dyn Module) -> anyhow::Result<()> {
        let is_last = ctx.process_group().is_none_or(|group| group.rank() + 1 == group.world_size());
        if is_last && ctx.batch_idx() == 2 {
            let begun = Instant::now();
            while !self.0.exists() {
                anyhow::ensure!(begun.elapsed() < Duration::from_secs(60), "no checkpoint");
                std::thread::sleep(Duration::from_millis(1));
            }
            let ignored = std::sync::Arc::new(AtomicBool::new(false));
            signal_hook::flag::register(libc::SIGXFSZ, ignored)?;
            limit_files("512");
        }
        Ok(())
    }
}

/// The error is that of all ranks: at the next save, or at the end of the fit. The checkpoint before it stays.
fn cannot_write(ranks: usize, folder: &Path) {
    for (stage, last) in [("zero3", 2), ("zero1", 4)] {
        let path = folder.join(format!("{stage}.ckpt"));
        let mut builder = staged(ranks, stage, folder).plugins(vec![PluginConfig::AsyncCheckpointIo]);
        for batch in 1..=last {
            builder = builder.callback(SaveAfter(batch, path.clone()));
        }
        let mut trainer = builder.callback(Full(path.clone())).max_epochs(1).build().unwrap();
        let group = trainer.world().group().unwrap().clone();
        let begun = Instant::now();
        let error = trainer.fit(&mut Small::new(), &mut loaders(12 * ranks as i64)).unwrap_err().to_string();
        limit_files("unlimited");
        let named = [
            "cannot save ",
            &format!("rank {}: cannot write ", ranks - 1),
            "rank-1.safetensors",
            "bytes of tensors",
            "; raise the limit on the size of files (ulimit -f), or choose another file system",
        ];
        for named in named {
            assert!(error.contains(named), "{stage}: `{named}` is missing: {error}");
        }
        for other in group.all_gather_object(&error).unwrap() {
            assert_eq!(other, error, "{stage}");
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "{stage}");
        assert_eq!(Checkpoint::load(&path).unwrap().meta.global_step, 2, "{stage}: the older one stays");
        if trainer.is_global_zero() {
            let left = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.file_name());
            let left: Vec<_> = left.filter(|name| name.to_string_lossy().ends_with(".tmp")).collect();
            assert!(left.is_empty(), "{left:?}");
        }
        group.barrier().unwrap();
        // and the run goes on from it
        let mut resumed = staged(ranks, stage, folder).max_epochs(1).build().unwrap();
        resumed.ckpt_path(&path).fit(&mut Small::new(), &mut loaders(12 * ranks as i64)).unwrap();
    }
}

on_ranks_tests! {
    what_a_rank_cannot_write_in_the_background_ends_all: 2, cannot_write;
}

/// Fills a small disk that all ranks share.
fn fill_up(ranks: usize, folder: &Path) {
    let mut builder = silent(ranks, "zero2", folder).plugins(vec![PluginConfig::AsyncCheckpointIo]);
    for batch in 0..3 {
        // each takes more than a third of the disk
        builder = builder.callback(SaveAfter(batch, folder.join(format!("{batch}.ckpt"))));
    }
    let mut trainer = builder.max_epochs(1).build().unwrap();
    let group = trainer.world().group().unwrap().clone();
    let error = trainer.fit(&mut Heavy::new(), &mut ones(ranks)).unwrap_err().to_string();
    for named in ["2.ckpt", "cannot write ", "bytes of tensors", "; free some disk space, or choose another"]
    {
        assert!(error.contains(named), "`{named}` is missing: {error}");
    }
    for other in group.all_gather_object(&error).unwrap() {
        assert_eq!(other, error);
    }
    let steps =
        [0, 1].map(|at| Checkpoint::load(folder.join(format!("{at}.ckpt"))).unwrap().meta.global_step);
    assert_eq!(steps, [1, 2]);
    assert!(!folder.join("2.ckpt").exists());
    println!("the disk was full");
}

#[test]
fn a_full_disk_in_the_background_ends_all_ranks() {
    if let Some(folder) = folder_of_rank() {
        return fill_up(2, &folder);
    }
    let folder = tempfile::tempdir().unwrap();
    let test = process("background::a_full_disk_in_the_background_ends_all_ranks", 2, folder.path());
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c"]);
    let mount = format!(r#"mount -t tmpfs -o size={} tmpfs "$0" && exec "$@""#, 30 * BALLAST);
    command.arg(mount).arg(folder.path());
    command.arg(test.get_program()).args(test.get_args());
    command.envs(test.get_envs().filter_map(|(key, value)| Some((key, value?))));
    match command.output() {
        Ok(output) if String::from_utf8_lossy(&output.stdout).contains("running 1 test") => {
            let text = String::from_utf8_lossy(&output.stdout);
            let shown = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && text.contains("the disk was full"), "{text}{shown}");
        }
        // the test before shows the same with a limit on the size of files
        refused => println!("skipped: this system lets nobody mount a small disk: {refused:?}"),
    }
}

fn ones(ranks: usize) -> Loaders<Tensor> {
    let data = Tensor::ones([8 * ranks as i64, 1], (Kind::Float, tch::Device::Cpu));
    Loaders::new().train(DataLoader::new(TensorDataset::new(data).unwrap()).build().unwrap())
}

/// Says where training starts, and which process a rank is.
struct Announce(PathBuf);

impl Callback for Announce {
    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        let rank = ctx.process_group().map_or(0, ProcessGroup::rank);
        std::fs::write(self.0.join(format!("pid-{rank}")), std::process::id().to_string())?;
        ctx.process_group().map_or(Ok(()), ProcessGroup::barrier)?;
        println!("\nstarts at {}", ctx.global_step());
        Ok(())
    }
}

fn train_until_killed(ranks: usize, folder: &Path) {
    let builder = silent(ranks, "zero3", folder).enable_checkpointing(true).max_epochs(-1);
    let builder = builder.plugins(vec![PluginConfig::AsyncCheckpointIo]);
    let saved = folder.join("saved");
    let mut trainer =
        builder.callback(Announce(folder.to_path_buf())).callback(saver(&saved)).build().unwrap();
    if let Err(error) = trainer.ckpt_path("last").fit(&mut Heavy::new(), &mut ones(ranks)) {
        eprintln!("\nerror of a rank: {error}");
        std::process::exit(1) // another one was killed
    }
}

/// Starts so many ranks; returns the process that watches over them, their own, and the step they start at.
fn start(test: &str, ranks: usize, folder: &Path) -> (Child, Vec<String>, u64) {
    let mut command = process(test, ranks, folder);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let step = lines
        .map_while(std::result::Result::ok)
        .find_map(|line| line.strip_prefix("starts at ")?.parse().ok());
    let pids = (0..ranks).map(|rank| std::fs::read_to_string(folder.join(format!("pid-{rank}"))).unwrap());
    let pids = pids.collect();
    (child, pids, step.expect("the ranks start"))
}

/// Waits for the end of processes whose parent is gone.
fn wait_for_end(pids: &[String]) {
    let begun = Instant::now();
    let lives = |pid: &String| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
    };
    while pids.iter().any(lives) {
        assert!(begun.elapsed() < Duration::from_secs(60), "ranks of {pids:?} live on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Steps of the folders that are there; each has to load completely, and to be of that very step.
fn saved_steps(folder: &Path) -> Vec<u64> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let checkpoints = entries.filter(|path| path.extension().is_some_and(|extension| extension == "ckpt"));
    let steps = checkpoints.map(|path| {
        let checkpoint = Checkpoint::load(&path).unwrap_or_else(|error| panic!("{error}"));
        let step = checkpoint.meta.global_step;
        let (weight, training) = (&checkpoint.weights[0].1, checkpoint.training.unwrap());
        let [least, most] = [weight.min(), weight.max()].map(|value| value.double_value(&[]));
        assert_eq!((weight.numel(), training.optimizers[0].len()), (BALLAST as usize, 3));
        assert!((least + LR * step as f64).abs() < 1e-3 * LR && least == most, "{least} {most} at {step}");
        step
    });
    steps.collect()
}

/// One process goes on from what is there for a step.
fn goes_on_alone(folder: &Path, newest: u64) {
    let saved = folder.join("saved");
    let builder = silent(1, "zero3", folder).enable_checkpointing(true).max_steps(newest as i64 + 1);
    let config = ModelCheckpointConfig {
        every_n_train_steps: Some(u64::MAX),
        dirpath: Some(saved),
        ..Default::default()
    };
    let mut trainer = builder.callback(ModelCheckpoint::new(config).unwrap()).build().unwrap();
    let mut net = Heavy::new();
    trainer.ckpt_path("last").fit(&mut net, &mut ones(1)).unwrap();
    let value = net.ballast.mean(Kind::Double).double_value(&[]);
    assert!((value + LR * (newest + 1) as f64).abs() < 1e-3 * LR, "{value} after {newest}");
}

/// Bytes that this process has read.
fn bytes_read() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    text.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
}

/// Rank 0 finds the last checkpoint, and reads no more of it than the others.
fn all_look_at_the_last(ranks: usize, folder: &Path) {
    let fit = |from: Option<&str>| {
        let builder = silent(ranks, "zero3", folder).enable_checkpointing(true).max_steps(1);
        let mut trainer = builder.callback(saver(&folder.join("saved"))).build().unwrap();
        if let Some(from) = from {
            trainer.ckpt_path(from);
        }
        let before = bytes_read();
        trainer.fit(&mut Heavy::new(), &mut ones(ranks)).unwrap();
        trainer.world().group().unwrap().all_gather_object(&(bytes_read() - before)).unwrap()
    };
    fit(None);
    let read = fit(Some("last"));
    let part = BALLAST as u64 * 12 / ranks as u64;
    assert!(read.iter().all(|&read| read > 2 * part && read < 3 * part), "{read:?}, parts of {part}");
}

on_ranks_tests! {
    no_rank_reads_the_last_checkpoint_alone: 4, all_look_at_the_last;
}

const KILLS: usize = 50;
/// Of them without `VOLTAIC_TEST_ALL=1`.
const SOME_KILLS: usize = 6;

/// Two and three ranks in turn go on from what ranks have left that were killed while they wrote, all at once or one of them.
#[test]
fn ranks_killed_while_they_save_leave_whole_folders() {
    let test = "background::ranks_killed_while_they_save_leave_whole_folders";
    if let Some(folder) = folder_of_rank() {
        let ranks = std::env::var("VOLTAIC_TEST_RANKS").unwrap().parse().unwrap();
        return train_until_killed(ranks, &folder);
    }
    let kills = if runs_all() { KILLS } else { SOME_KILLS };
    let wanted = (kills / 10).max(1);
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("saved");
    let mut rng = StdRng::seed_from_u64(7);
    let (mut newest, mut hits, mut longest) = (0, 0, 300_000);
    let mut round = 0;
    // on another machine a save takes less of the time, and it takes more kills to hit some
    while round < kills || (hits < wanted && round < 4 * kills) {
        let ranks = 2 + round % 2;
        let (mut child, pids, started_at) = start(test, ranks, folder.path());
        // two folders of one moment may be of two neighbouring steps
        assert!(started_at + 1 >= newest, "round {round}: {started_at} after {newest}");
        std::thread::sleep(Duration::from_micros(rng.random_range(0..longest)));
        if round % 4 < 2 {
            child.kill().unwrap(); // and its ranks with it
        } else {
            let pid = &pids[rng.random_range(0..ranks)];
            assert!(Command::new("kill").args(["-KILL", pid]).status().unwrap().success());
        }
        child.wait().unwrap(); // the others end by themselves
        wait_for_end(&pids);
        let names = std::fs::read_dir(&saved).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
        hits += usize::from(names.iter().any(|name| name.ends_with(".tmp")));
        assert!(names.len() <= 4, "leftovers add up: {names:?}");
        let step = saved_steps(&saved).into_iter().max().unwrap_or(0);
        assert!(step >= newest, "round {round}: {step} after {newest}");
        if step == newest {
            longest = (2 * longest).min(4_000_000);
        }
        newest = step;
        if newest > 0 {
            goes_on_alone(folder.path(), newest);
        }
        round += 1;
    }
    println!("{hits} of {round} kills hit a folder half written, {newest} steps");
    assert!(newest >= kills as u64 / 2 && hits >= wanted, "{hits} hits, {newest} steps show little");
}
