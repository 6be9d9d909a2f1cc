//! All mistakes of a configuration are told together.

#[macro_use]
mod support;

use voltaic::prelude::*;

fn main() -> Result<()> {
    support::run(blocks![all_at_once])
}

/// Each line has the key, what is wrong with its value, and how to fix it. `voltaic fit` also says where a key was set:
/// `trainer.max_epochs (from run.yaml:7)`.
fn all_at_once() -> Result<()> {
    let builder = Trainer::builder()
        .accelerator("hpu")
        .devices(9)
        .strategy("hpu_paralel")
        .max_epochs(-2)
        .limit_train_batches(1.5)
        .precision("bf16")
        .graph(voltaic::trainer::GraphMode::Step)
        .detect_anomaly(true);
    if let Err(error) = builder.build() {
        println!("{error}");
    }
    Ok(())
}
