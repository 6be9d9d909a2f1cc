//! Batch norm of whole tensors in training, with the channels last, by all threads.

use std::ops::Range;

use crate::element::Element;
use crate::memory::sized;
use crate::norm::loops::{BatchNormBackward, GradSums, Moments, Normalize};
use crate::processor::run_vectorized;
use crate::scratch::{Scratch, WithScratch};
use crate::threads::GRAIN;
use crate::views::{Floats, FloatsMut, for_units, in_one_format};

/// What [`batch_norm`] writes besides its output, and what it needs besides its input. Slices are of a number for each
/// channel.
#[derive(Debug)]
pub struct BatchNorm<'a> {
    /// The share of this batch in the running statistics.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
    /// What results are multiplied with; none for 1.
    pub weight: Option<&'a [f32]>,
    /// What is added; none for 0.
    pub bias: Option<&'a [f32]>,
    /// Updated if it is there.
    pub running_mean: Option<&'a mut [f32]>,
    /// Updated if it is there.
    pub running_var: Option<&'a mut [f32]>,
    /// Means of this batch.
    pub mean: &'a mut [f32],
    /// 1 divided by the standard deviations of this batch.
    pub invstd: &'a mut [f32],
}

/// What the gradients of batch norm need, and those of the channels. Slices are of a number for each channel.
#[derive(Debug)]
pub struct BatchNormGrads<'a> {
    /// As in the forward pass.
    pub weight: Option<&'a [f32]>,
    /// As the forward pass wrote it.
    pub mean: &'a [f32],
    /// As the forward pass wrote it.
    pub invstd: &'a [f32],
    /// Gradient of the weight.
    pub grad_weight: &'a mut [f32],
    /// Gradient of the bias.
    pub grad_bias: &'a mut [f32],
}

/// The most blocks of pixels that are summed up apart.
const MAX_BLOCKS: usize = 64;

thread_local! {
    /// Factors, and two sums of each block, by channel.
    static SCRATCH: Scratch<Vec<f32>> = Scratch::default();
}

/// Pixels that are summed up together, whatever the number of threads, which so changes no result.
#[derive(Clone, Copy)]
struct Blocks {
    pixels: usize,
    channels: usize,
    block: usize,
}

impl Blocks {
    fn new(numbers: usize, channels: usize) -> Self {
        let pixels = numbers / channels;
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

    /// Calls `sum_up` for all blocks on all threads, with where the numbers of the block lie, and space for two sums of each
    /// channel.
    fn sum_up(&self, sums: &mut [f32], sum_up: impl Fn(Range<usize>, &mut [f32], &mut [f32]) + Sync) {
        let len = 2 * self.channels;
        for_units(sums, len, 1, |blocks, sums| {
            for (block, sums) in blocks.zip(sums.chunks_exact_mut(len)) {
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

/// Batch norm of `[pixels, channels]`. False, with nothing written, if a moment is not finite: libtorch, whose sums have another
/// order, may have a number there, and else tells what is infinite and what is not a number.
///
/// # Panics
/// If formats or lengths differ.
pub fn batch_norm(norm: BatchNorm, input: Floats, output: FloatsMut) -> bool {
    SCRATCH.with_borrow_mut(
        |scratch| in_one_format!([input] [output] => normalize(norm, input, output, scratch)),
    )
}

fn normalize<T: Element>(mut norm: BatchNorm, input: &[T], output: &mut [T], scratch: &mut Vec<f32>) -> bool {
    let (mean, invstd) = (norm.mean, norm.invstd);
    let channels = mean.len();
    assert_eq!((input.len(), invstd.len()), (output.len(), channels));
    let blocks = Blocks::new(input.len(), channels);
    let pixels = blocks.pixels;
    let (factors, sums) = blocks.split(scratch, 2);
    blocks.sum_up(sums, |numbers, mean, squares| {
        run_vectorized(Moments { input: &input[numbers], mean, squares });
    });
    if !sums.iter().all(|sum| sum.is_finite()) {
        return false;
    }
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
        scale[c] = invstd[c] * norm.weight.map_or(1.0, |weight| weight[c]);
        shift[c] = norm.bias.map_or(0.0, |bias| bias[c]) - mean[c] * scale[c];
        update(&mut norm.running_mean, c, center);
        update(&mut norm.running_var, c, squares / (pixels as f64 - 1.0));
    }
    let (scale, shift) = (&*scale, &*shift);
    for_units(output, channels, (GRAIN / channels).max(1), |part, output| {
        run_vectorized(Normalize { input: &input[blocks.numbers(part)], scale, shift, output });
    });
    true
}

/// The gradients of [`batch_norm`], of that of its output and its input; without an output those of the channels alone.
///
/// # Panics
/// If formats or lengths differ.
pub fn batch_norm_backward(norm: BatchNormGrads, grad: Floats, input: Floats, output: Option<FloatsMut>) {
    SCRATCH.with_borrow_mut(|scratch| match output {
        Some(output) => in_one_format!([grad input] [output] => {
            normalize_backward(norm, grad, input, Some(output), scratch)
        }),
        None => in_one_format!([grad input] [] => normalize_backward(norm, grad, input, None, scratch)),
    });
}

fn normalize_backward<T: Element>(
    norm: BatchNormGrads,
    grad: &[T],
    input: &[T],
    output: Option<&mut [T]>,
    scratch: &mut Vec<f32>,
) {
    let BatchNormGrads { weight, mean, invstd, grad_weight, grad_bias } = norm;
    let channels = mean.len();
    assert_eq!(
        ([invstd.len(), grad_weight.len(), grad_bias.len()], grad.len()),
        ([channels; 3], input.len())
    );
    let blocks = Blocks::new(input.len(), channels);
    let pixels = blocks.pixels;
    let (factors, sums) = blocks.split(scratch, 3);
    blocks.sum_up(sums, |numbers, sums, products| {
        let (input, grad) = (&input[numbers.clone()], &grad[numbers]);
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
    let Some(output) = output else { return };
    assert_eq!(output.len(), input.len());
    let (slope, shift, scale) = (&*slope, &*shift, &*scale);
    for_units(output, channels, (GRAIN / channels).max(1), |part, output| {
        let numbers = blocks.numbers(part);
        let (input, grad) = (&input[numbers.clone()], &grad[numbers]);
        run_vectorized(BatchNormBackward { input, grad, mean, slope, shift, scale, output });
    });
}
