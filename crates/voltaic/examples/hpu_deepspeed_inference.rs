//! "DeepSpeed inference on HPU": a layer divided among cards, in the three forms of the document.

#[macro_use]
mod support;

use serde_json::json;
use voltaic::accelerator::HpuAccelerator;
use voltaic::nn::parallel::{ParallelPlan, RowwiseParallel};
use voltaic::precision::DeepSpeedPrecisionPlugin;
use voltaic::prelude::*;
use voltaic::strategy::{DeepSpeedStrategy, HpuDeepSpeedStrategy, TensorParallel};

fn main() -> Result<()> {
    support::run(blocks![using_arguments, using_kwargs, using_configuration, on_one_hpu])
}

/// Blocks 001-15, 001-16 and 001-17, which do not print it. Without a policy the model says how it is divided.
#[derive(Module)]
#[module(parallel_plan = Self::by_rows)]
struct InferenceSample {
    l1: Linear,
}

/// Blocks 001-15, 001-16 and 001-17.
impl InferenceSample {
    fn new() -> Result<Self> {
        Ok(Self { l1: Linear::new(32, 2)? })
    }

    fn by_rows(&self) -> ParallelPlan {
        ParallelPlan::new().layer("l1", RowwiseParallel::default())
    }
}

/// Blocks 001-15, 001-16 and 001-17.
impl LightningModule for InferenceSample {
    type Batch = Tensor;

    fn training_step(&self, x: &Tensor, _ctx: &mut StepContext) -> Result<Tensor> {
        Ok(self.l1.call(x)?.f_mean(Kind::Float)?)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Sgd::new(0.1).into()
    }

    fn predict_step(&self, x: &Tensor, _ctx: &mut StepContext) -> Result<Tensor> {
        self.l1.call(x)
    }

    fn predict_dataloader(&mut self) -> Result<Vec<DataLoader<Tensor>>> {
        let x = Tensor::f_arange(64 * 32, (Kind::Float, tch::Device::Cpu))?.f_sin()?.f_view([64, 32])?;
        Ok(vec![DataLoader::new(TensorDataset::new(x)?).batch_size(8).build()?])
    }
}

/// Block 001-15.
fn using_arguments() -> Result<()> {
    let mut model = InferenceSample::new()?;
    let strategy = DeepSpeedStrategy {
        parallel_devices: Some(json!(8)),
        tensor_parallel: Some(TensorParallel::size(8)),
        dtype: Some("torch.float".to_owned()),
        replace_with_kernel_inject: Some(true),
        ..DeepSpeedStrategy::default()
    };
    let mut trainer = Trainer::builder()
        .accelerator(HpuAccelerator::from_env()?)
        .devices(8)
        .strategy(HpuDeepSpeedStrategy(strategy))
        .plugins([DeepSpeedPrecisionPlugin::new("bf16-mixed")])
        .use_distributed_sampler(false)
        .build()?;
    let predictions = trainer.predict_module(&mut model)?;
    report(&trainer, &model, &predictions)
}

/// Block 001-16: `replace_method` has no effect, as in DeepSpeed.
fn using_kwargs() -> Result<()> {
    let mut model = InferenceSample::new()?;
    let parallel_hpus = ["hpu"; 4];
    let strategy = DeepSpeedStrategy {
        parallel_devices: Some(json!(parallel_hpus)),
        dtype: Some("torch.float".to_owned()),
        tensor_parallel: Some(TensorParallel::size(4)),
        enable_cuda_graph: Some(false),
        replace_method: Some("auto".to_owned()),
        replace_with_kernel_inject: Some(false),
        injection_policy: Some(json!({"InferenceSample": "l1"})),
        ..DeepSpeedStrategy::default()
    };
    let mut trainer = Trainer::builder()
        .accelerator(HpuAccelerator::from_env()?)
        .devices(4)
        .strategy(HpuDeepSpeedStrategy(strategy))
        .plugins([DeepSpeedPrecisionPlugin::new("bf16-mixed")])
        .use_distributed_sampler(false)
        .build()?;
    let predictions = trainer.predict_module(&mut model)?;
    report(&trainer, &model, &predictions)
}

/// Block 001-17: two replicas of four ranks each.
fn using_configuration() -> Result<()> {
    let mut model = InferenceSample::new()?;
    let config = json!({
        "replace_with_kernel_inject": true,
        "tensor_parallel": {"tp_size": 4},
        "dtype": "torch.float",
        "enable_cuda_graph": false,
    });
    let parallel_hpus = ["hpu"; 8];
    let strategy = DeepSpeedStrategy {
        parallel_devices: Some(json!(parallel_hpus)),
        ..DeepSpeedStrategy::settings(config)
    };
    let mut trainer = Trainer::builder()
        .accelerator(HpuAccelerator::from_env()?)
        .devices(8)
        .strategy(HpuDeepSpeedStrategy(strategy))
        .plugins([DeepSpeedPrecisionPlugin::new("bf16-mixed")])
        .use_distributed_sampler(false)
        .build()?;
    let predictions = trainer.predict_module(&mut model)?;
    report(&trainer, &model, &predictions)
}

/// What the others are compared with.
fn on_one_hpu() -> Result<()> {
    let mut model = InferenceSample::new()?;
    let mut trainer = Trainer::builder().accelerator(HpuAccelerator::from_env()?).devices(1).build()?;
    let predictions = trainer.predict_module(&mut model)?;
    report(&trainer, &model, &predictions)
}

/// Prints the mesh, the part of the layer, and the sum of the squares of all predictions, on rank 0.
fn report(trainer: &Trainer, model: &InferenceSample, predictions: &[Vec<Tensor>]) -> Result<()> {
    let batches = predictions.iter().flatten().map(|batch| batch.to_device(tch::Device::Cpu));
    let sum: f64 = batches.map(|batch| batch.square().sum(Kind::Double).double_value(&[])).sum();
    if trainer.is_global_zero() {
        let (dims, shape) = (trainer.world().mesh().dims, model.l1.weight.size());
        println!("dp {} x tp {}, l1 has {shape:?}, sum of squares {sum:.4}", dims.dp(), dims.tp);
    }
    Ok(())
}
