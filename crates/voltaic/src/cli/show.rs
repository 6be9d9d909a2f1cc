//! What `graph show` does: captures a step, and prints and draws what it consists of.

use std::io::Write;

use super::console::print;
use super::request::RunRequest;
use crate::checkpoint::write_atomically;
use crate::data::DataModule;
use crate::graph::ShownGraph;
use crate::module::LightningModule;
use crate::trainer::TrainerBuilder;

/// Shows a training step of the first batch.
pub(super) fn show<M: LightningModule>(
    request: &RunRequest,
    builder: TrainerBuilder,
    model: &mut M,
    data: &mut (dyn DataModule<Batch = M::Batch> + 'static),
) -> anyhow::Result<()> {
    let Some(arguments) = request.show() else { anyhow::bail!("graph show without its options") };
    let graphs = builder.build()?.show_graphs(model, data)?;
    let texts: Vec<String> = graphs.iter().map(|graph| graph.text(arguments.all)).collect();
    print(&texts.join("\n"))?;
    if let Some(path) = &arguments.picture {
        write_atomically(path, |file| file.write_all(ShownGraph::picture(&graphs).as_bytes()))?;
        print(&format!("\npicture  {}\n", path.display()))?;
    }
    Ok(())
}
