//! A program's own command line, with a recipe for each configuration of "Using LightningCLI".

use std::fs;

use crate::{Ran, run};

const PROGRAM: &str = "lightning_cli";

/// Runs a recipe; it must train on that device with so many ranks, in bfloat16 or not.
fn fits(block: &str, device: &str, ranks: usize, autocast: bool) -> Ran {
    let ran = run(PROGRAM, block);
    for line in
        [format!("trains on {device}, autocast {autocast}\n"), format!("60 steps, world_size {ranks}\n")]
    {
        assert!(ran.out.contains(&line), "{line} in {}", ran.out);
    }
    ran.assert_fell(0, "train_loss", 0.7);
    assert!(ran.column(0, "val_acc").pop().unwrap() > 0.8);
    assert_eq!(ran.checkpoint(0).meta.global_step, 60);
    ran
}

/// The configuration as the run has kept it.
fn kept(ran: &Ran) -> String {
    fs::read_to_string(ran.folder.path().join("lightning_logs/version_0/config.yaml")).unwrap()
}

#[test]
fn accelerator_auto() {
    let ran = run(PROGRAM, "accelerator_auto");
    assert!(ran.out.contains("trains on ") && !ran.out.contains("hpu"), "no emulated card: {}", ran.out);
    ran.assert_fell(0, "train_loss", 0.7);
}

#[test]
fn accelerator_hpu() {
    fits("accelerator_hpu", "hpu:0", 1, false);
}

#[test]
fn strategy_auto() {
    fits("strategy_auto", "hpu:0", 2, false);
}

#[test]
fn strategy_hpu_single() {
    fits("strategy_hpu_single", "hpu:0", 1, false);
}

#[test]
fn strategy_hpu_parallel() {
    fits("strategy_hpu_parallel", "hpu:0", 2, false);
}

#[test]
fn plugin_precision() {
    fits("plugin_precision", "hpu:0", 1, true);
}

#[test]
fn plugin_checkpoint_io() {
    let ran = fits("plugin_checkpoint_io", "hpu:0", 1, false);
    assert!(kept(&ran).contains("- class_path: HpuCheckpointIo\n"), "{}", kept(&ran));
}

#[test]
fn accelerator_instance() {
    let ran = fits("accelerator_instance", "hpu:0", 1, false);
    assert!(kept(&ran).contains("accelerator:\n    class_path: HPUAccelerator\n"), "{}", kept(&ran));
}

#[test]
fn strategy_instance() {
    let ran = fits("strategy_instance", "hpu:0", 2, false);
    assert!(kept(&ran).contains("process_group_backend: hccl\n"), "{}", kept(&ran));
}

#[test]
fn instances_on_the_command_line() {
    let ran = fits("instances_on_the_command_line", "hpu:0", 2, true);
    assert!(kept(&ran).contains("bucket_cap_mb: 50\n"), "{}", kept(&ran));
}
