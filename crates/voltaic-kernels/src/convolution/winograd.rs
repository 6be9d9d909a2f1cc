//! Convolutions of 3 x 3 in fewer multiplications: Winograd's minimal filtering, as in [Lavin and Gray,
//! 2015](https://arxiv.org/abs/1509.09308).
//!
//! A tile of `M` x `M` outputs sees `N` x `N` pixels `d`, with `N = M + 2`. With a formula's matrices `B`, `G` and `A` it is
//! `A^T [(G g G^T) * (B^T d B)] A` for the weights `g`: `N^2` multiplications for `9 M^2`. Summed over channels, each of the
//! places of a tile is a product of matrices. The derivative by `g` is `G^T [(A y A^T) * (B^T d B)] G` for gradients `y` of the
//! tile.

use std::marker::PhantomData;
use std::ops::Range;

use crate::convolution::tiling::{Places, Square, Tiling};
use crate::element::Bf16;
use crate::elementwise::pointwise::Convert;
use crate::kernel::Kernel;
use crate::memory::sized;
use crate::processor::lanes::{InLanes, LANES, Lanes};
use crate::processor::run_vectorized;
use crate::product::strips::has_strips;

/// A format of images and weights, with the formula that serves it: all is computed in float32.
///
/// float32 has 16 multiplications for 36, as exact as without the formula:
///
/// ```text
///       | 1  0 -1  0 |        |  1    0   0  |
/// B^T = | 0  1  1  0 |    G = | 1/2  1/2 1/2 |    A^T = | 1  1  1  0 |
///       | 0 -1  1  0 |        | 1/2 -1/2 1/2 |          | 0  1 -1 -1 |
///       | 0  1  0 -1 |        |  0    0   1  |
/// ```
///
/// bfloat16 has 36 for 144; that loses some of float32's digits, none that bfloat16 has:
///
/// ```text
///       | 4  0 -5  0  1  0 |        |  1/4    0     0  |
///       | 0 -4 -4  1  1  0 |        | -1/6  -1/6  -1/6 |          | 1  1  1  1  1  0 |
/// B^T = | 0  4 -4 -1  1  0 |    G = | -1/6   1/6  -1/6 |    A^T = | 0  1 -1  2 -2  0 |
///       | 0 -2 -1  2  1  0 |        | 1/24  1/12   1/6 |          | 0  1  1  4  4  0 |
///       | 0  2 -1 -2  1  0 |        | 1/24 -1/12   1/6 |          | 0  1 -1  8 -8  1 |
///       | 0  4  0 -5  0  1 |        |   0     0     1  |
/// ```
pub(crate) trait Filtering<const N: usize, const M: usize>: InLanes {
    /// `B^T d`
    type OfPixels: Transform<N, N>;
    /// `G g`
    type OfWeights: Transform<3, N>;
    /// `A^T m`
    type ToOutputs: Transform<N, M>;
    /// `A y`
    type OfGrads: Transform<M, N>;
    /// `G^T s`
    type ToWeights: Transform<N, 3>;

    /// All numbers in float32: these, or a copy.
    fn widened<'a>(numbers: &'a [Self], copy: &'a mut Vec<f32>) -> &'a [f32];
}

impl Filtering<4, 2> for f32 {
    type OfPixels = OfPixels;
    type OfWeights = OfWeights;
    type ToOutputs = ToOutputs;
    type OfGrads = OfGrads;
    type ToWeights = ToWeights;

    fn widened<'a>(numbers: &'a [Self], _copy: &'a mut Vec<f32>) -> &'a [f32] {
        numbers
    }
}

impl Filtering<6, 4> for Bf16 {
    type OfPixels = OfPixels;
    type OfWeights = OfWeights;
    type ToOutputs = ToOutputs;
    type OfGrads = OfGrads;
    type ToWeights = ToWeights;

    fn widened<'a>(numbers: &'a [Self], copy: &'a mut Vec<f32>) -> &'a [f32] {
        let copy = sized(copy, numbers.len());
        run_vectorized(Convert { numbers, copy: &mut *copy });
        copy
    }
}

/// One of the matrices, from `N` to `M` numbers.
pub(crate) trait Transform<const N: usize, const M: usize> {
    /// The product.
    fn apply(numbers: [Lanes; N]) -> [Lanes; M];

    /// Of the rows, then of the columns.
    ///
    /// # Safety
    /// As for [`Lanes::zero`].
    #[inline(always)]
    unsafe fn on_both_axes(square: Square<N>) -> Square<M> {
        // SAFETY: as this function asks.
        let zero = unsafe { Lanes::zero() };
        let mut rows = [[zero; M]; N];
        for i in 0..N {
            rows[i] = Self::apply(square[i]);
        }
        let mut out = [[zero; M]; M];
        for j in 0..M {
            let mut column = [zero; N];
            for i in 0..N {
                column[i] = rows[i][j];
            }
            let column = Self::apply(column);
            for i in 0..M {
                out[i][j] = column[i];
            }
        }
        out
    }
}

pub(crate) struct OfPixels;

impl Transform<4, 4> for OfPixels {
    #[inline(always)]
    fn apply([a, b, c, d]: [Lanes; 4]) -> [Lanes; 4] {
        [a - c, b + c, c - b, b - d]
    }
}

impl Transform<6, 6> for OfPixels {
    #[inline(always)]
    fn apply([a, b, c, d, e, f]: [Lanes; 6]) -> [Lanes; 6] {
        let (even, odd) = (e.add_product(-4.0, c), d.add_product(-4.0, b));
        let (wide_even, wide_odd) = (e - c, d - b);
        [
            e.add_product(-5.0, c).add_product(4.0, a),
            even + odd,
            even - odd,
            wide_even.add_product(2.0, wide_odd),
            wide_even.add_product(-2.0, wide_odd),
            f.add_product(-5.0, d).add_product(4.0, b),
        ]
    }
}

pub(crate) struct OfWeights;

impl Transform<3, 4> for OfWeights {
    #[inline(always)]
    fn apply([a, b, c]: [Lanes; 3]) -> [Lanes; 4] {
        let (outer, inner) = ((a + c) * 0.5, b * 0.5);
        [a, outer + inner, outer - inner, c]
    }
}

impl Transform<3, 6> for OfWeights {
    #[inline(always)]
    fn apply([a, b, c]: [Lanes; 3]) -> [Lanes; 6] {
        let (outer, inner) = ((a + c) * (-1.0 / 6.0), b * (-1.0 / 6.0));
        let (wide_outer, wide_inner) = (a * (1.0 / 24.0) + c * (1.0 / 6.0), b * (1.0 / 12.0));
        [a * 0.25, outer + inner, outer - inner, wide_outer + wide_inner, wide_outer - wide_inner, c]
    }
}

pub(crate) struct ToOutputs;

impl Transform<4, 2> for ToOutputs {
    #[inline(always)]
    fn apply([a, b, c, d]: [Lanes; 4]) -> [Lanes; 2] {
        [a + b + c, b - c - d]
    }
}

impl Transform<6, 4> for ToOutputs {
    #[inline(always)]
    fn apply([a, b, c, d, e, f]: [Lanes; 6]) -> [Lanes; 4] {
        let (sum, difference) = (b + c, b - c);
        let (wide_sum, wide_difference) = (d + e, d - e);
        [
            a + sum + wide_sum,
            difference.add_product(2.0, wide_difference),
            sum.add_product(4.0, wide_sum),
            (difference + f).add_product(8.0, wide_difference),
        ]
    }
}

pub(crate) struct OfGrads;

impl Transform<2, 4> for OfGrads {
    #[inline(always)]
    fn apply([a, b]: [Lanes; 2]) -> [Lanes; 4] {
        [a, a + b, a - b, b * -1.0]
    }
}

impl Transform<4, 6> for OfGrads {
    #[inline(always)]
    fn apply([a, b, c, d]: [Lanes; 4]) -> [Lanes; 6] {
        let (even, odd) = (a + c, b + d);
        let (wide_even, wide_odd) = (a.add_product(4.0, c), b.add_product(4.0, d));
        [
            a,
            even + odd,
            even - odd,
            wide_even.add_product(2.0, wide_odd),
            wide_even.add_product(-2.0, wide_odd),
            d,
        ]
    }
}

pub(crate) struct ToWeights;

impl Transform<4, 3> for ToWeights {
    #[inline(always)]
    fn apply([a, b, c, d]: [Lanes; 4]) -> [Lanes; 3] {
        let sum = (b + c) * 0.5;
        [a + sum, (b - c) * 0.5, sum + d]
    }
}

impl Transform<6, 3> for ToWeights {
    #[inline(always)]
    fn apply([a, b, c, d, e, f]: [Lanes; 6]) -> [Lanes; 3] {
        let (sum, wide_sum) = ((b + c) * (-1.0 / 6.0), d + e);
        [
            a * 0.25 + sum + wide_sum * (1.0 / 24.0),
            (c - b) * (1.0 / 6.0) + (d - e) * (1.0 / 12.0),
            sum + wide_sum * (1.0 / 6.0) + f,
        ]
    }
}

/// Writes the transformed tiles of some rows of tiles: of inputs, which are windows of `N` x `N` pixels, or of gradients of
/// outputs.
pub(crate) struct TransformTiles<'a, T, const N: usize, const M: usize> {
    /// All of them.
    pub images: &'a [T],
    /// How they are cut.
    pub tiling: Tiling,
    /// Whether they are gradients of outputs.
    pub are_grads: bool,
    /// Of tiles, through all images.
    pub rows: Range<usize>,
    /// `[tiles, channels]`
    pub places: Places,
    /// All of them.
    pub out: &'a mut [f32],
}

impl<T: Filtering<N, M>, const N: usize, const M: usize> Kernel for TransformTiles<'_, T, N, M> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        assert_avx512();
        // SAFETY: as was just asked.
        unsafe {
            if self.are_grads {
                self.transform::<M, T::OfGrads>();
            } else {
                self.transform::<N, T::OfPixels>();
            }
        }
    }
}

impl<T: Filtering<N, M>, const N: usize, const M: usize> TransformTiles<'_, T, N, M> {
    /// # Safety
    /// As for [`Lanes::zero`].
    #[inline(always)]
    unsafe fn transform<const K: usize, F: Transform<K, N>>(self) {
        let Tiling { tiles: [_, columns], channels, .. } = self.tiling;
        assert_eq!(self.places.shape, [self.rows.len() * columns, channels]);
        let step = self.places.step();
        assert_eq!(self.out.len(), N * N * step);
        self.tiling.check(&self.rows, self.images.len());
        let (images, out) = (self.images.as_ptr(), self.out.as_mut_ptr());
        for (row, first) in self.rows.zip((0..).step_by(columns)) {
            for column in 0..columns {
                let window = self.tiling.window::<K>(row, column);
                for channel in (0..channels).step_by(LANES) {
                    // SAFETY: all pixels of the rows are in `images`, as was checked, and the numbers of their channels
                    // in lanes; places in `out` lie below `N * N * step`.
                    unsafe {
                        let square = F::on_both_axes(window.load(images, channel));
                        let at = self.places.at(first + column, channel);
                        for (i, row) in square.into_iter().enumerate() {
                            for (j, lanes) in row.into_iter().enumerate() {
                                f32::store(lanes, out.add((i * N + j) * step + at));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Writes the outputs of some rows of tiles.
pub(crate) struct OutputTiles<'a, T, const N: usize, const M: usize> {
    /// All places of `[tiles, channels]`, row by row.
    pub sums: &'a [f32],
    /// How the outputs are cut.
    pub tiling: Tiling,
    /// Of tiles, through all images.
    pub rows: Range<usize>,
    /// A number for each channel.
    pub bias: Option<&'a [T]>,
    /// The pixels of these rows.
    pub out: &'a mut [T],
}

impl<T: Filtering<N, M>, const N: usize, const M: usize> Kernel for OutputTiles<'_, T, N, M> {
    /// Whether all outputs are finite, as far as their sums tell, which may overflow.
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        assert_avx512();
        let Tiling { tiles: [_, columns], channels, size: [_, width], .. } = self.tiling;
        let step = Places::in_rows([self.rows.len() * columns, channels]).step();
        let lines = self.tiling.lines(&self.rows);
        assert_eq!(self.sums.len(), N * N * step);
        assert_eq!(self.out.len(), lines.len() * width * channels);
        assert!(self.bias.is_none_or(|bias| bias.len() == channels));
        let (sums, out) = (self.sums.as_ptr(), self.out.as_mut_ptr());
        let start = lines.start * width * channels;
        // SAFETY: the processor has AVX-512.
        let mut checks = unsafe { Lanes::zero() };
        for (row, first) in self.rows.zip((0..).step_by(columns)) {
            for column in 0..columns {
                let window = self.tiling.window::<M>(row, column);
                for channel in (0..channels).step_by(LANES) {
                    let at = (first + column) * channels + channel;
                    // SAFETY: the processor has AVX-512; the lengths were checked, and the tiling's pixels of these rows
                    // are those of `out`.
                    unsafe {
                        let mut square = [[Lanes::zero(); N]; N];
                        for (i, row) in square.iter_mut().enumerate() {
                            for (j, lanes) in row.iter_mut().enumerate() {
                                *lanes = f32::load(sums.add((i * N + j) * step + at));
                            }
                        }
                        let bias = match self.bias {
                            Some(bias) => T::load(bias.as_ptr().add(channel)),
                            None => Lanes::zero(),
                        };
                        let square = T::ToOutputs::on_both_axes(square);
                        let total =
                            square.iter().flatten().fold(Lanes::zero(), |total, lanes| total + *lanes);
                        // 0 unless it is not finite, which stays
                        checks = checks.add_product(0.0, total);
                        for (i, row) in square.into_iter().enumerate() {
                            if window.rows.contains(&i) {
                                for (j, lanes) in row.into_iter().enumerate() {
                                    let to = window.at(i, j) + channel as isize - start as isize;
                                    T::store_some(lanes + bias, out.wrapping_offset(to), window.lanes(j));
                                }
                            }
                        }
                    }
                }
            }
        }
        checks.are_finite()
    }
}

/// Transforms weights, of which some are next to each other for each tap.
pub(crate) struct TransformWeights<'a, T, const N: usize, const M: usize> {
    /// `[9][numbers]`, a multiple of [`LANES`] of them
    pub taps: [&'a [f32]; 9],
    /// `[places][numbers]`
    pub out: [[&'a mut [f32]; N]; N],
    /// Of the convolution.
    pub format: PhantomData<T>,
}

impl<T: Filtering<N, M>, const N: usize, const M: usize> Kernel for TransformWeights<'_, T, N, M> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        assert_avx512();
        let len = self.taps[0].len();
        assert!(self.taps.iter().all(|numbers| numbers.len() == len) && len.is_multiple_of(LANES));
        assert!(self.out.iter().flatten().all(|numbers| numbers.len() == len));
        let out = self.out.map(|row| row.map(|numbers| numbers.as_mut_ptr()));
        for at in (0..len).step_by(LANES) {
            // SAFETY: the processor has AVX-512, and the lengths were checked.
            unsafe {
                let mut square = [[Lanes::zero(); 3]; 3];
                for tap in 0..9 {
                    square[tap / 3][tap % 3] = f32::load(self.taps[tap].as_ptr().add(at));
                }
                let square = T::OfWeights::on_both_axes(square);
                for i in 0..N {
                    for j in 0..N {
                        f32::store(square[i][j], out[i][j].add(at));
                    }
                }
            }
        }
    }
}

/// Writes the gradients of weights `[outputs, 3, 3, inputs]`.
pub(crate) struct WeightGrads<'a, T, const N: usize, const M: usize> {
    /// `[parts]` of all places, which are summed.
    pub sums: &'a [f32],
    /// `[all outputs, inputs]`, row by row.
    pub places: Places,
    /// Those that are written.
    pub outputs: Range<usize>,
    /// The gradients.
    pub out: &'a mut [T],
}

impl<T: Filtering<N, M>, const N: usize, const M: usize> Kernel for WeightGrads<'_, T, N, M> {
    /// Whether all gradients are finite, as far as their sums tell, which may overflow.
    type Output = bool;

    #[inline(always)]
    fn run(self) -> bool {
        assert_avx512();
        let ([all, inputs], step) = (self.places.shape, self.places.step());
        assert!(inputs.is_multiple_of(LANES) && self.sums.len().is_multiple_of(N * N * step));
        assert!(self.outputs.end <= all && self.out.len() == 9 * self.outputs.len() * inputs);
        // SAFETY: the processor has AVX-512.
        let mut checks = unsafe { Lanes::zero() };
        for (output, out) in self.outputs.zip(self.out.chunks_exact_mut(9 * inputs)) {
            for channel in (0..inputs).step_by(LANES) {
                // SAFETY: the processor has AVX-512, and the lengths were checked.
                unsafe {
                    let mut square = [[Lanes::zero(); N]; N];
                    for part in self.sums.chunks_exact(N * N * step) {
                        let part = part.as_ptr().add(self.places.at(output, channel));
                        for (i, row) in square.iter_mut().enumerate() {
                            for (j, lanes) in row.iter_mut().enumerate() {
                                *lanes = *lanes + f32::load(part.add((i * N + j) * step));
                            }
                        }
                    }
                    let square = T::ToWeights::on_both_axes(square);
                    let total = square.iter().flatten().fold(Lanes::zero(), |total, lanes| total + *lanes);
                    checks = checks.add_product(0.0, total);
                    for tap in 0..9 {
                        let to = out.as_mut_ptr().add(tap * inputs + channel);
                        T::store(square[tap / 3][tap % 3], to);
                    }
                }
            }
        }
        checks.are_finite()
    }
}

fn assert_avx512() {
    assert!(has_strips(), "no AVX-512");
}
