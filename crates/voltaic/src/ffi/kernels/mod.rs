//! The kernels of [`kernels`](crate::kernels) in libtorch's dispatcher.

mod attention;
mod batch_norm;
mod convolutions;
mod elementwise;
mod guard;
mod images;
mod products;

use std::ops::Range;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use convolutions::{ByPatches, ByTiles, Choice};
use tch::{Kind, Tensor};
use voltaic_sys as sys;

use super::amx::{has_described_amx, withhold_undescribed_amx};
use super::amx_product::has_tiles;
use super::check;
use super::mkl::has_mkl_bf16;
use super::simd::{has_vectors, has_wide_units, is_intel, prefetch};
use super::strip_product::{has_bf16_products, has_fast_bf16_products};
use super::strips::has_strips;
use super::switch::read_switch;
use super::threads::parallel_for;
use crate::error::Result;
use crate::kernels::blocks;

/// `0`: libtorch's kernels. `1`: all of voltaic's, also where libtorch's are faster. Unset: voltaic's if the program is
/// optimized.
const SWITCH: &str = "VOLTAIC_CPU_KERNELS";

/// Numbers that are worth a thread, as for libtorch.
const GRAIN: usize = 32_768;

/// Held while [`install_kernels`] puts them in.
static INSTALLING: Mutex<()> = Mutex::new(());
/// Whether it has.
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Whether attention without mask and dropout is voltaic's.
pub fn has_attention_kernel() -> bool {
    INSTALLED.load(Ordering::Acquire)
}

/// Puts voltaic's kernels for the CPU in the place of libtorch's, for the rest of the process: attention, convolutions of
/// 3 x 3, in bfloat16 with AMX only of many channels on small images, gradients of others' weights, batch norm of images
/// with the channels last, GELU, max-pooling of 2 x 2, ReLU, sums and casts with bfloat16, random masks unless libtorch
/// draws them by the MKL, products of float32 matrices, on Intel's processors only large ones and only with AMX, since the
/// MKL is at its best there, products of bfloat16 on AMD's from Zen 5 on, and these and convolutions where oneDNN has no
/// fast instructions for them. Later calls change nothing.
///
/// Results differ from libtorch's in the last bits of products, convolutions, attention, weights' gradients, batch norm
/// and GELU; the others are equal.
///
/// Keeps oneDNN from AMX, too, on virtual machines that offer it without a description, where its operators in bfloat16
/// would end the process; to be called before the first of them, as trainers and accelerators do.
///
/// Returns whether they are in use: they are not in a program compiled without optimization, unless the environment says
/// `VOLTAIC_CPU_KERNELS=1`, which asks for all of them, also where libtorch's are faster; nor with
/// `VOLTAIC_CPU_KERNELS=0`; nor on x86-64 without AVX2.
///
/// # Errors
/// [`SwitchError`](crate::error::SwitchError) if `VOLTAIC_CPU_KERNELS` is neither `0` nor `1`.
pub fn install_kernels() -> Result<bool> {
    withhold_undescribed_amx();
    let switch = read_switch(SWITCH, "kernels")?;
    let is_wanted = switch.unwrap_or(!cfg!(debug_assertions));
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let is_installed = INSTALLED.load(Ordering::Acquire);
    if is_installed || !is_wanted || !has_vectors() {
        return Ok(is_installed);
    }
    let is_for_all = switch == Some(true);
    let keeps_intels = is_intel() && !is_for_all;
    let takes_bf16 = has_mkl_bf16() && (is_for_all || !onednn_is_fast_at_bf16());
    let by_strips = has_wide_units() && has_bf16_products();
    let choice = Choice {
        by_strips,
        by_patches: match takes_bf16 {
            true => ByPatches::All,
            false if by_strips => ByPatches::Slower,
            false if has_mkl_bf16() && has_described_amx() => ByPatches::SmallImages,
            false => ByPatches::None,
        },
        by_tiles: match has_strips() {
            false => ByTiles::None,
            true if keeps_intels => ByTiles::Float32,
            true => ByTiles::All,
        },
    };
    choice.set();
    let table = sys::vt_kernels {
        failure: Some(guard::failure),
        product: match (keeps_intels, has_tiles()) {
            (false, _) if has_wide_units() => Some(products::product_by_strips),
            (false, _) => Some(products::product),
            (true, true) => Some(products::large_product),
            (true, false) => None,
        },
        product_bf16: match by_strips {
            true => Some(products::product_bf16_by_strips),
            false => takes_bf16.then_some(products::product_bf16_by_mkl as _),
        },
        gelu: Some(elementwise::gelu),
        gelu_backward: Some(elementwise::gelu_backward),
        max_pool2d: Some(images::max_pool2d),
        max_pool2d_backward: Some(images::max_pool2d_backward),
        relu_bf16: Some(elementwise::relu_bf16),
        relu_backward_bf16: Some(elementwise::relu_backward_bf16),
        add_bf16: Some(elementwise::add_bf16),
        convert: Some(elementwise::convert),
        bernoulli: elementwise::draws_by_mt19937()?.then_some(elementwise::bernoulli as _),
        attention: Some(attention::attention),
        attention_backward: Some(attention::attention_backward),
        convolves_by_taps: Some(convolutions::convolves_by_taps),
        convolves: choice.is_any().then_some(convolutions::convolves as _),
        convolution: Some(convolutions::convolution),
        convolution_input_grad: Some(convolutions::input_grad),
        convolution_weight_grad: Some(convolutions::weight_grad),
        batch_norm: Some(batch_norm::batch_norm),
        batch_norm_backward: Some(batch_norm::batch_norm_backward),
    };
    // SAFETY: the shim copies the table, whose functions keep what voltaic.h asks of them.
    check("install_kernels", unsafe { sys::vt_install_kernels(&table) })?;
    INSTALLED.store(true, Ordering::Release);
    Ok(true)
}

/// Whether oneDNN, which computes libtorch's products and convolutions of bfloat16, has fast instructions for them: AMX, or
/// on processors that are not Intel's the dot products of AVX-512.
fn onednn_is_fast_at_bf16() -> bool {
    has_described_amx() || has_fast_bf16_products()
}

/// Numbers that are worked on while those two steps later are brought into the cache.
const STREAMED: usize = 256;

/// Calls `run` for parts of `0..len` on libtorch's threads, and before it `prefetch` for the part that comes soon.
fn stream(len: usize, prefetch: impl Fn(Range<usize>) + Sync, run: impl Fn(Range<usize>) + Sync) {
    parallel_for(len, GRAIN, |part| {
        for block in blocks(part.clone(), STREAMED) {
            let soon = block.start + 2 * STREAMED;
            if soon < part.end {
                prefetch(soon..(soon + STREAMED).min(part.end));
            }
            run(block);
        }
    });
}

/// Memory for `len` numbers; None if there is none left.
fn scratch(len: usize) -> Option<Tensor> {
    Tensor::f_empty([len as i64], (Kind::Float, tch::Device::Cpu)).ok()
}

fn address(scratch: &Tensor) -> Shared<f32> {
    Shared(scratch.data_ptr().cast())
}

/// An address that threads share; each uses another part of what is there.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: whoever makes slices of it says why no two threads write to the same numbers.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<T> {}

impl<T> Shared<T> {
    /// The address of another number.
    fn at(self, offset: isize) -> *mut T {
        self.0.wrapping_offset(offset)
    }

    /// Asks for numbers that are to be in the cache soon.
    fn prefetch(self, range: Range<usize>) {
        prefetch(self.0.wrapping_add(range.start), range.len());
    }

    /// # Safety
    /// The numbers must be there for `'a`, initialised unless they are only written, and used by nobody else.
    unsafe fn slice_mut<'a>(self, range: Range<usize>) -> &'a mut [T] {
        // SAFETY: as this function asks.
        unsafe { slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }

    /// # Safety
    /// The numbers must be there for `'a`, initialised, and written by nobody.
    unsafe fn slice<'a>(self, range: Range<usize>) -> &'a [T] {
        // SAFETY: as this function asks.
        unsafe { slice::from_raw_parts(self.0.add(range.start), range.len()) }
    }
}

/// Calls one of two instances of a generic function, by the dtype of a tensor.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),*)) => {
        if $dtype == sys::VT_FLOAT32 { $function::<f32>($($argument),*) } else { $function::<Bf16>($($argument),*) }
    };
}

use by_dtype;
