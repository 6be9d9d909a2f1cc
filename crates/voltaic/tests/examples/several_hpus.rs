//! One card, several, and two nodes.

use crate::{run, run_with};

const PROGRAM: &str = "several_hpus";

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
    // 10,800 digits in batches of 64 on each of eight ranks
    assert!(ran.out.contains("hpu_parallel, world_size 8, 22 steps"), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.9);
    assert_eq!(ran.checkpoint(0).meta.global_step, 22);
}

#[test]
fn two_nodes() {
    let ran = run(PROGRAM, "two_nodes");
    assert!(ran.out.contains("hpu_parallel, world_size 16, 11 steps"), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.95);
    assert_eq!(ran.checkpoint(0).meta.global_step, 11);
}

#[test]
fn select_gaudis_automatically() {
    let ran = run(PROGRAM, "select_gaudis_automatically");
    assert!(ran.out == "1 of 8 cards\n1 of 8 cards\n", "{}", ran.out);
    let ran = run_with(PROGRAM, "select_gaudis_automatically", &[("VOLTAIC_HPU_DEVICES", "2")]);
    assert!(ran.out == "2 of 2 cards\n2 of 2 cards\n", "{}", ran.out);
}
