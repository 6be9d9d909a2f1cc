//! What is told of a configuration with several mistakes.

use crate::run;

#[test]
fn all_at_once() {
    let ran = run("mistakes", "all_at_once");
    let keys: Vec<&str> = ran.out.lines().map(|line| line.split(": ").next().unwrap()).collect();
    println!("{keys:?}");
    assert_eq!(
        keys,
        [
            "trainer.devices",
            "trainer.strategy",
            "trainer.max_epochs",
            "trainer.graph",
            "trainer.limit_train_batches"
        ]
    );
    assert!(ran.out.lines().all(|line| line.contains("; ")), "each says how to fix it: {}", ran.out);
}
