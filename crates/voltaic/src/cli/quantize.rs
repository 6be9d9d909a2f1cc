//! What `quantize` does: measures, quantizes, compares, and writes.

use std::fmt::Write as _;

use super::console::{print, print_metrics};
use super::request::{MeasuredOn, QuantizeArgs, RunRequest};
use crate::data::DataModule;
use crate::error::ConfigError;
use crate::logger::plot_quantization;
use crate::module::LightningModule;
use crate::nn::quant::{self, Converted, LayerReport};
use crate::precision::fp8::{QuantConfig, QuantMode, ScaleMethod};
use crate::trainer::{Trainer, TrainerBuilder};

/// Measures on the data of a stage with the weights of `ckpt_path`, and writes quantized ones.
pub(super) fn quantize<M: LightningModule>(
    request: &RunRequest,
    builder: TrainerBuilder,
    model: &mut M,
    data: &mut (dyn DataModule<Batch = M::Batch> + 'static),
) -> anyhow::Result<()> {
    let Some(arguments) = request.quantize() else { anyhow::bail!("quantize without its options") };
    if request.weights_are_drawn() {
        let remedy = "give --ckpt_path=FILE, last or best, or --weights=FILE";
        return Err(
            ConfigError::new("ckpt_path", "not set, so that the weights would be random", remedy).into()
        );
    }
    let config = config(arguments)?;
    let mut trainer = builder.build()?;
    let folder = trainer.log_dir().to_path_buf();
    let measure = QuantConfig { mode: QuantMode::Measure, ..config.clone() };
    if !config.scale_method.needs_no_measures() && quant::convert(model, &measure)? == Converted::Measured(0)
    {
        quant::convert(model, &config)?; // the error says what leaves no layer
    }
    request.begin(&mut trainer)?;
    let before = run(&mut trainer, arguments.stage, model, data)?;
    let is_own = config.dump_stats_path.is_none();
    let found = is_own.then(|| folder.join(crate::precision::fp8::MEASURE));
    let config = QuantConfig { dump_stats_path: config.dump_stats_path.clone().or(found), ..config };
    quant::convert(model, &config)?;
    quant::count_casts(model);
    let after = run(&mut trainer, arguments.stage, model, data)?;
    let layers = quant::report(model);
    if !trainer.is_global_zero() {
        return Ok(());
    }
    quant::save(model, &arguments.output)?;
    let picture = arguments.output.with_extension("png");
    plot_quantization(&layers, &picture)?;
    print(&table(&layers))?;
    for (what, metrics) in [("before", before), ("quantized", after)] {
        if !metrics.is_empty() {
            print_metrics(what, &metrics)?;
        }
    }
    print(&format!(
        "{:<10}  {}\n{:<10}  {}\n",
        "weights",
        arguments.output.display(),
        "picture",
        picture.display()
    ))
}

fn config(arguments: &QuantizeArgs) -> anyhow::Result<QuantConfig> {
    let mut config = match &arguments.quant {
        Some(path) => QuantConfig { mode: QuantMode::Quantize, ..QuantConfig::from_json_file(path)? },
        None => QuantConfig::quantize(),
    };
    if let Some(word) = &arguments.scale_method {
        config.scale_method = ScaleMethod::try_from(word.clone())
            .map_err(|what| ConfigError::new("scale_method", what, "choose one of them"))?;
        if config.scale_method.needs_channels() && arguments.quant.is_none() {
            config.observer = crate::precision::fp8::Observer::MaxabsPerChannel;
            config.blocklist.types.push("Conv2d".to_owned()); // they have no scales by channel
        }
    }
    config.check("quantize")?;
    Ok(config)
}

/// Metrics of the stage; none of predict.
fn run<M: LightningModule>(
    trainer: &mut Trainer,
    stage: MeasuredOn,
    model: &mut M,
    data: &mut (dyn DataModule<Batch = M::Batch> + 'static),
) -> anyhow::Result<Vec<(String, f64)>> {
    Ok(match stage {
        MeasuredOn::Validate => trainer.validate(model, data)?,
        MeasuredOn::Test => trainer.test(model, data)?,
        MeasuredOn::Predict => {
            trainer.return_predictions(false);
            trainer.predict_outputs(model, data)?;
            Vec::new()
        }
    })
}

/// A line for each layer.
fn table(layers: &[LayerReport]) -> String {
    let width = layers.iter().map(|layer| layer.fqn.len()).max().unwrap_or(0).max(5);
    let mut text = format!(
        "{:<width$}  {:<14}  {:>21}  {:>21}  {:>9}  {:>9}  {:>9}  {:>9}  {:>10}\n",
        "layer",
        "type",
        "input scale",
        "weight scale",
        "error in",
        "error w",
        "clipped",
        "clipped w",
        "bytes"
    );
    let range = |(low, high): (f32, f32)| match low == high {
        true => format!("{low:e}"),
        false => format!("{low:e} to {high:e}"),
    };
    let share = |share: Option<f64>| share.map_or("-".to_owned(), |share| format!("{:.3} %", 100.0 * share));
    for layer in layers {
        let _ = writeln!(
            text,
            "{:<width$}  {:<14}  {:>21}  {:>21}  {:>9}  {:>9}  {:>9}  {:>9}  {:>10}",
            layer.fqn,
            layer.type_name,
            range(layer.input_scale),
            layer.weight_scale.map_or("-".to_owned(), range),
            share(layer.input_error),
            share(layer.weight_error),
            share(layer.input_clipped),
            share(layer.weight_clipped),
            layer.bytes
        );
    }
    text
}
