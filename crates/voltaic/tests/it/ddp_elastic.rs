//! Ranks that are started again: by voltaic's launcher, by torchrun, and as torchrun's agents on several nodes do.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use voltaic::ffi::{Listen, Store};

use crate::ddp::{FOLDER, Net, alone, assert_same, builder, finish, folder_of_parent, loaders, weights};
use crate::distributed::free_port;
use crate::launchers::program;
use crate::probe::{own_process, plays, text_of};
use crate::signal::SignalOnce;

fn train_with_a_kill(devices: i64, max_restarts: u64) {
    let folder = folder_of_parent();
    let builder = builder(&folder).devices(devices).enable_checkpointing(true).max_restarts(max_restarts);
    let kill = SignalOnce { signal: Some("-KILL"), batch: 1, mark: folder.join("killed") };
    let mut trainer = builder.callback(kill).build().unwrap();
    println!("attempt {}", trainer.world().attempt);
    let mut net = Net::new();
    trainer.fit(&mut net, &mut loaders(None)).unwrap();
    finish(&trainer, &net, &folder);
}

/// Rank 0's output of both attempts tells that the second went on from the first one's checkpoint.
fn assert_went_on(text: &str, steps: u64) {
    let begun = format!("begins at step {steps}\n");
    assert!(text.contains("attempt 0") && text.contains("attempt 1") && text.contains(&begun), "{text}");
}

#[test]
fn ranks_are_started_again_from_the_last_checkpoint() {
    for (part, devices, steps) in [("two", 2, 6), ("one", 1, 12)] {
        if plays(part) {
            return train_with_a_kill(devices, 1);
        }
        if plays("two") || plays("one") {
            continue;
        }
        let (_kept, expected, ..) = alone(devices as usize, 1);
        let folder = TempDir::new().unwrap();
        let output = own_process(part).env(FOLDER, folder.path()).output().unwrap();
        let shown = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_went_on(&text_of(&output), steps);
        assert!(shown.contains("starting all ranks again (1 of at most 1 times)"), "{shown}");
        assert_same(&weights(folder.path()), &expected);
    }
}

#[test]
fn max_restarts_is_spelled_as_torchrun_spells_it_too() {
    let recipe = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/mnist.yaml");
    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    let options = ["--max-restarts", "2", "--trainer.devices=2", "--print_config=skip_default"];
    let text = text_of(&command.args(["fit", "--config", recipe]).args(options).output().unwrap());
    assert!(text.contains("max_restarts: 2"), "{text}");
}

#[test]
fn torchrun_starts_ranks_and_restarts_them() {
    if plays("torchrun") {
        return train_with_a_kill(2, 0);
    }
    let Some(torchrun) = program("torchrun", "VOLTAIC_TEST_TORCHRUN") else { return };
    let (_kept, expected, ..) = alone(2, 1);
    let folder = TempDir::new().unwrap();
    let own = own_process("torchrun");
    let mut command = Command::new(torchrun);
    command.args(["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--no-python"]);
    command.arg(own.get_program()).args(own.get_args()).env(FOLDER, folder.path());
    command.envs(own.get_envs().filter_map(|(key, value)| Some((key, value?))));
    assert_went_on(&text_of(&command.output().unwrap()), 6);
    assert_same(&weights(folder.path()), &expected);
}

/// Where the ranks of a torchrun meet.
struct Meeting<'a> {
    folder: &'a Path,
    port: u16,
    agent_has_store: bool,
}

impl Meeting<'_> {
    /// Starts a rank as torchrun's agent does that has started its ranks again so often.
    fn start(&self, rank: usize, restarts: usize) -> Child {
        let mut command = own_process("rank of torchrun");
        for (name, value) in
            [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)]
        {
            command.env(name, value.to_string());
        }
        let has_store = if self.agent_has_store { "True" } else { "False" };
        command.env("TORCHELASTIC_RUN_ID", "a run/7").env("TORCHELASTIC_USE_AGENT_STORE", has_store);
        command.env("TORCHELASTIC_RESTART_COUNT", restarts.to_string());
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", self.port.to_string());
        command.env(FOLDER, self.folder).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// What two ranks print, by rank.
    fn run(&self, restarts: [usize; 2]) -> [Output; 2] {
        let ranks = [self.start(0, restarts[0]), self.start(1, restarts[1])];
        ranks.map(|rank| rank.wait_with_output().unwrap())
    }
}

/// Two attempts; the agents say of the second what `restarts` says.
fn restart(agent_has_store: bool, restarts: [usize; 2]) {
    if plays("rank of torchrun") {
        return train_with_a_kill(2, 0);
    }
    let (_kept, expected, ..) = alone(2, 1);
    let folder = TempDir::new().unwrap();
    let agent = agent_has_store
        .then(|| Store::tcp("127.0.0.1", 0, Some(Listen::Everywhere), Duration::from_secs(30)).unwrap());
    let port = || agent.as_ref().map_or_else(free_port, |(_, port)| *port);
    let meeting = |port| Meeting { folder: folder.path(), port, agent_has_store };
    let [first, killed] = meeting(port()).run([0, 0]);
    assert!(!first.status.success() && !killed.status.success());
    let before = String::from_utf8_lossy(&first.stdout).into_owned();
    for again in meeting(port()).run(restarts) {
        assert_went_on(&(before.clone() + &text_of(&again)), 6);
    }
    assert_same(&weights(folder.path()), &expected);
    let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let hidden: Vec<_> = left.filter(|name| name.to_string_lossy().starts_with('.')).collect();
    assert!(hidden.is_empty(), "{hidden:?}");
}

#[test]
fn nodes_that_count_restarts_each_for_itself_meet_again() {
    restart(true, [0, 1]);
}

#[test]
fn a_checkpoint_is_known_after_the_end_of_the_store() {
    restart(false, [0, 1]);
}
