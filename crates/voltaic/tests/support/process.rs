//! Tests that run in processes of their own: this binary, started again for the test that asks.

use std::process::{Command, Output};

/// Set in such a process to the part that it plays.
pub const PART: &str = "VOLTAIC_TEST_PART";

/// The test that this thread runs: test harnesses name their threads so. Its name cannot be that of another test, with which a
/// process would run nothing and end well.
pub fn own_test() -> String {
    std::thread::current().name().expect("the thread of a test").to_owned()
}

/// This binary, to run the present test in a process of its own as `part`.
pub fn own_process(part: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &own_test(), "--include-ignored", "--nocapture", "--test-threads=1"]);
    command.env(PART, part).env("OMP_NUM_THREADS", "1");
    command
}

/// Whether this process plays `part`.
pub fn plays(part: &str) -> bool {
    std::env::var(PART).is_ok_and(|value| value == part)
}

/// What a process printed, which must have ended well.
pub fn text_of(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}
