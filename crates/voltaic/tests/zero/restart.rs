//! Folders of checkpoints where a run ends before its time: a notice of Slurm, a rank that is killed and started again.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use voltaic::Module;
use voltaic::callback::{Callback, ModelCheckpoint, ModelCheckpointConfig};
use voltaic::module::HookContext;

use crate::models::{Small, all_loaders};
use crate::ranks::{assert_same, folder_of_rank, output, silent, sorted_file, weights};
use crate::shards::staged;

/// What is asked of a run, and the strategy it has.
const WHAT: &str = "VOLTAIC_TEST_WHAT";
const STRATEGY: &str = "VOLTAIC_TEST_STRATEGY";

fn signal_self(signal: &str) -> std::io::Result<()> {
    Command::new("kill").args([signal, &std::process::id().to_string()]).status().map(drop)
}

/// Says where training begins; in the second epoch rank 1 gets a notice, or is killed when it comes there first.
struct Ends;

impl Callback for Ends {
    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        println!("\nbegins at step {}", ctx.global_step());
        Ok(())
    }

    fn on_train_batch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        let is_second = ctx.process_group().is_some_and(|group| group.rank() == 1);
        if !is_second || (ctx.current_epoch(), ctx.batch_idx()) != (1, 2) {
            return Ok(());
        }
        let mark = folder_of_rank().unwrap().join("killed");
        match std::env::var(WHAT).as_deref() {
            Ok("notice") => signal_self("-USR1")?,
            Ok("kill") if !mark.exists() => {
                std::fs::write(mark, "")?;
                signal_self("-KILL")?;
                std::thread::sleep(std::time::Duration::from_secs(60));
            }
            _ => {}
        }
        Ok(())
    }
}

fn train(ranks: usize, folder: &Path) {
    let strategy = std::env::var(STRATEGY).unwrap();
    let mut builder = if strategy.starts_with("zero") {
        staged(ranks, &strategy, folder)
    } else {
        silent(ranks, &strategy, folder)
    };
    builder = builder.max_epochs(3).callback(Ends);
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
    for stage in ["zero1", "zero2", "zero3"] {
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
    assert_eq!(std::fs::read_to_string(bin.path().join("asked")).unwrap(), "requeue 4711\n".repeat(3));
}

#[test]
fn ranks_that_are_started_again_go_on_from_a_folder() {
    let test = "restart::ranks_that_are_started_again_go_on_from_a_folder";
    if let Some(folder) = folder_of_rank() {
        return train(2, &folder);
    }
    for stage in ["zero1", "zero2", "zero3"] {
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
