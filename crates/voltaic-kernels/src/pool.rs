//! Max-pooling with windows of 2 x 2 that do not overlap, as `torch.nn.functional.max_pool2d(x, 2)`.

use crate::element::Element;
use crate::kernel::Kernel;
use crate::processor::run_vectorized;
use crate::threads::GRAIN;
use crate::views::{Floats, FloatsMut, for_units, for_units_of_both, in_one_format};

/// Pairs of rows of images `[height, width, channels]` that follow each other in memory: a row of windows each.
#[derive(Debug, Clone, Copy)]
pub struct RowPairs {
    /// The pairs before these, from the first image on.
    pub start: usize,
    /// Rows of an image, even.
    pub height: usize,
    /// Pixels of a row, even.
    pub width: usize,
    /// Numbers of a pixel; 1 for planes.
    pub channels: usize,
}

impl RowPairs {
    /// Numbers of a row.
    pub fn row_len(&self) -> usize {
        self.width * self.channels
    }

    /// The first pixel of a pair in its image.
    #[inline(always)]
    fn first_pixel(&self, pair: usize) -> usize {
        (self.start + pair) % (self.height / 2) * 2 * self.width
    }
}

/// The largest of each window, and which pixel of the image it is: the first of equal numbers, and the last NaN, as in
/// libtorch.
pub struct MaxPool2d<'a, T> {
    /// Where the numbers lie.
    pub pairs: RowPairs,
    /// `[pairs, 2, width, channels]`
    pub input: &'a [T],
    /// `[pairs, width / 2, channels]`
    pub output: &'a mut [T],
    /// `[pairs, width / 2, channels]`
    pub indices: &'a mut [i64],
}

impl<T: Element> Kernel for MaxPool2d<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { pairs, input, output, indices } = self;
        let (row, width) = (pairs.row_len(), pairs.width as u32);
        let outputs = output.chunks_exact_mut(row / 2).zip(indices.chunks_exact_mut(row / 2));
        for (i, (input, (output, indices))) in input.chunks_exact(2 * row).zip(outputs).enumerate() {
            let (upper, lower) = input.split_at(row);
            let pixel = pairs.first_pixel(i);
            if pairs.channels == 1 {
                let windows = upper.chunks_exact(2).zip(lower.chunks_exact(2));
                let outputs = output.iter_mut().zip(indices);
                for (x, ((upper, lower), (out, index))) in windows.zip(outputs).enumerate() {
                    let (best, at) = largest([upper[0], upper[1], lower[0], lower[1]], width);
                    (*out, *index) = (best, (pixel + 2 * x) as i64 + i64::from(at));
                }
            } else {
                let channels = pairs.channels;
                let windows = upper.chunks_exact(2 * channels).zip(lower.chunks_exact(2 * channels));
                let outputs = output.chunks_exact_mut(channels).zip(indices.chunks_exact_mut(channels));
                for (x, ((upper, lower), (output, indices))) in windows.zip(outputs).enumerate() {
                    let [(a, b), (c, d)] = [upper, lower].map(|row| row.split_at(channels));
                    let inputs = a.iter().zip(b).zip(c.iter().zip(d));
                    for (((a, b), (c, d)), (out, index)) in inputs.zip(output.iter_mut().zip(indices)) {
                        let (best, at) = largest([*a, *b, *c, *d], width);
                        (*out, *index) = (best, (pixel + 2 * x) as i64 + i64::from(at));
                    }
                }
            }
        }
    }
}

/// The largest of `[upper left, upper right, lower left, lower right]`, and how many pixels it lies behind the first.
#[inline(always)]
fn largest<T: Element>(window: [T; 4], width: u32) -> (T, u32) {
    let (mut best, mut at) = (window[0], 0);
    for (candidate, place) in [(window[1], 1), (window[2], width), (window[3], width + 1)] {
        let value = candidate.to_f32();
        let wins = value > best.to_f32() || value.is_nan();
        best = if wins { candidate } else { best };
        at = if wins { place } else { at };
    }
    (best, at)
}

/// The gradient of [`MaxPool2d`]: each number goes to where its window was largest, and 0 to the rest of the window.
pub struct MaxPool2dBackward<'a, T> {
    /// Where the numbers lie.
    pub pairs: RowPairs,
    /// `[pairs, width / 2, channels]`
    pub grad: &'a [T],
    /// `[pairs, width / 2, channels]`
    pub indices: &'a [i64],
    /// `[pairs, 2, width, channels]`
    pub output: &'a mut [T],
}

impl<T: Element> Kernel for MaxPool2dBackward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { pairs, grad, indices, output } = self;
        let (row, width, channels) = (pairs.row_len(), pairs.width as u32, pairs.channels);
        let grads = grad.chunks_exact(row / 2).zip(indices.chunks_exact(row / 2));
        for (i, (output, (grad, indices))) in output.chunks_exact_mut(2 * row).zip(grads).enumerate() {
            let (upper, lower) = output.split_at_mut(row);
            let windows = upper.chunks_exact_mut(2 * channels).zip(lower.chunks_exact_mut(2 * channels));
            let grads = grad.chunks_exact(channels).zip(indices.chunks_exact(channels));
            for (x, ((upper, lower), (grad, indices))) in windows.zip(grads).enumerate() {
                let pixel = (pairs.first_pixel(i) + 2 * x) as i64;
                let [(a, b), (c, d)] = [upper, lower].map(|row| row.split_at_mut(channels));
                spread(grad, indices, pixel, [(a, 0), (b, 1), (c, width), (d, width + 1)]);
            }
        }
    }
}

/// Writes each number of `grad` to the pixel of the window that `indices` name, and 0 to the others.
///
/// Works on blocks in arrays of its own, which spares the loops to ask whether the slices overlap.
#[inline(always)]
fn spread<T: Element>(grad: &[T], indices: &[i64], pixel: i64, window: [(&mut [T], u32); 4]) {
    const BLOCK: usize = 64;
    let (mut sums, mut at) = ([T::default(); BLOCK], [0; BLOCK]);
    let mut window = window.map(|(numbers, place)| (numbers.chunks_mut(BLOCK), place));
    for (grad, indices) in grad.chunks(BLOCK).zip(indices.chunks(BLOCK)) {
        // libtorch adds to 0, which loses the sign of -0
        sums.iter_mut().zip(grad).for_each(|(sum, grad)| *sum = T::from_f32(0.0 + grad.to_f32()));
        at.iter_mut().zip(indices).for_each(|(at, index)| *at = (*index - pixel) as u32);
        for (numbers, place) in &mut window {
            let numbers = numbers.next().unwrap_or_default().iter_mut();
            numbers.zip(&sums).zip(&at).for_each(|((number, sum), at)| {
                *number = if *at == *place { *sum } else { T::default() };
            });
        }
    }
}

/// [`MaxPool2d`] of whole images, on all threads; `images` starts with the first pair.
///
/// # Panics
/// If formats or lengths differ.
pub fn max_pool2d(images: RowPairs, input: Floats, output: FloatsMut, indices: &mut [i64]) {
    fn run<T: Element>(images: RowPairs, input: &[T], output: &mut [T], indices: &mut [i64]) {
        assert_eq!(input.len(), 4 * output.len());
        let pooled = images.row_len() / 2;
        for_units_of_both((output, indices), pooled, grain(pooled), |pairs, output, indices| {
            let input = &input[4 * pooled * pairs.start..4 * pooled * pairs.end];
            let pairs = RowPairs { start: pairs.start, ..images };
            run_vectorized(MaxPool2d { pairs, input, output, indices });
        });
    }
    in_one_format!([input] [output] => run(images, input, output, indices));
}

/// [`MaxPool2dBackward`] of whole images, on all threads; `images` starts with the first pair.
///
/// # Panics
/// If formats or lengths differ.
pub fn max_pool2d_backward(images: RowPairs, grad: Floats, indices: &[i64], output: FloatsMut) {
    fn run<T: Element>(images: RowPairs, grad: &[T], indices: &[i64], output: &mut [T]) {
        assert_eq!([4 * grad.len(), 4 * indices.len()], [output.len(); 2]);
        let pooled = images.row_len() / 2;
        for_units(output, 4 * pooled, grain(pooled), |pairs, output| {
            let part = pooled * pairs.start..pooled * pairs.end;
            let (grad, indices) = (&grad[part.clone()], &indices[part]);
            let pairs = RowPairs { start: pairs.start, ..images };
            run_vectorized(MaxPool2dBackward { pairs, grad, indices, output });
        });
    }
    in_one_format!([grad] [output] => run(images, grad, indices, output));
}

/// Pairs of rows that are worth a thread.
fn grain(pooled: usize) -> usize {
    (GRAIN / pooled / 4).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(pairs: RowPairs, input: &[f32]) -> (Vec<f32>, Vec<i64>) {
        let (mut output, mut indices) = (vec![0.0; input.len() / 4], vec![0; input.len() / 4]);
        MaxPool2d { pairs, input, output: &mut output, indices: &mut indices }.run();
        (output, indices)
    }

    #[test]
    fn the_first_of_equals_and_the_last_nan_win() {
        let nan = f32::NAN;
        let input = [1.0, 1.0, nan, 2.0, 1.0, 0.0, nan, 3.0];
        let pairs = RowPairs { start: 0, height: 2, width: 4, channels: 1 };
        let (output, indices) = pool(pairs, &input);
        assert!(output[0] == 1.0 && output[1].is_nan());
        assert_eq!(indices, [0, 6]);
    }

    #[test]
    fn indices_count_from_the_start_of_each_image() {
        let pairs = RowPairs { start: 1, height: 4, width: 2, channels: 1 };
        let input = [0.0, 1.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0];
        assert_eq!(pool(pairs, &input), (vec![1.0, 3.0, 2.0], vec![5, 0, 6]));
    }

    #[test]
    fn pixels_may_have_several_numbers() {
        let pairs = RowPairs { start: 1, height: 4, width: 4, channels: 2 };
        let upper = [[1.0, 5.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]];
        let lower = [[0.0, 7.0], [0.0, 0.0], [9.0, 0.0], [0.0, 4.0]];
        let (output, indices) = pool(pairs, [upper, lower].as_flattened().as_flattened());
        assert_eq!(output, [1.0, 7.0, 9.0, 4.0]);
        assert_eq!(indices, [8, 12, 14, 15]);

        let (grad, mut back) = ([-1.0, 2.0, -0.0, 4.0], [1.0_f32; 16]);
        MaxPool2dBackward { pairs, grad: &grad, indices: &indices, output: &mut back }.run();
        let mut expected = [0.0_f32; 16];
        (expected[0], expected[9], expected[15]) = (-1.0, 2.0, 4.0);
        assert_eq!(back.map(f32::to_bits), expected.map(f32::to_bits));
    }
}
