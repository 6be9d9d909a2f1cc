//! States divided among emulated cards, in the blocks of the documents.

use crate::{run, run_with};

const PROGRAM: &str = "hpu_deepspeed";

/// Steps of an epoch in which each of 8 ranks takes batches of 64.
const STEPS: u64 = 10_800_u64.div_ceil(8).div_ceil(64);

#[test]
fn using_deepspeed_on_hpu() {
    let ran = run(PROGRAM, "using_deepspeed_on_hpu");
    assert!(ran.out.contains("world_size 1, 60 steps"), "{}", ran.out);
    assert!(ran.out.contains("TestCB: 60 steps on hpu:0"), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.9);
}

/// All stages give the same numbers, with an offload, too.
#[test]
fn stages() {
    let blocks = ["zero_1", "zero_2", "zero_3", "zero_offload", "zero_infinity", "bf16_precision"];
    let losses = blocks.map(|block| {
        let ran = run(PROGRAM, block);
        assert!(ran.out.contains(&format!("world_size 8, {STEPS} steps")), "{}", ran.out);
        assert_eq!(ran.checkpoint(0).meta.global_step, STEPS);
        ran.column(0, "train_loss")
    });
    assert!(losses[0].last() < losses[0].first(), "{losses:?}");
    assert!(losses.iter().all(|of| *of == losses[0]), "{losses:?}");
}

/// The large layer is in files, which the log says, and none is left.
#[test]
fn zero_infinity_in_files() {
    let ran = run_with(PROGRAM, "zero_infinity_in_files", &[("RUST_LOG", "info")]);
    assert!(ran.out.contains("world_size 2, 60 steps"), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.9);
    for expected in
        ["local_nvme/zero_stage_3/optimizer/rank0: ", "local_nvme/zero_stage_3/bfloat16params/rank0: "]
    {
        assert!(ran.err.contains(expected), "{}", ran.err);
    }
    // of half of the weights: copies in float32, gradients and two moments of four bytes each, and shards of two
    assert!(ran.err.contains("zero3: rank 0 of 2 had 13.78 MiB in files"), "{}", ran.err);
    assert!(!ran.folder.path().join("local_nvme/zero_stage_3").exists());
}

#[test]
fn bf16_optimizer() {
    let ran = run(PROGRAM, "bf16_optimizer");
    assert!(ran.out.contains("world_size 2, 4 steps"), "{}", ran.out);
}

#[test]
fn activation_checkpointing() {
    let ran = run_with(PROGRAM, "activation_checkpointing", &[("RUST_LOG", "info")]);
    assert!(ran.out.contains("world_size 1, 60 steps"), "{}", ran.out);
    assert!(ran.err.contains("of them in host memory"), "{}", ran.err);
    ran.assert_fell(0, "train_loss", 0.9);
}
