//! The plugin, and regions with autocast.

use crate::mixed_precision::{assert_near, full_precision};
use crate::run;

const PROGRAM: &str = "autocast";

#[test]
fn hpu_precision_plugin() {
    let ran = run(PROGRAM, "hpu_precision_plugin");
    ran.assert_fell(0, "train_loss", 0.9);
    assert_near(&ran.column(0, "train_loss"), &full_precision());
    let switch = run("mixed_precision", "bf16_mixed");
    assert_eq!(
        ran.column(0, "train_loss"),
        switch.column(0, "train_loss"),
        "the plugin and trainer.precision"
    );
    assert_eq!(ran.checkpoint(0).meta.global_step, 60);
}

#[test]
fn torch_autocast() {
    let (guard, decorated) = (run(PROGRAM, "torch_autocast"), run(PROGRAM, "decorated"));
    for ran in [&guard, &decorated] {
        assert!(ran.out.contains("logits are BFloat16"), "{}", ran.out);
        ran.assert_fell(0, "train_loss", 0.9);
        assert_eq!(ran.checkpoint(0).meta.global_step, 60);
    }
    assert_eq!(guard.column(0, "train_loss"), decorated.column(0, "train_loss"));
}

#[test]
fn enabled() {
    let ran = run(PROGRAM, "enabled");
    assert_eq!(ran.out, "inside BFloat16, where it is off Float\n");
}
