//! HMP with the lists that ship beside the program.

use crate::mixed_precision::{assert_near, full_precision};
use crate::run;

#[test]
fn hmp_op_lists() {
    let ran = run("hmp_op_lists", "hmp_op_lists");
    let casts: Vec<&str> = ran.out.lines().filter(|line| line.contains(" gets ")).collect();
    let expected = ["cross_entropy_loss gets Float for BFloat16", "linear gets BFloat16 for Float"];
    assert_eq!(casts, expected, "the operators of the files, and no others");
    ran.assert_fell(0, "train_loss", 0.9);
    assert_near(&ran.column(0, "train_loss"), &full_precision());
    assert_eq!(ran.checkpoint(0).meta.global_step, 60);
}
