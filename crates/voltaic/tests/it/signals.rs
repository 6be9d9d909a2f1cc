//! Signals to a run, the notice of Slurm, and failures that are not worth a restart.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::module::HookContext;

use crate::ddp::{FOLDER, Net, alone, assert_same, builder, finish, folder_of_parent, loaders, weights};
use crate::probe::{own_process, plays, short_fit, text_of};

/// Says when training has come to the second epoch; sends itself a signal there, or waits for one.
struct Receives;

impl Callback for Receives {
    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if (ctx.current_epoch(), ctx.batch_idx()) != (1, 2) {
            return Ok(());
        }
        if ctx.is_global_zero() {
            println!("\ntraining");
        }
        let is_second = std::env::var("LOCAL_RANK").is_ok_and(|rank| rank == "1");
        if plays("stopped") && is_second {
            Command::new("kill").args(["-STOP", &std::process::id().to_string()]).status()?;
        }
        if std::env::var_os("VOLTAIC_TEST_WAITS").is_some() {
            std::thread::sleep(Duration::from_secs(1)); // until the signal has come
        }
        Ok(())
    }
}

fn train(devices: usize) {
    let folder = folder_of_parent();
    let builder = builder(&folder).devices(devices as i64).callback(Receives);
    let mut trainer = builder.build().unwrap();
    let mut net = Net::new();
    match trainer.fit(&mut net, &mut loaders(None)) {
        Ok(()) => finish(&trainer, &net, &folder),
        Err(voltaic::Error::Interrupted { signal, .. }) => {
            println!("\ntold by {signal}");
            std::process::exit(if signal == "SIGUSR1" { 138 } else { 130 })
        }
        Err(error) => panic!("{error}"),
    }
}

/// Starts a test as `part`, sends it a signal when it trains; returns its exit code, what it printed, and how long it took
/// to end.
fn signalled(
    test: &str,
    part: &str,
    signal: &str,
    folder: &Path,
    path: &str,
) -> (Option<i32>, String, Duration) {
    let mut command = own_process(test, part);
    command.env(FOLDER, folder).env("VOLTAIC_TEST_WAITS", "1").env("PATH", path);
    command.env("SLURM_JOB_ID", "4711").env("SLURM_JOB_NAME", "train");
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line == "training"));
    let started = Instant::now();
    Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    let text = lines.collect::<Vec<_>>().join("\n");
    let code = child.wait().unwrap().code();
    (code, text, started.elapsed())
}

#[test]
fn slurms_notice_saves_queues_again_and_is_gone_on_from() {
    let test = "signals::slurms_notice_saves_queues_again_and_is_gone_on_from";
    if plays("job") {
        return train(2);
    }
    // what scontrol is asked
    let bin = TempDir::new().unwrap();
    let scontrol = bin.path().join("scontrol");
    std::fs::write(&scontrol, format!("#!/bin/sh\necho \"$@\" >>{}/asked\n", bin.path().display())).unwrap();
    std::fs::set_permissions(&scontrol, PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());

    let folder = TempDir::new().unwrap();
    let (code, text, _) = signalled(test, "job", "-USR1", folder.path(), &path);
    assert_eq!(code, Some(138), "{text}");
    assert!(text.contains("told by SIGUSR1"), "{text}");
    let asked = std::fs::read_to_string(bin.path().join("asked")).unwrap();
    assert_eq!(asked, "requeue 4711\n", "once, by rank 0");
    let saved = Checkpoint::load(&folder.path().join("hpc_ckpt_1.ckpt")).unwrap();
    assert_eq!(saved.meta.global_step, 10, "the notice travels with the next gradients");
    assert_eq!(saved.training.unwrap().ranks.len(), 1, "with what rank 1 has to itself");

    let mut again = own_process(test, "job");
    again.env(FOLDER, folder.path()).env("PATH", &path).env("SLURM_JOB_ID", "4711");
    text_of(&again.env("SLURM_JOB_NAME", "train").env("SLURM_RESTART_COUNT", "1").output().unwrap());
    let (_kept, expected, ..) = alone(2, 1);
    assert_same(&weights(folder.path()), &expected);
}

#[test]
fn a_stopped_rank_does_not_hold_up_the_end() {
    let test = "signals::a_stopped_rank_does_not_hold_up_the_end";
    if plays("stopped") {
        return train(2);
    }
    let folder = TempDir::new().unwrap();
    let (code, text, took) =
        signalled(test, "stopped", "-INT", folder.path(), &std::env::var("PATH").unwrap());
    assert_eq!(code, Some(130), "{text}");
    assert!(took < Duration::from_secs(20), "{took:?} {text}");
}

#[test]
fn a_wrong_configuration_is_not_started_again() {
    if plays("wrong") {
        if std::env::var_os("LOCAL_RANK").is_some() {
            std::process::exit(2);
        }
        builder(&folder_of_parent()).devices(2).max_restarts(3_u64).build().unwrap();
        return;
    }
    let folder = TempDir::new().unwrap();
    let mut command = own_process("signals::a_wrong_configuration_is_not_started_again", "wrong");
    let output = command.env(FOLDER, folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("are not started again") && !text.contains("starting all ranks again"), "{text}");
}

#[test]
fn too_many_processes_are_refused_before_any_is_started() {
    let (code, text) = short_fit(&["--trainer.devices=1000000", "--trainer.strategy=ddp"], &[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("1000000 processes are too many for the ") && text.contains(" cores"), "{text}");
}
