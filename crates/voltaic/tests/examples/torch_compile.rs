//! Compiled and not, a run has the same losses to the rounding of float32.

use crate::run;

const PROGRAM: &str = "torch_compile";

#[test]
fn using_torch_compile() {
    let (compiled, plain) = (run(PROGRAM, "using_torch_compile"), run(PROGRAM, "without_compile"));
    assert_close(&compiled.column(0, "train_loss"), &plain.column(0, "train_loss"));
    assert_eq!(
        compiled.err.matches("*** Usage of deprecated backend! Please use hpu_backend. ***").count(),
        1
    );
    assert!(
        compiled.number("training: ") >= 50.0 && compiled.number("evaluation: ") > 0.0,
        "{}",
        compiled.out
    );
}

#[test]
fn compile_by_the_trainer() {
    let (compiled, plain) = (run(PROGRAM, "compile_by_the_trainer"), run(PROGRAM, "without_compile"));
    assert_close(&compiled.column(0, "train_loss"), &plain.column(0, "train_loss"));
    assert!(compiled.out.contains("55 steps replayed"), "{}", compiled.out);
    assert!(!compiled.err.contains("deprecated"), "{}", compiled.err);
}

fn assert_close(own: &[f64], expected: &[f64]) {
    assert_eq!(own.len(), 60);
    let off = own.iter().zip(expected).map(|(a, b)| (a - b).abs() / b.abs().max(0.1)).fold(0.0, f64::max);
    assert!(own.len() == expected.len() && off < 1e-3, "{off}: {own:?} and {expected:?}");
}
