//! The kernels of [`kernels`](crate::kernels) in libtorch's dispatcher.

mod amx;
mod entries;
mod float8;
mod guard;
mod host;
mod updates;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use amx::withhold_undescribed_amx;
pub(in crate::ffi) use float8::define_float8;
use host::hand_in_host;
use tch::{Kind, Tensor};
use voltaic_sys as sys;

use crate::config::read_switch;
use crate::device::Device;
use crate::error::Result;
use crate::ffi::check::check;
use crate::ffi::tensor::rng::{rng_state, set_rng_state};
use crate::kernels::{self, Dtype, Machine, Operator};

/// `0`: libtorch's kernels. `1`: all of voltaic's, also where libtorch's are faster. Unset: voltaic's if they are optimized.
const SWITCH: &str = "VOLTAIC_CPU_KERNELS";

/// Held while [`install_kernels`] puts them in.
static INSTALLING: Mutex<bool> = Mutex::new(false);
/// Whether it has.
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Whether attention without mask and dropout is voltaic's.
pub fn has_attention_kernel() -> bool {
    has_kernels()
}

/// Whether voltaic's kernels are in use, among them the one that runs chains of operators.
pub(crate) fn has_kernels() -> bool {
    INSTALLED.load(Ordering::Acquire)
}

/// Puts voltaic's kernels for the CPU in place of libtorch's, for the rest of the process: attention, convolutions of
/// 3 x 3, in bfloat16 with AMX only of many channels on small images, gradients of others' weights, batch norm of images
/// with the channels last, GELU, max-pooling of 2 x 2, ReLU, sums and casts with bfloat16, random masks unless libtorch
/// draws them by the MKL, steps of optimizers on x86-64, products of float32 matrices, on Intel's processors only large ones and only with AMX, since the
/// MKL is at its best there, products of bfloat16 on AMD's from Zen 5 on, and these and convolutions where oneDNN has no
/// fast instructions for them. Later calls change nothing.
///
/// Results differ from libtorch's in the last bits of products, convolutions, attention, weights' gradients, batch norm
/// and GELU; the others are equal.
///
/// With and without the kernels, the gradient of a convolution's weight is 0 where that weight multiplies padding only. oneDNN leaves
/// these elements uninitialized in bfloat16.
///
/// Keeps oneDNN from AMX, too, on virtual machines that offer it without a description, where its operators in bfloat16
/// would end the process; to be called before the first of them, as trainers and accelerators do.
///
/// Returns whether they are in use: they are not if the crate `voltaic-kernels` was compiled without optimization, as in a
/// program without its override of the debug profile, unless the environment says `VOLTAIC_CPU_KERNELS=1`, which asks for
/// all of them, also where libtorch's are faster; nor with `VOLTAIC_CPU_KERNELS=0`; nor on x86-64 without AVX2.
///
/// # Errors
/// [`SwitchError`](crate::error::SwitchError) if `VOLTAIC_CPU_KERNELS` is neither `0` nor `1`.
pub fn install_kernels() -> Result<bool> {
    withhold_undescribed_amx();
    let switch = read_switch(SWITCH, "kernels")?;
    let is_wanted = switch.unwrap_or(kernels::IS_OPTIMIZED);
    let mut has_grads = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if !*has_grads {
        // SAFETY: the shim takes nothing, and registers functions that live as long as the process.
        check("install_convolution_grads", unsafe { sys::vt_install_convolution_grads() })?;
        *has_grads = true;
    }
    let is_installed = INSTALLED.load(Ordering::Acquire);
    if is_installed || !is_wanted {
        return Ok(is_installed);
    }
    hand_in_host();
    kernels::ask_for_all(switch == Some(true));
    let machine = Machine::here();
    if !machine.has_vectors {
        return Ok(false); // no kernel is for such a processor
    }
    let serves = |operator| kernels::serves(&machine, operator);
    let table = sys::vt_kernels {
        failure: Some(guard::failure),
        product: kernels::multiplies(&machine, Dtype::Float32).then_some(entries::product as _),
        product_bf16: kernels::multiplies(&machine, Dtype::Bfloat16).then_some(entries::product_bf16 as _),
        gelu: serves(Operator::Gelu).then_some(entries::gelu as _),
        gelu_backward: serves(Operator::Gelu).then_some(entries::gelu_backward as _),
        max_pool2d: serves(Operator::MaxPool2d).then_some(entries::max_pool2d as _),
        max_pool2d_backward: serves(Operator::MaxPool2d).then_some(entries::max_pool2d_backward as _),
        relu_bf16: serves(Operator::Relu).then_some(entries::relu_bf16 as _),
        relu_backward_bf16: serves(Operator::Relu).then_some(entries::relu_backward_bf16 as _),
        add_bf16: serves(Operator::Add).then_some(entries::add_bf16 as _),
        convert: serves(Operator::Convert).then_some(entries::convert as _),
        bernoulli: (serves(Operator::Bernoulli) && draws_by_mt19937()?).then_some(entries::bernoulli as _),
        attention: serves(Operator::Attention).then_some(entries::attention as _),
        attention_backward: serves(Operator::Attention).then_some(entries::attention_backward as _),
        attend_cached: serves(Operator::Attention).then_some(entries::attend_cached as _),
        convolves_by_taps: Some(entries::convolves_by_taps),
        convolves: kernels::convolves(&machine).then_some(entries::convolves as _),
        convolution: Some(entries::convolution),
        convolution_input_grad: Some(entries::convolution_input_grad),
        convolution_weight_grad: Some(entries::convolution_weight_grad),
        batch_norm: serves(Operator::BatchNorm).then_some(entries::batch_norm as _),
        batch_norm_backward: serves(Operator::BatchNorm).then_some(entries::batch_norm_backward as _),
        update: serves(Operator::Update).then_some(updates::update as _),
        chain: Some(entries::chain),
    };
    // SAFETY: the shim copies the table, whose functions keep what csrc/kernels/abi.h asks of them.
    check("install_kernels", unsafe { sys::vt_install_kernels(&table) })?;
    INSTALLED.store(true, Ordering::Release);
    tracing::debug!("voltaic's kernels for the CPU are in use");
    for line in kernels::in_force(&machine) {
        tracing::debug!("{line}");
    }
    Ok(true)
}

/// Whether libtorch's masks follow from its generator's numbers, as voltaic's do: on Intel's processors it may draw them
/// by the MKL. To be asked before the kernels are in.
fn draws_by_mt19937() -> Result<bool> {
    let (device_type, index) = Device::Cpu.numbers();
    let state = rng_state(device_type, index)?;
    let empty = || Tensor::f_empty([64], (Kind::Double, tch::Device::Cpu));
    let mask = empty()?.f_bernoulli_float_(0.5)?;
    set_rng_state(device_type, index, &state)?;
    let numbers = empty()?.f_uniform_(0.0, 1.0)?;
    set_rng_state(device_type, index, &state)?;
    Ok(mask.f_equal(&numbers.f_lt(0.5)?.f_to_kind(Kind::Double)?)?)
}
