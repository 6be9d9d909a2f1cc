//! "Using DeepSpeed on HPU" and "DeepSpeed Configurations": optimizer states, gradients and weights divided among ranks.

#[macro_use]
mod support;

use anyhow::ensure;
use serde_json::json;
use support::{LitClassifier, Short, report, this_program};
use voltaic::accelerator::HpuAccelerator;
use voltaic::data::MnistData;
use voltaic::models::{Classifier, Mlp, MlpConfig};
use voltaic::precision::DeepSpeedPrecisionPlugin;
use voltaic::prelude::*;
use voltaic::strategy::{DeepSpeedStrategy, HpuDeepSpeedStrategy};

fn main() -> Result<()> {
    let blocks = blocks![
        using_deepspeed_on_hpu,
        zero_1,
        zero_2,
        zero_3,
        zero_offload,
        zero_infinity,
        zero_infinity_in_files,
        bf16_precision,
        bf16_optimizer,
        activation_checkpointing,
    ];
    support::run_with(blocks, blocks![bf16_optimizer_on_all_cards])
}

/// Block 001-6. `configure_optimizers` gives the optimizer, with its schedule.
#[derive(Module)]
struct DemoModel {
    layer: Linear,
}

/// Block 001-6: its step is not printed in the document.
impl LightningModule for DemoModel {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let loss = cross_entropy(&self.layer.call(&x.f_flatten(1, -1)?)?, y)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn validation_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<()> {
        ctx.log("val_loss", cross_entropy(&self.layer.call(&x.f_flatten(1, -1)?)?, y)?).sync_dist(true);
        Ok(())
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        Ok(Optimizers::new(Sgd::new(0.1)).scheduler(StepLr::new(1, 0.1)))
    }
}

/// Block 001-6: its callback is not printed either.
struct TestCb;

/// Block 001-6.
impl Callback for TestCb {
    fn on_train_end(&mut self, ctx: &mut HookContext, _: &mut dyn Module) -> Result<()> {
        println!("TestCB: {} steps on {}", ctx.global_step(), ctx.device());
        Ok(())
    }
}

/// Block 001-6. By default that is stage 2.
fn using_deepspeed_on_hpu() -> Result<()> {
    let mut model = DemoModel { layer: Linear::new(28 * 28, 10)? };
    let plugins = [DeepSpeedPrecisionPlugin::new("bf16-mixed")];
    let strategy = HpuDeepSpeedStrategy(DeepSpeedStrategy::default());
    let builder = Trainer::builder().accelerator(HpuAccelerator::from_env()?).strategy(strategy);
    let mut trainer = builder.short().callback(TestCb).max_epochs(1).plugins(plugins).build()?;

    trainer.fit(&mut model, &mut MnistData::default())?;
    report(&trainer)
}

/// Block 001-7: optimizer states are divided.
fn zero_1() -> Result<()> {
    train_on_8(HpuDeepSpeedStrategy(DeepSpeedStrategy {
        zero_optimization: true,
        ..DeepSpeedStrategy::stage(1)
    }))
}

/// Block 001-8: gradients, too.
fn zero_2() -> Result<()> {
    train_on_8(HpuDeepSpeedStrategy(DeepSpeedStrategy {
        zero_optimization: true,
        ..DeepSpeedStrategy::stage(2)
    }))
}

/// Block 001-9: weights, too.
fn zero_3() -> Result<()> {
    train_on_8(HpuDeepSpeedStrategy(DeepSpeedStrategy {
        zero_optimization: true,
        ..DeepSpeedStrategy::stage(3)
    }))
}

/// Block 001-10: optimizer states are in host memory, and updated there.
fn zero_offload() -> Result<()> {
    train_on_8(HpuDeepSpeedStrategy(DeepSpeedStrategy {
        zero_optimization: true,
        offload_optimizer: true,
        ..DeepSpeedStrategy::stage(2)
    }))
}

/// Block 001-11 as it is printed: that of ZeRO-Offload again.
fn zero_infinity() -> Result<()> {
    train_on_8(HpuDeepSpeedStrategy(DeepSpeedStrategy {
        zero_optimization: true,
        offload_optimizer: true,
        ..DeepSpeedStrategy::stage(2)
    }))
}

/// Block 001-11 as its title says: optimizer states and weights are in files.
fn zero_infinity_in_files() -> Result<()> {
    let strategy = HpuDeepSpeedStrategy(DeepSpeedStrategy {
        zero_optimization: true,
        offload_optimizer: true,
        offload_parameters: true,
        offload_optimizer_device: "nvme".to_owned(),
        offload_params_device: "nvme".to_owned(),
        nvme_path: "local_nvme".to_owned(),
        max_in_cpu: 0,
        ..DeepSpeedStrategy::stage(3)
    });
    let plugins = [DeepSpeedPrecisionPlugin::new("bf16-mixed")];
    let builder = Trainer::builder().devices(2).accelerator(HpuAccelerator::from_env()?).strategy(strategy);
    let mut trainer = builder.short().plugins(plugins).build()?;

    let mlp = Mlp::new(MlpConfig { hidden_features: 2048, ..MlpConfig::default() })?;
    trainer.fit(&mut Classifier::new(mlp), &mut MnistData::default())?;
    report(&trainer)
}

/// Block 001-12.
fn bf16_precision() -> Result<()> {
    train_on_8(HpuDeepSpeedStrategy(DeepSpeedStrategy::default()))
}

/// Blocks 001-7, 001-8, 001-9, 001-10, 001-11 and 001-12. What follows `build` runs in each of the eight ranks.
fn train_on_8(strategy: HpuDeepSpeedStrategy) -> Result<()> {
    let plugins = [DeepSpeedPrecisionPlugin::new("bf16-mixed")];
    let builder = Trainer::builder().devices(8).accelerator(HpuAccelerator::from_env()?).strategy(strategy);
    let mut trainer = builder.short().plugins(plugins).build()?;

    trainer.fit(&mut LitClassifier::new()?, &mut MnistData::default())?;
    report(&trainer)
}

/// Block 001-13, with the variable that says how many emulated cards `auto_device_count` counts. The numbers of the block fit
/// two: 8 = 2 samples x 2 batches x 2 ranks.
fn bf16_optimizer() -> Result<()> {
    let status =
        this_program().arg("bf16_optimizer_on_all_cards").env("VOLTAIC_HPU_DEVICES", "2").status()?;
    ensure!(status.success(), "bf16_optimizer_on_all_cards failed: {status}");
    Ok(())
}

/// Block 001-13.
fn bf16_optimizer_on_all_cards() -> Result<()> {
    let config = json!({
        "train_batch_size": 8,
        "bf16": {"enabled": true}, "fp16": {"enabled": false},
        "train_micro_batch_size_per_gpu": 2,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0.02, "warmup_max_lr": 0.05, "warmup_num_steps": 4,
                       "total_num_steps": 8, "warmup_type": "linear"},
        },
        "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": 2},
    });
    let hpu = HpuAccelerator::from_env()?;
    let parallel_hpus = vec!["hpu"; hpu.auto_device_count()];
    let strategy = DeepSpeedStrategy {
        parallel_devices: Some(json!(parallel_hpus)),
        ..DeepSpeedStrategy::settings(config)
    };
    let mut trainer = Trainer::builder()
        .accelerator(hpu)
        .strategy(HpuDeepSpeedStrategy(strategy))
        .enable_progress_bar(false)
        .fast_dev_run(8)
        .plugins([DeepSpeedPrecisionPlugin::new("bf16-mixed")])
        .use_distributed_sampler(false)
        .limit_train_batches(16)
        .accumulate_grad_batches(2_u64)
        .build()?;
    fit_sample(&mut trainer, 2)
}

/// Blocks 001-13 and 001-14: sizes of layers are printed as 32 alone, and neither a step nor data.
#[derive(Module)]
struct SampleModel {
    l1: Linear,
    l2: Linear,
}

/// Block 001-14: what the second layer saves for backward is dropped, and computed again.
impl Forward for SampleModel {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let l1_out = self.l1.call(x)?;
        let l2_out = checkpoint(&self.l2, &l1_out)?;
        Ok(l2_out)
    }
}

/// Blocks 001-13 and 001-14.
impl LightningModule for SampleModel {
    type Batch = (Tensor, Tensor);

    fn training_step(&self, (x, y): &Self::Batch, ctx: &mut StepContext) -> Result<Tensor> {
        let loss = self.call(x)?.f_sub(y)?.f_square()?.f_mean(Kind::Float)?;
        ctx.log("train_loss", &loss);
        Ok(loss)
    }

    fn configure_optimizers(&self) -> Result<Optimizers> {
        AdamW::default().into()
    }
}

/// Blocks 001-13 and 001-14.
fn fit_sample(trainer: &mut Trainer, batch_size: usize) -> Result<()> {
    let mut model = SampleModel { l1: Linear::new(32, 32)?, l2: Linear::new(32, 32)? };
    let x = Tensor::f_randn([480, 32], (Kind::Float, tch::Device::Cpu))?;
    let loader = DataLoader::new(TensorDataset::new((x.shallow_clone(), x))?).batch_size(batch_size);
    trainer.fit(&mut model, &mut Loaders::new().train(loader.build()?))?;
    report(trainer)
}

/// Block 001-14. The input of `l2` is kept on the host until the backward pass, optimizer states always.
fn activation_checkpointing() -> Result<()> {
    let strategy = HpuDeepSpeedStrategy(DeepSpeedStrategy {
        zero_optimization: true,
        offload_optimizer: true,
        cpu_checkpointing: true,
        ..DeepSpeedStrategy::stage(3)
    });
    let plugins = [DeepSpeedPrecisionPlugin::new("bf16-mixed")];
    let builder = Trainer::builder().accelerator(HpuAccelerator::from_env()?).strategy(strategy);
    let mut trainer = builder.short().plugins(plugins).build()?;
    fit_sample(&mut trainer, 8)
}
