//! Standard output and standard error: what they get, and that cannot be written.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::ddp::{Net, loaders};
use crate::probe::{own_process, plays, silent};

/// A run of one batch by the real `voltaic` in a folder of its own.
fn short_run(verb: &str, stdout: impl Into<Stdio>, stderr: impl Into<Stdio>) -> Output {
    short_run_with(&[], verb, stdout, stderr)
}

/// The same with more arguments.
fn short_run_with(more: &[&str], verb: &str, stdout: impl Into<Stdio>, stderr: impl Into<Stdio>) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let data = ["--model=Mlp", "--data=MnistData", "--data.batch_size=2", "--trainer.accelerator=cpu"];
    let limits = ["train", "val", "test", "predict"].map(|what| format!("--trainer.limit_{what}_batches=1"));
    Command::new(env!("CARGO_BIN_EXE_voltaic"))
        .arg(verb)
        .args(data)
        .args(limits)
        .args(["--trainer.max_epochs=1", "--trainer.profiler=simple"])
        .args(more)
        .current_dir(folder.path())
        .stdout(stdout)
        .stderr(stderr)
        .output()
        .unwrap()
}

fn full() -> Option<File> {
    if !Path::new("/dev/full").exists() {
        eprintln!("skipped: needs /dev/full");
        return None;
    }
    Some(File::options().write(true).open("/dev/full").unwrap())
}

#[test]
fn training_goes_on_if_standard_error_cannot_be_written() {
    let Some(full) = full() else { return };
    let output = short_run("fit", Stdio::piped(), full);
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains(".ckpt") && text.contains("metrics.csv"), "{text}");
}

#[test]
fn a_fit_whose_standard_output_cannot_be_written_says_so_and_succeeds() {
    let Some(full) = full() else { return };
    let output = short_run("fit", full, Stdio::piped());
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("cannot write to standard output: "), "{text}");
}

#[test]
fn verbs_whose_results_are_their_standard_output_fail_without_it() {
    for verb in ["validate", "test", "predict"] {
        let Some(full) = full() else { return };
        let output = short_run(verb, full, Stdio::piped());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{verb}: {text}");
        assert!(text.contains("error: cannot write to standard output: "), "{verb}: {text}");
    }
}

/// Results of random numbers look like those of a bad model.
#[test]
fn verbs_of_weights_say_that_there_are_none() {
    let output = |more: &[&str], verb| {
        let output = short_run_with(more, verb, Stdio::piped(), Stdio::piped());
        assert_eq!(output.status.code(), Some(0));
        String::from_utf8_lossy(&output.stderr).contains("the weights are drawn at random")
    };
    assert!(!output(&[], "fit"));
    for verb in ["validate", "test", "predict"] {
        assert!(output(&[], verb), "{verb}");
    }
}

#[test]
fn paths_that_a_run_names_do_not_control_the_terminal() {
    let output =
        short_run_with(&["--trainer.default_root_dir=a\x1b[31mb"], "fit", Stdio::piped(), Stdio::piped());
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.contains("a\\u{1b}[31mb") && !text.contains('\x1b'), "{text}");
}

/// Warnings are shown, unless the program decides where they go.
#[test]
fn a_program_without_a_subscriber_shows_warnings() {
    let fit = || {
        let mut trainer = silent().max_epochs(1).limit_val_batches(0).build().unwrap();
        trainer.ckpt_path("last").fit(&mut Net::new(), &mut loaders(None)).unwrap();
    };
    let own = || tracing::subscriber::set_global_default(tracing::subscriber::NoSubscriber::default());
    if plays("shows") {
        fit();
        return assert!(own().is_err());
    }
    if plays("decides") {
        own().unwrap();
        return fit();
    }
    for (part, is_shown) in [("shows", true), ("decides", false)] {
        let folder = TempDir::new().unwrap();
        let output = own_process(part).current_dir(folder.path()).env_remove("RUST_LOG").output().unwrap();
        assert!(output.status.success());
        let shown = String::from_utf8_lossy(&output.stderr);
        assert_eq!(shown.contains("ckpt_path=last, but there is no checkpoint"), is_shown, "{shown}");
    }
}
