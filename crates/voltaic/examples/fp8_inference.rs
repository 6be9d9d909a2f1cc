//! "fp8 Inference": measure, then quantize, by the plugin of the documents.

#[macro_use]
mod support;

use std::fs;

use serde_json::json;
use support::Short;
use voltaic::accelerator::HpuAccelerator;
use voltaic::data::MnistData;
use voltaic::models::{Classifier, LeNet, LeNetConfig};
use voltaic::nn::quant;
use voltaic::precision::{DeepSpeedPrecisionPlugin, HpuPrecisionPlugin};
use voltaic::prelude::*;

type Net = Classifier<LeNet>;

fn main() -> Result<()> {
    support::run(blocks![hqt, measurement, quantization, two_processes, quant_config, deepspeed])
}

/// A net that has learned something, with its data.
fn trained() -> Result<(Net, MnistData)> {
    let (mut model, mut data) = (Classifier::new(LeNet::new(LeNetConfig::default())?), MnistData::default());
    Trainer::builder()
        .accelerator("hpu")
        .devices(1)
        .logger(false)
        .short()
        .build()?
        .fit(&mut model, &mut data)?;
    Ok((model, data))
}

fn all(predictions: Vec<Vec<Tensor>>) -> Result<Tensor> {
    let batches: Vec<Tensor> = predictions.into_iter().flatten().collect();
    Ok(Tensor::f_cat(&batches, 0)?.f_to_device(tch::Device::Cpu)?)
}

/// Block 000-5: `pip install habana-quantization-toolkit`. Nothing is to be installed: measuring and quantizing are part of voltaic.
fn hqt() -> Result<()> {
    println!("scale methods: {:?}", voltaic::precision::fp8::ScaleMethod::default());
    Ok(())
}

/// Block 000-6, and 000-7 if `quantizes`.
fn measure_and_quantize(quantizes: bool) -> Result<()> {
    let (mut model, mut data) = trained()?;

    // init the precision plugin for fp8 inference.
    let plugin = HpuPrecisionPlugin::new("fp8");

    // Replace module for fp8 inference measurements
    plugin.inference(false).convert_modules(&mut model)?;

    // Initialize a trainer with HPUPrecisionPlugin
    let mut trainer = Trainer::builder()
        .accelerator(HpuAccelerator::from_env()?)
        .devices(1)
        .plugins([plugin.clone()])
        .limit_test_batches(0.1)
        .limit_predict_batches(0.1) // as printed there is none, and predict measures on all batches, with a warning
        .enable_progress_bar(false)
        .build()?;

    // Run inference and dump measurements ⚡
    let measured = all(trainer.predict(&mut model, &mut data)?)?;
    for file in fs::read_dir(trainer.log_dir().join("inc_output"))? {
        println!("wrote {}", file?.file_name().display());
    }
    if !quantizes {
        return Ok(());
    }

    // Replace module for fp8 inference measurements
    plugin.inference(true).convert_modules(&mut model)?;

    // Run inference ⚡
    let quantized = all(trainer.predict(&mut model, &mut data)?)?;
    let alike = f64::try_from(measured.f_eq_tensor(&quantized)?.f_mean(Kind::Float)?)?;
    println!("{} layers in float8 agree with {alike:.3} of the labels", quant::report(&model).len());
    Ok(())
}

/// Block 000-6.
fn measurement() -> Result<()> {
    measure_and_quantize(false)
}

/// Block 000-7.
fn quantization() -> Result<()> {
    measure_and_quantize(true)
}

/// The same by two trainers, as two processes do: the second finds the measurements in the folder of the first one's run. The plugin does it
/// all, after the weights were loaded from a checkpoint.
fn two_processes() -> Result<()> {
    let (mut model, mut data) = trained()?;
    for quant in [false, true] {
        let plugin = HpuPrecisionPlugin::new("fp8").inference(quant);
        let builder = Trainer::builder().accelerator("hpu").devices(1).plugins([plugin]);
        // as printed: `limit_test_batches` does not limit predict
        let mut trainer = builder.limit_test_batches(0.1).enable_progress_bar(false).build()?;
        let mut copy = Classifier::new(LeNet::new(LeNetConfig::default())?);
        copy.load_state_dict(&model.state_dict(), true)?;
        trainer.predict(&mut copy, &mut data)?;
        println!("quant={quant}: {} layers in float8", quant::report(&copy).len());
        if quant {
            quant::save(&copy, "quantized.safetensors".as_ref())?;
            quant::load(&mut model, "quantized.safetensors".as_ref())?;
            let same = all(trainer.predict(&mut model, &mut data)?)?
                .f_eq_tensor(&all(trainer.predict(&mut copy, &mut data)?)?)?;
            println!("a quantized file gives the same: {}", bool::try_from(same.f_all()?)?);
        }
    }
    Ok(())
}

/// `QUANT_CONFIG` names the settings, here set by the caller; settings may also be given as a dict.
fn quant_config() -> Result<()> {
    let (mut model, mut data) = trained()?;
    let plugin = HpuPrecisionPlugin { inference: true, ..HpuPrecisionPlugin::new("fp8") };
    plugin.convert_modules(&mut model)?;
    let mut trainer =
        Trainer::builder().accelerator("hpu").devices(1).plugins([plugin.clone()]).short().build()?;
    trainer.test(&mut model, &mut data)?;
    let settings =
        json!({"scale_method": "act_maxabs_pow2_weights_pcs_maxabs_pow2", "blocklist": {"names": ["fc3"]}});
    plugin.inference(settings).convert_modules(&mut model)?;
    trainer.test(&mut model, &mut data)?;
    for layer in quant::report(&model) {
        println!("{} {:?}", layer.fqn, layer.weight_scale);
    }
    Ok(())
}

/// The note: with a DeepSpeed strategy it is the other plugin.
fn deepspeed() -> Result<()> {
    let (mut model, mut data) = trained()?;
    let plugin = DeepSpeedPrecisionPlugin::new("fp8");
    plugin.inference(false).convert_modules(&mut model)?;
    let builder = Trainer::builder().accelerator("hpu").devices(1).strategy("hpu_deepspeed");
    let mut trainer = builder.plugins([plugin.clone()]).short().build()?;
    trainer.test(&mut model, &mut data)?;
    plugin.inference(true).convert_modules(&mut model)?;
    trainer.test(&mut model, &mut data)?;
    println!("{} layers in float8", quant::report(&model).len());
    Ok(())
}
