//! "HPU Graphs APIs for Training".

#[macro_use]
mod support;

use support::{NetHpuGraphs, Short, report};
use voltaic::data::{MnistData, MnistDataConfig, MnistSet, SplitSize};
use voltaic::graph::{self, HpuGraph, ModuleCacher, StaticTensor};
use voltaic::models::Classifier;
use voltaic::prelude::*;

const BATCH_SIZE: i64 = 256;
const MAX_GRAPHS: usize = 10;

type Batch = (Tensor, Tensor);

fn main() -> Result<()> {
    support::run(blocks![
        capture_and_replay,
        capture_begin_and_end,
        without_capture,
        make_graphed_callables,
        module_cacher,
        without_graphs
    ])
}

/// Block 001-18.
#[derive(Module)]
struct HpuGraphsModel {
    net: NetHpuGraphs,
    g: HpuGraph,
    static_input: StaticTensor,
    static_target: StaticTensor,
    static_loss: StaticTensor,
}

/// Block 001-18. As printed the first batch is not looked at: the capture trains on the placeholders.
impl HpuGraphsModel {
    fn new(batch_size: i64) -> Result<Self> {
        Ok(Self {
            net: NetHpuGraphs::new()?,
            // Create a HPUGraph instance
            g: HpuGraph::new(),
            // Placeholders for capture. Should be compliant with data and target dims
            static_input: StaticTensor::rand([batch_size, 1, 28, 28], Device::Hpu(0))?,
            static_target: StaticTensor::randint(10, [batch_size], Device::Hpu(0))?,
            // result is available in static_loss tensor after graph is replayed
            static_loss: StaticTensor::default(),
        })
    }

    /// Manual optimization training step
    fn train_with_capture_and_replay(&self, (data, target): &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        if ctx.batch_idx() > 0 || ctx.current_epoch() > 0 {
            // data must be copied to existing tensors that were used in the capture phase
            self.static_input.copy_(data)?;
            self.static_target.copy_(target)?;
        }
        if self.g.is_captured() {
            // Replay the graph
            self.g.replay()?;
        } else {
            // On a Gaudi card nothing is captured, and each step runs this code.
            ctx.optimizer(0)?.zero_grad()?;
            // Capture graphs in a closure.
            // Alternatively, use HpuGraph::capture_begin() and HpuGraph::capture_end()
            self.g.capture(|| {
                let static_y_pred = self.net.forward(&self.static_input.get())?;
                let static_loss = cross_entropy(&static_y_pred, &self.static_target.get())?;
                static_loss.f_backward()?;
                ctx.optimizer(0)?.step()?;
                Ok(self.static_loss.set(&static_loss)?)
            })?;
        }
        ctx.log("train_loss", self.static_loss.get());
        Ok(self.static_loss.get())
    }
}

/// Block 001-18.
impl LightningModule for HpuGraphsModel {
    type Batch = Batch;

    // Set manual optimization training
    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        self.train_with_capture_and_replay(batch, ctx)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(AdamW::new(0.002).into())
    }
}

/// Block 001-18.
fn capture_and_replay() -> Result<()> {
    let mut trainer = trainer()?;
    let mut model = HpuGraphsModel::new(BATCH_SIZE)?;
    trainer.fit(&mut model, &mut data_module(true))?;
    report(&trainer)?;
    print_graph(&model.g);
    Ok(())
}

/// The same between `capture_begin` and `capture_end`, after a warmup.
#[derive(Module)]
struct BeginAndEnd {
    model: HpuGraphsModel,
}

impl LightningModule for BeginAndEnd {
    type Batch = Batch;

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, (data, target): &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let Self { model } = self;
        model.static_input.copy_(data)?;
        model.static_target.copy_(target)?;
        if model.g.is_captured() {
            model.g.replay()?;
        } else {
            // three steps to warm up, then one that is captured: all of them train
            let captures = ctx.batch_idx() == 3;
            ctx.optimizer(0)?.zero_grad()?;
            if captures {
                model.g.capture_begin()?;
            }
            let static_y_pred = model.net.forward(&model.static_input.get())?;
            let static_loss = cross_entropy(&static_y_pred, &model.static_target.get())?;
            ctx.manual_backward(&static_loss)?;
            ctx.optimizer(0)?.step()?;
            model.static_loss.set(&static_loss)?;
            drop((static_y_pred, static_loss)); // with what autograd keeps of the step
            if captures {
                model.g.capture_end()?;
            }
        }
        ctx.log("train_loss", model.static_loss.get());
        Ok(model.static_loss.get())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        self.model.configure_optimizers()
    }
}

fn capture_begin_and_end() -> Result<()> {
    let mut trainer = trainer()?;
    let mut module = BeginAndEnd { model: HpuGraphsModel::new(BATCH_SIZE)? };
    trainer.fit(&mut module, &mut data_module(true))?;
    report(&trainer)?;
    print_graph(&module.model.g);
    Ok(())
}

/// What the captured steps are compared with: a first step on the placeholders, then one on each batch.
#[derive(Module)]
struct WithoutCapture {
    model: HpuGraphsModel,
    starts_on_placeholders: bool,
}

impl LightningModule for WithoutCapture {
    type Batch = Batch;

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, (data, target): &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let Self { model, starts_on_placeholders } = self;
        let is_first = *starts_on_placeholders && ctx.global_step() == 0;
        if !is_first {
            model.static_input.copy_(data)?;
            model.static_target.copy_(target)?;
        }
        ctx.optimizer(0)?.zero_grad()?;
        let y_pred = model.net.forward(&model.static_input.get())?;
        let loss = cross_entropy(&y_pred, &model.static_target.get())?;
        ctx.manual_backward(&loss)?;
        ctx.optimizer(0)?.step()?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        self.model.configure_optimizers()
    }
}

/// The same steps as those of `capture_and_replay`, then as those of `capture_begin_and_end`.
fn without_capture() -> Result<()> {
    for starts_on_placeholders in [true, false] {
        seed_everything(1)?;
        let mut trainer = trainer()?;
        let mut module = WithoutCapture { model: HpuGraphsModel::new(BATCH_SIZE)?, starts_on_placeholders };
        trainer.fit(&mut module, &mut data_module(true))?;
        report(&trainer)?;
    }
    Ok(())
}

/// Block 001-19.
fn make_graphed_callables() -> Result<()> {
    let mut trainer = trainer()?;
    // model and sample_args as input to make_graphed_callables.
    let mut model = Classifier::new(NetHpuGraphs::new()?);
    model.to_device(Device::Hpu(0))?;
    let x = Tensor::randn([BATCH_SIZE, 1, 28, 28], (Kind::Float, Device::Hpu(0).into()));
    let graph = graph::make_graphed_callables_inplace(&mut model, &x, 3)?;
    trainer.fit(&mut model, &mut data_module(true))?;
    report(&trainer)?;
    let replays: Vec<u64> = graph.replay_stats().iter().map(|stats| stats.replays).collect();
    match replays[..] {
        [forward, backward] => println!("forward pass replayed {forward} times, backward pass {backward}"),
        _ => println!("no graph"), // on a Gaudi card
    }
    Ok(())
}

/// Block 001-20.
fn module_cacher() -> Result<()> {
    let mut trainer = trainer()?;
    // model is given an input to ModuleCacher.
    let mut model = Classifier::new(NetHpuGraphs::new()?);
    let graphs = ModuleCacher::new(MAX_GRAPHS).inplace(&model);
    trainer.fit(&mut model, &mut data_module(false))?;
    report(&trainer)?;
    println!("{}", graphs.stats());
    Ok(())
}

/// What the two are compared with.
fn without_graphs() -> Result<()> {
    for drop_last in [true, false] {
        seed_everything(1)?;
        let mut trainer = trainer()?;
        let mut model = Classifier::new(NetHpuGraphs::new()?);
        trainer.fit(&mut model, &mut data_module(drop_last))?;
        report(&trainer)?;
    }
    Ok(())
}

/// Three epochs.
fn trainer() -> Result<Trainer> {
    let builder = Trainer::builder().accelerator("hpu").devices(1).short();
    Ok(builder.max_epochs(3).limit_val_batches(0).build()?)
}

/// 15 batches of 256 images, and one of 160 that may be left out.
fn data_module(drop_last: bool) -> MnistData {
    let batch_size = BATCH_SIZE as usize;
    MnistData::new(MnistDataConfig {
        set: MnistSet::Subset,
        val_size: SplitSize::Count(8000),
        batch_size,
        drop_last,
        ..MnistDataConfig::default()
    })
}

/// What a graph holds, and how often it was replayed.
fn print_graph(graph: &HpuGraph) {
    for (stats, counts) in graph.stats().zip(graph.replay_stats()) {
        println!("{} operators, {} bytes, replays {}", stats.num_calls, stats.arena_bytes, counts.replays);
    }
}
