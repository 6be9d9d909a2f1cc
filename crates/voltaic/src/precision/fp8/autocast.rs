//! The region in which layers compute in float8.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use tch::Tensor;

use super::meta::{Forward, Fp8Meta};
use super::recipe::{DelayedScaling, Recipe};
use crate::accelerator::HpuEmulator;
use crate::device::Device;
use crate::distributed::{ProcessGroup, ReduceOp};
use crate::error::{DeviceError, Problem, Result};
use crate::ffi::RecordingPause;
use crate::precision::precision::NO_FLOAT8;

/// What holds in a region.
#[derive(Clone)]
struct Region {
    recipe: Arc<Recipe>,
    is_enabled: bool,
    /// In place of the recipe's interval.
    force_measurement: Option<bool>,
    /// The ranks that largest magnitudes are shared with.
    group: Option<Arc<ProcessGroup>>,
    number: u64,
}

thread_local! {
    static REGION: RefCell<Option<Region>> = const { RefCell::new(None) };
    static MANUAL: Cell<Option<bool>> = const { Cell::new(None) };
    /// Layers with `reduce_amax` that have measured since largest magnitudes were shared last, in the order of their first calls.
    static MEASURED: RefCell<Vec<Weak<Fp8Meta>>> = const { RefCell::new(Vec::new()) };
    /// Those of the step before.
    static LAST: RefCell<Vec<Weak<Fp8Meta>>> = const { RefCell::new(Vec::new()) };
    /// No layer was called in the outermost region yet.
    static IS_FRESH: Cell<bool> = const { Cell::new(false) };
}

/// Numbers regions with different settings, so that graphs know theirs.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// A region in which layers of the transformer engine compute in float8, until this is dropped; what held before then holds again. Belongs
/// to its thread.
#[must_use = "the region ends when the guard is dropped"]
pub struct Fp8Autocast {
    before: Option<Region>,
    _of_this_thread: PhantomData<*const ()>,
}

/// Lets [`te::Linear`](crate::nn::te::Linear) and layers that were converted compute in float8 by `recipe`, with its defaults if it is
/// `None`, until the guard is dropped. Backward passes need not be within it. With `enabled` false they compute as other layers.
///
/// ```
/// use voltaic::nn::{Forward, te};
/// use voltaic::precision::fp8::{DelayedScaling, Fp8Format, fp8_autocast};
/// # use voltaic::{Kind, Tensor};
///
/// # fn main() -> anyhow::Result<()> {
/// let fc = te::Linear::new(16, 8)?;
/// # let x = Tensor::ones([4, 16], (Kind::Float, tch::Device::Cpu));
/// let recipe = DelayedScaling { fp8_format: Fp8Format::Hybrid, ..Default::default() };
/// let y = {
///     let _fp8 = fp8_autocast(true, Some(recipe.into()))?;
///     fc.forward(&x)?
/// };
/// y.sum(Kind::Float).backward();
/// # Ok(())
/// # }
/// ```
///
/// Source: `transformer_engine.fp8_autocast`.
///
/// # Errors
/// If the recipe is none ([`Recipe::check`]), or the device is a first-generation Gaudi.
pub fn fp8_autocast(enabled: bool, recipe: Option<Recipe>) -> Result<Fp8Autocast> {
    fp8_autocast_of(enabled, Arc::new(recipe.unwrap_or_default()))
}

/// [`fp8_autocast`] with a recipe that is shared.
pub(crate) fn fp8_autocast_of(enabled: bool, recipe: Arc<Recipe>) -> Result<Fp8Autocast> {
    recipe.check()?;
    if enabled {
        check_generation()?;
    }
    let before = REGION.with_borrow(Clone::clone);
    let number = match &before {
        Some(known) if known.recipe == recipe && known.is_enabled == enabled => known.number,
        _ => number_of(&recipe),
    };
    let group = before.as_ref().and_then(|region| region.group.clone());
    if before.is_none() {
        IS_FRESH.set(true);
    }
    let region = Region { recipe, is_enabled: enabled, force_measurement: None, group, number };
    REGION.set(Some(region));
    Ok(Fp8Autocast { before, _of_this_thread: PhantomData })
}

/// Refuses a first-generation Gaudi.
pub(crate) fn check_generation() -> Result<()> {
    if HpuEmulator::get().is_some_and(|emulator| !emulator.settings().has_float16()) {
        let problem = Problem::new(NO_FLOAT8, "use bf16-mixed, or a Gaudi2");
        return Err(DeviceError::Unavailable { device: "float8".to_owned(), problem }.into());
    }
    Ok(())
}

/// The number of a recipe: regions of the same one have the same.
fn number_of(recipe: &Arc<Recipe>) -> u64 {
    thread_local!(static LAST: RefCell<Option<(Arc<Recipe>, u64)>> = const { RefCell::new(None) });
    LAST.with_borrow_mut(|last| match last {
        Some((known, number)) if known == recipe => *number,
        _ => {
            let number = NEXT_NUMBER.fetch_add(1, Ordering::Relaxed);
            *last = Some((recipe.clone(), number));
            number
        }
    })
}

/// The region of a forward pass, for its recomputation.
#[derive(Clone)]
pub(crate) struct Fp8Region(Option<Region>);

impl Fp8Region {
    /// That of this thread.
    pub(crate) fn now() -> Self {
        Self(REGION.with_borrow(Clone::clone))
    }

    /// Enters it again: no layer is the first one in it.
    pub(crate) fn enter(&self) -> Fp8Autocast {
        Fp8Autocast { before: REGION.replace(self.0.clone()), _of_this_thread: PhantomData }
    }
}

impl Fp8Autocast {
    /// Measures largest magnitudes in all forward passes of the region (`true`) or in none (`false`), in place of the recipe's interval.
    pub fn force_measurement(self, measures: bool) -> Self {
        REGION.with_borrow_mut(|region| {
            region.iter_mut().for_each(|region| region.force_measurement = Some(measures));
        });
        self
    }

    /// Shares largest magnitudes with these ranks, if the recipe has `reduce_amax`.
    ///
    /// # Collective
    /// All of them must call the same layers in the same order.
    pub fn group(self, group: Arc<ProcessGroup>) -> Self {
        REGION.with_borrow_mut(|region| {
            region.iter_mut().for_each(|region| region.group = Some(group.clone()));
        });
        self
    }
}

impl Drop for Fp8Autocast {
    fn drop(&mut self) {
        REGION.set(self.before.take());
    }
}

/// Whether layers of this thread compute in float8.
pub fn is_fp8_enabled() -> bool {
    REGION.with_borrow(|region| region.as_ref().is_some_and(|region| region.is_enabled))
}

/// The recipe of the region that this thread is in, if it computes in float8.
pub fn fp8_recipe() -> Option<Arc<Recipe>> {
    region().map(|region| region.recipe)
}

/// Tells regions apart that have different recipes, or that measure by hand otherwise.
pub(crate) fn fp8_number() -> u64 {
    let by_hand = manual_measurement().map_or(0, |measures| 1 + u64::from(measures));
    3 * region().map_or(0, |region| region.number) + by_hand
}

fn region() -> Option<Region> {
    REGION.with_borrow(|region| region.clone().filter(|region| region.is_enabled))
}

/// With `manual`, passes of this thread measure largest magnitudes if `measures` says so, whatever the recipe's interval; else by the recipe
/// again.
///
/// Source: `FP8GlobalStateManager.set_measurement_mode`.
pub fn set_measurement_mode(manual: bool, measures: bool) {
    MANUAL.set(manual.then_some(measures));
}

/// Whether the passes of this thread measure by hand, and if so whether they do.
fn manual_measurement() -> Option<bool> {
    region().and_then(|region| region.force_measurement).or(MANUAL.get())
}

/// A layer has measured what ranks share.
fn note_measured(meta: &Weak<Fp8Meta>) {
    MEASURED.with_borrow_mut(|measured| {
        if !measured.iter().any(|known| Weak::ptr_eq(known, meta)) {
            measured.push(meta.clone());
        }
    });
}

/// A replayed step has measured, as the layers of the step before it did.
pub(crate) fn note_replayed() {
    MEASURED.with_borrow_mut(|measured| {
        if measured.is_empty() {
            *measured = LAST.with_borrow(Clone::clone);
        }
    });
}

/// The layers of a captured forward pass that have measured what ranks share, in the order of their calls. Replays of it measure, too.
#[derive(Debug, Default)]
pub(crate) struct Measured(Vec<Weak<Fp8Meta>>);

impl Measured {
    /// Those of `pass`.
    pub(crate) fn by<T>(pass: impl FnOnce() -> T) -> (T, Self) {
        let before = MEASURED.take();
        let done = pass();
        let own = Self(MEASURED.replace(before));
        own.note();
        (done, own)
    }

    /// They have measured.
    pub(crate) fn note(&self) {
        self.0.iter().for_each(note_measured);
    }
}

/// The first call in the outermost region shares largest magnitudes, if the region has ranks.
///
/// # Collective
/// As [`reduce_amaxes`].
pub(crate) fn share_amaxes() -> Result<()> {
    if !is_fp8_enabled() || !IS_FRESH.replace(false) {
        return Ok(());
    }
    region().and_then(|region| region.group).map_or(Ok(()), |group| reduce_amaxes(&group))
}

/// A forward pass of a layer begins in a region with a recipe that has scales from earlier steps. The first one in the outermost region
/// shares largest magnitudes.
///
/// # Collective
/// As [`reduce_amaxes`].
pub(crate) fn begin_forward(
    meta: &Arc<Fp8Meta>,
    recipe: &DelayedScaling,
    device: Device,
    with_grad: bool,
) -> Result<Forward> {
    share_amaxes()?;
    let forward = meta.begin_forward(recipe, device, with_grad, manual_measurement())?;
    if forward.measures && recipe.reduce_amax {
        note_measured(&Arc::downgrade(meta));
    }
    Ok(forward)
}

/// After a step, or before the next one: the ranks share the largest magnitudes that were measured, so that all make the same scales of
/// them.
///
/// # Collective
/// All ranks of the group must call it.
///
/// # Errors
/// The group's.
pub(crate) fn reduce_amaxes(group: &ProcessGroup) -> Result<()> {
    let measured = MEASURED.take();
    if measured.is_empty() || group.world_size() == 1 {
        return Ok(());
    }
    let _pause = RecordingPause::begin();
    let _no_grad = tch::no_grad_guard();
    let mut rows = Vec::new();
    for meta in measured.iter().filter_map(Weak::upgrade) {
        rows.extend(meta.last_amaxes()?);
    }
    LAST.set(measured);
    if rows.is_empty() {
        return Ok(());
    }
    let all = Tensor::f_cat(&rows, 0)?;
    group.all_reduce(&all, ReduceOp::Max)?;
    let mut first = 0;
    for row in rows {
        let len = row.numel() as i64;
        row.shallow_clone().f_copy_(&all.f_narrow(0, first, len)?)?;
        first += len;
    }
    Ok(())
}
