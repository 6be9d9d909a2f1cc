//! Attention as one function.

use tch::{Kind, Tensor};

use crate::accelerator::HpuEmulator;
use crate::device::Device;
use crate::error::Result;
use crate::ffi;
use crate::precision::disable_casts;

/// Keys up to which the CPU attends faster in float32 than in 16 bits, for which its small products are emulated:
/// 4 times at 64 keys of 32 channels, as fast at 256 of 64 (AVX-512 with bfloat16, one thread).
const MAX_FLOAT32_KEYS: i64 = 256;

/// Attention `softmax(query keyᵀ / sqrt(dim)) value`, as `torch.nn.functional.scaled_dot_product_attention`: libtorch
/// chooses a fused kernel where it has one.
///
/// `query` `[batch, heads, queries, dim]`, `key` and `value` `[batch, heads, keys, dim]`, output as `query`.
/// `attn_mask` is added to the scores, or, if `bool`, says where attention is allowed; it broadcasts to
/// `[batch, heads, queries, keys]`. With `is_causal` no query sees a later key. `dropout_p` drops attention weights
/// whatever the mode: pass [`Dropout::active_p`](crate::nn::Dropout::active_p).
///
/// On the CPU and the emulated HPU, 16-bit attention over at most 256 keys is computed in float32, which is faster
/// there than in libtorch's kernel for 16 bits, and rounded. A single query in bfloat16 is not: with 256 keys of 6 heads, casting them
/// takes 80 microseconds, the kernel 27 (AVX-512, one thread).
///
/// # Errors
/// If the shapes do not fit together, or both `attn_mask` and `is_causal` are given.
pub fn scaled_dot_product_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    attn_mask: Option<&Tensor>,
    dropout_p: f64,
    is_causal: bool,
) -> Result<Tensor> {
    let attend = |query: &Tensor, key: &Tensor, value: &Tensor, mask: Option<&Tensor>| {
        Tensor::f_scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal, None, false)
    };
    // ours takes bfloat16 as it is
    let is_ours = || {
        query.kind() == Kind::BFloat16
            && attn_mask.is_none()
            && dropout_p == 0.0
            && ffi::has_attention_kernel()
    };
    let Some(device) = attends_in_float32(query, key)?.filter(|_| !is_ours()) else {
        return Ok(attend(query, key, value, attn_mask)?);
    };
    let _no_casts = disable_casts(device)?;
    let [q, k, v] = [query, key, value].map(|tensor| tensor.f_to_kind(Kind::Float));
    let mask = match attn_mask {
        Some(mask) if mask.kind() != Kind::Bool => Some(mask.f_to_kind(Kind::Float)?),
        mask => mask.map(Tensor::shallow_clone),
    };
    Ok(attend(&q?, &k?, &v?, mask.as_ref())?.f_to_kind(query.kind())?)
}

/// The device, if float32 is the faster one there.
fn attends_in_float32(query: &Tensor, key: &Tensor) -> Result<Option<Device>> {
    let is_short = key.dim() >= 2 && key.size()[key.dim() - 2] <= MAX_FLOAT32_KEYS;
    let is_one = query.kind() == Kind::BFloat16 && query.dim() >= 2 && query.size()[query.dim() - 2] == 1;
    if !is_short || is_one || !matches!(query.kind(), Kind::BFloat16 | Kind::Half) {
        return Ok(None);
    }
    let device = Device::of(query)?;
    let is_host = match device {
        Device::Cpu => true,
        Device::Hpu(_) => HpuEmulator::get().is_some(),
        _ => false,
    };
    Ok(is_host.then_some(device))
}
