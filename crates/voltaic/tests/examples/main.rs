//! Runs the programs of `examples/` as a user does, and checks what each block prints and writes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail the test")]

mod autocast;
mod callbacks;
mod card;
mod checkpoints;
#[path = "../support/compile.rs"]
mod compile;
mod device_stats_monitor;
mod fabric_gpt;
mod fp8;
mod fp8_inference;
mod getting_started;
mod graph_step;
mod hmp_op_lists;
mod how_to;
mod hpu_deepspeed;
mod hpu_deepspeed_inference;
mod hpu_graphs_dynamic;
mod hpu_graphs_inference;
mod hpu_graphs_training;
mod hpu_profiler;
mod lightning_cli;
mod logging;
mod mistakes;
mod mixed_precision;
mod page;
mod runtime_flags;
mod several_hpus;
mod simple_profiler;
#[path = "../support/stand_ins.rs"]
mod stand_ins;
mod torch_compile;

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use voltaic::checkpoint::Checkpoint;

/// A block takes seconds; one that takes so long hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// What one block of a program left behind.
pub struct Ran {
    /// The current folder of the program.
    pub folder: TempDir,
    /// Its standard output.
    pub out: String,
    /// Its standard error, which has the log.
    pub err: String,
}

/// Runs `cargo run --example PROGRAM BLOCK` in an empty folder; it must succeed.
pub fn run(program: &str, block: &str) -> Ran {
    run_with(program, block, &[])
}

/// [`run`] with variables in its environment.
pub fn run_with(program: &str, block: &str, variables: &[(&str, &str)]) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let binary = binary_of(program);
    println!("$ cargo run --example {program} {block}");
    let mut command = Command::new(&binary);
    // threads that wait for each other take many times as long where tests share the cores
    command.env("OMP_NUM_THREADS", "1");
    command.env("VOLTAIC_DATA_DIR", shipped_data().path());
    command.arg(block).current_dir(folder.path()).envs(variables.iter().copied());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| {
        panic!("{}: {error}; `make examples` builds the programs and runs them", binary.display())
    });
    let (out, err) = (reader(child.stdout.take().unwrap()), reader(child.stderr.take().unwrap()));
    let succeeded = wait(&mut child);
    let (out, err) = (out.join().unwrap(), err.join().unwrap());
    println!("{out}");
    assert!(succeeded, "{program} {block} failed:\n{out}{err}");
    Ran { folder, out, err }
}

/// A data folder with the digits that ship alone: another set would take other numbers of steps.
fn shipped_data() -> &'static TempDir {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let digits = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/digits");
        std::os::unix::fs::symlink(digits, folder.path().join("digits")).unwrap();
        folder
    })
}

fn binary_of(program: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(|deps| deps.parent()).unwrap().join("examples").join(program)
}

fn reader(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Whether it ends well, in time.
fn wait(child: &mut Child) -> bool {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("it has not ended after {LIMIT:?}");
        }
        thread::sleep(Duration::from_millis(10));
    }
}

impl Ran {
    /// The values that stand in a column of `metrics.csv` of the run of this number, in order.
    pub fn column(&self, version: usize, name: &str) -> Vec<f64> {
        let path = self.folder.path().join(format!("lightning_logs/version_{version}/metrics.csv"));
        let mut rows = csv::Reader::from_path(path).unwrap();
        let at = rows.headers().unwrap().iter().position(|column| column == name);
        let at = at.unwrap_or_else(|| panic!("metrics.csv has no {name}"));
        rows.records().filter_map(|row| row.unwrap()[at].parse().ok()).collect()
    }

    /// Asserts that the mean of the last ten values is less than this part of the mean of the first ten.
    pub fn assert_fell(&self, version: usize, name: &str, part: f64) {
        let values = self.column(version, name);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        let count = values.len().min(20) / 2;
        let (first, last) = (mean(&values[..count]), mean(&values[values.len() - count..]));
        assert!(last < part * first, "{name} went from {first} to {last}");
    }

    /// The one checkpoint of the run of this number, which must load.
    pub fn checkpoint(&self, version: usize) -> Checkpoint {
        let folder = self.folder.path().join(format!("lightning_logs/version_{version}/checkpoints"));
        let files: Vec<PathBuf> =
            std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        Checkpoint::load(&files[0]).unwrap()
    }

    /// The number that follows a word in what was printed.
    pub fn number(&self, word: &str) -> f64 {
        let rest = self.out.split_once(word).unwrap_or_else(|| panic!("`{word}` is not in:\n{}", self.out)).1;
        let number: String =
            rest.trim_start().chars().take_while(|c| c.is_ascii_digit() || "+-.e".contains(*c)).collect();
        number.parse().unwrap_or_else(|_| panic!("no number follows `{word}` in:\n{}", self.out))
    }
}
