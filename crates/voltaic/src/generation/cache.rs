//! Keys and values of the tokens that a model has seen.

use std::cell::{Cell, RefCell};

use tch::{Kind, Tensor};

use crate::accelerator::HpuEmulator;
use crate::device::Device;
use crate::dtype::bytes_of;
use crate::error::{ModuleError, Problem, Result};
use crate::ffi::{self, CachedStates};
use crate::nn::KvCacheLayer;
use crate::nn::functional::scaled_dot_product_attention;

/// Keys and values of the tokens seen so far, in memory that is allocated once for `capacity` tokens of each sequence.
///
/// Sequences of different lengths end together: the shorter ones begin with padding, which nothing attends to.
///
/// A model gives its layers' queries, keys and values to [`KvCache::attend`] and looks its position embeddings up by
/// [`KvCache::positions`]; [`Generator`](super::Generator) does the rest.
pub struct KvCache {
    /// Tokens of padding that each sequence begins with.
    padding: Vec<i64>,
    capacity: i64,
    len: Cell<i64>,
    layers: RefCell<Vec<[Tensor; 2]>>,
    step: RefCell<Option<Step>>,
    /// Steps of one token have the same shapes and the same tensors each time, so that a graph can be replayed.
    is_static: Cell<bool>,
}

/// The tokens of the pass in progress.
struct Step {
    start: i64,
    time: i64,
    /// Slots of the tokens, int64 `[time]`.
    slots: Tensor,
    /// int64 `[batch, time]`
    positions: Tensor,
    /// bool `[batch, 1, time, keys]`; none if the tokens see all up to themselves.
    mask: Option<Tensor>,
    /// A kernel writes the token to the caches, and reads the part of them that is filled.
    by_kernel: bool,
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvCache({} of {} tokens, {} sequences)", self.len.get(), self.capacity, self.padding.len())
    }
}

impl KvCache {
    /// A cache of `capacity` tokens for each sequence, padding included; `padding` is how much of it each begins with.
    pub(super) fn new(padding: Vec<i64>, capacity: i64) -> Self {
        Self {
            padding,
            capacity,
            len: Cell::new(0),
            layers: RefCell::default(),
            step: RefCell::default(),
            is_static: Cell::new(false),
        }
    }

    /// Tokens of each sequence that are there, padding included.
    pub fn len(&self) -> i64 {
        self.len.get()
    }

    /// Whether no token was seen yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of each sequence that there is room for, padding included.
    pub fn capacity(&self) -> i64 {
        self.capacity
    }

    /// Number of sequences.
    pub fn batch(&self) -> i64 {
        self.padding.len() as i64
    }

    /// Begins a pass over the next `time` tokens, on this device. A static step writes into the tensors of the one before.
    pub(super) fn begin(&self, time: i64, device: tch::Device) -> Result<()> {
        let (start, end) = (self.len(), self.len() + time);
        if end > self.capacity {
            return Err(wrong(
                format!("{end} tokens in a cache of {}", self.capacity),
                "start a new cache with the last tokens",
            ));
        }
        let is_static = self.is_static.get();
        let keys = if is_static { self.capacity } else { end };
        let slots = Tensor::f_arange_start(start, end, (Kind::Int64, tch::Device::Cpu))?;
        let places =
            self.padding.iter().flat_map(|padding| (start..end).map(move |slot| (slot - padding).max(0)));
        let positions = Tensor::f_from_slice(&places.collect::<Vec<_>>())?.f_view([-1, time])?;
        let is_padded = self.padding.iter().any(|&padding| padding > 0);
        let by_kernel = time == 1 && self.attends_by_kernel()?;
        let mask = if !by_kernel && (is_padded || is_static || (start > 0 && time > 1)) {
            let padding = Tensor::f_from_slice(&self.padding)?;
            let key = Tensor::f_arange(keys, (Kind::Int64, tch::Device::Cpu))?.f_view([1, 1, keys])?;
            let query = slots.f_view([1, time, 1])?;
            let is_seen =
                key.f_le_tensor(&query)?.f_logical_and(&key.f_ge_tensor(&padding.f_view([-1, 1, 1])?)?)?;
            // padding sees itself, since what sees nothing is not a number
            Some(is_seen.f_logical_or(&key.f_eq_tensor(&query)?)?.f_unsqueeze(1)?)
        } else {
            None
        };
        let mut step = self.step.borrow_mut();
        match step.as_mut().filter(|step| is_static && step.time == time) {
            Some(step) => {
                step.start = start;
                step.slots.f_copy_(&slots)?;
                step.positions.f_copy_(&positions)?;
                if let (Some(old), Some(new)) = (&mut step.mask, &mask) {
                    old.f_copy_(new)?;
                }
            }
            None => {
                let mask = mask.map(|mask| mask.f_to_device(device)).transpose()?;
                let (slots, positions) = (slots.f_to_device(device)?, positions.f_to_device(device)?);
                *step = Some(Step { start, time, slots, positions, mask, by_kernel });
            }
        }
        Ok(())
    }

    /// Whether a kernel attends from one token to what the layers have cached so far.
    fn attends_by_kernel(&self) -> Result<bool> {
        let layers = self.layers.borrow();
        let Some([first, _]) = layers.first().filter(|_| ffi::has_attention_kernel()) else {
            return Ok(false);
        };
        let is_host = match Device::of(first)? {
            Device::Cpu => true,
            Device::Hpu(_) => HpuEmulator::get().is_some(),
            Device::Cuda(_) => false,
        };
        let is_known = |tensor: &Tensor| matches!(tensor.kind(), Kind::Float | Kind::BFloat16 | Kind::Uint8);
        Ok(is_host && layers.iter().flatten().all(is_known))
    }

    /// Ends the pass: its tokens are seen.
    pub(super) fn end(&self) {
        let time = self.step.borrow().as_ref().map_or(0, |step| step.time);
        self.len.set(self.len() + time);
    }

    /// From the next pass on, all have the same shapes and tensors.
    pub(super) fn make_static(&self) {
        self.is_static.set(true);
        *self.step.borrow_mut() = None;
    }

    /// Places of the tokens of this pass in their sequences, from 0, int64 `[batch, time]`; those of padding are 0.
    ///
    /// # Errors
    /// [`ModuleError::Input`] outside of a pass.
    pub fn positions(&self) -> Result<Tensor> {
        let step = self.step.borrow();
        Ok(step.as_ref().ok_or_else(no_pass)?.positions.shallow_clone())
    }

    /// Keeps the keys and values of this pass for a layer, and attends: each query sees the keys of its own sequence up to its own.
    /// `query`, `key` and `value` are `[batch, heads, time, head_dim]`; layers are numbered from 0 in the order of the model.
    ///
    /// # Errors
    /// [`ModuleError::Input`] outside of a pass, or if the shapes are not those of the layer; libtorch's.
    pub fn attend(&self, layer: usize, query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Tensor> {
        self.attend_as(layer, None, [query, key, value])
    }

    /// [`KvCache::attend`] with keys and values that these two modules of the layer quantize, once they are converted: the cache keeps one
    /// byte for each number, and attention sees the numbers of these bytes.
    ///
    /// # Errors
    /// As [`KvCache::attend`]; as [`KvCacheLayer::quantize`].
    pub fn attend_by(
        &self,
        layer: usize,
        k_and_v_cache: [&KvCacheLayer; 2],
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
    ) -> Result<Tensor> {
        self.attend_as(layer, Some(k_and_v_cache), [query, key, value])
    }

    fn attend_as(
        &self,
        layer: usize,
        by: Option<[&KvCacheLayer; 2]>,
        [query, key, value]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let step = self.step.borrow();
        let step = step.as_ref().ok_or_else(no_pass)?;
        let shape = key.size();
        let fits = |tensor: &Tensor| matches!(tensor.size()[..], [b, _, t, _] if b == self.batch() && t == step.time);
        if ![query, key, value].into_iter().all(fits) || value.size()[1] != shape[1] {
            let what = format!("queries {:?}, keys {shape:?}, values {:?}", query.size(), value.size());
            let remedy = format!("give [{}, heads, {}, head_dim] each", self.batch(), step.time);
            return Err(wrong(what, remedy));
        }
        let kinds = [key.kind(), value.kind()];
        let [key, value] = match by {
            None => [key, value].map(Tensor::shallow_clone),
            Some([k_cache, v_cache]) => [k_cache.quantize(key)?, v_cache.quantize(value)?],
        };
        let mut layers = self.layers.borrow_mut();
        if layer > layers.len() {
            return Err(wrong(
                format!("layer {layer} after {}", layers.len()),
                "number layers from 0, in order",
            ));
        }
        if layer == layers.len() {
            let empty = |like: &Tensor| {
                let [batch, heads, _, dim] = like.size()[..] else { return Err(no_pass()) };
                Ok(Tensor::f_zeros([batch, heads, self.capacity, dim], (like.f_kind()?, like.device()))?)
            };
            layers.push([empty(&key)?, empty(&value)?]);
        }
        let [keys, values] = &mut layers[layer];
        if step.by_kernel {
            return attend_cached([query, &key, &value], [keys, values], by, step);
        }
        let is_static = self.is_static.get();
        let (keys, values) = if is_static {
            let _ = keys.f_index_copy_(2, &step.slots, &key)?;
            let _ = values.f_index_copy_(2, &step.slots, &value)?;
            (keys.shallow_clone(), values.shallow_clone())
        } else {
            keys.f_narrow(2, step.start, step.time)?.f_copy_(&key)?;
            values.f_narrow(2, step.start, step.time)?.f_copy_(&value)?;
            let end = step.start + step.time;
            (keys.f_narrow(2, 0, end)?, values.f_narrow(2, 0, end)?)
        };
        let (keys, values) = match by {
            None => (keys, values),
            Some([k_cache, v_cache]) => {
                (k_cache.dequantize(&keys, kinds[0])?, v_cache.dequantize(&values, kinds[1])?)
            }
        };
        let is_causal = step.mask.is_none() && step.time > 1;
        scaled_dot_product_attention(query, &keys, &values, step.mask.as_ref(), 0.0, is_causal)
    }

    /// Bytes that the keys and values of all layers take.
    pub fn num_bytes(&self) -> usize {
        self.layers.borrow().iter().flatten().map(bytes_of).sum()
    }

    /// The last token of each sequence in what a pass gave, `[batch, time, *]` to `[batch, *]`.
    ///
    /// # Errors
    /// libtorch's.
    pub fn last(&self, output: &Tensor) -> Result<Tensor> {
        Ok(output.f_select(1, -1)?)
    }
}

/// Attends by the kernel, from one token of each sequence.
fn attend_cached(
    [query, key, value]: [&Tensor; 3],
    [keys, values]: [&Tensor; 2],
    by: Option<[&KvCacheLayer; 2]>,
    step: &Step,
) -> Result<Tensor> {
    let formats = match by {
        None => [None, None],
        Some([k_cache, v_cache]) => [k_cache.format(keys)?, v_cache.format(values)?],
    };
    let as_numbers = |tensor: &Tensor, format: &Option<(Kind, Tensor)>| match format {
        Some((kind, _)) => tensor.f_view_dtype(*kind),
        None => Ok(tensor.shallow_clone()),
    };
    let [of_keys, of_values] = &formats;
    let [key, keys] = [as_numbers(key, of_keys)?, as_numbers(keys, of_keys)?];
    let [value, values] = [as_numbers(value, of_values)?, as_numbers(values, of_values)?];
    let states = [(&key, &keys, of_keys), (&value, &values, of_values)];
    let states = states.map(|(new, kept, format)| CachedStates {
        new,
        kept,
        scale_inv: format.as_ref().map(|(_, scale_inv)| scale_inv),
    });
    let dtype = if query.kind() == Kind::BFloat16 { Kind::BFloat16 } else { Kind::Float };
    let out = ffi::attend_cached(&query.f_to_kind(dtype)?, states, &step.slots, &step.positions)?;
    Ok(out.f_to_kind(query.kind())?)
}

fn no_pass() -> crate::error::Error {
    wrong("no pass is in progress".to_owned(), "let a Generator call next_logits")
}

fn wrong(what: String, remedy: impl Into<std::borrow::Cow<'static, str>>) -> crate::error::Error {
    ModuleError::Input { layer: "KvCache".to_owned(), problem: Problem::new(what, remedy) }.into()
}
