//! "Enable Mixed Precision", as both documents have it.

#[macro_use]
mod support;

use support::{LitClassifier, Short, report};
use voltaic::accelerator::HpuAccelerator;
use voltaic::data::MnistData;
use voltaic::prelude::*;

fn main() -> Result<()> {
    support::run(blocks![bf16_mixed, precision_16])
}

/// Block 000-1.
fn bf16_mixed() -> Result<()> {
    let accelerator = HpuAccelerator::from_env()?;
    let builder = Trainer::builder().devices(1).accelerator(accelerator).precision("bf16-mixed");
    let mut trainer = builder.short().build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    report(&trainer)
}

/// Block 003-1. On an HPU 16 means bfloat16 by HMP, as it did there; a warning says that HMP is deprecated.
fn precision_16() -> Result<()> {
    let mut trainer = Trainer::builder().devices(1).accelerator("hpu").precision(16).short().build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    report(&trainer)
}
