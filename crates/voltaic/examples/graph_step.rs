//! `trainer.graph`: training steps are recorded once and replayed, without changes to the model.

#[macro_use]
mod support;

use support::{LitClassifier, Short, report};
use voltaic::data::MnistData;
use voltaic::models::{Classifier, Mlp, MlpConfig};
use voltaic::prelude::*;
use voltaic::trainer::{GraphMode, TrainerBuilder};

fn main() -> Result<()> {
    support::run(blocks![graph_step, graph_modules])
}

fn with_graph(mode: GraphMode) -> TrainerBuilder {
    Trainer::builder().accelerator("hpu").devices(1).short().graph(mode)
}

/// Forward, backward and optimizer step are replayed; the losses are those of the first run, bit for bit.
fn graph_step() -> Result<()> {
    for mode in [GraphMode::Off, GraphMode::Step] {
        seed_everything(1)?;
        let mut trainer = with_graph(mode).build()?;
        trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;

        report(&trainer)?;
        let graph = trainer.graph_report();
        println!(
            "{} steps as usual, {} captured, {} replayed; {} optimizer steps replayed",
            graph.eager_steps, graph.captured_steps, graph.replayed_steps, graph.replayed_updates
        );
    }
    Ok(())
}

/// Only the modules that the steps call by `ctx.graphed` are replayed: as those of the models that ship do.
fn graph_modules() -> Result<()> {
    for mode in [GraphMode::Off, GraphMode::Modules] {
        seed_everything(1)?;
        let mut trainer = with_graph(mode).build()?;
        let mut net = Classifier::new(Mlp::new(MlpConfig::default())?);
        trainer.fit(&mut net, &mut MnistData::default())?;

        report(&trainer)?;
        for (module, calls) in &trainer.graph_report().modules {
            println!("{module}: {} calls replayed, {} captured", calls.hits, calls.misses);
        }
    }
    Ok(())
}
