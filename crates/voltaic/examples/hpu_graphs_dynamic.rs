//! "HPU Graphs and Dynamicity in Models".

#[macro_use]
mod support;

use support::{NetHpuGraphs, Short, report};
use voltaic::data::MnistData;
use voltaic::graph::{CacheStats, GraphedModule, ModuleCacher, mark_step};
use voltaic::nn::Identity;
use voltaic::prelude::*;

type Batch = (Tensor, Tensor);

fn main() -> Result<()> {
    support::run(blocks![dynamic_control_flow, dynamic_ops, without_graphs])
}

/// `random.random()`, from the generator of the host that `seed_everything` seeds and checkpoints hold.
fn random() -> Result<f64> {
    Ok(Tensor::f_rand([], (Kind::Double, tch::Device::Cpu))?.f_double_value(&[])?)
}

/// Block 001-23.
#[derive(Module)]
struct DynamicControlFlow {
    module1: GraphedModule<NetHpuGraphs>,
    module2: GraphedModule<Identity>,
    module3: GraphedModule<Relu>,
}

/// Block 001-23.
impl DynamicControlFlow {
    fn new(max_graphs: usize) -> Result<Self> {
        // Break Model into separate HPU Graphs for each control flow.
        Ok(Self {
            module1: ModuleCacher::new(max_graphs).wrap(NetHpuGraphs::new()?),
            module2: ModuleCacher::new(max_graphs).wrap(Identity),
            module3: ModuleCacher::new(max_graphs).wrap(Relu),
        })
    }

    /// Training step with HPU Graphs and Dynamic control flow
    fn dynamic_control_flow_training_step(&self, batch: &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let mut optimizer = ctx.optimizer(0)?;
        let (data, target) = batch;
        optimizer.zero_grad()?;
        // Train with HPU Graph
        let tmp = self.module1.forward(data)?;

        // dynamic control flow
        let tmp = if random()? > 0.5 {
            self.module2.forward(&tmp)? // forward ops run as a graph
        } else {
            self.module3.forward(&tmp)? // forward ops run as a graph
        };

        let loss = cross_entropy(&tmp, target)?;
        loss.f_backward()?;
        optimizer.step()?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }
}

/// Block 001-23.
impl LightningModule for DynamicControlFlow {
    type Batch = Batch;

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        self.dynamic_control_flow_training_step(batch, ctx)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(AdamW::new(0.002).into())
    }
}

/// Block 001-23.
fn dynamic_control_flow() -> Result<()> {
    let model = train_control_flow(10)?;
    print_stats([model.module1.stats(), model.module2.stats(), model.module3.stats()]);
    Ok(())
}

fn train_control_flow(max_graphs: usize) -> Result<DynamicControlFlow> {
    let mut trainer = trainer()?;
    let mut model = DynamicControlFlow::new(max_graphs)?;
    trainer.fit(&mut model, &mut MnistData::default())?;
    report(&trainer)?;
    Ok(model)
}

/// Block 001-24.
#[derive(Module)]
struct DynamicOps {
    module1: GraphedModule<NetHpuGraphs>,
    module2: GraphedModule<Identity>,
}

/// Block 001-24.
impl DynamicOps {
    fn new(max_graphs: usize) -> Result<Self> {
        // Encapsulate dynamic ops between two separate HPU Graph modules,
        // instead of using one single HPU Graph for whole model
        Ok(Self {
            module1: ModuleCacher::new(max_graphs).wrap(NetHpuGraphs::new()?),
            module2: ModuleCacher::new(max_graphs).wrap(Identity),
        })
    }

    /// Training step with HPU Graphs and Dynamic ops. As printed `tmp < 0` leaves a flat tensor, which no target fits: here
    /// it chooses rows, by their first logit, and the targets of these rows.
    fn dynamic_ops_training_step(&self, batch: &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let mut optimizer = ctx.optimizer(0)?;
        let (data, target) = batch;
        optimizer.zero_grad()?;
        // Train with HPU graph module
        let tmp = self.module1.forward(data)?;

        // Dynamic op
        mark_step()?;
        let negative = tmp.f_select(1, 0)?.f_lt(0.0)?;
        let (tmp, target) = (tmp.f_index(&[Some(&negative)])?, target.f_index(&[Some(&negative)])?);
        mark_step()?;

        // Resume training with HPU graph module
        let tmp = self.module2.forward(&tmp)?;
        let loss = cross_entropy(&tmp, &target)?;
        loss.f_backward()?;
        optimizer.step()?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }
}

/// Block 001-24.
impl LightningModule for DynamicOps {
    type Batch = Batch;

    fn automatic_optimization(&self) -> bool {
        false
    }

    fn training_step(&self, batch: &Batch, ctx: &mut StepContext) -> Result<Tensor> {
        self.dynamic_ops_training_step(batch, ctx)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(AdamW::new(0.002).into())
    }
}

/// Block 001-24.
fn dynamic_ops() -> Result<()> {
    let model = train_ops(10)?;
    print_stats([model.module1.stats(), model.module2.stats()]);
    Ok(())
}

fn train_ops(max_graphs: usize) -> Result<DynamicOps> {
    let mut trainer = trainer()?;
    let mut model = DynamicOps::new(max_graphs)?;
    trainer.fit(&mut model, &mut MnistData::default())?;
    report(&trainer)?;
    Ok(model)
}

/// Both with modules that run as usual.
fn without_graphs() -> Result<()> {
    train_control_flow(0)?;
    seed_everything(1)?;
    train_ops(0)?;
    Ok(())
}

/// Two epochs of 60 batches.
fn trainer() -> Result<Trainer> {
    let builder = Trainer::builder().accelerator("hpu").devices(1).short();
    Ok(builder.max_epochs(2).limit_val_batches(0).build()?)
}

fn print_stats<const N: usize>(stats: [CacheStats; N]) {
    for (stats, module) in stats.iter().zip(1..) {
        let CacheStats { num_graphs, hits, misses, checks, uncached, .. } = stats;
        println!(
            "module{module}: graphs {num_graphs}, captured {misses}, checked {checks}, replayed {hits}, as usual {uncached}"
        );
    }
}
