//! Static modules with what is dynamic between them: the bits of a run without graphs.

use crate::hpu_graphs_training::assert_same_training;
use crate::{Ran, run};

const PROGRAM: &str = "hpu_graphs_dynamic";

/// Of a module: graphs, captured, checked, replayed, as usual.
fn counts(ran: &Ran, module: usize) -> [u64; 5] {
    let line = ran.out.lines().find(|line| line.starts_with(&format!("module{module}: "))).unwrap();
    let words = line.split(|c: char| !c.is_ascii_digit()).skip(1).filter_map(|word| word.parse().ok());
    let numbers: Vec<u64> = words.skip(1).collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{line}"))
}

#[test]
fn dynamic_parts_between_graphs() {
    let plain = run(PROGRAM, "without_graphs");
    let branches = run(PROGRAM, "dynamic_control_flow");
    assert_same_training(&branches, &plain, 0, 120);
    assert_eq!(counts(&branches, 1), [1, 1, 1, 118, 0]);
    let (second, third) = (counts(&branches, 2), counts(&branches, 3));
    assert!(second[3] > 30 && third[3] > 30, "both branches are taken often: {second:?} {third:?}");
    assert_eq!(second[3] + third[3] + 4, 120, "each of them is captured twice, then replayed");

    let operators = run(PROGRAM, "dynamic_ops");
    assert_same_training(&operators, &plain, 1, 120);
    assert_eq!(counts(&operators, 1), [1, 1, 1, 118, 0]);
    let [graphs, captured, checked, replayed, as_usual] = counts(&operators, 2);
    assert_eq!((graphs, captured), (10, 10), "more sizes come than there may be graphs");
    assert!(checked > 0 && replayed > 0 && as_usual > 0, "{}", operators.out);
    assert_eq!(captured + checked + replayed + as_usual, 120);
    assert_ne!(operators.column(0, "train_loss"), branches.column(0, "train_loss"));
}
