//! Signals to a run, the notice of Slurm, and failures that are not worth a restart.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::checkpoint::Checkpoint;
use voltaic::data::Loaders;
use voltaic::distributed::{Launch, RequeueSignal, SlurmEnvironment, launch};
use voltaic::module::HookContext;

use crate::ddp::{FOLDER, Net, alone, assert_same, builder, finish, folder_of_parent, loaders, weights};
use crate::probe::{Probe, loaders as probe_loaders, own_process, plays, short_fit, silent, text_of};
use crate::signal::signal_self;

/// Says when training has come to the second epoch; sends itself a signal there, or waits for one.
struct Receives;

impl Callback for Receives {
    fn on_train_start(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        println!("\nbegins at step {}", ctx.global_step());
        Ok(())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        if (ctx.current_epoch(), ctx.batch_idx()) != (1, 2) {
            return Ok(());
        }
        if ctx.is_global_zero() {
            println!("\ntraining");
        }
        let is_second = std::env::var("LOCAL_RANK").is_ok_and(|rank| rank == "1");
        if plays("stopped") && is_second {
            signal_self("-STOP")?;
        }
        if std::env::var_os("VOLTAIC_TEST_WAITS").is_some() {
            std::thread::sleep(Duration::from_secs(1)); // until the signal has come
        }
        Ok(())
    }
}

fn train(devices: usize) {
    train_with(devices, None, false);
}

/// Trains in a Slurm job with settings; if it is `early`, the signal comes before the fit begins.
fn train_with(devices: usize, settings: Option<SlurmEnvironment>, is_early: bool) {
    let folder = folder_of_parent();
    let mut builder = builder(&folder).devices(devices as i64).callback(Receives);
    if plays("saves") {
        builder = builder.enable_checkpointing(true);
    }
    if let Some(settings) = settings {
        builder = builder.plugin(settings);
    }
    let mut trainer = builder.build().unwrap();
    if is_early {
        println!("\ntraining");
        std::thread::sleep(Duration::from_secs(1));
    }
    if plays("hpc") {
        trainer.ckpt_path("hpc");
    }
    let mut net = Net::new();
    match trainer.fit(&mut net, &mut loaders(None)) {
        Ok(()) => finish(&trainer, &net, &folder),
        Err(voltaic::Error::Interrupted { signal, .. }) => {
            println!("\ntold by {signal}");
            std::process::exit(if signal == "SIGINT" { 130 } else { 138 })
        }
        Err(error) => panic!("{error}"),
    }
}

/// [`own_process`] with the default action of SIGHUP: under `nohup` this program ignores it, and so would all that it starts.
fn own_process_hung_up(part: &str) -> Command {
    let own = own_process(part);
    if !voltaic::ffi::ignores(1) {
        return own;
    }
    let mut command = Command::new("env"); // of coreutils, since 8.31
    command.arg("--default-signal=HUP").arg(own.get_program()).args(own.get_args());
    command.envs(own.get_envs().filter_map(|(key, value)| Some((key, value?))));
    command
}

/// Starts a test as `part`, sends it a signal when it trains; returns its exit code, what it printed, and how long it took
/// to end.
fn signalled(part: &str, signal: &str, folder: &Path, path: &str) -> (Option<i32>, String, Duration) {
    let mut command = own_process_hung_up(part);
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

/// A stand-in for `scontrol`, and a path of programs with it in front.
struct Scontrol(TempDir, String);

impl Scontrol {
    fn new() -> Self {
        let bin = TempDir::new().unwrap();
        let scontrol = bin.path().join("scontrol");
        std::fs::write(&scontrol, format!("#!/bin/sh\necho \"$@\" >>{}/asked\n", bin.path().display()))
            .unwrap();
        std::fs::set_permissions(&scontrol, PermissionsExt::from_mode(0o755)).unwrap();
        let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
        Self(bin, path)
    }

    fn asked(&self) -> String {
        std::fs::read_to_string(self.0.path().join("asked")).unwrap_or_default()
    }
}

/// A test as a process of a job that has been started again.
fn again(part: &str, folder: &Path, job: &str) -> Command {
    let mut again = own_process(part);
    again.env(FOLDER, folder).env("SLURM_JOB_ID", job).env("SLURM_JOB_NAME", "train");
    again.env("SLURM_RESTART_COUNT", "1");
    again
}

#[test]
fn slurms_notice_saves_queues_again_and_is_gone_on_from() {
    if plays("job") || plays("hpc") {
        return train(2);
    }
    let scontrol = Scontrol::new();
    let folder = TempDir::new().unwrap();
    let (code, text, _) = signalled("job", "-USR1", folder.path(), &scontrol.1);
    assert_eq!(code, Some(138), "{text}");
    assert!(text.contains("told by SIGUSR1"), "{text}");
    assert_eq!(scontrol.asked(), "requeue 4711\n", "once, by rank 0");
    let saved = Checkpoint::load(folder.path().join("hpc_ckpt_1.ckpt")).unwrap();
    assert_eq!(saved.meta.global_step, 10, "the notice travels with the next gradients");
    assert_eq!(saved.training.unwrap().ranks.len(), 1, "with what rank 1 has to itself");

    let (_kept, expected, ..) = alone(2, 1);
    for (part, job, step) in [("job", "4711", 10), ("job", "4712", 0), ("hpc", "4712", 10)] {
        let text = text_of(&again(part, folder.path(), job).output().unwrap());
        assert!(text.contains(&format!("begins at step {step}\n")), "{part} {job}: {text}");
        assert_same(&weights(folder.path()), &expected);
    }
    std::fs::remove_file(folder.path().join("hpc_ckpt_1.ckpt")).unwrap();
    let text = again("hpc", folder.path(), "4711").output().unwrap();
    let text = String::from_utf8_lossy(&text.stderr).into_owned();
    assert!(text.contains("ckpt_path: `hpc`, but there is no hpc_ckpt_<n>.ckpt in "), "{text}");
}

#[test]
fn a_notice_that_comes_before_the_fit_is_kept() {
    if plays("early") {
        return train_with(1, None, true);
    }
    let (scontrol, folder) = (Scontrol::new(), TempDir::new().unwrap());
    let (code, text, _) = signalled("early", "-USR1", folder.path(), &scontrol.1);
    assert_eq!(code, Some(138), "{text}");
    assert_eq!(scontrol.asked(), "requeue 4711\n");
    assert!(!folder.path().join("hpc_ckpt_1.ckpt").exists(), "in the sanity check there is nothing to save");
}

#[test]
fn the_command_keeps_a_notice_from_its_start() {
    let (scontrol, folder) = (Scontrol::new(), TempDir::new().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    command.args(["fit", "--model=Mlp", "--data=MnistData", "--trainer.accelerator=cpu"]);
    command.args(["--trainer.max_epochs=1", "--trainer.logger=false", "--trainer.num_sanity_val_steps=0"]);
    command.current_dir(folder.path());
    command.env("SLURM_JOB_ID", "4711").env("SLURM_JOB_NAME", "train").env("PATH", &scontrol.1);
    command.arg("--config=/dev/stdin").stdin(Stdio::piped()); // it waits for its configuration
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let catches = || {
        let text = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let mask = text.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
        u64::from_str_radix(mask, 16).unwrap() & (1 << (10 - 1)) != 0
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while !catches() {
        assert!(Instant::now() < deadline, "{:?}", child.kill());
        std::thread::sleep(Duration::from_millis(1));
    }
    Command::new("kill").args(["-USR1", &child.id().to_string()]).status().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"trainer:\n  accelerator: cpu\n").unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(138), "{text}");
    assert_eq!(scontrol.asked(), "requeue 4711\n", "{text}");
    assert!(folder.path().join("hpc_ckpt_1.ckpt").exists(), "{text}");
}

#[test]
fn the_plugin_names_another_signal_or_none() {
    let by = |signal| SlurmEnvironment { requeue_signal: Some(signal), ..SlurmEnvironment::default() };
    let cases = [
        ("hangup", "-HUP", by(RequeueSignal::SigHup), "SIGHUP", 129),
        ("second", "-USR2", by(RequeueSignal::SigUsr2), "SIGUSR2", 140),
        ("other", "-USR1", by(RequeueSignal::SigHup), "SIGUSR1", 138),
        ("off", "-USR1", SlurmEnvironment { auto_requeue: false, requeue_signal: None }, "SIGUSR1", 138),
    ];
    for (part, signal, settings, name, expected) in cases {
        let requeues = expected != 138; // the launcher's code
        if plays(part) {
            return train_with(2, Some(settings), false);
        }
        if std::env::var_os(crate::process::PART).is_some() {
            continue;
        }
        let (scontrol, folder) = (Scontrol::new(), TempDir::new().unwrap());
        let (code, text, _) = signalled(part, signal, folder.path(), &scontrol.1);
        assert_eq!(code, Some(expected), "{part}: {text}");
        assert!(text.contains(&format!("told by {name}")), "{part}: {text}");
        assert_eq!(scontrol.asked(), if requeues { "requeue 4711\n" } else { "" }, "{part}");
        assert_eq!(folder.path().join("hpc_ckpt_1.ckpt").exists(), requeues, "{part}");
    }
}

#[test]
fn a_stopped_rank_does_not_hold_up_the_end() {
    if plays("stopped") {
        return train(2);
    }
    let folder = TempDir::new().unwrap();
    let (code, text, took) = signalled("stopped", "-INT", folder.path(), &std::env::var("PATH").unwrap());
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
    let mut command = own_process("wrong");
    let output = command.env(FOLDER, folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("are not started again") && !text.contains("starting all ranks again"), "{text}");
}

#[test]
fn a_program_whose_configuration_is_wrong_is_not_started_again() {
    if plays("wrong program") {
        let builder = builder(&folder_of_parent()).devices(2).max_restarts(3_u64);
        builder.build().unwrap().fit(&mut Net::new(), &mut Loaders::new()).unwrap();
        return;
    }
    let folder = TempDir::new().unwrap();
    let output = own_process("wrong program").env(FOLDER, folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(101), "its own exit code: {text}");
    assert!(text.contains("are not started again") && !text.contains("starting all ranks again"), "{text}");
}

#[test]
fn a_hangup_saves_what_a_run_with_checkpoints_has_done() {
    if plays("saves") {
        return train_with(2, None, false);
    }
    let folder = TempDir::new().unwrap();
    let path = std::env::var("PATH").unwrap();
    let (code, text, _) = signalled("saves", "-HUP", folder.path(), &path);
    assert_eq!(code, Some(129), "{text}");
    let saved = Checkpoint::load(folder.path().join("checkpoints/on_signal.ckpt")).unwrap();
    assert_eq!((saved.meta.global_step, saved.training.unwrap().ranks.len()), (10, 1));
}

#[test]
fn too_many_processes_are_refused_before_any_is_started() {
    let (code, text) = short_fit(&["--trainer.devices=1000000", "--trainer.strategy=ddp"], &[]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("1000000 processes are too many for the ") && text.contains(" cores"), "{text}");
}

#[test]
fn after_a_fit_or_a_launch_signals_end_the_process_again() {
    let signals = ["-INT", "-TERM", "-HUP", "-USR1"];
    if plays("launch") && std::env::var_os("LOCAL_RANK").is_some() {
        return; // a rank
    }
    if plays("fit") || plays("launch") {
        if plays("fit") {
            let mut trainer = silent().max_epochs(1).build().unwrap();
            trainer.fit(&mut Probe::default(), &mut probe_loaders()).unwrap();
        } else {
            let ranks =
                Launch { devices: 2, num_nodes: 1, node_rank: 0, master_addr: None, master_port: None };
            let logs = TempDir::new().unwrap();
            assert_eq!(launch(&ranks, 0, logs.path()).unwrap(), 0);
        }
        signal_self(&std::env::var("VOLTAIC_TEST_SIGNAL").unwrap()).unwrap();
        std::thread::sleep(Duration::from_secs(20));
        return;
    }
    for part in ["fit", "launch"] {
        for (signal, number) in signals.into_iter().zip([2, 15, 1, 10]) {
            let mut command = own_process_hung_up(part);
            let status = command.env("VOLTAIC_TEST_SIGNAL", signal).stdout(Stdio::null()).status().unwrap();
            assert_eq!(status.signal(), Some(number), "{part} {signal}: {status}");
        }
    }
}
