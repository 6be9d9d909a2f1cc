//! The scales of one layer, and what was measured for the next ones.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use super::recipe::{AmaxComputeAlgo, DelayedScaling, Fp8Format, rounds_stochastically};
use super::window::{is_measured, is_updated};
use crate::accelerator::HpuEmulator;
use crate::device::Device;
use crate::dtype::DtypeNames;
use crate::error::{CheckpointError, DeviceError, Error, ModuleError, Problem, Result};
use crate::ffi::{self, Fp8Cast, Fp8Tensor, Fp8Tensors, RecordingPause};

/// Scales and histories of a layer that computes in float8, which makes them at its first forward pass in a region
/// ([`fp8_autocast`](super::fp8_autocast)). They are no parameters or buffers; checkpoints have them.
#[derive(Debug)]
pub struct Fp8Meta {
    /// Tensors of the forward pass: inputs and weights of the products.
    num_forward: usize,
    /// Gradients of the outputs.
    num_backward: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    scalings: Option<Scalings>,
    /// Forward passes with grad so far.
    run_cnt: u64,
    /// The last forward pass, and the last backward pass, measured.
    has_measured: [bool; 2],
    /// The weights in float8, from the first micro-batch on: for the forward pass and for the backward pass.
    weight: Option<(Fp8Tensor, Fp8Tensor)>,
}

/// The scales of each pass.
#[derive(Debug)]
struct Scalings {
    device: Device,
    forward: Fp8Tensors,
    /// For what the forward pass casts for the backward pass, if the format is another one there.
    hybrid: Option<Fp8Tensors>,
    backward: Fp8Tensors,
}

/// The state of a layer's scales as tensors, by the names of the original.
#[derive(Debug)]
pub struct Fp8State {
    /// `scale_fwd`, `scale_inv_fwd`, `amax_history_fwd`, `amax_history_index_fwd`, the same with `_hybrid` where there are
    /// some and with `_bwd`, `run_cnt` (`[1]` int64), `update_amax` (`[2]` int64: whether the last forward pass and the last backward
    /// pass measured). None for a layer that has not computed in float8.
    pub tensors: Vec<(String, Tensor)>,
}

const SUFFIXES: [&str; 3] = ["fwd", "hybrid", "bwd"];
const NAMES: [&str; 4] = ["scale", "scale_inv", "amax_history", "amax_history_index"];

/// What a forward pass casts with.
#[derive(Debug)]
pub(crate) struct Forward {
    meta: Arc<Fp8Meta>,
    recipe: DelayedScaling,
    forward: Fp8Tensors,
    hybrid: Option<Fp8Tensors>,
    /// Largest magnitudes go to the histories.
    pub(super) measures: bool,
    /// The backward pass makes scales of what was measured before it.
    updates: bool,
}

fn of_fns(error: anyhow::Error) -> Error {
    error.downcast().unwrap_or_else(|error| {
        let problem = Problem::new(format!("a function of the fp8 recipe: {error:#}"), "fix the function");
        ModuleError::Hook { problem }.into()
    })
}

fn zeros(shape: &[i64], kind: Kind, device: Device) -> Result<Tensor> {
    Ok(Tensor::f_zeros(shape, (kind, device.tch()))?)
}

fn new_scaling(slots: usize, rows: usize, device: Device) -> Result<Fp8Tensors> {
    let (slots, rows) = (slots as i64, rows as i64);
    let ones = || Tensor::f_ones([slots], (Kind::Float, device.tch()));
    Ok(Fp8Tensors {
        scale: ones()?,
        scale_inv: ones()?,
        amax_history: zeros(&[rows, slots], Kind::Float, device)?,
        amax_history_index: zeros(&[1], Kind::Int, device)?,
    })
}

/// The history with as many rows: the newest ones stay, and rows of zeros come behind the newest.
fn resize(tensors: &mut Fp8Tensors, rows: usize) -> Result<()> {
    let [len, rows] = [tensors.amax_history.size()[0], rows as i64];
    if len == rows {
        return Ok(());
    }
    let newest = i64::try_from(&tensors.amax_history_index)?;
    let history = &tensors.amax_history;
    if rows < len {
        // from the oldest that stays to the newest
        let kept: Vec<i64> = (0..rows).map(|row| (newest - rows + 1 + row).rem_euclid(len)).collect();
        let kept = Tensor::from_slice(&kept).f_to_device(history.device())?;
        tensors.amax_history = history.f_index_select(0, &kept)?;
        let _ = tensors.amax_history_index.f_fill_(rows - 1)?;
        return Ok(());
    }
    let before = history.f_narrow(0, 0, newest + 1)?;
    let after = history.f_narrow(0, newest + 1, len - newest - 1)?;
    let between = Tensor::f_zeros([rows - len, history.size()[1]], (Kind::Float, history.device()))?;
    tensors.amax_history = Tensor::f_cat(&[before, between, after], 0)?;
    Ok(())
}

/// New scales by the recipe, then the next row of the history.
fn update(tensors: &Fp8Tensors, dtype: Kind, recipe: &DelayedScaling) -> Result<()> {
    let uses_max = recipe.amax_compute_algo == AmaxComputeAlgo::Max;
    let own_amax = match &recipe.amax_compute_algo {
        AmaxComputeAlgo::Custom(own) => Some(own.call(&tensors.amax_history).map_err(of_fns)?),
        _ => None,
    };
    if own_amax.is_none() && recipe.scaling_factor_compute_algo.is_none() {
        return Ok(tensors.update(dtype, recipe.margin, uses_max)?);
    }
    let amax = match own_amax {
        Some(amax) => amax,
        None if uses_max => tensors.amax_history.f_amax([0_i64].as_slice(), false)?,
        None => tensors.amax_history.f_index_select(0, &tensors.amax_history_index)?.f_squeeze_dim(0)?,
    };
    let (scale, scale_inv) = (tensors.scale.shallow_clone(), tensors.scale_inv.shallow_clone());
    let Some(own) = &recipe.scaling_factor_compute_algo else {
        let amax = amax.f_to_kind(Kind::Float)?.f_reshape([1, -1])?.f_contiguous()?;
        let amax_history_index = tensors.amax_history_index.f_zeros_like()?;
        let of_amax = Fp8Tensors { scale, scale_inv, amax_history: amax, amax_history_index };
        of_amax.update(dtype, recipe.margin, false)?;
        return next_row(tensors);
    };
    let fp8_max = if dtype == Kind::Float8e4m3fn { 240.0 } else { 57344.0 };
    let new = own.call(&amax, &scale, fp8_max, recipe).map_err(of_fns)?;
    let mut scale = scale;
    scale.f_copy_(&new)?;
    scale_inv.shallow_clone().f_copy_(&scale.f_reciprocal()?)?;
    next_row(tensors)
}

fn next_row(tensors: &Fp8Tensors) -> Result<()> {
    let rows = tensors.amax_history.size()[0];
    if rows > 1 {
        let _ = tensors.amax_history_index.shallow_clone().f_add_scalar_(1)?.f_remainder_(rows)?;
    }
    Ok(())
}

impl Scalings {
    fn new(meta: &Fp8Meta, format: Fp8Format, rows: usize, device: Device) -> Result<Self> {
        let forward = || new_scaling(meta.num_forward, rows, device);
        let hybrid = (format == Fp8Format::Hybrid).then(forward).transpose()?;
        let backward = new_scaling(meta.num_backward, rows, device)?;
        Ok(Self { device, forward: forward()?, hybrid, backward })
    }

    fn all(&self) -> impl Iterator<Item = (&'static str, &Fp8Tensors)> {
        let all = [Some(&self.forward), self.hybrid.as_ref(), Some(&self.backward)];
        SUFFIXES.into_iter().zip(all).filter_map(|(suffix, tensors)| Some((suffix, tensors?)))
    }

    fn all_mut(&mut self) -> impl Iterator<Item = &mut Fp8Tensors> {
        [Some(&mut self.forward), self.hybrid.as_mut(), Some(&mut self.backward)].into_iter().flatten()
    }
}

impl State {
    /// The scales as the recipe and the device want them. They exist before a graph, not within it.
    fn scalings(&mut self, meta: &Fp8Meta, recipe: &DelayedScaling, device: Device) -> Result<&mut Scalings> {
        let (format, rows) = (recipe.fp8_format, recipe.amax_history_len);
        let _pause = RecordingPause::begin();
        let _no_grad = tch::no_grad_guard();
        let mut scalings = match self.scalings.take() {
            Some(scalings) => scalings,
            None => Scalings::new(meta, format, rows, device)?,
        };
        if scalings.device != device {
            for tensors in scalings.all_mut() {
                let Fp8Tensors { scale, scale_inv, amax_history, amax_history_index } = tensors;
                for tensor in [scale, scale_inv, amax_history, amax_history_index] {
                    *tensor = tensor.f_to_device(device.tch())?;
                }
            }
            scalings.device = device;
        }
        match (format, &scalings.hybrid) {
            (Fp8Format::Hybrid, None) => {
                scalings.hybrid = Some(new_scaling(meta.num_forward, rows, device)?);
            }
            (Fp8Format::E5M2, Some(_)) => scalings.hybrid = None,
            _ => {}
        }
        scalings.all_mut().try_for_each(|tensors| resize(tensors, rows))?;
        Ok(self.scalings.insert(scalings))
    }
}

/// Refuses devices whose float8 operators voltaic does not have.
pub(crate) fn check_device(device: Device) -> Result<()> {
    let has_operators = match device {
        Device::Cpu => true,
        Device::Hpu(_) => HpuEmulator::get().is_some(),
        _ => false,
    };
    if has_operators {
        return Ok(());
    }
    let what = "voltaic computes in float8 on the CPU and on emulated HPUs alone";
    let problem = Problem::new(what, "use precision=bf16-mixed there");
    Err(DeviceError::Unavailable { device: format!("float8 on {device}"), problem }.into())
}

impl Fp8Meta {
    /// For a layer with as many tensors that the forward pass casts, and as many gradients.
    pub fn new(num_forward: usize, num_backward: usize) -> Arc<Self> {
        Arc::new(Self { num_forward, num_backward, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A forward pass begins; `with_grad` if a backward pass is to follow: others change nothing. `manual` says whether it measures, in
    /// place of the recipe's interval.
    pub(super) fn begin_forward(
        self: &Arc<Self>,
        recipe: &DelayedScaling,
        device: Device,
        with_grad: bool,
        manual: Option<bool>,
    ) -> Result<Forward> {
        check_device(device)?;
        if with_grad && recipe.interval != 1 {
            ffi::refuse_recording(
                "the fp8 recipe has an interval, which replays do not count; use interval=1, or no graph",
            );
        }
        let state = &mut *self.lock();
        state.scalings(self, recipe, device)?;
        let (mut measures, mut updates) = (false, false);
        if with_grad {
            state.run_cnt += 1;
            measures = manual.unwrap_or_else(|| is_measured(state.run_cnt, recipe));
            updates = manual.is_some() || is_updated(state.run_cnt, recipe);
        }
        let Some(scalings) = &state.scalings else {
            return Err(of_fns(anyhow::anyhow!("scales are missing")));
        };
        if with_grad {
            let dtypes = [recipe.fp8_format.forward_dtype(), recipe.fp8_format.backward_dtype()];
            let all = [Some(&scalings.forward), scalings.hybrid.as_ref()];
            for (tensors, dtype) in all.into_iter().zip(dtypes) {
                let Some(tensors) = tensors.filter(|_| state.has_measured[0]) else { continue };
                if updates { update(tensors, dtype, recipe) } else { next_row(tensors) }?;
            }
            state.has_measured[0] = measures;
        }
        Ok(Forward {
            meta: self.clone(),
            recipe: recipe.clone(),
            forward: scalings.forward.shallow_clone(),
            hybrid: scalings.hybrid.as_ref().map(Fp8Tensors::shallow_clone),
            measures,
            updates,
        })
    }

    /// Whether the last forward pass and the last backward pass measured.
    pub(crate) fn has_measured(&self) -> [bool; 2] {
        self.lock().has_measured
    }

    /// Sets that.
    pub(crate) fn set_measured(&self, has_measured: [bool; 2]) {
        self.lock().has_measured = has_measured;
    }

    /// The rows of the histories that were written last, as views.
    pub(super) fn last_amaxes(&self) -> Result<Vec<Tensor>> {
        let state = self.lock();
        let Some(scalings) = &state.scalings else { return Ok(Vec::new()) };
        let rows = scalings.all().map(|(_, tensors)| {
            let row = match tensors.amax_history.size()[0] {
                1 => 0,
                _ => i64::try_from(&tensors.amax_history_index)?,
            };
            Ok(tensors.amax_history.f_select(0, row)?)
        });
        rows.collect()
    }

    /// The weights in float8 from the first micro-batch, for both passes.
    pub(crate) fn cached_weight(&self) -> Option<(Fp8Tensor, Fp8Tensor)> {
        self.lock()
            .weight
            .as_ref()
            .map(|(forward, backward)| (forward.shallow_clone(), backward.shallow_clone()))
    }

    /// Keeps them.
    pub(crate) fn cache_weight(&self, forward: &Fp8Tensor, backward: &Fp8Tensor) {
        self.lock().weight = Some((forward.shallow_clone(), backward.shallow_clone()));
    }

    /// Copies of the scales, to be put back by [`Fp8Meta::load_state`]: around a capture whose passes are not to count.
    ///
    /// Source: `save_fp8_meta`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn state(&self) -> Result<Fp8State> {
        let state = self.lock();
        let Some(scalings) = &state.scalings else { return Ok(Fp8State { tensors: Vec::new() }) };
        let _pause = RecordingPause::begin();
        let _no_grad = tch::no_grad_guard();
        let mut tensors = Vec::new();
        for (suffix, held) in scalings.all() {
            let held = [&held.scale, &held.scale_inv, &held.amax_history, &held.amax_history_index];
            for (name, tensor) in NAMES.into_iter().zip(held) {
                let mut copy = tensor.f_empty_like()?;
                copy.f_copy_(tensor)?;
                tensors.push((format!("{name}_{suffix}"), copy));
            }
        }
        tensors.push(("run_cnt".to_owned(), Tensor::from_slice(&[state.run_cnt as i64])));
        tensors.push(("update_amax".to_owned(), Tensor::from_slice(&state.has_measured.map(i64::from))));
        Ok(Fp8State { tensors })
    }

    /// Takes a state, in place where the tensors have the same sizes, so that graphs go on.
    ///
    /// Source: `load_fp8_meta`.
    ///
    /// # Errors
    /// [`CheckpointError::Mismatch`] if a tensor is missing, or of another size or dtype.
    pub fn load_state(&self, state: &Fp8State) -> Result<()> {
        let own = &mut *self.lock();
        own.weight = None;
        if state.tensors.is_empty() {
            (own.run_cnt, own.has_measured) = (0, [false; 2]);
            let _pause = RecordingPause::begin();
            let _no_grad = tch::no_grad_guard();
            for (_, tensors) in own.scalings.iter().flat_map(Scalings::all) {
                let Fp8Tensors { scale, scale_inv, amax_history, amax_history_index } = tensors;
                let _ = [scale, scale_inv].map(|scale| scale.shallow_clone().f_fill_(1.0));
                let _ = [amax_history, amax_history_index].map(|tensor| tensor.shallow_clone().f_zero_());
            }
            return Ok(());
        }
        let _pause = RecordingPause::begin();
        let _no_grad = tch::no_grad_guard();
        let named =
            |name: &str| state.tensors.iter().find(|(known, _)| known == name).map(|(_, tensor)| tensor);
        let read = |suffix: &str, slots: usize| read_scaling(&named, suffix, slots);
        let forward =
            read("fwd", self.num_forward)?.ok_or_else(|| mismatch("scale_fwd is missing".to_owned()))?;
        let backward =
            read("bwd", self.num_backward)?.ok_or_else(|| mismatch("scale_bwd is missing".to_owned()))?;
        let loaded = Scalings {
            device: Device::of(&forward.scale)?,
            hybrid: read("hybrid", self.num_forward)?,
            forward,
            backward,
        };
        let numbers = |name: &str, len: usize| -> Result<Vec<i64>> {
            let tensor = named(name).ok_or_else(|| mismatch(format!("{name} is missing")))?;
            Vec::<i64>::try_from(tensor)
                .ok()
                .filter(|numbers| numbers.len() == len)
                .ok_or_else(|| mismatch(format!("{name} has shape {:?}, not [{len}]", tensor.size())))
        };
        let run_cnt = numbers("run_cnt", 1)?[0];
        let measured = numbers("update_amax", 2)?;
        own.run_cnt = run_cnt.max(0) as u64;
        own.has_measured = [measured[0] != 0, measured[1] != 0];
        match &own.scalings {
            Some(known) if have_same_sizes(known, &loaded) => {
                for ((_, known), (_, loaded)) in known.all().zip(loaded.all()) {
                    copy(known, loaded)?;
                }
            }
            _ => own.scalings = Some(loaded),
        }
        Ok(())
    }
}

fn mismatch(what: String) -> Error {
    let problem =
        Problem::new(format!("the fp8 state of a layer: {what}"), "use a checkpoint of this module");
    CheckpointError::Mismatch { module: "Fp8Meta".to_owned(), problem }.into()
}

fn copy(known: &Fp8Tensors, loaded: &Fp8Tensors) -> Result<()> {
    known.scale.shallow_clone().f_copy_(&loaded.scale)?;
    known.scale_inv.shallow_clone().f_copy_(&loaded.scale_inv)?;
    known.amax_history.shallow_clone().f_copy_(&loaded.amax_history)?;
    known.amax_history_index.shallow_clone().f_copy_(&loaded.amax_history_index)?;
    Ok(())
}

fn have_same_sizes(a: &Scalings, b: &Scalings) -> bool {
    a.hybrid.is_some() == b.hybrid.is_some() && a.forward.amax_history.size() == b.forward.amax_history.size()
}

/// The tensors of one pass; none if there are none. Both scales or neither must be there.
fn read_scaling<'a>(
    named: &dyn Fn(&str) -> Option<&'a Tensor>,
    suffix: &str,
    slots: usize,
) -> Result<Option<Fp8Tensors>> {
    let found = NAMES.map(|name| named(&format!("{name}_{suffix}")));
    let [Some(scale), Some(scale_inv), Some(amax_history), Some(index)] = found else {
        if found.iter().all(Option::is_none) {
            return Ok(None);
        }
        let missing = NAMES.iter().zip(found).find(|(_, tensor)| tensor.is_none());
        return Err(mismatch(format!("{}_{suffix} is missing", missing.map_or("", |(name, _)| name))));
    };
    let slots = slots as i64;
    let rows = amax_history.size().first().copied().unwrap_or_default();
    let place = i64::try_from(index).unwrap_or(-1);
    let fits = |tensor: &Tensor, shape: &[i64], kind| tensor.size() == shape && tensor.kind() == kind;
    let are_whole = fits(scale, &[slots], Kind::Float)
        && fits(scale_inv, &[slots], Kind::Float)
        && fits(amax_history, &[rows, slots], Kind::Float)
        && fits(index, &[1], Kind::Int)
        && (0..rows).contains(&place);
    if !are_whole {
        let name = DtypeNames::of_kind(scale.kind()).map_or("?", |names| names.name);
        let what = format!(
            "scale_{suffix} has shape {:?} ({name}), amax_history_{suffix} {:?} with row {place}; {slots} tensors are needed",
            scale.size(),
            amax_history.size()
        );
        return Err(mismatch(what));
    }
    let own = |tensor: &Tensor| -> Result<Tensor> {
        let mut copy = tensor.f_contiguous()?.f_empty_like()?;
        copy.f_copy_(tensor)?;
        Ok(copy)
    };
    Ok(Some(Fp8Tensors {
        scale: own(scale)?,
        scale_inv: own(scale_inv)?,
        amax_history: own(amax_history)?,
        amax_history_index: own(index)?,
    }))
}

impl Forward {
    /// The same for a recomputation of the pass, with the scales as they are now: nothing is measured again.
    pub(crate) fn stashed(&self) -> Result<Self> {
        let frozen = |tensors: &Fp8Tensors| -> Result<Fp8Tensors> {
            let mut copy = tensors.shallow_clone();
            copy.scale = tensors.scale.f_mul_scalar(1.0)?;
            copy.scale_inv = tensors.scale_inv.f_mul_scalar(1.0)?;
            Ok(copy)
        };
        Ok(Self {
            meta: self.meta.clone(),
            recipe: self.recipe.clone(),
            forward: frozen(&self.forward)?,
            hybrid: self.hybrid.as_ref().map(frozen).transpose()?,
            measures: false,
            updates: self.updates,
        })
    }

    /// The same, sharing memory.
    pub(crate) fn shallow_clone(&self) -> Self {
        Self {
            meta: self.meta.clone(),
            recipe: self.recipe.clone(),
            forward: self.forward.shallow_clone(),
            hybrid: self.hybrid.as_ref().map(Fp8Tensors::shallow_clone),
            measures: self.measures,
            updates: self.updates,
        }
    }

    /// Casts tensor number `slot` for both passes.
    pub(crate) fn cast(&self, input: &Tensor, slot: usize) -> Result<(Fp8Tensor, Fp8Tensor)> {
        let format = self.recipe.fp8_format;
        let nearest = |dtype| Fp8Cast { dtype, is_stochastic: false };
        let own = self.forward.cast(input, slot, self.measures, nearest(format.forward_dtype()))?;
        let backward = match &self.hybrid {
            Some(hybrid) => hybrid.cast(input, slot, self.measures, nearest(format.backward_dtype()))?,
            None => own.shallow_clone(),
        };
        Ok((own, backward))
    }

    /// The same for the backward pass alone, with nothing measured.
    pub(crate) fn cast_again(&self, input: &Tensor, slot: usize) -> Result<Fp8Tensor> {
        let dtype = self.recipe.fp8_format.backward_dtype();
        let tensors = self.hybrid.as_ref().unwrap_or(&self.forward);
        Ok(tensors.cast(input, slot, false, Fp8Cast { dtype, is_stochastic: false })?)
    }

    /// Casts gradient number `slot` in the backward pass of this forward pass.
    pub(crate) fn cast_grad(&self, grad: &Tensor, slot: usize) -> Result<Fp8Tensor> {
        let dtype = self.recipe.fp8_format.backward_dtype();
        let state = &mut *self.meta.lock();
        let Some(scalings) = &state.scalings else {
            return Err(of_fns(anyhow::anyhow!("the scales of the forward pass are gone")));
        };
        if slot == 0 {
            if state.has_measured[1] {
                let tensors = &scalings.backward;
                if self.updates { update(tensors, dtype, &self.recipe) } else { next_row(tensors) }?;
            }
            state.has_measured[1] = self.measures;
        }
        let is_stochastic = rounds_stochastically(self.recipe.fp8_format);
        Ok(scalings.backward.cast(grad, slot, self.measures, Fp8Cast { dtype, is_stochastic })?)
    }
}
