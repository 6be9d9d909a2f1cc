//! Layers of the transformer engine: they compute in float8 within a region of [`fp8_autocast`].

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use tch::Tensor;

use crate::accelerator::rng;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::nn::calls::reach::unwrapped;
use crate::nn::compute::Compute;
use crate::nn::fp8_linear::Fp8Linear;
use crate::nn::init;
use crate::nn::layers::linear;
use crate::nn::modes::NumberHash;
use crate::nn::module::{AsModule, Forward, Member, Module};
use crate::nn::named::modules_named;
use crate::nn::quant::convert::{convert_here, has_inference_layers};
use crate::nn::tree::ModuleExt;

use crate::error::{ConfigError, ConfigProblem};
use crate::precision::DeepSpeedPrecisionPlugin;
use crate::precision::HpuPrecisionPlugin;
use crate::precision::Precision;
use crate::precision::fp8::{Fp8Meta, Fp8Settings, Fp8State};

pub use crate::nn::fp8_attention::FusedAttention;
pub use crate::precision::fp8 as recipe;
pub use crate::precision::fp8::{fp8_autocast, set_measurement_mode};

/// [`nn::Linear`](crate::nn::Linear) that computes in float8 within a region of [`fp8_autocast`], and is it elsewhere. Its names in state
/// dicts are the same.
///
/// Inputs, weights and gradients are cast to float8 with a scale; products are exact and summed in float32. The output has the dtype of
/// activations: what autocast casts to, else that of the input, which the parameters must have then, too. With float32 activations the
/// bias is rounded to bfloat16, as on the cards. Rows of zeros, and no rows, are fine.
///
/// ```
/// use voltaic::nn::{Forward, te};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let fc = te::Linear::new(784, 256)?;
/// # let digits = Tensor::ones([64, 784], (Kind::Float, tch::Device::Cpu));
/// let _fp8 = te::fp8_autocast(true, None)?;
/// assert_eq!(fc.forward(&digits)?.size(), [64, 256]);
/// # Ok(())
/// # }
/// ```
///
/// Source: `habana_frameworks.torch.hpex.experimental.transformer_engine.Linear`.
pub struct Linear(linear::Linear);

impl Linear {
    /// A layer from `in_features` to `out_features` with a bias of zeros, and weights drawn from a normal distribution of deviation 0.023.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn new(in_features: i64, out_features: i64) -> Result<Self> {
        Self::builder(in_features, out_features).build()
    }

    /// A layer with options.
    pub fn builder(in_features: i64, out_features: i64) -> LinearBuilder {
        LinearBuilder { plain: linear::Linear::builder(in_features, out_features), minimize_memory: false }
    }

    /// The layer of a batch that is the first of those whose gradients make one step (`true`), or a later one (`false`). The weight is cast
    /// at the first one only. Call it so at each of them, or at none.
    ///
    /// # Errors
    /// As [`Forward::forward`].
    pub fn forward_microbatch(&self, input: &Tensor, is_first_microbatch: bool) -> anyhow::Result<Tensor> {
        self.0.forward_microbatch(input, is_first_microbatch)
    }
}

/// Options of a [`Linear`].
#[derive(Debug, Clone)]
#[must_use = "a builder does nothing until build()"]
pub struct LinearBuilder {
    plain: linear::LinearBuilder,
    minimize_memory: bool,
}

impl LinearBuilder {
    /// Whether a bias is added (default `true`).
    pub fn bias(mut self, bias: bool) -> Self {
        self.plain = self.plain.bias(bias);
        self
    }

    /// Whether the backward pass casts the weight again, in place of keeping it in float8 (default `false`).
    pub fn minimize_memory(mut self, minimize_memory: bool) -> Self {
        self.minimize_memory = minimize_memory;
        self
    }

    /// Makes the layer.
    ///
    /// # Errors
    /// [`ModuleError::Sizes`](crate::error::ModuleError::Sizes) if a size is below 1.
    pub fn build(self) -> Result<Linear> {
        let plain = self.plain.build()?;
        init::normal_(&plain.weight, 0.0, 0.023)?;
        if let Some(bias) = &plain.bias {
            init::zeros_(bias)?;
        }
        plain.compute.set(Compute::Fp8(Fp8Linear::new(self.minimize_memory)));
        Ok(Linear(plain))
    }
}

impl Deref for Linear {
    type Target = linear::Linear;

    fn deref(&self) -> &linear::Linear {
        &self.0
    }
}

impl fmt::Debug for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "te::{:?}", self.0)
    }
}

impl Module for Linear {
    fn members<'a>(&'a self, visit: &mut dyn FnMut(&str, Member<'a>)) {
        self.0.members(visit);
    }

    fn children_mut<'a>(&'a mut self, visit: &mut dyn FnMut(&str, &'a mut dyn Module)) {
        self.0.children_mut(visit);
    }

    fn settings(&self, visit: &mut dyn FnMut(u64)) {
        self.0.settings(visit);
    }

    fn wrapped(&self) -> Option<&dyn Module> {
        Some(self.0.as_module())
    }

    fn type_name(&self) -> &'static str {
        self.0.type_name()
    }
}

impl Forward for Linear {
    fn forward(&self, input: &Tensor) -> anyhow::Result<Tensor> {
        self.0.forward(input)
    }
}

/// What [`convert`] has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Converted {
    /// Layers of the transformer engine were there already: nothing was changed.
    HadLayers(usize),
    /// As many layers compute in float8 within a region from now on.
    Layers(usize),
}

/// Lets each [`nn::Linear`](crate::nn::Linear) of the module compute in float8 within a region of [`fp8_autocast`]. Weights stay, which is
/// better than the original, whose layers get new ones. A module that has layers of the transformer engine already stays as it is.
///
/// # Errors
/// [`ConfigError`] if a name is that of no module.
pub fn convert(module: &(impl ModuleExt + ?Sized), settings: &Fp8Settings) -> Result<Converted> {
    let known = fp8_layers(module.as_dyn()).len();
    if known > 0 {
        tracing::info!("the module has {known} layers of the transformer engine: no others are replaced");
        return Ok(Converted::HadLayers(known));
    }
    let mut converted = 0;
    for (layer, left_out) in selected(module.as_dyn(), settings)? {
        if left_out.is_none() {
            layer.compute.set(Compute::Fp8(Fp8Linear::new(false)));
            converted += 1;
        }
    }
    Ok(Converted::Layers(converted))
}

/// The layers that can be converted, each with the key that leaves it out.
fn selected<'a>(
    module: &'a dyn Module,
    settings: &Fp8Settings,
) -> Result<Vec<(&'a linear::Linear, Option<&'static str>)>> {
    let excluded = modules_named(module, &settings.exclude_layers).map_err(|name| {
        let what = format!("`{name}` is no module of this one");
        ConfigError::new("exclude_layers", what, "name a type, an fqn or a pattern of fqns")
    })?;
    let is_excluded =
        |fqn: &str| excluded.iter().any(|(outer, _)| fqn == outer || crate::nn::named::is_member(fqn, outer));
    let of = |(fqn, layer): (String, &'a linear::Linear)| {
        let is_small = layer.in_features() * layer.out_features() < settings.min_weights;
        let by_size = is_small.then_some("min_weights");
        (layer, is_excluded(&fqn).then_some("exclude_layers").or(by_size))
    };
    Ok(linears(module).into_iter().map(of).collect())
}

/// The layers with a weight for one product, each once, by fqn.
fn linears(module: &dyn Module) -> Vec<(String, &linear::Linear)> {
    let mut found: Vec<(String, &linear::Linear)> = Vec::new();
    for (fqn, module) in module.named_modules() {
        let Some(layer) = unwrapped::<linear::Linear>(module) else { continue };
        if !found.iter().any(|(_, known)| std::ptr::eq(*known, layer)) {
            found.push((fqn, layer));
        }
    }
    found
}

/// Puts back by `restore` what captured passes have left. Replays measure as these did, so that an eager pass after them makes scales of
/// what was measured, as they do themselves: before the first replay histories of zeros change no scale.
pub(crate) fn keep_measured<T>(module: &dyn Module, restore: impl FnOnce() -> Result<T>) -> Result<T> {
    let layers = fp8_layers(module).into_iter();
    let measured: Vec<_> = layers.map(|(_, meta)| (meta.has_measured(), meta)).collect();
    let restored = restore()?;
    measured.iter().for_each(|(measured, meta)| meta.set_measured(*measured));
    Ok(restored)
}

/// A hash of whether the last forward pass and the last backward pass of each layer measured.
pub(crate) fn measured_hash(module: &dyn Module) -> u64 {
    fn add(module: &dyn Module, hash: &mut NumberHash) {
        if let Some(meta) = meta_of(module) {
            meta.has_measured().iter().for_each(|measured| hash.add(u64::from(*measured)));
        }
        module.members(&mut |_, member| {
            if let Member::Module(child) = member {
                add(child, hash);
            }
        });
    }
    let mut hash = NumberHash::new();
    add(module, &mut hash);
    hash.get()
}

/// Runs a backward pass on zeros, which is captured but no pass of a step: scales, histories and random numbers are then as before.
pub(crate) fn not_counted<T>(
    module: &dyn Module,
    device: Device,
    run: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let layers = fp8_layers(module);
    if layers.is_empty() {
        return run();
    }
    let states = layers.iter().map(|(_, meta)| meta.state()).collect::<Result<Vec<_>>>()?;
    let random = rng::states(device)?;
    let done = run()?;
    keep_measured(module, || {
        layers.iter().zip(&states).try_for_each(|((_, meta), state)| meta.load_state(state))
    })?;
    rng::set_states(&random)?;
    Ok(done)
}

/// The scales of a layer that computes in float8 within a region.
fn meta_of(module: &dyn Module) -> Option<Arc<Fp8Meta>> {
    let of_linear =
        unwrapped::<linear::Linear>(module).and_then(|layer| layer.compute.fp8()).map(|fp8| fp8.meta);
    of_linear.or_else(|| unwrapped::<FusedAttention>(module).map(|layer| layer.meta.clone()))
}

/// The layers that compute in float8 within a region, by fqn, with their scales.
pub(crate) fn fp8_layers(module: &dyn Module) -> Vec<(String, Arc<Fp8Meta>)> {
    let mut found: Vec<(String, Arc<Fp8Meta>)> = Vec::new();
    for (fqn, module) in module.named_modules() {
        if let Some(meta) = meta_of(module)
            && !found.iter().any(|(_, known)| Arc::ptr_eq(known, &meta))
        {
            found.push((fqn, meta));
        }
    }
    found
}

/// Before a run in float8: converts the module if that is asked for, and says so if no layer would compute in float8.
///
/// # Errors
/// As [`convert`].
pub(crate) fn prepare_fp8(module: &dyn Module, settings: &Fp8Settings) -> Result<()> {
    if settings.replace_layers {
        convert(module, settings).map_err(|error| match error {
            Error::Config(error) => error.within("trainer.plugins").into(),
            error => error,
        })?;
    }
    if !fp8_layers(module).is_empty() || has_inference_layers(module) {
        return Ok(());
    }
    let name = module.type_name();
    if !settings.replace_layers {
        tracing::warn!(
            "precision=fp8, but no layer of {name} computes in float8: use te::Linear, call convert_modules, or give \
             HPUPrecisionPlugin with replace_layers: true"
        );
        return Ok(());
    }
    let all = selected(module, settings)?;
    let by = |key: &str| all.iter().filter(|(_, left_out)| *left_out == Some(key)).count();
    tracing::warn!(
        "precision=fp8, but no layer of {name} computes in float8: it has {} nn::Linear, of which exclude_layers leaves out {}, and \
         min_weights={} a further {}",
        all.len(),
        by("exclude_layers"),
        settings.min_weights,
        by("min_weights")
    );
    Ok(())
}

/// Scales and histories of all layers in float8, by fqn and the names of [`Fp8State`], as copies.
///
/// # Errors
/// libtorch's.
pub fn fp8_state_dict(module: &dyn Module) -> Result<Vec<(String, Tensor)>> {
    let mut named = Vec::new();
    for (fqn, meta) in fp8_layers(module) {
        let tensors = meta.state()?.tensors.into_iter();
        named.extend(tensors.map(|(name, tensor)| (format!("{fqn}/{name}"), tensor)));
    }
    Ok(named)
}

/// Puts them back. Layers that are not in `state` begin with scales of 1; what belongs to no layer is left out, with a warning.
///
/// # Errors
/// [`CheckpointError::Mismatch`](crate::error::CheckpointError::Mismatch) if the tensors of a layer do not fit.
pub fn load_fp8_state_dict(module: &dyn Module, state: &[(String, Tensor)]) -> Result<()> {
    let layers = fp8_layers(module);
    let of_layer = |fqn: &str| {
        let own = state.iter().filter_map(|(name, tensor)| Some((name.rsplit_once('/')?, tensor)));
        let own = own.filter(|((known, _), _)| *known == fqn);
        own.map(|((_, name), tensor)| (name.to_owned(), tensor.shallow_clone())).collect::<Vec<_>>()
    };
    for (fqn, meta) in &layers {
        meta.load_state(&Fp8State { tensors: of_layer(fqn) })?;
    }
    let unknown = state.iter().find(|(name, _)| {
        !layers.iter().any(|(fqn, _)| name.rsplit_once('/').is_some_and(|(known, _)| known == fqn))
    });
    if let Some((name, _)) = unknown {
        tracing::warn!(
            "the checkpoint has fp8 scales of layers that do not compute in float8 here, such as {name}"
        );
    }
    Ok(())
}

/// As the plugins do it.
fn convert_by(module: &(impl ModuleExt + ?Sized), settings: Option<Fp8Settings>, plugin: &str) -> Result<()> {
    let Some(settings) = settings else {
        let what = "the precision is another one, and convert_modules is for precision fp8 alone";
        return Err(ConfigError::new(format!("{plugin}.precision"), what, "set precision: fp8").into());
    };
    if let Some(inference) = &settings.inference {
        return convert_here(module.as_dyn(), inference).map(drop);
    }
    match settings.replace_layers {
        true => convert(module, &settings).map(drop),
        false => {
            tracing::info!(
                "{plugin}: replace_layers is false, so that convert_modules leaves the module as it is"
            );
            Ok(())
        }
    }
}

fn precision_of(
    value: &serde_json::Value,
    accelerator: &str,
    plugin: &str,
) -> Result<Precision, ConfigError> {
    let at = |problem| ConfigProblem::at(format!("{plugin}.precision"), problem);
    Precision::parse(value, accelerator).map_err(|problem| ConfigError { problems: vec![at(problem)] })
}

impl HpuPrecisionPlugin {
    /// With precision fp8 and `replace_layers`, lets the linear layers of the module compute in float8; to be called before `fit`. The
    /// trainer does it by itself, too. See [`convert`].
    ///
    /// With `inference` it lets layers measure, or compute in float8 by measurements, see [`quant::convert`](crate::nn::quant::convert):
    /// `plugin.inference(false).convert_modules(&mut model)` is the original's
    /// `plugin.convert_modules(model, inference=True, quant=False)`.
    ///
    /// Source: `HPUPrecisionPlugin.convert_modules`.
    ///
    /// # Errors
    /// If the precision is another one, or an excluded name is that of no module; as [`quant::convert`](crate::nn::quant::convert).
    pub fn convert_modules(&self, module: &mut (impl ModuleExt + ?Sized)) -> Result<()> {
        let precision = precision_of(&self.precision, "hpu", "HpuPrecisionPlugin")?;
        convert_by(module, self.fp8(precision)?, "HpuPrecisionPlugin")
    }
}

impl DeepSpeedPrecisionPlugin {
    /// With precision fp8 and `replace_layers`, lets the linear layers of the module compute in float8; to be called before `fit`. The
    /// trainer does it by itself, too. See [`convert`].
    ///
    /// With `inference` it is [`quant::convert`](crate::nn::quant::convert).
    ///
    /// Source: `HPUDeepSpeedPrecisionPlugin.convert_modules`.
    ///
    /// # Errors
    /// If the precision is another one, or an excluded name is that of no module; as [`quant::convert`](crate::nn::quant::convert).
    pub fn convert_modules(&self, module: &mut (impl ModuleExt + ?Sized)) -> Result<()> {
        let precision = precision_of(&self.precision, "hpu", "DeepSpeedPrecisionPlugin")?;
        convert_by(module, self.fp8(precision)?, "DeepSpeedPrecisionPlugin")
    }
}
