//! Captured and replayed steps, and modules whose calls are graphs: the bits of a run without.

use std::collections::BTreeMap;

use voltaic::Tensor;

use crate::{Ran, run};

const PROGRAM: &str = "hpu_graphs_training";

/// What two runs logged at each step, and the weights that they saved at the end, are the same bits.
pub fn assert_same_training(ran: &Ran, plain: &Ran, version: usize, steps: u64) {
    let losses = ran.column(0, "train_loss");
    assert_eq!(losses, plain.column(version, "train_loss"));
    assert_eq!(ran.column(0, "step"), plain.column(version, "step"));
    let (saved, expected) = (ran.checkpoint(0), plain.checkpoint(version));
    assert_eq!((saved.meta.global_step, expected.meta.global_step), (steps, steps));
    let own_name = |name: &str| name.trim_start_matches("model.").to_owned();
    let expected: BTreeMap<String, &Tensor> =
        expected.weights.iter().map(|(name, tensor)| (own_name(name), tensor)).collect();
    assert_eq!((saved.weights.len(), expected.len()), (4, 4), "two layers");
    for (name, tensor) in &saved.weights {
        assert!(tensor.equal(expected[&own_name(name)]), "{name}");
    }
    ran.assert_fell(0, "train_loss", 0.9);
}

#[test]
fn capture_and_replay() {
    let plain = run(PROGRAM, "without_capture");
    let captured_first = run(PROGRAM, "capture_and_replay");
    assert_same_training(&captured_first, &plain, 0, 45);
    assert_eq!(captured_first.column(0, "train_loss").len(), 45, "the first is of the placeholders");
    assert_eq!(captured_first.number("replays "), 44.0);
    let warmed_up = run(PROGRAM, "capture_begin_and_end");
    assert_same_training(&warmed_up, &plain, 1, 45);
    assert_eq!(warmed_up.column(0, "train_loss").len(), 45);
    assert_eq!(warmed_up.number("replays "), 41.0, "after three steps and a capture");
    let first = |ran: &Ran| ran.column(0, "train_loss")[1];
    assert_ne!(first(&captured_first), first(&warmed_up), "one has trained on the placeholders");
}

#[test]
fn modules() {
    let plain = run(PROGRAM, "without_graphs");
    let callable = run(PROGRAM, "make_graphed_callables");
    assert_same_training(&callable, &plain, 0, 45);
    assert!(callable.out.contains("forward pass replayed 45 times, backward pass 45"), "{}", callable.out);
    let cached = run(PROGRAM, "module_cacher");
    assert_same_training(&cached, &plain, 1, 48);
    // two captures of each of two sizes of batches, of which the shorter one comes once an epoch
    let stats = [
        "No. of HPUGraphs cached: 2",
        "Total captured: 2",
        "Total checked: 2",
        "Total cached hits: 44",
        "Total uncached: 0",
        "Total forwards executed: 48",
    ];
    for line in stats {
        assert!(cached.out.lines().any(|found| found == line), "{line} is not in:\n{}", cached.out);
    }
}
