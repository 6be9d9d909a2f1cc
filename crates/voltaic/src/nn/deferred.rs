//! Weights without memory until they are needed: their initial values are drawn then, with the generator's state of the time at which
//! they were declared.
//!
//! Functions of [`init`](super::init) note what they did to a tensor. Once the next one is drawn, the memory of the last one is freed,
//! if it is a parameter and nothing else has written to it; the first access fills it again by the same calls.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use super::parameter::{Parameter, Sharding, note_made, take_made};
use crate::error::Result;
use crate::ffi::{self, ReleasableStorage};

/// Smaller tensors keep their memory: what is noted of one takes 5 kB.
const LEAST_BYTES: usize = 1 << 16;
/// libtorch's number of the CPU, where initial values are drawn.
const CPU: (i32, i32) = (0, 0);

thread_local!(static SCOPE: RefCell<Option<Scope>> = const { RefCell::new(None) });

/// Makes a module whose weights have no memory: the values that its layers draw on this thread, until `make` returns, are noted, and drawn
/// when a weight is accessed, bit for bit as without. The generator ends where it would have. While the module is made, one
/// weight at a time has memory.
///
/// With the strategy `zero3` weights then get their values module by module when a fit begins, and each rank keeps its shard:
/// a model that is larger than the memory of the host is never unsharded there (DeepSpeed's `zero.Init`, Lightning's
/// `init_module(empty_init=True)`). With others they are unsharded from then on.
///
/// Weights that were changed by other means than this module's functions, smaller than 64 KiB, or brought into another
/// layout, keep their memory. Build the trainer first, or call [`ffi::install_host_pool`]: the heap of libtorch's own allocator falls to pieces
/// by weights that are made and freed in turn, and grows as if they stayed. Do not hold tensors of weights across calls of these functions in `make`; hold the parameters.
///
/// ```
/// use voltaic::nn::{Linear, init};
///
/// # fn main() -> voltaic::Result<()> {
/// voltaic::ffi::manual_seed(1)?;
/// let layers = init::deferred(|| [Linear::new(512, 512), Linear::new(512, 512)]);
/// voltaic::ffi::manual_seed(1)?;
/// let plain = [Linear::new(512, 512)?, Linear::new(512, 512)?];
/// for (layer, plain) in layers.into_iter().zip(&plain) {
///     let weight = layer?.weight;
///     assert!(weight.is_sharded());
///     assert!(weight.equal(&plain.weight) && !weight.is_sharded());
/// }
/// # Ok(())
/// # }
/// ```
pub fn deferred<R>(make: impl FnOnce() -> R) -> R {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            if let Some(mut scope) = SCOPE.take() {
                scope.free_others(None);
            }
            note_made(false);
        }
    }
    if SCOPE.with_borrow(Option::is_some) {
        return make();
    }
    SCOPE.set(Some(Scope::default()));
    note_made(true);
    let _end = End;
    make()
}

/// What is known while a module is made.
#[derive(Default)]
struct Scope {
    /// By memory.
    values: HashMap<usize, Arc<Deferred>>,
    /// Parameters whose memory may be freed, with it.
    parameters: Vec<(usize, Parameter)>,
}

/// Keeps a weight that has no memory, or had none.
#[derive(Debug)]
struct Deferred(Mutex<Values>);

/// How a tensor got its values.
struct Values {
    tensor: Tensor,
    storage: ReleasableStorage,
    steps: Vec<Step>,
    /// How often the tensor had been written to after the last of them.
    version: i64,
}

/// Writes values to a tensor.
type Change = dyn Fn(&Tensor) -> Result<()> + Send + Sync;

struct Step {
    /// Of the generator, before.
    rng: Tensor,
    change: Arc<Change>,
}

impl fmt::Debug for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Values").field("num_steps", &self.steps.len()).finish_non_exhaustive()
    }
}

impl Sharding for Deferred {
    fn unshard(&self, parameter: &Parameter) -> Result<()> {
        self.lock().restore()?;
        parameter.set_sharded(false)
    }

    fn reshard(&self, _parameter: &Parameter, _is_changed: bool) -> Result<()> {
        Ok(())
    }

    fn is_provisional(&self) -> bool {
        true
    }
}

impl Deferred {
    fn lock(&self) -> MutexGuard<'_, Values> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Values {
    /// Gives the tensor its memory and values, if it has none.
    fn restore(&mut self) -> Result<()> {
        if !self.storage.restore()? {
            return Ok(());
        }
        let now = ffi::rng_state(CPU.0, CPU.1)?;
        let mut drawn = self.steps.iter().try_for_each(|step| {
            ffi::set_rng_state(CPU.0, CPU.1, &step.rng)?;
            (step.change)(&self.tensor)
        });
        drawn = drawn.and(ffi::set_rng_state(CPU.0, CPU.1, &now).map_err(Into::into));
        if drawn.is_err() {
            self.storage.release()?;
        }
        self.version = self.tensor.f_internal_version()?;
        drawn
    }

    /// Whether its values are those of the steps.
    fn is_current(&self) -> Result<bool> {
        Ok(self.storage.is_released() || self.tensor.f_internal_version()? == self.version)
    }
}

/// Changes the values of a tensor; all of them, whatever they are, with `replaces`. Within [`deferred`] it is noted how.
pub(super) fn change(
    tensor: &Tensor,
    replaces: bool,
    change: impl Fn(&Tensor) -> Result<()> + Send + Sync + 'static,
) -> Result<()> {
    if !SCOPE.with_borrow(Option::is_some) {
        return change(tensor);
    }
    let (id, bytes) = ffi::describe_storage(tensor)?;
    let known = SCOPE.with_borrow(|scope| scope.as_ref()?.values.get(&id).cloned());
    let values = match known {
        Some(values) => values,
        None => {
            let is_whole = bytes == tensor.numel() * tensor.kind().elt_size_in_bytes();
            if !replaces || !is_whole || bytes < LEAST_BYTES || tensor.device() != tch::Device::Cpu {
                return change(tensor);
            }
            let tensor = tensor.f_detach()?;
            let (storage, steps) = (ReleasableStorage::of(&tensor), Vec::new());
            let values = Arc::new(Deferred(Mutex::new(Values { tensor, storage, steps, version: 0 })));
            SCOPE.with_borrow_mut(|scope| {
                scope.iter_mut().for_each(|scope| drop(scope.values.insert(id, values.clone())));
            });
            values
        }
    };
    let mut locked = values.lock();
    let is_whole = tensor.numel() == locked.tensor.numel();
    if !(is_whole && replaces) {
        locked.restore()?;
    }
    locked.storage.restore()?;
    if is_whole && (replaces || locked.is_current()?) {
        if replaces {
            locked.steps.clear();
            locked.tensor = tensor.f_detach()?;
        }
        let rng = ffi::rng_state(CPU.0, CPU.1)?;
        change(tensor)?;
        locked.steps.push(Step { rng, change: Arc::new(change) });
        locked.version = tensor.f_internal_version()?;
    } else {
        change(tensor)?; // its memory stays from now on
    }
    drop(locked);
    SCOPE.with_borrow_mut(|scope| scope.iter_mut().try_for_each(|scope| scope.drawn(id)))
}

impl Scope {
    /// The values in this memory are the newest; the others' may go.
    fn drawn(&mut self, id: usize) -> Result<()> {
        for parameter in take_made() {
            self.parameters.push((ffi::describe_storage(parameter.leaf())?.0, parameter));
        }
        let own = self.parameters.iter().filter(|(other, parameter)| *other == id && parameter.is_sharded());
        own.into_iter().try_for_each(|(_, parameter)| parameter.set_sharded(false))?;
        self.free_others(Some(id));
        Ok(())
    }

    fn free_others(&mut self, id: Option<usize>) {
        for (other, parameter) in self.parameters.iter().filter(|(other, _)| Some(*other) != id) {
            let Some(values) = self.values.get(other).filter(|_| !parameter.is_sharded()) else { continue };
            // what cannot be freed stays
            if let Err(error) = free(values, parameter) {
                tracing::debug!("a weight keeps its memory: {error}");
            }
        }
    }
}

fn free(values: &Arc<Deferred>, parameter: &Parameter) -> Result<()> {
    let mut locked = values.lock();
    if locked.steps.is_empty() || !locked.is_current()? {
        return Ok(());
    }
    if !parameter.is_kept() {
        parameter.attach_sharding(values.clone())?;
    }
    locked.storage.release()?;
    parameter.set_sharded(true)
}
