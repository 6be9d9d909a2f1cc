//! bfloat16 by autocast and by HMP.

use crate::run;

const PROGRAM: &str = "mixed_precision";

/// Losses of the same steps in float32.
pub fn full_precision() -> Vec<f64> {
    run("several_hpus", "run_on_1_gaudi").column(0, "train_loss")
}

/// bfloat16 has 8 bits: the losses are others, but not by much. Adam makes differences grow, so that steps are compared at
/// first, and all of them by their mean.
pub fn assert_near(losses: &[f64], full: &[f64]) {
    assert_eq!(losses.len(), full.len());
    assert_ne!(losses, full);
    for (loss, full) in losses.iter().zip(full).take(10) {
        assert!((loss - full).abs() < 0.02 * full.abs(), "{loss} beside {full} in float32");
    }
    let ratio = losses.iter().sum::<f64>() / full.iter().sum::<f64>();
    assert!((ratio - 1.0).abs() < 0.02, "{ratio} of the losses in float32");
}

#[test]
fn bf16_mixed() {
    let ran = run(PROGRAM, "bf16_mixed");
    ran.assert_fell(0, "train_loss", 0.9);
    assert_near(&ran.column(0, "train_loss"), &full_precision());
    let weight = &ran.checkpoint(0).weights[0].1;
    assert_eq!(weight.kind(), voltaic::Kind::Float, "the weights stay float32");
}

#[test]
fn precision_16_is_bfloat16_on_an_hpu() {
    let ran = run(PROGRAM, "precision_16");
    assert_near(&ran.column(0, "train_loss"), &full_precision());
    assert!(ran.err.contains("HMP (opt_level, or precision=16 on an HPU) is deprecated"), "{}", ran.err);
    // one layer gives HMP no operator that autocast would compute otherwise
    assert_eq!(ran.column(0, "train_loss"), run(PROGRAM, "bf16_mixed").column(0, "train_loss"));
}
