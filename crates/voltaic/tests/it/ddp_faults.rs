//! Runs of several ranks when things go badly.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use voltaic::Module;
use voltaic::callback::Callback;
use voltaic::module::HookContext;
use voltaic::strategy::DdpConfig;

use crate::ddp::{FOLDER, Net, loaders};
use crate::probe::{own_process, plays, silent};

const TEST: &str = "ddp_faults::a_rank_that_ends_or_hangs_takes_the_others_down";

/// What goes wrong on rank 1.
struct Fault(String);

fn kill_self() {
    let pid = std::process::id().to_string();
    Command::new("kill").args(["-KILL", &pid]).status().unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

impl Callback for Fault {
    fn on_train_batch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        if ctx.process_group().is_none_or(|group| group.rank() != 1) || ctx.batch_idx() != 2 {
            return Ok(());
        }
        match self.0.as_str() {
            "killed" => kill_self(),
            "hangs" => std::thread::sleep(Duration::from_secs(60)),
            "fails" => anyhow::bail!("the data of rank 1 is broken"),
            _ => {}
        }
        Ok(())
    }

    fn on_before_optimizer_step(
        &mut self,
        ctx: &mut HookContext,
        _module: &dyn Module,
    ) -> anyhow::Result<()> {
        // rank 1 is gone when rank 0 is in the middle of its all_reduce
        if self.0 == "killed in a collective" && ctx.global_step() == 1 {
            let Some(group) = ctx.process_group() else { return Ok(()) };
            if group.rank() == 1 {
                std::thread::spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    kill_self();
                });
            }
            let tensor = voltaic::Tensor::zeros([1], (voltaic::Kind::Float, tch::Device::Cpu));
            loop {
                group.all_reduce(&tensor, voltaic::distributed::ReduceOp::Sum)?;
            }
        }
        Ok(())
    }
}

fn train(fault: &str) {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    if fault == "killed before joining" && std::env::var("LOCAL_RANK").is_ok_and(|rank| rank == "1") {
        kill_self();
    }
    let config = DdpConfig { timeout_secs: 2.0, ..DdpConfig::default() };
    let builder = silent().max_epochs(2).devices(2).strategy(config).default_root_dir(folder);
    let built = builder.callback(Fault(fault.to_owned())).build();
    let mut trainer = built.unwrap_or_else(|error| fail(&error));
    trainer.fit(&mut Net::new(), &mut loaders(None)).unwrap_or_else(|error| fail(&error));
}

fn fail(error: &voltaic::Error) -> ! {
    eprintln!("error: {error}");
    std::process::exit(1)
}

/// Runs with a fault; returns the output and how long it took.
fn run(fault: &str, folder: &Path) -> (Output, Duration) {
    let started = Instant::now();
    let mut command = own_process(TEST, fault);
    let output = command.env(FOLDER, folder).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    (output, started.elapsed())
}

/// Processes that still run with this folder in their environment.
fn orphans(folder: &Path) -> usize {
    let needle = format!("{FOLDER}={}", folder.display());
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let environments = processes.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok());
    environments.filter(|bytes| String::from_utf8_lossy(bytes).contains(&needle)).count()
}

#[test]
fn a_rank_that_ends_or_hangs_takes_the_others_down() {
    let cases = [
        ("killed before joining", "launcher: rank 1 (local rank 1", "was killed by signal 9", 137),
        ("killed", "launcher: rank 1 (local rank 1", "was killed by signal 9", 137),
        ("killed in a collective", "launcher: rank 1 (local rank 1", "was killed by signal 9", 137),
        ("fails", "launcher: rank 1 (local rank 1", "the data of rank 1 is broken", 1),
        ("hangs", "error: broadcast (operation", "rank 1 did not take part", 1),
    ];
    for (fault, ..) in cases {
        if plays(fault) {
            return train(fault);
        }
    }
    for (fault, first, text, code) in cases {
        let folder = TempDir::new().unwrap();
        let (output, took) = run(fault, folder.path());
        let shown = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{fault}: {shown}");
        let lines: Vec<&str> = shown
            .lines()
            .filter(|line| line.starts_with("launcher:") || line.starts_with("error:"))
            .collect();
        assert!(lines.first().is_some_and(|line| line.starts_with(first)), "{fault}: {shown}");
        assert!(shown.contains(text), "{fault}: {shown}");
        // the hanging one has to run into its time-out of 2 s first
        assert!(took < Duration::from_secs(40), "{fault} took {took:?}: {shown}");
        assert_eq!(orphans(folder.path()), 0, "{fault}");
    }
}
