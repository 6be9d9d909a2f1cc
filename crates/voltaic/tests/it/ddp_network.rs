//! Two nodes with addresses of their own: network namespaces that a virtual cable joins.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use voltaic::callback::LambdaCallback;
use voltaic::checkpoint::Checkpoint;
use voltaic::strategy::DdpConfig;

use crate::ddp::{FOLDER, Net, alone, assert_same, builder, finish, folder_of_parent, loaders, weights};
use crate::probe::{own_process, plays, text_of};

/// Runs its arguments as node 0 at 10.77.0.1 and as node 1 at 10.77.0.2; node 1 writes to a file.
const NODES: &str = r#"
unshare --net sleep 300 & other=$!
trap 'kill $other' EXIT
until [ "$(readlink /proc/$other/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
inside="nsenter --target $other --net"
ip link add name cable0 type veth peer name cable1 netns $other &&
ip address add 10.77.0.1/24 dev cable0 && ip link set cable0 up && ip link set lo up &&
$inside ip address add 10.77.0.2/24 dev cable1 && $inside ip link set cable1 up && $inside ip link set lo up || exit 1
echo "the cable is plugged in"
NODE_RANK=1 $inside "$@" >"$VOLTAIC_TEST_FOLDER/node_1.txt" 2>&1 & second=$!
NODE_RANK=0 "$@"; first=$?
wait $second; second=$?
echo "nodes ended with $first and $second"
"#;

/// Runs a test as `part` on two nodes; none, with the reason printed, if this system does not allow it.
fn on_two_nodes(part: &str, folder: &Path) -> Option<Output> {
    let own = own_process(part);
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--net", "sh", "-c", NODES, "sh"]);
    command.arg(own.get_program()).args(own.get_args());
    command.envs(own.get_envs().filter_map(|(key, value)| Some((key, value?))));
    command.env(FOLDER, folder).env("MASTER_ADDR", "10.77.0.1").env("MASTER_PORT", "29500");
    command.env("WORLD_SIZE", "2");
    match command.output() {
        Ok(output) if String::from_utf8_lossy(&output.stdout).contains("the cable is plugged in") => {
            Some(output)
        }
        refused => {
            println!("skipped: this system lets nobody join network namespaces: {refused:?}");
            None
        }
    }
}

#[test]
fn two_nodes_with_addresses_of_their_own_train_together() {
    if plays("on two nodes") {
        let folder = folder_of_parent();
        let mut trainer = builder(&folder).devices(1).num_nodes(2_u64).build().unwrap();
        let mut net = Net::new();
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let folder = TempDir::new().unwrap();
    let Some(output) = on_two_nodes("on two nodes", folder.path()) else { return };
    assert_contains!(text_of(&output), "nodes ended with 0 and 0");
    let (_kept, expected, ..) = alone(2, 1);
    assert_same(&weights(folder.path()), &expected);
}

fn train_until_cut(folder: &Path) {
    let config = DdpConfig { timeout_secs: 3.0, ..DdpConfig::default() };
    let builder = builder(folder).devices(1).num_nodes(2_u64).strategy(config).enable_checkpointing(true);
    let mut trainer = builder
        .callback(LambdaCallback::new().on_train_batch_start(|ctx, _| {
            let is_second = ctx.process_group().is_some_and(|group| group.rank() == 1);
            if is_second && (ctx.current_epoch(), ctx.batch_idx()) == (1, 2) {
                let status = Command::new("ip").args(["link", "set", "cable1", "down"]).status()?;
                anyhow::ensure!(status.success(), "the cable stays");
            }
            Ok(())
        }))
        .build()
        .unwrap();
    if let Err(error) = trainer.fit(&mut Net::new(), &mut loaders(None)) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

#[test]
fn a_cut_network_ends_both_nodes_in_time_and_loses_nothing() {
    if plays("cut") {
        return train_until_cut(&folder_of_parent());
    }
    if plays("resumed") {
        let folder = folder_of_parent();
        let mut trainer = builder(&folder).devices(2).build().unwrap();
        let mut net = Net::new();
        trainer.ckpt_path(std::env::var("VOLTAIC_TEST_CHECKPOINT").unwrap());
        trainer.fit(&mut net, &mut loaders(None)).unwrap();
        return finish(&trainer, &net, &folder);
    }
    let folder = TempDir::new().unwrap();
    let started = Instant::now();
    let Some(output) = on_two_nodes("cut", folder.path()) else { return };
    let took = started.elapsed();
    let first =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let second = std::fs::read_to_string(folder.path().join("node_1.txt")).unwrap();
    assert!(first.contains("nodes ended with 1 and 1"), "{first}{second}");
    for text in [&first, &second] {
        assert!(text.contains("error: broadcast (operation") && text.contains("imed out"), "{text}");
    }
    // the time-out is 3 s; a rank asks the store for 3 s more, and waits 5 s for its launcher
    assert!(took < Duration::from_secs(60), "{took:?} {first}{second}");
    let saved = crate::probe::files(&folder.path().join("checkpoints"));
    assert_eq!(saved.len(), 1, "that of the first epoch: {saved:?}");
    assert_eq!(Checkpoint::load(&saved[0]).unwrap().meta.global_step, 6);

    let resumed = TempDir::new().unwrap();
    let mut command = own_process("resumed");
    command.env(FOLDER, resumed.path()).env("VOLTAIC_TEST_CHECKPOINT", &saved[0]);
    text_of(&command.output().unwrap());
    let (_kept, expected, ..) = alone(2, 1);
    assert_same(&weights(resumed.path()), &expected);
}
