//! Batch norm in training (Ioffe and Szegedy, 2015) of `[pixels, channels]`, as `torch.nn.functional.batch_norm` of
//! images with the channels last.

use crate::element::Element;
use crate::kernel::Kernel;
use crate::memory::zeros;

/// Numbers that are read twice while they are near.
const NEAR: usize = 16_384;

/// Mean of each channel, and sum of the squares of what differs from it.
pub struct Moments<'a, T> {
    /// `[pixels, channels]`, one pixel or more
    pub input: &'a [T],
    /// `[channels]`
    pub mean: &'a mut [f32],
    /// `[channels]`
    pub squares: &'a mut [f32],
}

impl<T: Element> Kernel for Moments<'_, T> {
    type Output = ();

    /// Part by part, whose moments are merged (Chan, Golub and LeVeque, 1979).
    #[inline(always)]
    fn run(self) {
        let Self { input, mean, squares } = self;
        let channels = mean.len();
        let part_len = (NEAR / channels).max(4) * channels;
        mean.fill(0.0);
        squares.fill(0.0);
        let (mut part_mean, mut part_squares) = (zeros(channels), zeros(channels));
        let mut pixels = 0.0;
        for part in input.chunks(part_len) {
            let part_pixels = (part.len() / channels) as f32;
            sum_up(part, &mut part_mean, None);
            part_mean.iter_mut().for_each(|mean| *mean /= part_pixels);
            sum_up(part, &mut part_squares, Some(&part_mean));

            let share = part_pixels / (pixels + part_pixels);
            let parts = part_mean.iter().zip(&part_squares);
            for ((mean, squares), (part_mean, part_squares)) in mean.iter_mut().zip(&mut *squares).zip(parts)
            {
                let delta = part_mean - *mean;
                *mean += delta * share;
                // from the right, since the first of all is 0 and the square of a large number infinite
                *squares += part_squares + delta * (delta * (pixels * share));
            }
            pixels += part_pixels;
        }
    }
}

/// Calls `sum_up` for tiles of channels as wide as possible, of which the compiler knows the width.
macro_rules! for_tiles {
    ($channels:expr, $sum_up:ident($($argument:expr),*)) => {{
        let mut first = 0;
        while first < $channels {
            first += match $channels - first {
                64.. => $sum_up::<_, 64>(first, $($argument),*),
                16.. => $sum_up::<_, 16>(first, $($argument),*),
                _ => $sum_up::<_, 1>(first, $($argument),*),
            };
        }
    }};
}

#[inline(always)]
fn part<T, const WIDTH: usize>(numbers: &[T], first: usize) -> &[T; WIDTH] {
    numbers[first..].first_chunk().expect("a tile lies in the channels")
}

/// Writes the sums over all pixels; with `center` those of the squares of what differs from it.
#[inline(always)]
fn sum_up<T: Element>(input: &[T], sums: &mut [f32], center: Option<&[f32]>) {
    for_tiles!(sums.len(), sum_up_tile(input, sums, center));
}

/// Four pixels at a time, which spares three of four additions to memory.
#[inline(always)]
fn sum_up_tile<T: Element, const WIDTH: usize>(
    first: usize,
    input: &[T],
    sums: &mut [f32],
    center: Option<&[f32]>,
) -> usize {
    let channels = sums.len();
    let center = center.map(|center| part::<f32, WIDTH>(center, first));
    let term = |i: usize, x: T| match center {
        Some(center) => (x.to_f32() - center[i]) * (x.to_f32() - center[i]),
        None => x.to_f32(),
    };
    let mut sum = [0.0; WIDTH];
    let mut fours = input.chunks_exact(4 * channels);
    for four in &mut fours {
        let a: &[T; WIDTH] = part(four, first);
        let b: &[T; WIDTH] = part(four, channels + first);
        let c: &[T; WIDTH] = part(four, 2 * channels + first);
        let d: &[T; WIDTH] = part(four, 3 * channels + first);
        for i in 0..WIDTH {
            sum[i] += (term(i, a[i]) + term(i, b[i])) + (term(i, c[i]) + term(i, d[i]));
        }
    }
    for pixel in fours.remainder().chunks_exact(channels) {
        let x: &[T; WIDTH] = part(pixel, first);
        for i in 0..WIDTH {
            sum[i] += term(i, x[i]);
        }
    }
    sums[first..first + WIDTH].copy_from_slice(&sum);
    WIDTH
}

/// `input * scale + shift`
pub struct Normalize<'a, T> {
    /// `[pixels, channels]`
    pub input: &'a [T],
    /// `[channels]`
    pub scale: &'a [f32],
    /// `[channels]`
    pub shift: &'a [f32],
    /// `[pixels, channels]`
    pub output: &'a mut [T],
}

impl<T: Element> Kernel for Normalize<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let channels = self.scale.len();
        let pixels = self.input.chunks_exact(channels);
        for (output, input) in self.output.chunks_exact_mut(channels).zip(pixels) {
            let factors = self.scale.iter().zip(self.shift);
            for ((out, x), (scale, shift)) in output.iter_mut().zip(input).zip(factors) {
                *out = T::from_f32(x.to_f32().mul_add(*scale, *shift));
            }
        }
    }
}

/// Sums of the gradient, and of its products with what differs from the mean.
pub struct GradSums<'a, T> {
    /// `[pixels, channels]`
    pub input: &'a [T],
    /// `[pixels, channels]`
    pub grad: &'a [T],
    /// `[channels]`
    pub mean: &'a [f32],
    /// `[channels]`
    pub sums: &'a mut [f32],
    /// `[channels]`
    pub products: &'a mut [f32],
}

impl<T: Element> Kernel for GradSums<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(mut self) {
        for_tiles!(self.mean.len(), sum_gradients_of_tile(&mut self));
    }
}

#[inline(always)]
fn sum_gradients_of_tile<T: Element, const WIDTH: usize>(first: usize, work: &mut GradSums<'_, T>) -> usize {
    let channels = work.mean.len();
    let mean: &[f32; WIDTH] = part(work.mean, first);
    let (mut sums, mut products) = ([0.0; WIDTH], [0.0; WIDTH]);
    let mut inputs = work.input.chunks_exact(2 * channels);
    let mut grads = work.grad.chunks_exact(2 * channels);
    for (input, grad) in (&mut inputs).zip(&mut grads) {
        let x: &[T; WIDTH] = part(input, first);
        let y: &[T; WIDTH] = part(input, channels + first);
        let dx: &[T; WIDTH] = part(grad, first);
        let dy: &[T; WIDTH] = part(grad, channels + first);
        for i in 0..WIDTH {
            let (dx, dy) = (dx[i].to_f32(), dy[i].to_f32());
            sums[i] += dx + dy;
            products[i] += (x[i].to_f32() - mean[i]).mul_add(dx, (y[i].to_f32() - mean[i]) * dy);
        }
    }
    let last = inputs.remainder().chunks_exact(channels).zip(grads.remainder().chunks_exact(channels));
    for (input, grad) in last {
        let x: &[T; WIDTH] = part(input, first);
        let dx: &[T; WIDTH] = part(grad, first);
        for i in 0..WIDTH {
            sums[i] += dx[i].to_f32();
            products[i] += (x[i].to_f32() - mean[i]) * dx[i].to_f32();
        }
    }
    work.sums[first..first + WIDTH].copy_from_slice(&sums);
    work.products[first..first + WIDTH].copy_from_slice(&products);
    WIDTH
}

/// `(grad - shift - (input - mean) * slope) * scale`: the gradient of the input, with the mean of the gradients as `shift`.
pub struct BatchNormBackward<'a, T> {
    /// `[pixels, channels]`
    pub input: &'a [T],
    /// `[pixels, channels]`
    pub grad: &'a [T],
    /// `[channels]`
    pub mean: &'a [f32],
    /// `[channels]`
    pub slope: &'a [f32],
    /// `[channels]`
    pub shift: &'a [f32],
    /// `[channels]`
    pub scale: &'a [f32],
    /// `[pixels, channels]`
    pub output: &'a mut [T],
}

impl<T: Element> Kernel for BatchNormBackward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let channels = self.mean.len();
        let pixels = self.input.chunks_exact(channels).zip(self.grad.chunks_exact(channels));
        for (output, (input, grad)) in self.output.chunks_exact_mut(channels).zip(pixels) {
            let factors = self.mean.iter().zip(self.slope).zip(self.shift.iter().zip(self.scale));
            let numbers = output.iter_mut().zip(input.iter().zip(grad));
            for ((out, (x, grad)), ((mean, slope), (shift, scale))) in numbers.zip(factors) {
                let by_mean = grad.to_f32() - shift;
                *out = T::from_f32((mean - x.to_f32()).mul_add(*slope, by_mean) * scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(input: &[f32], channels: usize) -> (Vec<f32>, Vec<f32>) {
        let (mut mean, mut squares) = (vec![1.0; channels], vec![1.0; channels]);
        Moments { input, mean: &mut mean, squares: &mut squares }.run();
        (mean, squares)
    }

    #[test]
    fn moments_are_of_each_channel() {
        let input = [1.0, 10.0, 2.0, 10.0, 3.0, 10.0, 4.0, 10.0, 5.0, 10.0];
        assert_eq!(moments(&input, 2), (vec![3.0, 10.0], vec![10.0, 0.0]));
        assert_eq!(moments(&input[..2], 2), (vec![1.0, 10.0], vec![0.0, 0.0]));
    }

    #[test]
    fn a_large_mean_does_not_hide_what_differs() {
        let input: Vec<f32> = (0..3 * NEAR).map(|i| 10_000.0 + if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
        let (mean, squares) = moments(&input, 1);
        assert_eq!(mean, [10_000.0]);
        assert_eq!(squares, [input.len() as f32]);
    }

    #[test]
    fn gradients_are_those_of_the_formula() {
        let (input, grad) = ([1.0_f32, 2.0, 6.0], [1.0_f32, -1.0, 3.0]);
        let (mut sums, mut products) = ([0.0], [0.0]);
        GradSums { input: &input, grad: &grad, mean: &[3.0], sums: &mut sums, products: &mut products }.run();
        assert_eq!((sums, products), ([3.0], [8.0])); // -2 * 1 + -1 * -1 + 3 * 3
        let mut output = [0.0; 3];
        let (mean, slope, shift, scale) = (&[3.0], &[0.5], &[1.0], &[2.0]);
        let backward =
            BatchNormBackward { input: &input, grad: &grad, mean, slope, shift, scale, output: &mut output };
        backward.run();
        assert_eq!(output, [2.0, -3.0, 1.0]);
    }
}
