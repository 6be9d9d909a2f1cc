//! Folders of checkpoints where a run ends before its time: a notice of Slurm, a rank that is killed and started again.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use voltaic::callback::{ModelCheckpoint, ModelCheckpointConfig};

use crate::models::{Small, all_loaders};
use crate::ranks::{assert_same, folder_of_rank, output, runs_all, silent, sorted_file, weights};
use crate::shards::staged;
use crate::signal::SignalOnce;

/// What is asked of a run, and the strategy it has.
const WHAT: &str = "VOLTAIC_TEST_WHAT";
const STRATEGY: &str = "VOLTAIC_TEST_STRATEGY";

fn train(ranks: usize, folder: &Path) {
    let strategy = std::env::var(STRATEGY).unwrap();
    let mut builder = if strategy.starts_with("zero") {
        staged(ranks, &strategy, folder)
    } else {
        silent(ranks, &strategy, folder)
    };
    let signal = match std::env::var(WHAT).as_deref() {
        Ok("notice") => Some("-USR1"),
        Ok("kill") => Some("-KILL"),
        _ => None,
    };
    let signal = SignalOnce { signal, batch: 2, mark: folder.join("signalled") };
    builder = builder.max_epochs(3).callback(signal);
    if std::env::var(WHAT).as_deref() == Ok("kill") {
        let config = ModelCheckpointConfig { dirpath: Some(folder.join("saved")), ..Default::default() };
        let saver = ModelCheckpoint::new(config).unwrap();
        builder = builder.max_restarts(1_u64).enable_checkpointing(true).callback(saver);
    }
    let mut trainer = builder.build().unwrap();
    if std::env::var(WHAT).as_deref() == Ok("hpc") {
        trainer.ckpt_path("hpc");
    }
    let mut net = Small::new();
    match trainer.fit(&mut net, &mut all_loaders(8 * ranks as i64)) {
        Ok(()) => {
            if trainer.is_global_zero() {
                let end = weights(&net);
                let end: Vec<_> = end.iter().map(|(name, tensor)| (name, tensor)).collect();
                tch::Tensor::write_safetensors(&end, folder.join("end.safetensors")).unwrap();
            }
        }
        Err(voltaic::Error::Interrupted { signal, .. }) => {
            println!("\ntold by {signal}");
            std::process::exit(138)
        }
        Err(error) => panic!("{error}"),
    }
}

/// The stage that divides most, or all.
fn stages() -> &'static [&'static str] {
    if runs_all() { &["zero1", "zero2", "zero3"] } else { &["zero3"] }
}

/// The exit code and what rank 0 printed.
fn run(test: &str, ranks: usize, folder: &Path, variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let output = output(test, ranks, folder, variables);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[test]
fn a_notice_of_slurm_saves_a_folder_that_the_job_goes_on_from() {
    let test = "restart::a_notice_of_slurm_saves_a_folder_that_the_job_goes_on_from";
    if let Some(folder) = folder_of_rank() {
        return train(2, &folder);
    }
    let bin = tempfile::tempdir().unwrap();
    let scontrol = bin.path().join("scontrol");
    std::fs::write(&scontrol, format!("#!/bin/sh\necho \"$@\" >>{}/asked\n", bin.path().display())).unwrap();
    std::fs::set_permissions(&scontrol, PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    for &stage in stages() {
        let folder = tempfile::tempdir().unwrap();
        let go = |what: &str, strategy: &str, job: &str, restarts: &str| {
            let slurm =
                [("SLURM_JOB_ID", job), ("SLURM_JOB_NAME", "train"), ("SLURM_RESTART_COUNT", restarts)];
            let own = [(WHAT, what), (STRATEGY, strategy), ("PATH", &path)];
            run(test, 2, folder.path(), &[&slurm[..], &own].concat())
        };
        let (code, text) = go("none", stage, "1", "0");
        assert_eq!(code, Some(0), "{stage}: {text}");
        let expected = sorted_file(&folder.path().join("end.safetensors"));
        let (code, text) = go("notice", stage, "4711", "0");
        assert_eq!(code, Some(138), "{stage}: {text}");
        assert!(text.contains("told by SIGUSR1"), "{stage}: {text}");
        let saved = folder.path().join("hpc_ckpt_1.ckpt");
        assert!(saved.join("rank-1.safetensors").exists(), "{stage}: a folder");
        let mut begins = Vec::new();
        for (what, strategy, job) in [("none", stage, "4711"), ("hpc", stage, "4712"), ("hpc", "ddp", "4712")]
        {
            let (code, text) = go(what, strategy, job, "1");
            let what = format!("{stage}: {what} by {strategy} in job {job}: {text}");
            assert_eq!(code, Some(0), "{what}");
            begins.extend(
                ["begins at step 7\n", "begins at step 8\n"].into_iter().filter(|step| text.contains(step)),
            );
            assert_same(&what, &sorted_file(&folder.path().join("end.safetensors")), &expected);
        }
        // the notice comes in the seventh step, and is seen by all ranks after it or after the next
        assert!(begins.len() == 3 && begins.iter().all(|step| *step == begins[0]), "{begins:?}");
    }
    assert_eq!(
        std::fs::read_to_string(bin.path().join("asked")).unwrap(),
        "requeue 4711\n".repeat(stages().len())
    );
}

#[test]
fn ranks_that_are_started_again_go_on_from_a_folder() {
    let test = "restart::ranks_that_are_started_again_go_on_from_a_folder";
    if let Some(folder) = folder_of_rank() {
        return train(2, &folder);
    }
    for &stage in stages() {
        let folder = tempfile::tempdir().unwrap();
        let go = |what: &str| run(test, 2, folder.path(), &[(WHAT, what), (STRATEGY, stage)]);
        let (code, text) = go("none");
        assert_eq!(code, Some(0), "{stage}: {text}");
        let expected = sorted_file(&folder.path().join("end.safetensors"));
        let (code, text) = go("kill");
        assert!(
            code == Some(0) && text.contains("starting all ranks again (1 of at most 1"),
            "{stage}: {text}"
        );
        assert!(
            text.contains("begins at step 0\n") && text.contains("begins at step 4\n"),
            "{stage}: {text}"
        );
        assert_same(stage, &sorted_file(&folder.path().join("end.safetensors")), &expected);
    }
}
