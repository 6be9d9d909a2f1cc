//! A rank that hangs or dies: the others name it and the operation, keep the record of their operations, and end in time.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use voltaic::callback::Callback;
use voltaic::checkpoint::{Checkpoint, CheckpointIo};
use voltaic::distributed::{ProcessGroup, ReduceOp, collective_scope};
use voltaic::module::{HookContext, LightningModule, StepContext};
use voltaic::optim::Optimizers;
use voltaic::strategy::DdpConfig;
use voltaic::{Kind, Module, Tensor};

use crate::ddp::{FOLDER, Net, builder, folder_of_parent, loaders};
use crate::probe::{files, own_process, own_thread, plays};
use crate::signal::signal_self;

/// Long enough for ranks that start beside others on a busy machine.
const TIMEOUT_SECS: f64 = 4.0;

/// What goes wrong, and in which phase; the ones of each run.
const CASES: [[&str; 2]; 10] = [
    ["skips", "forward"],
    ["order", "forward"],
    ["skips", "validation"],
    ["stopped", "forward"],
    ["stopped", "backward"],
    ["stopped", "between"],
    ["stopped", "checkpoint"],
    ["killed", "step"],
    ["killed", "validation"],
    ["sleeps", "between"],
];

/// All that there are, with `VOLTAIC_TEST_ALL=1`.
fn cases() -> Vec<[&'static str; 2]> {
    if std::env::var_os("VOLTAIC_TEST_ALL").is_none() {
        return CASES.to_vec();
    }
    let phases = ["forward", "backward", "step", "between", "validation"];
    let faults = ["skips", "order", "stopped", "killed", "sleeps"];
    let all = faults.into_iter().flat_map(|fault| phases.map(|phase| [fault, phase]));
    all.chain([["stopped", "checkpoint"], ["killed", "checkpoint"], ["sleeps", "checkpoint"]]).collect()
}

fn sum(group: &ProcessGroup, name: &'static str) -> voltaic::Result<()> {
    let _scope = collective_scope(name);
    group.all_reduce(&Tensor::zeros([7], (Kind::Float, tch::Device::Cpu)), ReduceOp::Sum)
}

/// Where the fault is, other than between two ranks of one host.
const PLACE: &str = "VOLTAIC_TEST_PLACE";

fn place() -> String {
    std::env::var(PLACE).unwrap_or_default()
}

/// The fault, if this is the phase that has it.
fn fault(phase: &str, faulty: usize, group: Option<&ProcessGroup>) -> anyhow::Result<()> {
    let (Some(group), Ok(part)) = (group, std::env::var(crate::process::PART)) else { return Ok(()) };
    let Some(what) = part.strip_suffix(phase) else { return Ok(()) };
    if place() == "group" {
        let Some(group) = group.new_group(&[0, 1])? else { return Ok(()) };
        return if group.rank() == faulty { Ok(()) } else { Ok(sum(&group, "of this test")?) };
    }
    match (what.trim(), group.rank() == faulty) {
        ("skips", true) => {}
        ("order", true) => {
            group.barrier()?;
            sum(group, "of this test")?;
        }
        ("stopped", true) => signal_self("-STOP")?,
        ("killed", true) => signal_self("-KILL")?,
        ("sleeps", true) => std::thread::sleep(Duration::from_secs(60)),
        ("order", false) => {
            sum(group, "of this test")?;
            group.barrier()?;
        }
        _ => sum(group, "of this test")?,
    }
    Ok(())
}

/// The net, with faults in its forward.
#[derive(Module)]
struct Faulty(Net);

impl LightningModule for Faulty {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<Tensor> {
        if ctx.batch_idx() == 2 {
            fault("forward", 1, ctx.process_group())?;
        }
        self.0.training_step(batch, ctx)
    }

    fn validation_step(&self, batch: &Self::Batch, ctx: &mut StepContext) -> anyhow::Result<()> {
        self.0.validation_step(batch, ctx)
    }

    fn configure_optimizers(&self) -> anyhow::Result<Optimizers> {
        self.0.configure_optimizers()
    }
}

/// The other faults of rank 1.
struct Faults;

impl Callback for Faults {
    fn on_before_backward(&mut self, ctx: &mut HookContext, _module: &dyn Module) -> anyhow::Result<()> {
        fault("backward", 1, ctx.process_group())
    }

    fn on_before_optimizer_step(
        &mut self,
        ctx: &mut HookContext,
        _module: &dyn Module,
    ) -> anyhow::Result<()> {
        fault("step", 1, ctx.process_group())
    }

    fn on_train_batch_end(&mut self, ctx: &mut HookContext, _module: &mut dyn Module) -> anyhow::Result<()> {
        fault("between", 1, ctx.process_group())
    }

    fn on_validation_batch_start(
        &mut self,
        ctx: &mut HookContext,
        _module: &mut dyn Module,
    ) -> anyhow::Result<()> {
        fault("validation", 1, ctx.process_group())
    }
}

/// Faults of rank 0, which writes.
struct Writes;

impl CheckpointIo for Writes {
    fn save_checkpoint(
        &mut self,
        checkpoint: &Checkpoint,
        path: &Path,
        _storage_options: Option<&Value>,
    ) -> voltaic::Result<()> {
        match std::env::var(crate::process::PART).as_deref() {
            Ok("stopped checkpoint") => signal_self("-STOP").unwrap(),
            Ok("killed checkpoint") => signal_self("-KILL").unwrap(),
            Ok("sleeps checkpoint") => std::thread::sleep(Duration::from_secs(60)),
            _ => {}
        }
        checkpoint.save(path)
    }
}

fn train() {
    let config = DdpConfig { timeout_secs: TIMEOUT_SECS, ..DdpConfig::default() };
    let builder = builder(&folder_of_parent()).num_sanity_val_steps(0).enable_checkpointing(true);
    let builder = builder.strategy(config).callback(Faults).checkpoint_io(Writes);
    let builder = match place().as_str() {
        "hpu" => builder.devices(2).accelerator("hpu"),
        "group" => builder.devices(3),
        "restart" => builder.devices(2).max_restarts(1_u64),
        "hosts" => builder.devices(1).num_nodes(2_u64),
        _ => builder.devices(2),
    };
    let trained = builder.build().and_then(|mut trainer| {
        trainer
            .fit(&mut Faulty(Net::new()), &mut loaders(None))
            .inspect_err(|error| eprintln!("error: {error}"))
    });
    std::process::exit(i32::from(trained.is_err()));
}

/// The operations that a rank has noted, after the line that says whose they are.
fn record(folder: &Path, rank: usize) -> Vec<Value> {
    record_of(folder, rank, 0)
}

fn record_of(folder: &Path, rank: usize, attempt: usize) -> Vec<Value> {
    let path = folder.join(format!("rank_logs/collectives_rank_{rank}_attempt_{attempt}.jsonl"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| {
        panic!("{}: {error}; there are {:?}", path.display(), files(&folder.join("rank_logs")))
    });
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Runs with a fault.
fn run([fault, phase]: [&str; 2]) {
    let (what, folder, started) = (format!("{fault} {phase}"), TempDir::new().unwrap(), Instant::now());
    let mut command = own_process(&what);
    let output =
        command.env(FOLDER, folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).output().unwrap();
    let took = started.elapsed();
    let (faulty, other) = if phase == "checkpoint" { (0, 1) } else { (1, 0) };
    let shown = String::from_utf8_lossy(&output.stderr).into_owned();
    let log = std::fs::read_to_string(folder.path().join("rank_logs/rank_1.log")).unwrap_or_default();
    let said = if other == 0 { &shown } else { &log };
    let all = format!("{what}: {shown}\n--- rank 1:\n{log}");
    assert!(output.status.code().is_some_and(|code| code > 0), "{all}");
    // processes start, time-out, 5 s for questions, 3 s to end; on a machine with other work; a rank that sleeps does so for longer
    assert!(took < Duration::from_secs(50), "{took:?} {all}");

    let own = record(folder.path(), other);
    assert_eq!((&own[0]["rank"], &own[0]["attempt"]), (&other.into(), &0.into()), "{all}");
    let last = own.last().unwrap();
    assert!(own.len() > 3 && last["op"].is_string() && last["began"].is_f64(), "{last} {all}");
    let bucket = own.iter().any(|entry| entry["from"] == "backward / gradient of second.bias and 3 more")
        || own.iter().any(|entry| entry["from"].as_str().is_some_and(|from| from.contains("gradients of")));
    assert!(bucket || own.iter().any(|entry| entry["from"] == "prepare"), "{own:?} {all}");
    match fault {
        "skips" | "order" => {
            assert!(said.contains("rank 1 was in ") || said.contains("rank 1 sums "), "{all}");
            assert!(said.contains("of this test"), "{all}");
            record(folder.path(), faulty);
        }
        "stopped" => {
            let text = format!("rank {faulty} (process ");
            assert!(said.contains(&text) && said.contains(", which a signal has stopped) is "), "{all}");
            record(folder.path(), faulty);
        }
        "killed" => {
            assert!(shown.contains(&format!("launcher: rank {faulty} ")), "{all}");
            assert!(said.contains(", which has ended) was "), "{all}");
            record(folder.path(), faulty);
        }
        _ => {
            assert!(said.contains(&format!("rank {faulty} did not take part")), "{all}");
            assert!(said.contains(&format!("rank {faulty} (process ")), "{all}");
            record(folder.path(), faulty); // written while it sleeps
        }
    }
}

#[test]
fn a_rank_that_is_missing_is_named_with_the_operation() {
    let cases = cases();
    if cases.iter().any(|[fault, phase]| plays(&format!("{fault} {phase}"))) {
        return train();
    }
    // they mostly wait
    for some in cases.chunks(5) {
        std::thread::scope(|scope| {
            some.iter().for_each(|&case| drop(own_thread().spawn_scoped(scope, move || run(case)).unwrap()))
        });
    }
}

/// Runs with a fault of rank 1 in another place than two ranks of one host; returns what rank 0 said.
fn run_in(place: &str, fault: [&str; 2]) -> (String, TempDir) {
    let (what, folder, started) = (fault.join(" "), TempDir::new().unwrap(), Instant::now());
    let rank = |node_rank: usize| {
        let own = own_process(&what);
        let mut command = own_process(&what);
        if place == "hosts" {
            // other host names and processes, and a folder of its own: what two hosts do not share, but for the network
            command = Command::new("unshare");
            command.args(["--uts", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c"]);
            command.arg(format!("hostname host{node_rank}; exec \"$@\"")).arg("sh");
            command.arg(own.get_program()).args(own.get_args());
            command.envs(own.get_envs().filter_map(|(key, value)| Some((key, value?))));
            command.env("NODE_RANK", node_rank.to_string()).env("MASTER_ADDR", "127.0.0.1");
        }
        if place == "gloo" {
            command.env("VOLTAIC_SHARED_MEMORY", "0");
        }
        let own = folder.path().join(format!("node_{node_rank}"));
        std::fs::create_dir(&own).unwrap();
        command.env(FOLDER, own).env(PLACE, place).env("VOLTAIC_HPU", "emulator");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let mut first = rank(0);
    let second = (place == "hosts").then(|| {
        let port = crate::distributed::free_port().to_string();
        first.env("MASTER_PORT", &port);
        rank(1).env("MASTER_PORT", &port).spawn().unwrap()
    });
    let output = first.output().unwrap();
    let shown = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code().is_some_and(|code| code > 0), "{place} {what}: {shown}");
    if let Some(second) = second {
        let output = second.wait_with_output().unwrap();
        assert!(!output.status.success(), "{place} {what}: {shown}");
    }
    assert!(started.elapsed() < Duration::from_secs(50), "{:?} {place} {what}: {shown}", started.elapsed());
    (shown, folder)
}

/// The end of the record of rank 0 is the operation that failed.
fn assert_recorded(folder: &TempDir, attempt: usize, shown: &str) {
    let own = record_of(&folder.path().join("node_0"), 0, attempt);
    assert_eq!((&own[0]["rank"], &own[0]["attempt"]), (&0.into(), &attempt.into()), "{shown}");
    assert!(own.len() > 3 && own.last().unwrap()["op"].is_string(), "{own:?} {shown}");
}

#[test]
fn the_record_is_there_wherever_ranks_are() {
    let faults = [["skips", "forward"], ["killed", "step"]];
    if faults.iter().any(|fault| plays(&fault.join(" "))) {
        return train();
    }
    let namespaces = ["--uts", "--pid", "--mount-proc", "--fork", "true"];
    let has_hosts = Command::new("unshare").args(namespaces).status().is_ok_and(|status| status.success());
    if !has_hosts {
        println!("skipped: two hosts, since processes cannot have namespaces here");
    }
    let places = ["gloo", "hpu", "group", "restart", "hosts"].into_iter();
    let cases = places.flat_map(|place| faults.map(|fault| (place, fault)));
    let cases: Vec<_> = cases
        .filter(|&(place, [fault, _])| {
            (place != "hosts" || has_hosts) && (place != "group" || fault == "skips")
        })
        .collect();
    // the launcher gives ranks 3 s to write their records: few at a time, so that a busy machine has the time
    for some in cases.chunks(3) {
        std::thread::scope(|scope| {
            some.iter().for_each(|&(place, fault)| {
                drop(own_thread().spawn_scoped(scope, move || check_in(place, fault)).unwrap())
            });
        });
    }
}

fn check_in(place: &str, fault: [&str; 2]) {
    let (shown, folder) = run_in(place, fault);
    let all = format!("{place} {fault:?}: {shown}");
    assert_recorded(&folder, 0, &all);
    match (place, fault) {
        ("restart", _) => {
            assert!(shown.contains("starting all ranks again"), "{all}");
            assert_recorded(&folder, 1, &all);
        }
        ("group", _) => assert!(shown.contains("rank 1 did not take part"), "{all}"),
        // Gloo ends rank 1 at the first message that is longer than what it waits for
        ("hosts", ["skips", _]) => assert!(shown.contains("rank 1 did not take part"), "{all}"),
        ("hosts", _) => assert!(shown.contains("rank 1 does not answer"), "{all}"),
        (_, ["skips", _]) => assert!(shown.contains("of this test"), "{all}"),
        _ => assert!(shown.contains(", which has ended) was "), "{all}"),
    }
}
