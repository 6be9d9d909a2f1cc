//! "Customize Mixed Precision": HMP with lists of operators of your own.

#[macro_use]
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::sync::Mutex;

use support::{LitClassifier, Short, report};
use voltaic::data::MnistData;
use voltaic::precision::{Cast, HpuPrecisionPlugin, OptLevel, observe_casts};
use voltaic::prelude::*;

const BATCH_SIZE: usize = 64;

/// A file beside this one.
fn beside(name: &str) -> Option<std::path::PathBuf> {
    Some(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/hmp_op_lists").join(name))
}

fn main() -> Result<()> {
    support::run(blocks![hmp_op_lists])
}

/// Block 003-2.
fn hmp_op_lists() -> Result<()> {
    // Initialize a trainer with HPU accelerator for HPU strategy for single device,
    // with mixed precision using overidden HMP settings
    let mut trainer = Trainer::builder()
        .accelerator("hpu")
        .devices(1)
        // Optional Habana mixed precision params to be set
        // Checkout `examples/hmp_op_lists/ops_bf16_mnist.txt` for the format
        .plugins([HpuPrecisionPlugin {
            precision: 16.into(),
            opt_level: Some(OptLevel::O1),
            verbose: false,
            bf16_file_path: beside("ops_bf16_mnist.txt"),
            fp32_file_path: beside("ops_fp32_mnist.txt"),
            ..HpuPrecisionPlugin::default()
        }])
        .short()
        .build()?;

    // Init our model
    let mut model = LitClassifier::new()?;
    // Init the data
    let mut dm = MnistData::default().batch_size(BATCH_SIZE);

    // Train the model ⚡
    observe_casts(Some(note));
    trainer.fit(&mut model, &mut dm)?;
    for cast in CASTS.lock().iter().flat_map(|casts| casts.iter()) {
        println!("{cast}");
    }
    report(&trainer)
}

/// What was cast, each kind once.
static CASTS: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn note(cast: &Cast) {
    if let Ok(mut casts) = CASTS.lock() {
        casts.insert(format!("{} gets {:?} for {:?}", cast.operator, cast.to, cast.from));
    }
}
