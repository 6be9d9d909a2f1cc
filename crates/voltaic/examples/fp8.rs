//! "fp8 Training": the plugin, and layers of the transformer engine by hand.

#[macro_use]
mod support;

use support::{LitClassifier, Short, report};
use voltaic::accelerator::HpuAccelerator;
use voltaic::data::MnistData;
use voltaic::models::Classifier;
use voltaic::precision::HpuPrecisionPlugin;
use voltaic::prelude::*;
use voltaic::te::{self, fp8_autocast, recipe};

const BATCH_SIZE: usize = 64;

fn main() -> Result<()> {
    support::run(blocks![fp8_training, transformer_engine, deepspeed])
}

/// Block 000-4.
fn fp8_training() -> Result<()> {
    let mut model = LitClassifier::new()?;

    // init the precision plugin for fp8 training.
    let plugin = HpuPrecisionPlugin {
        replace_layers: true,
        recipe: Some(recipe::DelayedScaling::default().into()),
        ..HpuPrecisionPlugin::new("fp8")
    };

    // Replace torch.nn.Modules with transformer engine equivalent modules
    plugin.convert_modules(&mut model)?;

    // Initialize a trainer with HPUPrecisionPlugin
    let mut trainer = Trainer::builder()
        .accelerator(HpuAccelerator::from_env()?)
        .devices(1)
        .plugins([plugin])
        .short()
        .build()?;

    // Train the model ⚡
    trainer.fit(&mut model, &mut MnistData::default().batch_size(BATCH_SIZE))?;
    println!("{} layers compute in float8", te::fp8_state_dict(&model)?.len() / 10);
    report(&trainer)
}

/// The first note after it: modules of the transformer engine, and the forward pass within `fp8_autocast`.
#[derive(Module)]
struct TeModel {
    l1: te::Linear,
}

impl Forward for TeModel {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let _fp8 = fp8_autocast(true, Some(recipe::DelayedScaling::default().into()))?;
        self.l1.forward(&input.f_flatten(1, -1)?)
    }
}

/// The same, with a plugin that trains the other modules in bf16-mixed.
fn transformer_engine() -> Result<()> {
    let mut trainer = Trainer::builder()
        .accelerator("hpu")
        .devices(1)
        .plugins([HpuPrecisionPlugin::new("bf16-mixed")])
        .short()
        .build()?;
    let mut model = Classifier::new(TeModel { l1: te::Linear::new(28 * 28, 10)? });
    trainer.fit(&mut model, &mut MnistData::default().batch_size(BATCH_SIZE))?;
    let x = Tensor::zeros([2, 28 * 28], (Kind::Float, tch::Device::Cpu));
    let logits = model.net().forward(&voltaic::data::Batch::move_to(x, Device::Hpu(0))?)?;
    println!("logits of float32 images outside autocast are {:?}", logits.kind());
    report(&trainer)
}

/// The second note: with a DeepSpeed strategy it is the other plugin.
fn deepspeed() -> Result<()> {
    use voltaic::precision::DeepSpeedPrecisionPlugin;
    let plugin = DeepSpeedPrecisionPlugin { replace_layers: true, ..DeepSpeedPrecisionPlugin::new("fp8") };
    let mut model = LitClassifier::new()?;
    plugin.convert_modules(&mut model)?;
    let mut trainer = Trainer::builder()
        .accelerator("hpu")
        .devices(1)
        .strategy("hpu_deepspeed")
        .plugins([plugin])
        .short()
        .build()?;
    trainer.fit(&mut model, &mut MnistData::default().batch_size(BATCH_SIZE))?;
    report(&trainer)
}
