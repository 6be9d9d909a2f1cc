//! Tests whose bodies run on several ranks, each a process that the trainer starts.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use voltaic::nn::ModuleExt;
use voltaic::trainer::{Trainer, TrainerBuilder};
use voltaic::{Module, Tensor};

const RANKS: &str = "VOLTAIC_TEST_RANKS";
const FOLDER: &str = "VOLTAIC_TEST_FOLDER";
/// Which of several turns a rank is of.
const TURN: &str = "VOLTAIC_TEST_TURN";

/// Whether a test does all that it can, in place of a part.
pub fn runs_all() -> bool {
    std::env::var_os("VOLTAIC_TEST_ALL").is_some()
}

/// Runs `body` on so many ranks, in a folder that they share; returns what they printed. `None` on a rank, after its body.
pub fn on_ranks(test: &str, ranks: usize, body: impl FnOnce(usize, &Path)) -> Option<String> {
    if let (Ok(own), Some(folder)) = (std::env::var(RANKS), std::env::var_os(FOLDER)) {
        if own == ranks.to_string() {
            body(ranks, &PathBuf::from(folder));
        }
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    Some(start(test, ranks, folder.path(), 0))
}

/// What runs on each rank, with the number of ranks and the folder that they share.
pub type Body = fn(usize, &Path);

/// The same several times, with other bodies or numbers of ranks, in one folder.
pub fn on_ranks_in_turn(test: &str, turns: &[(usize, Body)]) {
    if let (Ok(turn), Some(folder)) = (std::env::var(TURN), folder_of_rank()) {
        let (ranks, body) = turns[turn.parse::<usize>().unwrap()];
        return body(ranks, &folder);
    }
    let folder = tempfile::tempdir().unwrap();
    for (turn, &(ranks, _)) in turns.iter().enumerate() {
        start(test, ranks, folder.path(), turn);
    }
}

/// The folder on a rank, or `None` in the test itself, which starts the ranks by [`output`].
pub fn folder_of_rank() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Starts the process that starts the ranks.
fn start(test: &str, ranks: usize, folder: &Path, turn: usize) -> String {
    let output = output(test, ranks, folder, &[(TURN, &turn.to_string())]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// How a process ends that runs this test on so many ranks, with these variables.
pub fn output(test: &str, ranks: usize, folder: &Path, variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env(RANKS, ranks.to_string()).env(FOLDER, folder).env("OMP_NUM_THREADS", "1");
    command.envs(variables.iter().copied()).output().unwrap()
}

/// A trainer that prints nothing and writes nothing unless told to.
pub fn silent(ranks: usize, strategy: &str, folder: &Path) -> TrainerBuilder {
    Trainer::builder()
        .accelerator("cpu")
        .devices(ranks as i64)
        .strategy(strategy)
        .logger(false)
        .enable_checkpointing(false)
        .enable_progress_bar(false)
        .enable_model_summary(false)
        .default_root_dir(folder.to_path_buf())
}

/// The state dict, copied.
pub fn weights(module: &impl Module) -> Vec<(String, Tensor)> {
    let copy = |tensor: Tensor| tensor.to_device(tch::Device::Cpu).copy();
    module.state_dict().into_iter().map(|(name, tensor)| (name, copy(tensor))).collect()
}

/// The tensors of a file, by name.
pub fn sorted_file(path: &Path) -> Vec<(String, Tensor)> {
    let mut read = Tensor::read_safetensors(path).unwrap();
    read.sort_by(|(a, _), (b, _)| a.cmp(b));
    read
}

/// Asserts the same names and bits.
pub fn assert_same(what: &str, own: &[(String, Tensor)], expected: &[(String, Tensor)]) {
    assert_within(what, own, expected, 0.0);
}

/// Asserts the same names and values within a part of the largest one.
pub fn assert_within(what: &str, own: &[(String, Tensor)], expected: &[(String, Tensor)], tolerance: f64) {
    let names = |all: &[(String, Tensor)]| all.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(own), names(expected), "{what}");
    for ((name, own), (_, expected)) in own.iter().zip(expected) {
        assert_eq!((own.size(), own.kind()), (expected.size(), expected.kind()), "{what}: {name}");
        if own.numel() == 0 || own.equal(expected) {
            continue;
        }
        let largest = |tensor: &Tensor| tensor.to_kind(tch::Kind::Double).abs().max().double_value(&[]);
        let difference = largest(&(own.to_kind(tch::Kind::Double) - expected.to_kind(tch::Kind::Double)));
        let limit = tolerance * largest(expected).max(1e-3);
        assert!(difference <= limit, "{what}: {name} differs by {difference}, limit {limit}");
    }
}
