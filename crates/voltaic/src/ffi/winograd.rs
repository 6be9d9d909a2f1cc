//! Convolutions of 3 x 3 in fewer multiplications: Winograd's minimal filtering `F(2 x 2, 3 x 3)`, as in [Lavin and Gray,
//! 2015](https://arxiv.org/abs/1509.09308).
//!
//! A tile of 2 x 2 outputs sees 4 x 4 pixels `d`. With the matrices
//!
//! ```text
//!       | 1  0 -1  0 |        |  1    0   0  |
//! B^T = | 0  1  1  0 |    G = | 1/2  1/2 1/2 |    A^T = | 1  1  1  0 |
//!       | 0 -1  1  0 |        | 1/2 -1/2 1/2 |          | 0  1 -1 -1 |
//!       | 0  1  0 -1 |        |  0    0   1  |
//! ```
//!
//! it is `A^T [(G g G^T) * (B^T d B)] A` for the weights `g`: 16 multiplications for 36. Summed over channels, each of the 16
//! places is a product of matrices. The derivative by `g` is `G^T [(A y A^T) * (B^T d B)] G` for gradients `y` of the tile.

use std::ops::Range;

use super::lanes::{LANES, Lanes};
use super::strips::{COLUMNS, has_strips};
use crate::kernels::Kernel;

/// Places of a transformed tile.
pub(super) const PLACES: usize = 16;

type Square<const N: usize> = [[Lanes; N]; N];

/// One of the matrices, from `N` to `M` numbers.
trait Transform<const N: usize, const M: usize> {
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

/// `B^T d`
struct OfPixels;

impl Transform<4, 4> for OfPixels {
    #[inline(always)]
    fn apply([a, b, c, d]: [Lanes; 4]) -> [Lanes; 4] {
        [a - c, b + c, c - b, b - d]
    }
}

/// `G g`
struct OfWeights;

impl Transform<3, 4> for OfWeights {
    #[inline(always)]
    fn apply([a, b, c]: [Lanes; 3]) -> [Lanes; 4] {
        let (outer, inner) = ((a + c) * 0.5, b * 0.5);
        [a, outer + inner, outer - inner, c]
    }
}

/// `A^T m`
struct ToOutputs;

impl Transform<4, 2> for ToOutputs {
    #[inline(always)]
    fn apply([a, b, c, d]: [Lanes; 4]) -> [Lanes; 2] {
        [a + b + c, b - c - d]
    }
}

/// `A y`
struct OfGrads;

impl Transform<2, 4> for OfGrads {
    #[inline(always)]
    fn apply([a, b]: [Lanes; 2]) -> [Lanes; 4] {
        [a, a + b, a - b, b * -1.0]
    }
}

/// `G^T s`
struct ToWeights;

impl Transform<4, 3> for ToWeights {
    #[inline(always)]
    fn apply([a, b, c, d]: [Lanes; 4]) -> [Lanes; 3] {
        let sum = (b + c) * 0.5;
        [a + sum, (b - c) * 0.5, sum + d]
    }
}

/// Images `[images, height, width, channels]` in tiles: rows of them, one after the other through all images.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tiling {
    /// Height and width of an image.
    pub size: [usize; 2],
    /// Rows and columns of tiles of an image.
    pub tiles: [usize; 2],
    /// Numbers of a pixel: a multiple of [`LANES`].
    pub channels: usize,
    /// The first row and column of the first tile, which may lie before the image.
    pub first: isize,
}

impl Tiling {
    /// Of outputs: each pixel is in one tile.
    pub fn of_outputs(size: [usize; 2], channels: usize) -> Self {
        Self { size, tiles: size.map(|pixels| pixels.div_ceil(2)), channels, first: 0 }
    }

    /// The rows of images, one after the other through all images, that some rows of tiles cover.
    pub fn lines(&self, rows: &Range<usize>) -> Range<usize> {
        let line = |row: usize| {
            let (image, row) = (row / self.tiles[0], row % self.tiles[0]);
            image * self.size[0] + 2 * row
        };
        line(rows.start)..line(rows.end)
    }

    /// Fails unless all images of these rows lie in `len` numbers, and channels in lanes.
    fn check(&self, rows: &Range<usize>, len: usize) {
        let images = rows.end.div_ceil(self.tiles[0]);
        assert!(images * self.size[0] * self.size[1] * self.channels <= len, "{self:?}, {rows:?} in {len}");
        assert!(self.channels.is_multiple_of(LANES), "{self:?}");
    }

    /// Where the numbers of `N` x `N` pixels start; [`OUTSIDE`] for those outside of the image.
    #[inline(always)]
    fn window<const N: usize>(&self, row: usize, column: usize) -> [[usize; N]; N] {
        let (image, row) = (row / self.tiles[0], row % self.tiles[0]);
        let [height, width] = self.size;
        let mut window = [[OUTSIDE; N]; N];
        for (i, places) in window.iter_mut().enumerate() {
            let y = (2 * row + i).wrapping_add_signed(self.first);
            for (j, place) in places.iter_mut().enumerate() {
                let x = (2 * column + j).wrapping_add_signed(self.first);
                if y < height && x < width {
                    *place = ((image * height + y) * width + x) * self.channels;
                }
            }
        }
        window
    }
}

/// No pixel.
const OUTSIDE: usize = usize::MAX;

/// How transformed tiles lie in each place.
#[derive(Debug, Clone, Copy)]
pub(super) enum TileOrder {
    /// `[tiles, channels]`
    Rows,
    /// `[strips of channels, tiles, channels of the strip]`
    Strips,
}

impl TileOrder {
    /// Numbers of a place.
    pub fn len(self, tiles: usize, channels: usize) -> usize {
        match self {
            Self::Rows => tiles * channels,
            Self::Strips => tiles * channels.next_multiple_of(COLUMNS),
        }
    }

    #[inline(always)]
    fn at(self, tiles: usize, channels: usize, tile: usize, channel: usize) -> usize {
        match self {
            Self::Rows => tile * channels + channel,
            Self::Strips => (channel / COLUMNS * tiles + tile) * COLUMNS + channel % COLUMNS,
        }
    }
}

/// Writes the transformed tiles of some rows of tiles: of inputs, which are windows of 4 x 4 pixels, or of gradients of
/// outputs.
pub(super) struct TransformTiles<'a> {
    /// All of them.
    pub images: &'a [f32],
    /// How they are cut.
    pub tiling: Tiling,
    /// Whether they are gradients of outputs.
    pub are_grads: bool,
    /// Of tiles, through all images.
    pub rows: Range<usize>,
    /// The order in each place.
    pub order: TileOrder,
    /// `[places, ...]`
    pub out: &'a mut [f32],
}

impl Kernel for TransformTiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        assert_avx512();
        // SAFETY: as was just asked.
        unsafe {
            if self.are_grads {
                self.transform::<2, OfGrads>();
            } else {
                self.transform::<4, OfPixels>();
            }
        }
    }
}

impl TransformTiles<'_> {
    /// # Safety
    /// As for [`Lanes::zero`].
    #[inline(always)]
    unsafe fn transform<const N: usize, F: Transform<N, 4>>(self) {
        let Tiling { tiles: [_, columns], channels, .. } = self.tiling;
        let tiles = self.rows.len() * columns;
        let len = self.order.len(tiles, channels);
        assert_eq!(self.out.len(), PLACES * len);
        self.tiling.check(&self.rows, self.images.len());
        let (images, out) = (self.images.as_ptr(), self.out.as_mut_ptr());
        for (row, first) in self.rows.zip((0..).step_by(columns)) {
            for column in 0..columns {
                let window = self.tiling.window::<N>(row, column);
                for channel in (0..channels).step_by(LANES) {
                    // SAFETY: all pixels of the rows are in `images`, as was checked, and the numbers of their channels
                    // in lanes; places in `out` lie below `PLACES * len`.
                    unsafe {
                        let mut square = [[Lanes::zero(); N]; N];
                        for i in 0..N {
                            for j in 0..N {
                                if window[i][j] != OUTSIDE {
                                    square[i][j] = Lanes::load(images.add(window[i][j] + channel));
                                }
                            }
                        }
                        let square = F::on_both_axes(square);
                        let at = self.order.at(tiles, channels, first + column, channel);
                        for i in 0..PLACES {
                            square[i / 4][i % 4].store(out.add(i * len + at));
                        }
                    }
                }
            }
        }
    }
}

/// Writes the outputs of some rows of tiles.
pub(super) struct OutputTiles<'a> {
    /// `[places, tiles, channels]`
    pub sums: &'a [f32],
    /// How the outputs are cut.
    pub tiling: Tiling,
    /// Of tiles, through all images.
    pub rows: Range<usize>,
    /// A number for each channel.
    pub bias: Option<&'a [f32]>,
    /// The pixels of these rows.
    pub out: &'a mut [f32],
}

impl Kernel for OutputTiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        assert_avx512();
        let Tiling { tiles: [_, columns], channels, size: [_, width], .. } = self.tiling;
        let len = self.rows.len() * columns * channels;
        let lines = self.tiling.lines(&self.rows);
        assert_eq!(self.sums.len(), PLACES * len);
        assert_eq!(self.out.len(), lines.len() * width * channels);
        assert!(self.bias.is_none_or(|bias| bias.len() == channels));
        let (sums, out) = (self.sums.as_ptr(), self.out.as_mut_ptr());
        let start = lines.start * width * channels;
        for (row, first) in self.rows.zip((0..).step_by(columns)) {
            for column in 0..columns {
                let window = self.tiling.window::<2>(row, column);
                for channel in (0..channels).step_by(LANES) {
                    let at = (first + column) * channels + channel;
                    // SAFETY: the processor has AVX-512; the lengths were checked, and the tiling's pixels of these rows
                    // are those of `out`.
                    unsafe {
                        let mut square = [[Lanes::zero(); 4]; 4];
                        for i in 0..PLACES {
                            square[i / 4][i % 4] = Lanes::load(sums.add(i * len + at));
                        }
                        let bias = match self.bias {
                            Some(bias) => Lanes::load(bias.as_ptr().add(channel)),
                            None => Lanes::zero(),
                        };
                        let square = ToOutputs::on_both_axes(square);
                        for i in 0..2 {
                            for j in 0..2 {
                                if window[i][j] != OUTSIDE {
                                    (square[i][j] + bias).store(out.add(window[i][j] + channel - start));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Transforms weights, of which some are next to each other for each tap.
pub(super) struct TransformWeights<'a> {
    /// `[9][numbers]`, a multiple of [`LANES`] of them
    pub taps: [&'a [f32]; 9],
    /// `[places][numbers]`
    pub out: [&'a mut [f32]; PLACES],
}

impl Kernel for TransformWeights<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        assert_avx512();
        let len = self.taps[0].len();
        assert!(self.taps.iter().all(|numbers| numbers.len() == len) && len.is_multiple_of(LANES));
        assert!(self.out.iter().all(|numbers| numbers.len() == len));
        let out = self.out.map(|numbers| numbers.as_mut_ptr());
        for at in (0..len).step_by(LANES) {
            // SAFETY: the processor has AVX-512, and the lengths were checked.
            unsafe {
                let mut square = [[Lanes::zero(); 3]; 3];
                for tap in 0..9 {
                    square[tap / 3][tap % 3] = Lanes::load(self.taps[tap].as_ptr().add(at));
                }
                let square = OfWeights::on_both_axes(square);
                for i in 0..PLACES {
                    square[i / 4][i % 4].store(out[i].add(at));
                }
            }
        }
    }
}

/// Writes the gradients of weights `[outputs, 3, 3, inputs]`.
pub(super) struct WeightGrads<'a> {
    /// `[parts][places][all outputs, inputs]`; parts are summed
    pub sums: &'a [f32],
    /// Numbers of a place.
    pub len: usize,
    /// Those that are written.
    pub outputs: Range<usize>,
    /// A multiple of [`LANES`].
    pub inputs: usize,
    /// The gradients.
    pub out: &'a mut [f32],
}

impl Kernel for WeightGrads<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        assert_avx512();
        let (inputs, len) = (self.inputs, self.len);
        assert!(inputs.is_multiple_of(LANES) && self.sums.len().is_multiple_of(PLACES * len));
        assert!(self.outputs.end * inputs <= len && self.out.len() == 9 * self.outputs.len() * inputs);
        for (output, out) in self.outputs.zip(self.out.chunks_exact_mut(9 * inputs)) {
            for channel in (0..inputs).step_by(LANES) {
                // SAFETY: the processor has AVX-512, and the lengths were checked.
                unsafe {
                    let mut square = [[Lanes::zero(); 4]; 4];
                    for part in self.sums.chunks_exact(PLACES * len) {
                        let part = part.as_ptr().add(output * inputs + channel);
                        for i in 0..PLACES {
                            square[i / 4][i % 4] = square[i / 4][i % 4] + Lanes::load(part.add(i * len));
                        }
                    }
                    let square = ToWeights::on_both_axes(square);
                    for tap in 0..9 {
                        let to = out.as_mut_ptr().add(tap * inputs + channel);
                        square[tap / 3][tap % 3].store(to);
                    }
                }
            }
        }
    }
}

fn assert_avx512() {
    assert!(has_strips(), "no AVX-512");
}
