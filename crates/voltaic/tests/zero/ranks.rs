//! Tests whose bodies run on several ranks, each a process that the trainer starts.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use voltaic::nn::ModuleExt;
use voltaic::trainer::TrainerBuilder;
use voltaic::{Module, Tensor};

pub use crate::compare::{assert_same, assert_within};

const RANKS: &str = "VOLTAIC_TEST_RANKS";
const FOLDER: &str = "VOLTAIC_TEST_FOLDER";
/// The strategies that divide states.
pub const STAGES: [&str; 3] = ["zero1", "zero2", "zero3"];
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

/// Tests of one function on so many ranks each: `two_ranks_are_ddp: 2, climb;`.
macro_rules! on_ranks_tests {
    ($($(#[$attribute:meta])* $test:ident: $ranks:literal, $body:expr;)+) => {$(
        #[test]
        $(#[$attribute])*
        fn $test() {
            let test = std::thread::current().name().unwrap().to_owned();
            crate::ranks::on_ranks(&test, $ranks, $body);
        }
    )+};
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
    process(test, ranks, folder).envs(variables.iter().copied()).output().unwrap()
}

/// A process that runs this test on so many ranks.
pub fn process(test: &str, ranks: usize, folder: &Path) -> Command {
    // with another name the process would run nothing, and end well
    assert_eq!(std::thread::current().name(), Some(test));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env(RANKS, ranks.to_string()).env(FOLDER, folder).env("OMP_NUM_THREADS", "1");
    command
}

/// A trainer that prints nothing and writes nothing unless told to.
pub fn silent(ranks: usize, strategy: &str, folder: &Path) -> TrainerBuilder {
    crate::silent::silent()
        .accelerator("cpu")
        .devices(ranks as i64)
        .strategy(strategy)
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
