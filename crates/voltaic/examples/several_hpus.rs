//! "Run on 1 Gaudi", "Run on multiple Gaudis", "Scale-out on Gaudis" and "Select Gaudis automatically".

#[macro_use]
mod support;

use std::net::TcpListener;

use anyhow::ensure;
use support::{LitClassifier, Short, report, this_program};
use voltaic::accelerator::HpuAccelerator;
use voltaic::data::MnistData;
use voltaic::prelude::*;

fn main() -> Result<()> {
    let blocks = blocks![run_on_1_gaudi, run_on_multiple_gaudis, two_nodes, select_gaudis_automatically];
    support::run_with(blocks, blocks![scale_out])
}

/// Block 002-1.
fn run_on_1_gaudi() -> Result<()> {
    let mut trainer = Trainer::builder().accelerator("hpu").devices(1).short().build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    report(&trainer)
}

/// Block 002-2. The strategy is `hpu_parallel`. What follows `build` runs in each of the eight ranks.
fn run_on_multiple_gaudis() -> Result<()> {
    let mut trainer = Trainer::builder().devices(8).accelerator("hpu").short().build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    report(&trainer)
}

/// Block 002-3: run on every node, with the variables of blocks 002-4 and 002-5.
fn scale_out() -> Result<()> {
    let builder = Trainer::builder().accelerator("hpu").devices(8).strategy("hpu_parallel").num_nodes(2_u64);
    let mut trainer = builder.short().build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    report(&trainer)
}

/// Blocks 002-4 and 002-5, with both nodes on this host.
///
///     MASTER_ADDR=<MASTER_ADDR> MASTER_PORT=<MASTER_PORT> NODE_RANK=0 WORLD_SIZE=16 several_hpus scale_out
///     MASTER_ADDR=<MASTER_ADDR> MASTER_PORT=<MASTER_PORT> NODE_RANK=1 WORLD_SIZE=16 several_hpus scale_out
fn two_nodes() -> Result<()> {
    let master_port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port(); // one that is free
    let start = |node_rank: u32| {
        let mut node = this_program();
        node.arg("scale_out")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", master_port.to_string())
            .env("NODE_RANK", node_rank.to_string())
            .env("WORLD_SIZE", "16");
        node.spawn()
    };
    for mut node in [start(0)?, start(1)?] {
        let status = node.wait()?;
        ensure!(status.success(), "a node failed: {status}");
    }
    Ok(())
}

/// Block 002-6. Both mean the same: on emulated cards, which share one processor, that is one of them, or as many as
/// `VOLTAIC_HPU_DEVICES` names.
fn select_gaudis_automatically() -> Result<()> {
    // equivalent
    let first = Trainer::builder().accelerator("hpu").build()?;
    let second = Trainer::builder().accelerator("hpu").devices("auto").build()?;

    for trainer in [first, second] {
        if trainer.is_global_zero() {
            println!(
                "{} of {} cards",
                trainer.world().world_size,
                HpuAccelerator::from_env()?.device_count()
            );
        }
    }
    Ok(())
}
