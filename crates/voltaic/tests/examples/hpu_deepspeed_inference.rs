//! A layer divided among emulated cards, in the three forms of the document.

use crate::{Ran, run};

const PROGRAM: &str = "hpu_deepspeed_inference";

fn assert_same(ran: &Ran, mesh: &str) {
    assert!(ran.out.contains(mesh), "{}", ran.out);
    let whole = run(PROGRAM, "on_one_hpu");
    assert!(whole.out.contains("dp 1 x tp 1, l1 has [2, 32]"), "{}", whole.out);
    let (own, expected) = (ran.number("sum of squares"), whole.number("sum of squares"));
    assert!(expected > 1.0 && (own - expected).abs() < 1e-3, "{own} {expected}");
    let note = "trainer.plugins (bf16-mixed) has no effect: the weights of inference are in dtype Float";
    assert_eq!(ran.err.matches(note).count(), 1, "{}", ran.err);
}

#[test]
fn using_arguments() {
    assert_same(&run(PROGRAM, "using_arguments"), "dp 1 x tp 8, l1 has [2, 4]");
}

#[test]
fn using_kwargs() {
    let ran = run(PROGRAM, "using_kwargs");
    assert_same(&ran, "dp 1 x tp 4, l1 has [2, 8]");
    let note = "trainer.strategy.replace_method has no effect: DeepSpeed ignores it, too";
    assert_eq!(ran.err.matches(note).count(), 1, "{}", ran.err);
}

#[test]
fn using_configuration() {
    assert_same(&run(PROGRAM, "using_configuration"), "dp 2 x tp 4, l1 has [2, 8]");
}
