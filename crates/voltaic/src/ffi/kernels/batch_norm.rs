//! Batch norm in training, with the channels last.

use std::ffi::c_void;
use std::ops::Range;

use voltaic_sys as sys;

use super::guard::{guard_done, guard_some};
use super::{GRAIN, Shared, by_dtype};
use crate::ffi::scratch::{Scratch as ThreadScratch, WithScratch};
use crate::ffi::simd::run_vectorized;
use crate::ffi::threads::parallel_for;
use crate::kernels::{BatchNormBackward, Bf16, Element, GradSums, Moments, Normalize, sized};

/// The most blocks of pixels that are summed up apart.
const MAX_BLOCKS: usize = 64;

thread_local! {
    /// Factors, and two sums of each block, by channel.
    static SCRATCH: ThreadScratch<Vec<f32>> = ThreadScratch::default();
}

/// Pixels that are summed up together, whatever the number of threads, which so changes no result.
#[derive(Clone, Copy)]
struct Blocks {
    pixels: usize,
    channels: usize,
    block: usize,
}

impl Blocks {
    fn new(norm: &sys::vt_batch_norm) -> Self {
        let (pixels, channels) = (norm.pixels as usize, norm.channels as usize);
        let block = (GRAIN / channels).max(pixels.div_ceil(MAX_BLOCKS)).next_multiple_of(4);
        Self { pixels, channels, block }
    }

    fn count(&self) -> usize {
        self.pixels.div_ceil(self.block)
    }

    /// The pixels of a block.
    fn pixels(&self, block: usize) -> Range<usize> {
        block * self.block..((block + 1) * self.block).min(self.pixels)
    }

    /// Where the numbers of such pixels lie.
    fn numbers(&self, pixels: Range<usize>) -> Range<usize> {
        pixels.start * self.channels..pixels.end * self.channels
    }

    /// Parts of `scratch`: for `factors` numbers of each channel, and for the two sums of all blocks.
    fn split<'a>(&self, scratch: &'a mut Vec<f32>, factors: usize) -> (&'a mut [f32], &'a mut [f32]) {
        sized(scratch, (factors + 2 * self.count()) * self.channels).split_at_mut(factors * self.channels)
    }

    /// Calls `sum_up` for all blocks on libtorch's threads, with where the numbers of the block lie, and space for two
    /// sums of each channel.
    fn sum_up(&self, sums: &mut [f32], sum_up: impl Fn(Range<usize>, &mut [f32], &mut [f32]) + Sync) {
        let sums = Shared(sums.as_mut_ptr());
        parallel_for(self.count(), 1, |part| {
            for block in part {
                let len = 2 * self.channels;
                // SAFETY: the caller gives sums of all blocks; each belongs to one thread.
                let sums = unsafe { sums.slice_mut(block * len..(block + 1) * len) };
                let (first, second) = sums.split_at_mut(self.channels);
                sum_up(self.numbers(self.pixels(block)), first, second);
            }
        });
    }

    /// Pixels of each block, and its two sums of a channel.
    fn sums<'a>(&'a self, sums: &'a [f32], channel: usize) -> impl Iterator<Item = [f64; 3]> + 'a {
        sums.chunks_exact(2 * self.channels).enumerate().map(move |(block, sums)| {
            [self.pixels(block).len() as f64, sums[channel].into(), sums[self.channels + channel].into()]
        })
    }
}

/// # Safety
/// `data` must be null, or name `len` numbers that are there for `'a` and written by nobody.
unsafe fn vector<'a>(data: *const f32, len: usize) -> Option<&'a [f32]> {
    // SAFETY: as this function asks.
    (!data.is_null()).then(|| unsafe { Shared(data.cast_mut()).slice(0..len) })
}

/// # Safety
/// As [`vector`], and used by nobody else.
unsafe fn vector_mut<'a>(data: *mut f32, len: usize) -> Option<&'a mut [f32]> {
    // SAFETY: as this function asks.
    (!data.is_null()).then(|| unsafe { Shared(data).slice_mut(0..len) })
}

pub(super) extern "C" fn batch_norm(norm: *const sys::vt_batch_norm, output: *mut c_void) -> i32 {
    guard_some("batch_norm", || {
        // SAFETY: the shim passes a description that lives during the call.
        let norm = unsafe { &*norm };
        SCRATCH.with_borrow_mut(|scratch| by_dtype!(norm.dtype, normalize(norm, output, scratch)))
    })
}

/// False, with nothing written, if a moment is not finite: libtorch, whose sums have another order, may have a number there, and
/// else tells what is infinite and what is no number.
fn normalize<T: Element>(norm: &sys::vt_batch_norm, output: *mut c_void, scratch: &mut Vec<f32>) -> bool {
    let blocks = Blocks::new(norm);
    let (pixels, channels) = (blocks.pixels, blocks.channels);
    let (input, output) = (Shared(norm.input.cast_mut().cast::<T>()), Shared(output.cast::<T>()));
    let (factors, sums) = blocks.split(scratch, 2);
    blocks.sum_up(sums, |numbers, mean, squares| {
        // SAFETY: the shim passes dense tensors of such sizes that share no memory.
        run_vectorized(Moments { input: unsafe { input.slice(numbers) }, mean, squares });
    });
    if !sums.iter().all(|sum| sum.is_finite()) {
        return false;
    }
    // SAFETY: the shim passes vectors of `channels` numbers, all apart.
    let ([weight, bias], [mean, invstd, mut running_mean, mut running_var]) = unsafe {
        let outputs = [norm.mean, norm.invstd, norm.running_mean, norm.running_var];
        (
            [norm.weight, norm.bias].map(|data| vector(data, channels)),
            outputs.map(|data| vector_mut(data, channels)),
        )
    };
    let (Some(mean), Some(invstd)) = (mean, invstd) else { unreachable!("the shim makes both") };
    let (scale, shift) = factors.split_at_mut(channels);
    let momentum = norm.momentum;
    let update = |running: &mut Option<&mut [f32]>, c: usize, value: f64| {
        if let Some(running) = running {
            running[c] = (momentum * value + (1.0 - momentum) * f64::from(running[c])) as f32;
        }
    };
    for c in 0..channels {
        let center = blocks.sums(sums, c).map(|[n, mean, _]| n * mean).sum::<f64>() / pixels as f64;
        let squares: f64 =
            blocks.sums(sums, c).map(|[n, mean, squares]| squares + n * (mean - center).powi(2)).sum();
        let var = squares / pixels as f64;
        mean[c] = center as f32;
        invstd[c] = if var + norm.eps == 0.0 { 0.0 } else { (1.0 / (var + norm.eps).sqrt()) as f32 };
        scale[c] = invstd[c] * weight.map_or(1.0, |weight| weight[c]);
        shift[c] = bias.map_or(0.0, |bias| bias[c]) - mean[c] * scale[c];
        update(&mut running_mean, c, center);
        update(&mut running_var, c, squares / (pixels as f64 - 1.0));
    }
    let (scale, shift) = (&*scale, &*shift);
    parallel_for(pixels, (GRAIN / channels).max(1), |part| {
        let numbers = blocks.numbers(part);
        // SAFETY: as above; parts do not overlap.
        let (input, output) = unsafe { (input.slice(numbers.clone()), output.slice_mut(numbers)) };
        run_vectorized(Normalize { input, scale, shift, output });
    });
    true
}

pub(super) extern "C" fn batch_norm_backward(
    norm: *const sys::vt_batch_norm,
    grad: *const c_void,
    output: *mut c_void,
    grad_weight: *mut f32,
    grad_bias: *mut f32,
) -> i32 {
    guard_done("batch_norm_backward", || {
        // SAFETY: as in `batch_norm`.
        let norm = unsafe { &*norm };
        let (numbers, vectors) = ([grad.cast_mut(), output], [grad_weight, grad_bias]);
        SCRATCH.with_borrow_mut(|scratch| {
            by_dtype!(norm.dtype, normalize_backward(norm, numbers, vectors, scratch))
        });
    })
}

fn normalize_backward<T: Element>(
    norm: &sys::vt_batch_norm,
    [grad, output]: [*mut c_void; 2],
    grad_vectors: [*mut f32; 2],
    scratch: &mut Vec<f32>,
) {
    let blocks = Blocks::new(norm);
    let (pixels, channels) = (blocks.pixels, blocks.channels);
    let [input, grad, output] =
        [norm.input.cast_mut(), grad, output].map(|address| Shared(address.cast::<T>()));
    // SAFETY: the shim passes vectors of `channels` numbers, all apart.
    let ([weight, mean, invstd], [grad_weight, grad_bias]) = unsafe {
        let inputs = [norm.weight, norm.mean, norm.invstd];
        (inputs.map(|data| vector(data, channels)), grad_vectors.map(|data| vector_mut(data, channels)))
    };
    let (Some(mean), Some(invstd), Some(grad_weight), Some(grad_bias)) =
        (mean, invstd, grad_weight, grad_bias)
    else {
        unreachable!("the shim makes them")
    };
    let (factors, sums) = blocks.split(scratch, 3);
    blocks.sum_up(sums, |numbers, sums, products| {
        // SAFETY: the shim passes dense tensors of such sizes that share no memory.
        let (input, grad) = unsafe { (input.slice(numbers.clone()), grad.slice(numbers)) };
        run_vectorized(GradSums { input, grad, mean, sums, products });
    });
    let (slope, rest) = factors.split_at_mut(channels);
    let (shift, scale) = rest.split_at_mut(channels);
    for c in 0..channels {
        let (sum, product) =
            blocks.sums(sums, c).fold((0.0, 0.0), |(a, b), [_, sum, product]| (a + sum, b + product));
        let invstd = f64::from(invstd[c]);
        grad_bias[c] = sum as f32;
        grad_weight[c] = (product * invstd) as f32;
        slope[c] = (product * invstd * invstd / pixels as f64) as f32;
        shift[c] = (sum / pixels as f64) as f32;
        scale[c] = invstd as f32 * weight.map_or(1.0, |weight| weight[c]);
    }
    if output.0.is_null() {
        return;
    }
    let (slope, shift, scale) = (&*slope, &*shift, &*scale);
    parallel_for(pixels, (GRAIN / channels).max(1), |part| {
        let numbers = blocks.numbers(part);
        // SAFETY: as above; parts do not overlap.
        let (input, grad, output) =
            unsafe { (input.slice(numbers.clone()), grad.slice(numbers.clone()), output.slice_mut(numbers)) };
        run_vectorized(BatchNormBackward { input, grad, mean, slope, shift, scale, output });
    });
}
