//! A run that was stopped goes on as if it had not been; files go to Lightning and back.

use std::process::Command;

use voltaic::checkpoint::{Checkpoint, read_torch};

use crate::{Ran, run};

const PROGRAM: &str = "checkpoints";

type Named = Vec<(String, voltaic::Tensor)>;

fn assert_same(expected: &Named, found: &Named) {
    assert_eq!(expected.len(), found.len());
    for (name, tensor) in expected {
        let (_, other) = found.iter().find(|(other, _)| other == name).unwrap_or_else(|| panic!("no {name}"));
        assert!(tensor.equal(other), "{name}");
    }
}

#[test]
fn resume_within_an_epoch() {
    let ran = run(PROGRAM, "resume_within_an_epoch");
    let [whole, stopped, resumed] = [0, 1, 2].map(|version| ran.column(version, "train_loss"));
    assert_eq!((whole.len(), stopped.len(), resumed.len()), (60, 23, 37));
    assert_eq!([stopped, resumed].concat(), whole);
    assert_same(&ran.checkpoint(0).weights, &ran.checkpoint(2).weights);
}

#[test]
fn in_the_background() {
    let ran = run(PROGRAM, "in_the_background");
    let folder = ran.folder.path().join("lightning_logs/version_0/checkpoints");
    for step in (10..=60).step_by(10) {
        let saved = Checkpoint::load(folder.join(format!("epoch=0-step={step}.ckpt"))).unwrap();
        assert_eq!(saved.meta.global_step, step);
    }
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 6, "no temporary file is left");
}

#[test]
fn killed_and_resumed() {
    let ran = run(PROGRAM, "killed_and_resumed");
    assert!(ran.out.contains("killed: signal: 9") && ran.out.contains("507 steps"), "{}", ran.out);
    assert!(ran.column(1, "train_loss").len() < 507, "it went on from a checkpoint");
    let whole = run(PROGRAM, "long_run");
    assert_eq!(whole.column(0, "train_loss").len(), 507);
    let last = |ran: &Ran, version: usize| {
        let folder = format!("lightning_logs/version_{version}/checkpoints/epoch=2-step=500.ckpt");
        Checkpoint::load(ran.folder.path().join(folder)).unwrap()
    };
    assert_same(&last(&whole, 0).weights, &last(&ran, 1).weights);
}

#[test]
fn to_lightning_and_back() {
    let ran = run(PROGRAM, "to_lightning_and_back");
    assert!(ran.out.contains("left out: states of callbacks"), "{}", ran.out);
    assert!(ran.out.contains("single_device, world_size 1, 120 steps"), "{}", ran.out);
    let own = ran.checkpoint(0);
    let [lightning, back, by_command] =
        ["lightning.ckpt", "back.ckpt", "command.ckpt"].map(|name| ran.folder.path().join(name));
    assert!(read_torch(&lightning).unwrap().get("pytorch-lightning_version").is_some());

    let mut command = Command::new(env!("CARGO_BIN_EXE_voltaic"));
    assert!(command.arg("convert").arg(&lightning).arg(&by_command).status().unwrap().success());
    for path in [&back, &by_command] {
        let again = Checkpoint::load(path).unwrap();
        assert_eq!(again.meta.global_step, 60);
        assert_same(&own.weights, &again.weights);
        let moments = |checkpoint: &Checkpoint| {
            checkpoint.training.as_ref().unwrap().optimizers[0]
                .iter()
                .map(|(n, t)| (n.clone(), t.copy()))
                .collect()
        };
        let (before, after): (Named, Named) = (moments(&own), moments(&again));
        assert!(before.len() >= 8, "two moments of four parameters");
        assert_same(&before, &after);
    }
    // the second epoch goes on from the first: its losses begin where those of the first have ended
    let [first, second] = [0, 1].map(|version| ran.column(version, "train_loss"));
    assert!(second[0] < 0.5 * first[0] && second.len() == 60, "{} {}", first[0], second[0]);
}
