//! Attention with a cache of keys and values.

use std::ptr;

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::check;
use crate::ffi::tensor::rng::take;

/// Keys or values of attention with a cache, in float32, bfloat16 or float8.
#[derive(Debug, Clone, Copy)]
pub struct CachedStates<'a> {
    /// Those of the newest token of each sequence, `[batch, heads, 1, dim]`.
    pub new: &'a Tensor,
    /// All, `[batch, heads, slots, dim]`, contiguous.
    pub kept: &'a Tensor,
    /// What float8 is multiplied by, one number of float32.
    pub scale_inv: Option<&'a Tensor>,
}

/// Puts the newest `key` and `value` of each sequence into `slot`, and attends to the slots of the sequence up to it: as many before it as
/// its position says, int64 `[batch]` in all. Slots beyond are not read. Where a graph replays this, it reads slot and positions again.
///
/// To be called where [`has_attention_kernel`](crate::ffi::has_attention_kernel), on the CPU and emulated HPUs, in float32 or bfloat16.
///
/// # Errors
/// If shapes or dtypes do not fit, or there is no such slot; that a device has no such operator.
pub fn attend_cached(
    query: &Tensor,
    [key, value]: [CachedStates<'_>; 2],
    slot: &Tensor,
    positions: &Tensor,
) -> Result<Tensor, TorchError> {
    let raw = |tensor: &Tensor| tensor.as_ptr().cast_mut();
    let optional = |tensor: Option<&Tensor>| tensor.map_or(ptr::null_mut(), raw);
    let tensors = sys::vt_cached_tensors {
        query: raw(query),
        key: raw(key.new),
        value: raw(value.new),
        keys: raw(key.kept),
        values: raw(value.kept),
        slot: raw(slot),
        positions: raw(positions),
        key_scale_inv: optional(key.scale_inv),
        value_scale_inv: optional(value.scale_inv),
    };
    let mut out = ptr::null_mut();
    // SAFETY: the tensors are borrowed for the call, and the operator checks their shapes; the out-pointer is valid.
    check("attend_cached", unsafe { sys::vt_attend_cached(&tensors, &mut out) })?;
    Ok(take(out))
}
