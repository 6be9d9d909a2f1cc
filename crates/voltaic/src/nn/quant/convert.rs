//! Lets the layers of a module measure, or compute in float8 by what was measured.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Kind, Tensor};

use super::layers::{Layer, WeightValues, codes_tensor, layers};
use super::measures::{LayerMeasures, Measures, latest, set_aside};
use super::observer::{LayerObserver, Measuring, observed};
use super::quantized::{CastCounts, LayerScales, Quantized, Unmeasured};
use crate::distributed::{World, is_global_zero};
use crate::error::{CheckpointError, ConfigError, Error, Problem, Result};
use crate::kernels::{Floats, FloatsMut, from_float8, to_float8};
use crate::nn::compute::Compute;
use crate::nn::module::Module;
use crate::nn::parameter::Parameter;
use crate::nn::tree::ModuleExt;
use crate::precision::fp8::{
    HpDtype, Inference, LayerList, LayerType, MEASURE, MeasureExclude, Observer, QuantConfig, QuantFormat,
    QuantMode, Rounding, Scaler, WeightScales, check_generation, kernel_format,
};

/// What a conversion has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Converted {
    /// Nothing, since the mode is `NONE`, or the layers were quantized already.
    Nothing,
    /// As many layers measure what they compute with.
    Measured(usize),
    /// As many layers compute in float8.
    Quantized {
        /// Their number.
        layers: usize,
        /// Layers without measurements, by fqn: calling one is an error, or it stays as it was with `ignore_modules_wo_measures`.
        unmeasured: Vec<String>,
    },
}

/// Lets layers of the module measure, or compute in float8, as the settings say. Quantized weights are float8 from then on, and are not
/// trained; it cannot be undone.
///
/// Measurements are read from `dump_stats_path`; if that is not set, from where this module has written them in this process, else the
/// latest in the folder of a run below the current folder.
///
/// ```
/// use voltaic::nn::{Forward, Linear, quant};
/// use voltaic::precision::fp8::QuantConfig;
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let mut fc = Linear::new(64, 32)?;
/// # let folder = tempfile::tempdir()?;
/// # let x = Tensor::randn([8, 64], (Kind::Float, tch::Device::Cpu));
/// quant::convert(&mut fc, &QuantConfig::measure())?;
/// fc.forward(&x)?;
/// quant::finish_measurements(&fc, folder.path())?;
///
/// quant::convert(&mut fc, &QuantConfig::quantize())?;
/// assert_eq!(fc.forward(&x)?.size(), [8, 32]);
/// assert_eq!(fc.weight.kind(), Kind::Float8e4m3fn);
/// # Ok(())
/// # }
/// ```
///
/// Source: Habana Quantization Toolkit's `prep_model`; `prepare` and `convert` of Intel Neural Compressor.
///
/// # Errors
/// If there are no measurements, or not of this module; if the method has no scales for a kind of layer.
pub fn convert(module: &mut (impl ModuleExt + ?Sized), config: &QuantConfig) -> Result<Converted> {
    let inference = Inference { config: config.clone(), origin: "QuantConfig".to_owned() };
    convert_here(module.as_dyn(), &inference)
}

/// [`convert`] with settings that say where they come from.
pub(in crate::nn) fn convert_here(module: &dyn Module, inference: &Inference) -> Result<Converted> {
    convert_found(module, inference, &[PathBuf::from("."), PathBuf::from("lightning_logs")])
}

/// [`convert`] of a plugin within a run that writes to `log_dir`.
pub(crate) fn convert_in_run(module: &dyn Module, inference: &Inference, log_dir: &Path) -> Result<()> {
    if has_inference_layers(module) {
        return Ok(()); // converted by hand, or in an earlier call
    }
    let folders = [log_dir.to_path_buf(), log_dir.parent().unwrap_or(log_dir).to_path_buf()];
    convert_found(module, inference, &folders).map(drop)
}

/// Whether layers measure, or are quantized.
pub(crate) fn has_inference_layers(module: &dyn Module) -> bool {
    layers(module).iter().any(|layer| layer.compute.is_of_inference())
}

fn convert_found(module: &dyn Module, inference: &Inference, folders: &[PathBuf]) -> Result<Converted> {
    let Inference { config, origin } = inference;
    config.check(origin)?;
    check_generation()?;
    let is_sharded = module.parameters().iter().any(|parameter| parameter.tensor_shard().is_some());
    if is_sharded && config.mode != QuantMode::None {
        let what =
            format!("the layers of {} are sharded over ranks (tensor parallelism)", module.type_name());
        let remedy = "leave tensor_parallel out; quantized layers are whole";
        return Err(ConfigError::new("fp8 inference", what, remedy).into());
    }
    match config.mode {
        QuantMode::None => Ok(Converted::Nothing),
        QuantMode::Measure | QuantMode::Shape => measure(module, config),
        QuantMode::Quantize => quantize(module, config, folders),
    }
}

fn measure(module: &dyn Module, config: &QuantConfig) -> Result<Converted> {
    if config.observer_in_force() == Observer::Save && config.dump_stats_path.is_none() {
        let what = "tensors are saved while layers are called, and nothing says where";
        let remedy = "name a folder by dump_stats_path, fp8_data_path or HABANA_LOGS";
        return Err(ConfigError::new("observer", what, remedy).into());
    }
    let measuring = Arc::new(Measuring { config: config.clone(), written: Mutex::default() });
    let mut measured = 0;
    let all = layers(module);
    if let Some(layer) = all.iter().find(|layer| layer.quantized().is_some()) {
        let what = format!("layer {} is quantized already", layer.fqn);
        return Err(ConfigError::new("fp8 inference", what, "measure a module with its own weights").into());
    }
    let skips_outputs = matches!(config.measure_exclude, MeasureExclude::Output | MeasureExclude::All);
    for layer in all.into_iter().filter(|layer| config.takes(&layer.fqn, layer.type_name)) {
        let measures_output = layer.requires_output() || !skips_outputs;
        let observer =
            LayerObserver::new(layer.fqn.clone(), measuring.clone(), layer.channel_dim, measures_output);
        layer.compute.set(Compute::Measured(observer));
        measured += 1;
    }
    if measured == 0 {
        tracing::warn!(
            "no layer of {} is measured: there is no Linear, Conv2d, Matmul, Softmax, FusedAttention or KvCacheLayer that allowlist \
             and blocklist let through",
            module.type_name()
        );
    }
    Ok(Converted::Measured(measured))
}

/// The observers of a module.
fn observers(module: &dyn Module) -> Vec<(Layer<'_>, Arc<LayerObserver>)> {
    let observed = layers(module).into_iter().filter_map(|layer| match layer.compute.get() {
        Compute::Measured(observer) => Some((layer, observer)),
        _ => None,
    });
    observed.collect()
}

/// What the layers of a module have measured so far.
fn collect(observers: &[(Layer<'_>, Arc<LayerObserver>)]) -> Result<Measures> {
    let mut measures = Measures::default();
    for (layer, observer) in observers {
        let Some(mut own) = observer.measures()? else { continue };
        if let Some(weight) = layer.weight.filter(|weight| !weight.is_kept()) {
            let observer = observer.measuring.config.observer_in_force();
            let most = observed(&weight.try_tensor()?.f_detach()?, observer, -1)?;
            own.weight = most.map(|most| Vec::try_from(most.f_to_device(tch::Device::Cpu)?)).transpose()?;
        }
        measures.layers.insert(observer.fqn.clone(), own);
    }
    measures.check()?;
    Ok(measures)
}

/// Writes the parameters of layers whose tensors are saved. Returns the beginning of the names of files.
fn save_modules(observers: &[(Layer<'_>, Arc<LayerObserver>)]) -> Result<Option<PathBuf>> {
    for (layer, observer) in observers {
        let named = [("weight", layer.weight), ("bias", layer.bias)].into_iter();
        let own = named.filter_map(|(name, parameter)| Some((name, parameter.filter(|it| !it.is_kept())?)));
        let parameters = own.map(|(name, parameter)| Ok((name, parameter.try_tensor()?)));
        observer.save_module(parameters.collect::<Result<_>>()?)?;
    }
    Ok(observers.first().and_then(|(_, first)| first.measuring.config.dump_stats_path.clone()))
}

fn write_all(measuring: &Measuring, folder: &Path, of_ranks: &[Measures]) -> Result<PathBuf> {
    let Measuring { config, written } = measuring;
    let prefix = config.dump_stats_path.clone().unwrap_or_else(|| folder.join(MEASURE));
    let observer = config.observer_in_force();
    set_aside(&prefix, observer)?;
    match of_ranks {
        [one] => one.write(&prefix, observer, None)?,
        all if config.seperate_measure_files => {
            for (rank, measures) in all.iter().enumerate() {
                measures.write(&prefix, observer, Some((rank, all.len())))?;
            }
        }
        all => {
            let mut merged = Measures::default();
            all.iter().for_each(|measures| merged.merge(measures.clone()));
            merged.write(&prefix, observer, None)?;
        }
    }
    *written.lock().unwrap_or_else(PoisonError::into_inner) = Some(prefix.clone());
    Ok(prefix)
}

/// Writes what the layers of a module have measured, to `dump_stats_path` of its settings, else below `folder`. Returns the beginning of the
/// files' names; `None` if no layer measures. The trainer does it by itself at the end of predict, test and validate.
///
/// # Errors
/// If a magnitude is infinite or no number, or a file cannot be written.
pub fn finish_measurements(module: &impl ModuleExt, folder: &Path) -> Result<Option<PathBuf>> {
    let observers = observers(module.as_dyn());
    let Some((_, first)) = observers.first() else { return Ok(None) };
    if first.saves_tensors() {
        return save_modules(&observers);
    }
    Ok(Some(write_all(&first.measuring, folder, &[collect(&observers)?])?))
}

/// [`finish_measurements`] in a run: rank 0 writes those of all ranks.
///
/// # Collective
/// All ranks must call it.
pub(crate) fn finish_in_run(module: &dyn Module, world: &World, log_dir: &Path) -> Result<()> {
    let observers = observers(module);
    let Some((_, first)) = observers.first() else { return Ok(()) };
    if first.saves_tensors() {
        return save_modules(&observers).map(drop);
    }
    let own = collect(&observers);
    let written = match world.group() {
        None => write_all(&first.measuring, log_dir, &[own?])?,
        Some(group) => {
            let all =
                group.all_gather_object(&own.as_ref().map(Clone::clone).map_err(ToString::to_string))?;
            own?;
            let all: Result<Vec<Measures>, String> = all.into_iter().collect();
            let all = all.map_err(|what| failed(log_dir, format!("another rank: {what}")))?;
            let own = match world.is_global_zero() {
                true => write_all(&first.measuring, log_dir, &all),
                false => Ok(PathBuf::new()),
            };
            let of_zero = world.of_rank_zero(own.as_ref().map(Clone::clone).map_err(ToString::to_string))?;
            own?;
            let written = of_zero.map_err(|what| failed(log_dir, format!("rank 0: {what}")))?;
            *first.measuring.written.lock().unwrap_or_else(PoisonError::into_inner) = Some(written.clone());
            written
        }
    };
    if world.is_global_zero() {
        tracing::info!("fp8 measurements of {} layers are in {}*", observers.len(), written.display());
    }
    Ok(())
}

fn failed(path: &Path, what: String) -> Error {
    let problem = Problem::new(what, "see the log of that rank");
    CheckpointError::OnRanks { action: "write", path: path.to_owned(), problem }.into()
}

/// Before a prediction whose layers measure: what only limits tests, as the printed block of the original has it, does not limit it.
pub(crate) fn warn_of_limits(module: &dyn Module, limits_test: bool, limits_predict: bool) {
    if limits_test && !limits_predict && !observers(module).is_empty() {
        tracing::warn!(
            "limit_test_batches does not limit predict, which measures on all its batches; set limit_predict_batches"
        );
    }
}

/// A layer that will be quantized.
struct Prepared<'a> {
    layer: Layer<'a>,
    quantized: Arc<Quantized>,
    codes: Option<Tensor>,
}

impl Prepared<'_> {
    fn apply(self) -> Result<()> {
        self.layer.quantize(self.quantized, self.codes.as_ref())
    }
}

/// Writes the scales beside the measurements, for whoever wants to look at them: voltaic does not read them. Where that is not possible, as in
/// a folder of another user, a warning says so.
fn write_scales(prepared: &[Prepared<'_>], prefix: &Path, config: &QuantConfig) {
    let of = |Prepared { layer, quantized, .. }: &Prepared<'_>| {
        let LayerScales { inputs, output, weight, .. } = &quantized.scales;
        let weight = (!weight.is_empty()).then(|| weight.clone());
        let outputs = output.iter().map(|scale| vec![*scale]).collect();
        (layer.fqn.clone(), LayerMeasures { inputs: inputs.clone(), outputs, weight })
    };
    let scales = Measures { layers: prepared.iter().map(of).collect() };
    if let Err(error) = scales.write_scales(prefix, config.observer, config.scale_method) {
        tracing::warn!("the scales are not written: {error}");
    }
}

/// The dtype of codes.
pub(super) fn dtype_of(format: QuantFormat) -> Kind {
    match format {
        QuantFormat::E4M3 => Kind::Float8e4m3fn,
        QuantFormat::E5M2 => Kind::Float8e5m2,
    }
}

/// The layers to quantize, with how scales of their inputs are rounded, and those that stay as they are.
type Selected<'a> = (Vec<(Layer<'a>, Rounding)>, Vec<Layer<'a>>);

fn select<'a>(all: Vec<Layer<'a>>, config: &QuantConfig, scaler: &Scaler) -> Result<Selected<'a>> {
    let (mut selected, mut rest, mut caches) = (Vec::new(), Vec::new(), Vec::new());
    let method = scaler.method;
    for layer in all {
        if !config.takes(&layer.fqn, layer.type_name) {
            rest.push(layer);
            continue;
        }
        if layer.is_tied {
            tracing::info!("layer {} stays as it is: another module has its weight, too", layer.fqn);
            rest.push(layer);
            continue;
        }
        let (fqn, layer_type) = (&layer.fqn, layer.layer_type);
        match method.of_inputs(layer_type, scaler.device) {
            Some(rounding) => selected.push((layer, rounding)),
            None if layer_type == LayerType::KvCache => {
                caches.push(fqn.clone());
                rest.push(layer);
            }
            None => {
                let (kind, type_name) = (layer_type.name(), layer.type_name);
                let what = format!("{method} has no scales for {kind} ({type_name} {fqn})");
                let remedy = format!("use maxabs_hw, or name {type_name} in blocklist.types");
                return Err(ConfigError::new("scale_method", what, remedy).into());
            }
        }
    }
    if !caches.is_empty() {
        let caches = caches.join(", ");
        tracing::warn!(
            "{method} has no scales for kv_cache, which stays as it is: {caches}; maxabs_hw has some"
        );
    }
    Ok((selected, rest))
}

/// Refuses lists that let no layer through.
fn refuse_nothing(module: &dyn Module, all: &[Layer<'_>], config: &QuantConfig) -> Result<()> {
    let Some(first) = all.first() else { return Ok(()) };
    if all.iter().any(|layer| config.takes(&layer.fqn, layer.type_name)) {
        return Ok(());
    }
    let is_listed = |list: &LayerList| !list.names.is_empty() || !list.types.is_empty();
    let lists = [("allowlist", &config.allowlist), ("blocklist", &config.blocklist)];
    let keys: Vec<&str> = lists.into_iter().filter(|(_, list)| is_listed(list)).map(|(key, _)| key).collect();
    let keys = keys.join(" and ");
    let what = format!(
        "leaves no layer of {} to be quantized: it has {}, such as {} ({})",
        module.type_name(),
        all.len(),
        first.fqn,
        first.type_name
    );
    Err(ConfigError::new(keys, what, "name fewer layers and types in it").into())
}

fn quantize(module: &dyn Module, config: &QuantConfig, folders: &[PathBuf]) -> Result<Converted> {
    let all = layers(module);
    if all.iter().any(|layer| layer.quantized().is_some()) {
        tracing::info!("{} is quantized already", module.type_name());
        return Ok(Converted::Nothing);
    }
    refuse_nothing(module, &all, config)?;
    let (prefix, measures) = match config.scale_method.needs_no_measures() {
        true => (config.dump_stats_path.clone(), Measures::default()),
        false => {
            let prefix = prefix_of(module, config, folders)?;
            let measures = Measures::read(&prefix, config.observer)?;
            (Some(prefix), measures)
        }
    };
    let scaler = Scaler {
        method: config.scale_method,
        params: config.scale_params.clone(),
        format: kernel_format(config.fp8_config),
        device: config.scale_device(),
    };
    let (selected, rest) = select(all, config, &scaler)?;
    let (mut prepared, mut unmeasured) = (Vec::new(), Vec::new());
    for (layer, rounding) in selected {
        let measured = match measures.layers.get(&layer.fqn) {
            Some(measured) => measured.clone(),
            None if scaler.method.needs_no_measures() => LayerMeasures {
                inputs: vec![vec![1.0]; layer.num_inputs],
                outputs: vec![vec![1.0]],
                weight: None,
            },
            None => {
                unmeasured.push(layer);
                continue;
            }
        };
        prepared.push(prepare(layer, config, &scaler, rounding, &measured)?);
    }
    if prepared.is_empty() && !unmeasured.is_empty() {
        let measured: Vec<&String> = measures.layers.keys().take(3).collect();
        let what = format!(
            "no layer of {} was measured: it has {}, and the measurements have {measured:?}",
            module.type_name(),
            unmeasured[0].fqn
        );
        return Err(ConfigError::new("fp8 measurements", what, "measure this module").into());
    }
    if let Some(prefix) = prefix.filter(|_| is_global_zero()) {
        write_scales(&prepared, &prefix, config);
    }
    let layers = prepared.len();
    prepared.into_iter().try_for_each(Prepared::apply)?;
    for layer in rest.into_iter().filter(|layer| layer.compute.is_of_inference()) {
        layer.compute.set(Compute::Plain); // it was measured
    }
    let names: Vec<String> = unmeasured.iter().map(|layer| layer.fqn.clone()).collect();
    for layer in unmeasured {
        match config.ignore_modules_wo_measures {
            true => layer.compute.set(Compute::Plain),
            false => layer.compute.set(Compute::Unmeasured(Unmeasured { fqn: layer.fqn.into() })),
        }
    }
    tracing::info!("{layers} layers of {} compute in float8 ({})", module.type_name(), config.scale_method);
    if !names.is_empty() {
        tracing::warn!("layers without measurements: {}", names.join(", "));
    }
    Ok(Converted::Quantized { layers, unmeasured: names })
}

/// Where the measurements of a module are.
fn prefix_of(module: &dyn Module, config: &QuantConfig, folders: &[PathBuf]) -> Result<PathBuf> {
    if let Some(prefix) = &config.dump_stats_path {
        return Ok(prefix.clone());
    }
    let own = observers(module).into_iter().find_map(|(_, observer)| {
        observer.measuring.written.lock().unwrap_or_else(PoisonError::into_inner).clone()
    });
    own.or_else(|| latest(folders, config.observer)).ok_or_else(|| {
        let is_named = |folder: &&PathBuf| !folder.as_os_str().is_empty();
        let folders: Vec<String> =
            folders.iter().filter(is_named).map(|folder| folder.display().to_string()).collect();
        let what = format!(
            "Failed to load file {MEASURE}_hooks_{}.json: it is not in {}, nor in their folders",
            config.observer,
            folders.join(", ")
        );
        let remedy = "run predict with quant=false first, or name the folder of the measurements by fp8_data_path, HABANA_LOGS or \
                      dump_stats_path";
        ConfigError::new("fp8 measurements", what, remedy).into()
    })
}

fn prepare<'a>(
    layer: Layer<'a>,
    config: &QuantConfig,
    scaler: &Scaler,
    rounding: Rounding,
    measured: &LayerMeasures,
) -> Result<Prepared<'a>> {
    let of_other = |what: String| -> Error {
        let what = format!("{what} of layer {}", layer.fqn);
        ConfigError::new("fp8 measurements", what, "measure this module, with the same observer").into()
    };
    if measured.inputs.len() < layer.num_inputs || measured.inputs.iter().any(Vec::is_empty) {
        return Err(of_other(format!("{} of {} inputs", measured.inputs.len(), layer.num_inputs)));
    }
    let (mut codes, mut weight_casts) = (None, None);
    let scales = match layer.weight {
        Some(weight) => {
            let values = WeightValues::of(&layer.fqn, weight)?;
            let columns = values.shape.get(1).copied().unwrap_or(1) as usize;
            if scaler.method.needs_channels() {
                if values.shape.len() != 2 {
                    let what = format!("{} with {} {}", scaler.method, layer.type_name, layer.fqn);
                    let remedy = format!("name {} in blocklist.types", layer.type_name);
                    return Err(ConfigError::new("scale_method", what, remedy).into());
                }
                if measured.inputs[0].len() != columns {
                    return Err(of_other(format!("{} of {columns} channels", measured.inputs[0].len())));
                }
            }
            let scales = scaler.weight(&measured.inputs[0], rounding, values.rows());
            let (cast, counts) = quantized_weight(&values, &scales, config, weight)?;
            (codes, weight_casts) = (Some(cast), Some(counts));
            let WeightScales { input, weight, weight_in } = scales;
            LayerScales { inputs: vec![input], output: None, weight, weight_in }
        }
        None => {
            let of = |measured: &Vec<f32>| scaler.input(measured, rounding);
            let inputs = match layer.layer_type {
                LayerType::Softmax => vec![vec![1.0]],
                _ => measured.inputs[..layer.num_inputs].iter().map(|input| vec![of(input)]).collect(),
            };
            let output = measured.outputs.first().map(of);
            if layer.layer_type == LayerType::Softmax && output.is_none() {
                return Err(of_other("nothing of the output".to_owned()));
            }
            let output = output.filter(|_| layer.layer_type == LayerType::Softmax);
            LayerScales { inputs, output, ..LayerScales::default() }
        }
    };
    let hp_dtype = config.hp_dtype.map(|dtype| match dtype {
        HpDtype::Bf16 => Kind::BFloat16,
        HpDtype::Fp16 => Kind::Half,
        HpDtype::Fp32 => Kind::Float,
    });
    let mut quantized = Quantized::new(layer.fqn.clone(), dtype_of(config.fp8_config), hp_dtype, scales);
    quantized.weight_casts = weight_casts;
    Ok(Prepared { layer, quantized: Arc::new(quantized), codes })
}

/// The codes of a weight, on its device, and what the cast has done.
fn quantized_weight(
    weight: &WeightValues,
    scales: &WeightScales,
    config: &QuantConfig,
    like: &Parameter,
) -> Result<(Tensor, CastCounts)> {
    let format = kernel_format(config.fp8_config);
    let columns = (weight.values.len() / weight.shape[0].max(1) as usize).max(1);
    let mut codes = vec![0; weight.values.len()];
    let mut counts = CastCounts::default();
    let mut wide = vec![0.0; columns];
    for (row, (values, codes)) in weight.values.chunks(columns).zip(codes.chunks_mut(columns)).enumerate() {
        let scale = scales.weight.get(row).or(scales.weight.first()).copied().unwrap_or(1.0);
        let moved: Vec<f32>;
        let values = match &scales.weight_in {
            None => values,
            Some(factors) => {
                moved = values.iter().zip(factors).map(|(value, factor)| value / factor).collect();
                &moved
            }
        };
        to_float8(Floats::Float32(values), codes, format, 1.0 / scale, None);
        from_float8(codes, FloatsMut::Float32(&mut wide), format, 1.0);
        for (at, (value, rounded)) in values.iter().zip(&wide).enumerate() {
            let factor = f64::from(scales.weight_in.as_ref().map_or(1.0, |factors| factors[at]));
            let (value, rounded) = (f64::from(*value) * factor, f64::from(rounded * scale) * factor);
            counts.numbers += 1.0;
            counts.clipped += f64::from(u8::from(value.abs() > f64::from(format.max() * scale) * factor));
            counts.errors += (value - rounded).powi(2);
            counts.squares += value.powi(2);
        }
    }
    let codes = codes_tensor(&codes, dtype_of(config.fp8_config), &weight.shape)?;
    Ok((codes.f_to_device(like.device())?, counts))
}
