//! nanoGPT's loop trains the same with each strategy, and where it was interrupted.

use crate::run;

const PROGRAM: &str = "fabric_gpt";

#[test]
fn each_strategy_and_a_resumed_run_have_the_same_losses() {
    let blocks = ["ddp", "zero2", "zero3", "resumed"];
    let losses = blocks.map(|block| {
        let out = run(PROGRAM, block).out;
        [10, 20, 30].map(|iter| {
            let line = out.lines().find_map(|line| line.split_once(&format!("iter {iter}: loss ")));
            line.unwrap_or_else(|| panic!("{block}: {out}")).1.to_owned()
        })
    });
    assert!(losses.iter().all(|own| *own == losses[0]), "{losses:?}");
    let [first, .., last] = losses[0].clone().map(|loss| loss.parse::<f64>().unwrap());
    assert!(last < first, "{first} {last}");
}
