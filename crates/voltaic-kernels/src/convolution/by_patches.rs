//! Convolutions in bfloat16 as products of patches, by the MKL or from strips.
//!
//! Patches have 0 where an output sees no pixel, which times a weight that is not finite is not a number. So each function tells
//! whether all sums are finite; else another is to compute it.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::choice::patches_are_from_strips;
use crate::convolution::patches::{Axis, Patches};
use crate::convolution::sizes::{Convolution, parts};
use crate::element::Bf16;
use crate::elementwise::pointwise::AllFinite;
use crate::held::held;
use crate::host::memory;
use crate::kernel::blocks;
use crate::memory::sized;
use crate::processor::run_vectorized;
use crate::product::matrix::{Matrix, MatrixMut};
use crate::product::mkl::multiply_by_mkl;
use crate::product::round::{Addend, RoundRows};
use crate::product::strip::multiply_by_strips;
use crate::product::strips::Strips;
use crate::scratch::{Scratch as ThreadScratch, WithScratch};
use crate::threads::{num_threads, parallel_for, threads_for};
use crate::views::Shared;

/// Numbers of the patches that a thread works on at a time: a megabyte, which the second cache holds.
const MAX_NUMBERS: usize = 1 << 19;
/// Fewer patches at a time leave the MKL too little for what it prepares.
const MIN_PATCHES: usize = 128;
/// Patches, or channels, that are worth a thread.
const MIN_PART: usize = 32;

thread_local! {
    static SCRATCH: ThreadScratch<Scratch> = ThreadScratch::default();
    /// Weights in the order of the gradients of inputs.
    static TURNED: ThreadScratch<Vec<Bf16>> = ThreadScratch::default();
    /// Weights for products from strips.
    static STRIPS: ThreadScratch<Vec<u32>> = ThreadScratch::default();
}

/// What a thread needs for its work, to be used again.
#[derive(Default)]
struct Scratch {
    patches: Vec<Bf16>,
    strips: Vec<u32>,
    sums: Vec<f32>,
}
held!(Scratch { patches, strips, sums });

/// A right factor, ready for what multiplies.
#[derive(Clone, Copy)]
enum Right<'a> {
    /// The MKL.
    Matrix(Matrix<'a, Bf16>),
    /// AVX-512.
    Strips(Strips<'a, Bf16>),
}

impl<'a> Right<'a> {
    fn new(matrix: Matrix<'a, Bf16>, strips: &'a mut Vec<u32>) -> Self {
        let by_strips = patches_are_from_strips() && !matrix.shape().contains(&0);
        if by_strips { Self::Strips(Strips::new(matrix, strips)) } else { Self::Matrix(matrix) }
    }

    /// `out = a b`, or `out += a b` if `adds`, on this thread.
    fn multiply(self, out: MatrixMut, a: Matrix<Bf16>, adds: bool) {
        match self {
            Self::Matrix(b) => multiply_by_mkl(out, a, b, adds),
            Self::Strips(b) => multiply_by_strips(out, a, b, adds),
        }
    }
}

impl Convolution {
    /// What each output sees of the input.
    fn patches<'a>(&self, input: &'a [Bf16]) -> Patches<'a> {
        let axis = |dim: usize| Axis {
            pixels: self.in_size[dim],
            patches: self.out_size[dim],
            step: self.stride[dim],
            first: -(self.padding[dim] as isize),
            taps: self.kernel[dim],
        };
        Patches { images: input, axes: [axis(0), axis(1)], channels: self.in_channels }
    }

    /// Of every `stride`-th input from number `phase` on: what they see of the outputs.
    fn phase(&self, dim: usize, phase: usize) -> Phase {
        let (stride, kernel) = (self.stride[dim], self.kernel[dim]);
        let first_tap = (phase + self.padding[dim]) % stride;
        let taps = kernel.saturating_sub(first_tap).div_ceil(stride);
        // input `i * stride + phase` is seen by output `i + (phase + padding - tap) / stride` at each tap
        let last_tap = first_tap + taps.saturating_sub(1) * stride;
        let first = ((phase + self.padding[dim]) as isize - last_tap as isize) / stride as isize;
        let inputs = self.in_size[dim].saturating_sub(phase).div_ceil(stride);
        let axis = Axis { pixels: self.out_size[dim], patches: inputs, step: 1, first, taps };
        Phase { axis, first_tap, stride }
    }
}

/// Inputs that are seen at the same taps.
#[derive(Clone, Copy)]
struct Phase {
    /// Of the patches of outputs that they see.
    axis: Axis,
    first_tap: usize,
    stride: usize,
}

impl Phase {
    /// In the order of the outputs that see an input: from the last to the first.
    fn taps(self) -> impl Iterator<Item = usize> + Clone {
        (0..self.axis.taps).rev().map(move |tap| self.first_tap + tap * self.stride)
    }
}

/// How many patches of a depth a thread works on at a time.
fn patches_at_a_time(depth: usize) -> usize {
    (MAX_NUMBERS / depth.max(1)).max(MIN_PATCHES)
}

// ---- products of patches ----

/// Outputs that are products of patches and a matrix.
struct Correlation<'a> {
    patches: Patches<'a>,
    /// `[depth, channels]`
    weight: Right<'a>,
    channels: usize,
    bias: Option<&'a [Bf16]>,
    output: Shared<Bf16>,
    /// Rows and columns of the output.
    size: [usize; 2],
    /// The first row and column that is written, and the distance to the next.
    places: [[usize; 2]; 2],
}

impl Correlation<'_> {
    /// Gives whether all sums are finite.
    ///
    /// # Safety
    /// `output` must have room for `images` of `size`, and be used by nothing else.
    unsafe fn run(&self, images: usize) -> bool {
        let are_finite = AtomicBool::new(true);
        let [rows, columns] = self.patches.axes.map(|axis| axis.patches);
        let block = patches_at_a_time(self.patches.depth());
        parallel_for(images * rows * columns, MIN_PART, |part| {
            SCRATCH.with_borrow_mut(|scratch| {
                for block in blocks(part, block) {
                    // SAFETY: as this function asks; parts do not overlap.
                    if !unsafe { self.run_block(block, scratch) } {
                        are_finite.store(false, Ordering::Relaxed);
                    }
                }
            });
        });
        are_finite.into_inner()
    }

    /// # Safety
    /// As for `run`.
    unsafe fn run_block(&self, block: Range<usize>, scratch: &mut Scratch) -> bool {
        let (depth, channels) = (self.patches.depth(), self.channels);
        let sums = sized(&mut scratch.sums, block.len() * channels);
        if depth > 0 {
            let patches = self.patches.rows(block.clone(), &mut scratch.patches);
            let patches = Matrix::dense(patches, [block.len(), depth]);
            self.weight.multiply(MatrixMut::dense(sums, [block.len(), channels]), patches, false);
        } else {
            sums.fill(0.0); // inputs that no output sees
        }
        if !run_vectorized(AllFinite { numbers: sums }) {
            return false;
        }
        let [rows, columns] = self.patches.axes.map(|axis| axis.patches);
        let addend = self.bias.map_or(Addend::Zero, Addend::Row);
        let [[top, left], [down, right]] = self.places;
        // SAFETY: callers promise that there is room for all images; each patch has a place of its own.
        let write = |first: usize, sums: &[f32], len: usize, stride: usize| unsafe {
            let len = (len - 1) * stride + channels;
            let output = self.output.slice_mut(first * channels..first * channels + len);
            run_vectorized(RoundRows { sums, width: channels, output, stride, addend });
        };
        if [rows, columns] == self.size {
            write(block.start, sums, block.len(), channels);
            return true;
        }
        let mut patch = block.start;
        while patch < block.end {
            let (line, column) = (patch / columns, patch % columns);
            let len = (columns - column).min(block.end - patch);
            let row = line / rows * self.size[0] + line % rows * down + top;
            let place = row * self.size[1] + column * right + left;
            write(place, &sums[(patch - block.start) * channels..][..len * channels], len, right * channels);
            patch += len;
        }
        true
    }
}

/// Writes the outputs.
pub(crate) fn output(
    call: &Convolution,
    input: &[Bf16],
    weight: &[Bf16],
    bias: Option<&[Bf16]>,
    out: Shared<Bf16>,
) -> bool {
    let weight = Matrix::dense(weight, [call.out_channels, call.depth()]);
    STRIPS.with_borrow_mut(|strips| {
        let correlation = Correlation {
            patches: call.patches(input),
            weight: Right::new(weight.transposed(), strips),
            channels: call.out_channels,
            bias,
            output: out,
            size: call.out_size,
            places: [[0, 0], [1, 1]],
        };
        // SAFETY: `out` has all outputs, and nothing else uses it.
        unsafe { correlation.run(call.images) }
    })
}

/// Writes the gradients of the inputs.
pub(crate) fn input_grad(call: &Convolution, grad: &[Bf16], weight: &[Bf16], out: Shared<Bf16>) -> bool {
    let [height, width] = call.stride;
    let mut places = (0..height).flat_map(|top| (0..width).map(move |left| (top, left)));
    places.all(|(top, left)| {
        let (rows, columns) = (call.phase(0, top), call.phase(1, left));
        let patches = Patches { images: grad, axes: [rows.axis, columns.axis], channels: call.out_channels };
        TURNED.with_borrow_mut(|turned| {
            let turned = turn_weight(call, weight, [rows, columns], turned);
            let weight = Matrix::dense(turned, [patches.depth(), call.in_channels]);
            STRIPS.with_borrow_mut(|strips| {
                let correlation = Correlation {
                    patches,
                    weight: Right::new(weight, strips),
                    channels: call.in_channels,
                    bias: None,
                    output: out,
                    size: call.in_size,
                    places: [[top, left], call.stride],
                };
                // SAFETY: `out` has all inputs, and nothing else uses it.
                unsafe { correlation.run(call.images) }
            })
        })
    })
}

/// Writes the weights of a phase as `[taps, outputs, inputs]`.
fn turn_weight<'a>(
    call: &Convolution,
    weight: &[Bf16],
    [rows, columns]: [Phase; 2],
    turned: &'a mut Vec<Bf16>,
) -> &'a [Bf16] {
    let inputs = call.in_channels;
    let taps = rows.axis.taps * columns.axis.taps;
    let all = sized(turned, taps * call.out_channels * inputs);
    let taps = rows.taps().flat_map(|y| columns.taps().map(move |x| y * call.kernel[1] + x));
    for (tap, turned) in taps.zip(all.chunks_exact_mut(call.out_channels * inputs)) {
        for (from, to) in weight.chunks_exact(call.depth()).zip(turned.chunks_exact_mut(inputs)) {
            to.copy_from_slice(&from[tap * inputs..][..inputs]);
        }
    }
    all
}

// ---- weights ----

/// Writes the gradients of the weights.
pub(crate) fn weight_grad(call: &Convolution, grad: &[Bf16], input: &[Bf16], out: Shared<Bf16>) -> bool {
    let gradient = WeightGrad { patches: call.patches(input), grad, outputs: call.out_channels };
    let pixels = call.out_pixels();
    // patches are made by each thread that multiplies by them, sums of all weights by each that has some of the patches
    if pixels < 4 * call.out_channels || num_threads() <= 1 {
        gradient.split_outputs(pixels, out)
    } else {
        gradient.split_pixels(pixels, out)
    }
}

/// Gradients of weights `[outputs, depth]`: the products of the gradients of the outputs and of the patches they see.
struct WeightGrad<'a> {
    patches: Patches<'a>,
    /// `[pixels, outputs]`
    grad: &'a [Bf16],
    outputs: usize,
}

impl WeightGrad<'_> {
    /// Adds up what some pixels give for the weights of some outputs, in `sums`.
    fn sum(
        &self,
        pixels: Range<usize>,
        outputs: Range<usize>,
        sums: &mut [f32],
        copy: &mut Vec<Bf16>,
        strips: &mut Vec<u32>,
    ) {
        let depth = self.patches.depth();
        let mut adds = false;
        for block in blocks(pixels, patches_at_a_time(depth)) {
            let grad = &self.grad[block.start * self.outputs + outputs.start..];
            let grad = Matrix::new(grad, [outputs.len(), block.len()], [1, self.outputs]);
            let patches = Matrix::dense(self.patches.rows(block.clone(), copy), [block.len(), depth]);
            let sums = MatrixMut::dense(&mut *sums, [outputs.len(), depth]);
            Right::new(patches, strips).multiply(sums, grad, adds);
            adds = true;
        }
    }

    /// Each thread has some of the outputs.
    fn split_outputs(&self, pixels: usize, output: Shared<Bf16>) -> bool {
        let depth = self.patches.depth();
        let are_finite = AtomicBool::new(true);
        parallel_for(self.outputs, MIN_PART, |outputs| {
            SCRATCH.with_borrow_mut(|Scratch { patches, strips, sums }| {
                let sums = sized(sums, outputs.len() * depth);
                self.sum(0..pixels, outputs.clone(), sums, patches, strips);
                // SAFETY: `output` has all weights; parts do not overlap.
                let output = unsafe { output.slice_mut(outputs.start * depth..outputs.end * depth) };
                if !round(sums, output) {
                    are_finite.store(false, Ordering::Relaxed);
                }
            });
        });
        are_finite.into_inner()
    }

    /// Each thread has some of the pixels.
    fn split_pixels(&self, pixels: usize, output: Shared<Bf16>) -> bool {
        let len = self.outputs * self.patches.depth();
        let [threads, part] = parts(pixels, threads_for(pixels, MIN_PATCHES));
        let Some(memory) = memory(threads * len) else { return self.split_outputs(pixels, output) };
        let all = Shared(memory.start());
        parallel_for(threads, 1, |some| {
            SCRATCH.with_borrow_mut(|scratch| {
                for thread in some {
                    // SAFETY: each thread has sums of its own.
                    let sums = unsafe { all.slice_mut(thread * len..(thread + 1) * len) };
                    let pixels = thread * part..((thread + 1) * part).min(pixels);
                    let Scratch { patches, strips, .. } = scratch;
                    self.sum(pixels, 0..self.outputs, sums, patches, strips);
                }
            });
        });
        // SAFETY: as above, and each thread has written its own.
        let (sums, others) = unsafe { all.slice_mut(0..threads * len) }.split_at_mut(len);
        for other in others.chunks_exact(len) {
            sums.iter_mut().zip(other).for_each(|(sum, other)| *sum += other);
        }
        // SAFETY: as above; no other thread writes now.
        round(sums, unsafe { output.slice_mut(0..len) })
    }
}

/// Whether the sums are finite.
fn round(sums: &[f32], output: &mut [Bf16]) -> bool {
    let width = sums.len();
    run_vectorized(RoundRows { sums, width, output, stride: width, addend: Addend::Zero });
    run_vectorized(AllFinite { numbers: sums })
}
