//! One card, several, and two nodes.

use crate::{run, run_with};

const PROGRAM: &str = "several_hpus";

/// Steps of an epoch in which each rank takes batches of 64, of 60 at most.
fn steps(world_size: u64) -> u64 {
    let digits = 10_800_u64;
    digits.div_ceil(world_size).div_ceil(64).min(60)
}

#[test]
fn run_on_1_gaudi() {
    let ran = run(PROGRAM, "run_on_1_gaudi");
    assert!(ran.out.contains("single_device, world_size 1, 60 steps"), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.9);
    assert_eq!(ran.checkpoint(0).meta.global_step, 60);
}

#[test]
fn run_on_multiple_gaudis() {
    let ran = run(PROGRAM, "run_on_multiple_gaudis");
    let steps = steps(8);
    assert!(ran.out.contains(&format!("hpu_parallel, world_size 8, {steps} steps")), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.9);
    assert_eq!(ran.checkpoint(0).meta.global_step, steps);
}

#[test]
fn two_nodes() {
    let ran = run(PROGRAM, "two_nodes");
    let steps = steps(16);
    assert!(ran.out.contains(&format!("hpu_parallel, world_size 16, {steps} steps")), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.95);
    assert_eq!(ran.checkpoint(0).meta.global_step, steps);
}

#[test]
fn select_gaudis_automatically() {
    let ran = run(PROGRAM, "select_gaudis_automatically");
    assert!(ran.out == "1 of 8 cards\n1 of 8 cards\n", "{}", ran.out);
    let ran = run_with(PROGRAM, "select_gaudis_automatically", &[("VOLTAIC_HPU_DEVICES", "2")]);
    assert!(ran.out == "2 of 2 cards\n2 of 2 cards\n", "{}", ran.out);
}
