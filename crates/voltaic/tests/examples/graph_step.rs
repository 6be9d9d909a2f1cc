//! With and without graphs, a run has the same losses.

use crate::run;

const PROGRAM: &str = "graph_step";

#[test]
fn graph_step() {
    let ran = run(PROGRAM, "graph_step");
    assert_eq!(ran.column(0, "train_loss").len(), 60);
    assert_eq!(ran.column(0, "train_loss"), ran.column(1, "train_loss"));
    assert!(ran.out.contains("0 steps as usual, 0 captured, 0 replayed"), "{}", ran.out);
    let replayed = "3 steps as usual, 2 captured, 55 replayed; 53 optimizer steps replayed";
    assert!(ran.out.contains(replayed), "{}", ran.out);
}

#[test]
fn graph_modules() {
    let ran = run(PROGRAM, "graph_modules");
    assert_eq!(ran.column(0, "train_loss"), ran.column(1, "train_loss"));
    assert_eq!(ran.column(0, "val_loss"), ran.column(1, "val_loss"));
    // in training and in validation a kind of call each; the second call of each is a check
    assert!(ran.out.contains("Mlp: 60 calls replayed, 2 captured"), "{}", ran.out);
}
