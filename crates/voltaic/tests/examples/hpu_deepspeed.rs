//! States divided among emulated cards, in the blocks of the documents.

use crate::run;

const PROGRAM: &str = "hpu_deepspeed";

/// Steps of an epoch in which each of 8 ranks takes batches of 64.
const STEPS: u64 = 10_800_u64.div_ceil(8).div_ceil(64);

#[test]
fn using_deepspeed_on_hpu() {
    let ran = run(PROGRAM, "using_deepspeed_on_hpu");
    assert!(ran.out.contains("world_size 1, 60 steps"), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.9);
}

/// All stages give the same numbers.
#[test]
fn stages() {
    let losses = ["zero_1", "zero_2", "zero_3", "bf16_precision"].map(|block| {
        let ran = run(PROGRAM, block);
        assert!(ran.out.contains(&format!("world_size 8, {STEPS} steps")), "{}", ran.out);
        assert_eq!(ran.checkpoint(0).meta.global_step, STEPS);
        ran.column(0, "train_loss")
    });
    assert!(losses[0].last() < losses[0].first(), "{losses:?}");
    assert!(losses.iter().all(|of| *of == losses[0]), "{losses:?}");
}

#[test]
fn bf16_optimizer() {
    let ran = run(PROGRAM, "bf16_optimizer");
    assert!(ran.out.contains("world_size 2, 4 steps"), "{}", ran.out);
}
