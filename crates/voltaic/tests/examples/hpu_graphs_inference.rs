//! Captured and replayed tests: the bits of a test without.

use crate::run;

const PROGRAM: &str = "hpu_graphs_inference";

#[test]
fn capture_and_replay() {
    let (captured, plain) = (run(PROGRAM, "capture_and_replay"), run(PROGRAM, "without_capture"));
    let losses = captured.column(0, "test_loss_step");
    assert_eq!(losses, plain.column(0, "test_loss_step"));
    assert_eq!(losses.len(), 10);
    assert!(losses.windows(2).all(|two| two[0] != two[1]), "each replay sees its batch: {losses:?}");
    assert_eq!(captured.number("test_loss"), plain.number("test_loss"));
    assert_eq!(captured.number("replays "), 9.0);
}

#[test]
fn wrap_in_hpu_graph() {
    let (wrapped, plain) = (run(PROGRAM, "wrap_in_hpu_graph"), run(PROGRAM, "without_graphs"));
    for metric in ["test_loss", "test_acc"] {
        let values = wrapped.column(0, metric);
        assert_eq!(values, plain.column(0, metric), "{metric}");
        assert_eq!(values.len(), 1);
    }
    for line in ["Total captured: 1", "Total checked: 1", "Total cached hits: 8", "Total uncached: 0"] {
        assert!(wrapped.out.lines().any(|found| found == line), "{line} is not in:\n{}", wrapped.out);
    }
}
