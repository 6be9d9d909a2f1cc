//! Training in float8.

use crate::mixed_precision::full_precision;
use crate::run;

const PROGRAM: &str = "fp8";

#[test]
fn fp8_training() {
    let ran = run(PROGRAM, "fp8_training");
    assert!(ran.out.contains(" layers compute in float8") && !ran.out.contains("\n0 layers"), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.9);
    // E5M2 rounds each factor by 2^-3 of its value at most. Adam makes differences grow: the first step is compared, and all by their mean
    let (own, full) = (ran.column(0, "train_loss"), full_precision());
    assert!(own.len() == full.len() && own != full, "{own:?}");
    let ratio = own.iter().sum::<f64>() / full.iter().sum::<f64>();
    for ratio in [own[0] / full[0], ratio] {
        assert!((ratio - 1.0).abs() < 0.125, "{ratio} of the losses in float32: {own:?} {full:?}");
    }
    let checkpoint = ran.checkpoint(0);
    let scales = &checkpoint.training.unwrap().fp8;
    assert!(scales.iter().any(|(name, _)| name.ends_with("/scale_fwd")), "scales are in checkpoints");
    assert!(checkpoint.weights.iter().all(|(name, _)| !name.contains("scale")));
}

#[test]
fn transformer_engine() {
    let ran = run(PROGRAM, "transformer_engine");
    assert!(ran.out.contains("outside autocast are Float"), "{}", ran.out);
    ran.assert_fell(0, "train_loss", 0.9);
}

#[test]
fn deepspeed() {
    let ran = run(PROGRAM, "deepspeed");
    ran.assert_fell(0, "train_loss", 0.9);
}
