//! "Enabling DeviceStatsMonitor with HPUs".

#[macro_use]
mod support;

use support::{LitClassifier, Short, report};
use voltaic::accelerator::HpuAccelerator;
use voltaic::data::MnistData;
use voltaic::prelude::*;

fn main() -> Result<()> {
    support::run(blocks![device_stats_monitor])
}

/// Block 000-8. The metrics stand in `metrics.csv`; `memory.png` shows InUse and MaxInUse.
fn device_stats_monitor() -> Result<()> {
    let device_stats = DeviceStatsMonitor::new();
    let builder = Trainer::builder().accelerator(HpuAccelerator::from_env()?).callback(device_stats);
    let mut trainer = builder.short().build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    for file in trainer.files() {
        println!("{}", file.display());
    }
    report(&trainer)
}
