//! Parameters: handles to the trained tensors of a module.

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::{Kind, Tensor};

use super::parallel::shard::TensorShard;
use super::unshard::note_failure;
use crate::error::{ConfigError, Result};
use crate::ffi;

/// Keeps weights sharded over ranks, or elsewhere, and unshards them; a strategy implements it.
///
/// A strategy attaches it with [`Parameter::attach_sharding`], frees a weight's memory, and reports that with
/// [`Parameter::set_sharded`]. From then on each use of the weight calls [`Sharding::unshard`].
pub trait Sharding: fmt::Debug + Send + Sync {
    /// Unshards the weight, in the memory of [`Parameter::leaf`], and reports that with [`Parameter::set_sharded`]. It stays until
    /// the strategy reshards it, mostly at the end of the step.
    ///
    /// # Collective
    /// If weights are sharded over ranks: all ranks must access the same weights in the same order.
    ///
    /// # Errors
    /// Why the weight cannot be unsharded.
    fn unshard(&self, parameter: &Parameter) -> Result<()>;

    /// As [`Sharding::unshard`], but [`Sharding::reshard`] follows when the weight is not needed any more.
    ///
    /// # Errors
    /// Why the weight cannot be unsharded.
    fn unshard_for_use(&self, parameter: &Parameter) -> Result<()> {
        if parameter.is_sharded() { self.unshard(parameter) } else { Ok(()) }
    }

    /// A weight that is unsharded is accessed.
    ///
    /// # Errors
    /// Why it cannot stay unsharded.
    fn keep_unsharded(&self, _parameter: &Parameter) -> Result<()> {
        Ok(())
    }

    /// Ends [`Sharding::unshard_for_use`]: [`Parameter::with_unsharded`] and [`Parameter::update`] call it when they do not need the whole weight
    /// any more. With `is_changed` it was written to, and its present values must be kept.
    ///
    /// # Errors
    /// Why it cannot be kept.
    fn reshard(&self, parameter: &Parameter, is_changed: bool) -> Result<()>;

    /// Whether the weight is kept only until it is moved, cast or attached to a strategy: it gets its values first then, and is detached.
    fn is_provisional(&self) -> bool {
        false
    }
}

thread_local!(static MADE: RefCell<Option<Vec<Parameter>>> = const { RefCell::new(None) });

/// Whether to note the parameters that this thread makes, for [`take_made`].
pub(super) fn note_made(notes: bool) {
    MADE.set(notes.then(Vec::new));
}

/// Parameters that this thread has made since this was last called.
pub(super) fn take_made() -> Vec<Parameter> {
    MADE.with_borrow_mut(|made| made.as_mut().map(std::mem::take).unwrap_or_default())
}

/// A trainable tensor of a module.
///
/// A handle: clones and tied weights share one libtorch tensor, and moving it to another device or dtype keeps its
/// identity, so that optimizers that hold it keep working. Layers reach their weights only through this type.
///
/// A strategy may keep a weight sharded over several ranks, or on the host, while it is not used: the parameter is *sharded*
/// then. Its size, dtype, name and gradient are there; it is unsharded when its values are accessed, by
/// [`Parameter::tensor`] or by using the parameter as the tensor that it derefs to. Views of the values and detached
/// tensors are then good until the end of the step only: copy what must last.
pub struct Parameter {
    tensor: Tensor,
    shared: Arc<Shared>,
    /// Stands for the values of a weight that could not be unsharded; made when it is needed.
    missing: OnceCell<Tensor>,
}

/// What all handles have in common.
struct Shared {
    id: u64,
    /// [`KEPT`] and [`SHARDED`]; 0 for a weight that is simply there.
    flags: AtomicU8,
    state: Mutex<State>,
}

/// A strategy keeps the values.
const KEPT: u8 = 1;
/// The values are not in memory.
const SHARDED: u8 = 2;

#[derive(Default)]
struct State {
    fqn: Option<Arc<str>>,
    /// The attached [`Sharding`], and shape and dtype of the whole weight.
    sharding: Option<(Arc<dyn Sharding>, Logical)>,
    /// Of a weight of which this rank has a slice.
    shard: Option<Arc<TensorShard>>,
    grad_share: GradShare,
}

/// What this rank has in [`Parameter::grad`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum GradShare {
    /// The gradient.
    #[default]
    All,
    /// A shard of it, which an optimizer updates a shard of the weight with.
    Shard,
    /// Nothing, once it has been reduced: ranks have shards of it elsewhere.
    Nothing,
}

/// What a weight is as a whole, wherever its values are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Logical {
    /// Its size.
    pub shape: Vec<i64>,
    /// Its dtype.
    pub dtype: Kind,
}

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

impl Shared {
    fn has(&self, flag: u8) -> bool {
        self.flags.load(Ordering::Acquire) & flag != 0
    }

    fn set(&self, flag: u8, is_set: bool) {
        match is_set {
            true => self.flags.fetch_or(flag, Ordering::Release),
            false => self.flags.fetch_and(!flag, Ordering::Release),
        };
    }
}

impl Parameter {
    /// A parameter with the values of `tensor`, detached from any graph, requiring grad.
    pub fn new(tensor: Tensor) -> Self {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let shared = Shared { id, flags: AtomicU8::new(0), state: Mutex::default() };
        let tensor = tensor.detach().set_requires_grad(true);
        let made = Self { tensor, shared: Arc::new(shared), missing: OnceCell::new() };
        MADE.with_borrow_mut(|all| all.iter_mut().for_each(|all| all.push(made.clone())));
        made
    }

    /// Tells parameters apart within this process: clones of a handle (tied weights) have the same id.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// The weights. Shares storage and gradient with every clone of this handle.
    ///
    /// Unshards them if they are sharded. If that fails this is an undefined tensor, which operators refuse, and
    /// [`take_unshard_failure`](super::take_unshard_failure) has the reason; [`Parameter::try_tensor`] returns it.
    pub fn tensor(&self) -> &Tensor {
        if self.shared.flags.load(Ordering::Acquire) == 0 { &self.tensor } else { self.fetched() }
    }

    /// The weights, unsharded if they are sharded.
    ///
    /// # Errors
    /// Why they cannot be unsharded.
    pub fn try_tensor(&self) -> Result<&Tensor> {
        if self.shared.flags.load(Ordering::Acquire) != 0 {
            self.fetch()?;
        }
        Ok(&self.tensor)
    }

    /// Unshards those of a layer's parameters that are sharded; called at the start of its forward.
    ///
    /// # Errors
    /// Why one cannot be unsharded. An undefined tensor would not do in place of a bias: libtorch takes it for no bias at
    /// all.
    pub(crate) fn unshard_all<const N: usize>(parameters: [Option<&Self>; N]) -> Result<()> {
        parameters.into_iter().flatten().try_for_each(|parameter| parameter.try_tensor().map(drop))
    }

    #[cold]
    fn fetched(&self) -> &Tensor {
        match self.fetch() {
            Ok(()) => &self.tensor,
            Err(error) => {
                note_failure(error);
                self.missing.get_or_init(Tensor::new)
            }
        }
    }

    fn fetch(&self) -> Result<()> {
        if ffi::is_recording() {
            let name = self.fqn().unwrap_or_else(|| Arc::from("a parameter"));
            ffi::refuse_recording(&format!(
                "{name} is used, which the strategy shards: a replay would not unshard it; run without graphs, or with a strategy that does not shard weights"
            ));
        }
        if !self.is_sharded() {
            return self.sharding().map_or(Ok(()), |sharding| sharding.keep_unsharded(self));
        }
        let Some(sharding) = self.sharding() else {
            return Err(self.lost("it is sharded, and no strategy keeps it"));
        };
        sharding.unshard(self)?;
        if self.is_sharded() { Err(self.lost("its strategy has not unsharded it")) } else { Ok(()) }
    }

    fn lost(&self, what: &str) -> crate::error::Error {
        let name = self.fqn().unwrap_or_else(|| Arc::from("a parameter"));
        ConfigError::new("trainer.strategy", format!("{name}: {what}"), "give the weights back first").into()
    }

    /// The leaf of autograd that stands for this parameter: what gradients, hooks and optimizers are bound to. Its values
    /// must not be read: it may be sharded.
    pub fn leaf(&self) -> &Tensor {
        &self.tensor
    }

    /// Whether the values are not in memory: they are sharded, on the host, or not drawn yet. Not about shards of tensor
    /// parallelism ([`Parameter::tensor_shard`]).
    pub fn is_sharded(&self) -> bool {
        self.shared.has(SHARDED)
    }

    /// Whether a strategy keeps the values, so that the parameter may be sharded at another time.
    pub fn is_kept(&self) -> bool {
        self.shared.has(KEPT)
    }

    /// Runs `body` with the whole weight. If a strategy keeps the values, it may free them afterwards: copy what must last.
    ///
    /// # Errors
    /// Why the weight cannot be unsharded; those of `body`.
    pub fn with_unsharded<T>(&self, body: impl FnOnce(&Tensor) -> Result<T>) -> Result<T> {
        self.use_unsharded(false, body)
    }

    /// Runs `body` without autograd. It may write to the weight, and what it has written is kept wherever a strategy keeps the values.
    ///
    /// # Errors
    /// As [`Parameter::with_unsharded`].
    pub fn update<T>(&self, body: impl FnOnce(&Tensor) -> Result<T>) -> Result<T> {
        let _no_grad = tch::no_grad_guard();
        self.use_unsharded(true, body)
    }

    fn use_unsharded<T>(&self, is_changed: bool, body: impl FnOnce(&Tensor) -> Result<T>) -> Result<T> {
        let Some(sharding) = self.sharding() else { return body(self.try_tensor()?) };
        sharding.unshard_for_use(self)?;
        let done = body(self.try_tensor()?);
        let resharded = sharding.reshard(self, is_changed);
        done.and_then(|value| resharded.map(|()| value))
    }

    /// A copy of the whole weight if a strategy keeps it or ranks have slices of it, which lasts; else the weight itself.
    ///
    /// # Errors
    /// Why it cannot be unsharded.
    ///
    /// # Collective
    /// If ranks have slices of the weight: all of them.
    pub fn lasting(&self) -> Result<Tensor> {
        let own = self.lasting_own()?;
        self.tensor_shard().map_or(Ok(own.shallow_clone()), |shard| shard.whole(&own))
    }

    /// The same of what this rank has.
    pub(crate) fn lasting_own(&self) -> Result<Tensor> {
        if self.sharding().is_none_or(|sharding| sharding.is_provisional()) {
            return Ok(self.try_tensor()?.f_detach()?);
        }
        let _no_grad = tch::no_grad_guard();
        self.with_unsharded(|tensor| {
            let mut copy = tensor.f_empty_like()?;
            copy.f_copy_(tensor)?;
            Ok(copy)
        })
    }

    /// Which slice of the weight this rank has, if tensor parallelism divides it. All other functions are about this slice, which is a
    /// parameter of its own; state dicts have the whole weight.
    pub fn tensor_shard(&self) -> Option<Arc<TensorShard>> {
        self.state().shard.clone()
    }

    /// Replaces the whole weight by this rank's slice.
    pub(super) fn set_shard(&self, local: &Tensor, shard: Arc<TensorShard>) -> Result<()> {
        self.set_data(local)?;
        self.note_shard(shard);
        Ok(())
    }

    /// Says of which slice the values are.
    pub(super) fn note_shard(&self, shard: Arc<TensorShard>) {
        self.state().shard = Some(shard);
    }

    /// Replaces this rank's slice by the whole weight.
    pub(super) fn end_shard(&self, whole: &Tensor) -> Result<()> {
        self.set_data(whole)?;
        self.state().shard = None;
        Ok(())
    }

    /// The shape that the weight has in a state dict.
    pub fn full_size(&self) -> Vec<i64> {
        self.tensor_shard().map_or_else(|| self.size(), |shard| shard.shape().to_vec())
    }

    /// Lets a strategy keep the values from now on. The whole values must be in memory.
    ///
    /// # Errors
    /// [`ConfigError`] if another one keeps them.
    pub fn attach_sharding(&self, sharding: Arc<dyn Sharding>) -> Result<()> {
        self.end_provisional()?;
        let mut state = self.state();
        if state.sharding.is_some() {
            drop(state);
            return Err(self.lost("another strategy keeps it"));
        }
        let logical = Logical { shape: self.tensor.size(), dtype: self.tensor.kind() };
        state.sharding = Some((sharding, logical));
        self.shared.set(KEPT, true);
        Ok(())
    }

    /// Ends what [`Parameter::attach_sharding`] began.
    ///
    /// # Errors
    /// [`ConfigError`] if the parameter is sharded.
    pub fn detach_sharding(&self) -> Result<()> {
        if self.is_sharded() {
            return Err(self.lost("it is sharded"));
        }
        self.state().sharding = None;
        self.shared.set(KEPT, false);
        Ok(())
    }

    /// Called by the strategy that keeps the values, after it has freed their memory, and after it has filled it again.
    ///
    /// # Errors
    /// libtorch's.
    pub fn set_sharded(&self, is_sharded: bool) -> Result<()> {
        if is_sharded {
            ffi::clear_autocast_cache()?; // it may hold this weight in another dtype
        }
        self.shared.set(SHARDED, is_sharded);
        Ok(())
    }

    /// The name in the module that the last run trained, such as `conv1.weight`: its first name if it has several.
    /// `None` before a run.
    pub fn fqn(&self) -> Option<Arc<str>> {
        self.state().fqn.clone()
    }

    pub(super) fn set_fqn(&self, fqn: &str) {
        self.state().fqn = Some(Arc::from(fqn));
    }

    /// Size of the whole weight.
    pub fn size(&self) -> Vec<i64> {
        self.logical().map_or_else(|| self.tensor.size(), |logical| logical.shape)
    }

    /// Number of dimensions of the whole weight.
    pub fn dim(&self) -> usize {
        self.logical().map_or_else(|| self.tensor.dim(), |logical| logical.shape.len())
    }

    /// Number of elements of the whole weight.
    pub fn numel(&self) -> usize {
        self.logical().map_or_else(|| self.tensor.numel(), |it| it.shape.iter().product::<i64>() as usize)
    }

    /// Dtype of the weight.
    pub fn kind(&self) -> Kind {
        self.logical().map_or_else(|| self.tensor.kind(), |logical| logical.dtype)
    }

    /// Device of the weight.
    pub fn device(&self) -> tch::Device {
        self.tensor.device()
    }

    /// Whether it is trained.
    pub fn requires_grad(&self) -> bool {
        self.tensor.requires_grad()
    }

    /// Sets whether it is trained. Returns the leaf.
    pub fn set_requires_grad(&self, requires_grad: bool) -> Tensor {
        self.tensor.set_requires_grad(requires_grad)
    }

    /// The gradient; undefined if there is none.
    pub fn grad(&self) -> Tensor {
        self.tensor.grad()
    }

    /// What this rank has of the gradient after a backward pass.
    pub(crate) fn grad_share(&self) -> GradShare {
        self.state().grad_share
    }

    /// Said by a strategy that shards gradients.
    pub(crate) fn set_grad_share(&self, share: GradShare) {
        self.state().grad_share = share;
    }

    /// Replaces device, dtype or values, keeping the handle's identity. A gradient of the old kind is dropped.
    ///
    /// # Errors
    /// [`ConfigError`] if a strategy keeps the values; if libtorch cannot swap the data (an incompatible kind of tensor).
    pub fn set_data(&self, data: &Tensor) -> Result<()> {
        self.refuse_if_kept()?;
        ffi::clear_grads([&self.tensor])?;
        self.tensor.shallow_clone().f_set_data(data)?;
        Ok(())
    }

    /// An error if a strategy keeps the values, so that they cannot be moved or cast.
    pub(super) fn refuse_if_kept(&self) -> Result<()> {
        self.end_provisional()?;
        if !self.is_kept() {
            return Ok(());
        }
        Err(self.lost("its strategy keeps the values, which cannot be moved or cast meanwhile"))
    }

    /// Gives a weight with a provisional [`Sharding`] its values, and detaches that.
    pub(crate) fn end_provisional(&self) -> Result<()> {
        if !self.is_provisional() {
            return Ok(());
        }
        self.fetch()?;
        self.detach_sharding()
    }

    /// Whether its initial values are drawn when they are needed: see [`init::deferred`](crate::nn::init::deferred).
    pub(crate) fn is_provisional(&self) -> bool {
        self.sharding().is_some_and(|sharding| sharding.is_provisional())
    }

    /// The number of handles.
    pub(crate) fn num_handles(&self) -> usize {
        Arc::strong_count(&self.shared)
    }

    /// Detaches a provisional [`Sharding`] without the values; the caller must replace them by [`Parameter::set_data`] at
    /// once. Returns whether there was one.
    pub(crate) fn drop_provisional(&self) -> Result<bool> {
        if !self.is_provisional() {
            return Ok(false);
        }
        self.set_sharded(false)?;
        self.detach_sharding()?;
        Ok(true)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sharding(&self) -> Option<Arc<dyn Sharding>> {
        self.state().sharding.as_ref().map(|(sharding, _)| sharding.clone())
    }

    /// Of a weight that is sharded.
    fn logical(&self) -> Option<Logical> {
        if !self.is_sharded() {
            return None;
        }
        self.state().sharding.as_ref().map(|(_, logical)| logical.clone())
    }
}

impl Clone for Parameter {
    /// Another handle to the same tensor (a tied weight), not a copy of the values.
    fn clone(&self) -> Self {
        let tensor = self.tensor.shallow_clone();
        Self { tensor, shared: self.shared.clone(), missing: OnceCell::new() }
    }
}

impl fmt::Debug for Parameter {
    /// Without the values, which may be sharded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("Parameter");
        if let Some(fqn) = self.fqn() {
            text.field("fqn", &fqn);
        }
        text.field("size", &self.size()).field("kind", &self.kind()).field("device", &self.device());
        text.field("requires_grad", &self.requires_grad()).finish()
    }
}

impl Deref for Parameter {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        self.tensor()
    }
}
