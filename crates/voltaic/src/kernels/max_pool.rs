//! Max-pooling with windows of 2 x 2 that do not overlap, as `torch.nn.functional.max_pool2d(x, 2)`.

use super::Kernel;
use super::element::Element;

/// The largest of each window of a plane, and where in the plane it is. As in libtorch the first of equal numbers wins,
/// and the last NaN.
pub struct MaxPool2d<'a, T> {
    /// `[height, width]`, both even.
    pub input: &'a [T],
    /// `[height / 2, width / 2]`
    pub output: &'a mut [T],
    /// `[height / 2, width / 2]`
    pub indices: &'a mut [i64],
    /// Numbers in a row of the input.
    pub width: usize,
}

impl<T: Element> Kernel for MaxPool2d<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { input, output, indices, width } = self;
        let rows = input.chunks_exact(2 * width).zip(output.chunks_exact_mut(width / 2));
        for (y, ((pair, output), indices)) in rows.zip(indices.chunks_exact_mut(width / 2)).enumerate() {
            let (upper, lower) = pair.split_at(width);
            let first = (2 * y * width) as i64;
            let windows = upper.chunks_exact(2).zip(lower.chunks_exact(2));
            for (x, ((upper, lower), (out, index))) in windows.zip(output.iter_mut().zip(indices)).enumerate()
            {
                let (mut best, mut at) = (upper[0], 0);
                for (candidate, offset) in
                    [(upper[1], 1), (lower[0], width as u32), (lower[1], width as u32 + 1)]
                {
                    let value = candidate.to_f32();
                    let wins = value > best.to_f32() || value.is_nan();
                    best = if wins { candidate } else { best };
                    at = if wins { offset } else { at };
                }
                *out = best;
                *index = first + (2 * x as u32 + at) as i64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equals_and_the_last_nan_win() {
        let nan = f32::NAN;
        let input = [1.0, 1.0, nan, 2.0, 1.0, 0.0, nan, 3.0];
        let (mut output, mut indices) = ([0.0; 2], [0; 2]);
        MaxPool2d { input: &input, output: &mut output, indices: &mut indices, width: 4 }.run();
        assert!(output[0] == 1.0 && output[1].is_nan());
        assert_eq!(indices, [0, 6]);
    }
}
