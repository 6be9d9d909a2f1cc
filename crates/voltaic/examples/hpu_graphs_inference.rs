//! "HPU Graphs APIs for Inference".

#[macro_use]
mod support;

use anyhow::Context;
use support::{NetHpuGraphs, Short};
use voltaic::data::{MnistData, MnistDataConfig, MnistSet};
use voltaic::graph::{self, HpuGraph, StaticTensor, WrapOptions};
use voltaic::models::Classifier;
use voltaic::prelude::*;

const BATCH_SIZE: i64 = 200;

type Batch = (Tensor, Tensor);

fn main() -> Result<()> {
    support::run(blocks![capture_and_replay, without_capture, wrap_in_hpu_graph, without_graphs])
}

/// Block 001-21.
#[derive(Module)]
struct HpuGraphsModel {
    net: NetHpuGraphs,
    g: HpuGraph,
    static_input: StaticTensor,
    static_target: StaticTensor,
    static_y_pred: StaticTensor,
    static_loss: StaticTensor,
}

/// Block 001-21.
impl HpuGraphsModel {
    fn new(batch_size: i64) -> Result<Self> {
        Ok(Self {
            net: NetHpuGraphs::new()?,
            // Create a HPUGraph object
            g: HpuGraph::new(),
            // Placeholders for capture. Should be compliant with data and target dims
            static_input: StaticTensor::rand([batch_size, 1, 28, 28], Device::Hpu(0))?,
            static_target: StaticTensor::randint(10, [batch_size], Device::Hpu(0))?,
            // Placeholder to store predictions after graph is replayed
            static_y_pred: StaticTensor::rand([batch_size, 10], Device::Hpu(0))?,
            // loss is available in static_loss tensor after graph is replayed
            static_loss: StaticTensor::default(),
        })
    }
}

/// Block 001-21. As printed the first batch is not looked at. One line is added: the loss is logged.
impl LightningModule for HpuGraphsModel {
    type Batch = Batch;

    /// Test step
    fn test_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> Result<()> {
        if ctx.batch_idx() > 0 {
            self.static_input.copy_(x)?;
            self.static_target.copy_(y)?;
        }
        if ctx.batch_idx() > 0 && self.g.is_captured() {
            self.g.replay()?;
        } else {
            // on a Gaudi card nothing is captured, and each step runs this code
            self.g.capture(|| {
                self.static_y_pred.set(&self.net.forward(&self.static_input.get())?)?;
                Ok(self
                    .static_loss
                    .set(&cross_entropy(&self.static_y_pred.get(), &self.static_target.get())?)?)
            })?;
        }
        ctx.log("test_loss", self.static_loss.get()).on_step(true);
        Ok(())
    }

    fn training_step(&self, _: &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        Ok(ctx.no_loss())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::none())
    }
}

/// Block 001-21.
fn capture_and_replay() -> Result<()> {
    let mut trainer = trainer()?;
    let mut model = HpuGraphsModel::new(BATCH_SIZE)?;
    trainer.test(&mut model, &mut data_module())?;
    report(&trainer)?;
    for (stats, counts) in model.g.stats().zip(model.g.replay_stats()) {
        println!("{} operators, {} bytes, replays {}", stats.num_calls, stats.arena_bytes, counts.replays);
    }
    Ok(())
}

/// The same without a graph.
#[derive(Module)]
struct WithoutCapture {
    model: HpuGraphsModel,
}

impl LightningModule for WithoutCapture {
    type Batch = Batch;

    fn test_step(&self, (x, y): &Batch, ctx: &mut StepContext) -> Result<()> {
        let Self { model } = self;
        if ctx.batch_idx() > 0 {
            model.static_input.copy_(x)?;
            model.static_target.copy_(y)?;
        }
        let y_pred = model.net.forward(&model.static_input.get())?;
        ctx.log("test_loss", cross_entropy(&y_pred, &model.static_target.get())?).on_step(true);
        Ok(())
    }

    fn training_step(&self, _: &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        Ok(ctx.no_loss())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::none())
    }
}

fn without_capture() -> Result<()> {
    let mut trainer = trainer()?;
    let mut model = WithoutCapture { model: HpuGraphsModel::new(BATCH_SIZE)? };
    trainer.test(&mut model, &mut data_module())?;
    report(&trainer)
}

/// Block 001-22.
fn wrap_in_hpu_graph() -> Result<()> {
    let mut trainer = trainer()?;
    let mut model = Classifier::new(NetHpuGraphs::new()?);
    model.to_device(Device::Hpu(0))?;
    let options = WrapOptions { asynchronous: false, disable_tensor_cache: true, ..WrapOptions::default() };
    let graphs = graph::wrap_in_hpu_graph_inplace(&model, options);
    trainer.test(&mut model, &mut data_module())?;
    report(&trainer)?;
    println!("{}", graphs.stats());
    Ok(())
}

/// What it is compared with.
fn without_graphs() -> Result<()> {
    let mut trainer = trainer()?;
    let mut model = Classifier::new(NetHpuGraphs::new()?);
    trainer.test(&mut model, &mut data_module())?;
    report(&trainer)
}

fn trainer() -> Result<Trainer> {
    Ok(Trainer::builder().accelerator("hpu").devices(1).short().limit_test_batches(1.0).build()?)
}

/// Ten batches for the test.
fn data_module() -> MnistData {
    let batch_size = BATCH_SIZE as usize;
    MnistData::new(MnistDataConfig { set: MnistSet::Subset, batch_size, ..MnistDataConfig::default() })
}

fn report(trainer: &Trainer) -> Result<()> {
    let loss = trainer.metric("test_loss").context("the step logs test_loss")?;
    println!("test_loss {loss}");
    Ok(())
}
