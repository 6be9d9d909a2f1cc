//! Right factors of products, brought into the order in which tiles of the product read them.
//!
//! A strip holds [`COLUMNS`] columns of the matrix, row after row: of float32 a number in each place of 32 bits, of
//! bfloat16 a pair of numbers, which are from two rows and the same column.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512i, _mm256_loadu_si256, _mm512_cvtepu16_epi32, _mm512_maskz_loadu_epi32, _mm512_or_si512,
    _mm512_shuffle_i32x4, _mm512_slli_epi32, _mm512_storeu_si512, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;

use crate::element::{Bf16, Element};
use crate::kernel::Kernel;
use crate::memory::sized;
use crate::processor::lanes::LANES;
use crate::processor::{has_avx512, run_vectorized};
use crate::product::matrix::{Matrix, MatrixMut};

/// Columns of a strip.
pub(crate) const COLUMNS: usize = 32;

/// A number that fills 32 bits alone, or with others of the next rows.
pub trait Packed: Element {
    /// Numbers in 32 bits.
    const PER_LANE: usize;

    /// Those of these numbers, the first one lowest.
    fn lane(numbers: impl Fn(usize) -> Self) -> u32;

    /// The lanes of a row of a strip, given the address of its numbers that come first, second and so on in a lane.
    ///
    /// # Safety
    /// The numbers must be readable, and none of the lanes; the processor must have AVX-512.
    unsafe fn fill(lanes: &mut [u32; COLUMNS], column: impl Fn(usize) -> *const Self);
}

impl Packed for f32 {
    const PER_LANE: usize = 1;

    #[inline(always)]
    fn lane(numbers: impl Fn(usize) -> Self) -> u32 {
        numbers(0).to_bits()
    }

    #[inline(always)]
    unsafe fn fill(lanes: &mut [u32; COLUMNS], column: impl Fn(usize) -> *const Self) {
        // SAFETY: as this function asks.
        unsafe { ptr::copy_nonoverlapping(column(0).cast(), lanes.as_mut_ptr(), COLUMNS) };
    }
}

impl Packed for Bf16 {
    const PER_LANE: usize = 2;

    #[inline(always)]
    fn lane(numbers: impl Fn(usize) -> Self) -> u32 {
        u32::from(numbers(0).0) | u32::from(numbers(1).0) << 16
    }

    #[inline(always)]
    unsafe fn fill(lanes: &mut [u32; COLUMNS], column: impl Fn(usize) -> *const Self) {
        for (lanes, first) in lanes.chunks_exact_mut(LANES).zip((0..).step_by(LANES)) {
            // SAFETY: as this function asks; there are 16 lanes of 32 bits.
            unsafe { fill_pairs(lanes, [0, 1].map(|k| column(k).wrapping_add(first))) };
        }
    }
}

/// Whether the processor has what strips are made with.
pub fn has_strips() -> bool {
    has_avx512()
}

/// A right factor in strips, for any number of products, or a part of one.
#[derive(Debug, Clone, Copy)]
pub struct Strips<'a, T> {
    strips: &'a [u32],
    /// Lanes of a whole strip.
    lanes: usize,
    /// Where the part starts: lane and column.
    start: [usize; 2],
    shape: [usize; 2],
    format: PhantomData<T>,
}

impl<'a> Strips<'a, f32> {
    /// A matrix of this shape that was written in strips.
    ///
    /// # Panics
    /// If there are too few numbers.
    pub fn of_numbers(numbers: &'a [f32], shape: [usize; 2]) -> Self {
        assert!(
            shape[0] * shape[1].next_multiple_of(COLUMNS) <= numbers.len(),
            "{shape:?}, {}",
            numbers.len()
        );
        // SAFETY: both have 32 bits, and all bits are numbers.
        let strips = unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) };
        Self { strips, lanes: shape[0], start: [0; 2], shape, format: PhantomData }
    }

    /// All numbers, strip by strip.
    pub(crate) fn numbers(self) -> &'a [f32] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.strips.as_ptr().cast(), self.strips.len()) }
    }
}

impl<'a, T: Packed> Strips<'a, T> {
    /// Brings a matrix into `strips`.
    ///
    /// # Panics
    /// If the processor does not have what [`has_strips`] asks for, or the matrix no numbers.
    pub fn new(matrix: Matrix<T>, strips: &'a mut Vec<u32>) -> Self {
        assert!(has_strips(), "no AVX-512");
        let shape = matrix.shape();
        assert!(!shape.contains(&0), "{shape:?}");
        // SAFETY: the constructor of the matrix checked that its numbers lie in its slice.
        let strips = unsafe { pack(strips, Numbers::new(matrix).transposed(), shape[1], shape[0]) };
        Self::of_lanes(strips, shape)
    }

    /// A matrix of this shape whose strips are there.
    pub(crate) fn of_lanes(strips: &'a [u32], shape: [usize; 2]) -> Self {
        Self { strips, lanes: shape[0].div_ceil(T::PER_LANE), start: [0; 2], shape, format: PhantomData }
    }

    /// Some of its rows and columns.
    ///
    /// # Panics
    /// If it does not have them, there are none, or the first are not at the beginning of a lane and of a strip.
    pub fn part(self, [rows, columns]: [Range<usize>; 2]) -> Self {
        assert!(
            rows.end <= self.shape[0] && columns.end <= self.shape[1],
            "{rows:?}, {columns:?} of {:?}",
            self.shape
        );
        assert!(rows.start % T::PER_LANE == 0 && columns.start % COLUMNS == 0, "{rows:?}, {columns:?}");
        assert!(!rows.is_empty() && !columns.is_empty(), "{rows:?}, {columns:?}");
        let start = [self.start[0] + rows.start / T::PER_LANE, self.start[1] + columns.start];
        Self { start, shape: [rows.len(), columns.len()], ..self }
    }

    /// Rows and columns.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Fails unless `out` can be the product of `a` and this; else gives the lanes of the product.
    pub(crate) fn check_product(&self, out: &MatrixMut, a: &Matrix<T>) -> usize {
        let ([rows, columns], [height, depth]) = (out.shape(), a.shape());
        assert!(
            rows == height && [depth, columns] == self.shape,
            "{:?} of {:?} and {:?}",
            out.shape(),
            a.shape(),
            self.shape
        );
        depth.div_ceil(T::PER_LANE)
    }

    /// The first `lanes` lanes of the strip that starts with column `first` of the part.
    pub(crate) fn strip(&self, first: usize, lanes: usize) -> &'a [u32] {
        &self.strips[(self.start[1] + first) * self.lanes + self.start[0] * COLUMNS..][..lanes * COLUMNS]
    }
}

/// The numbers of a matrix by their address; strides in numbers, from row to row and from column to column.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Numbers<T> {
    pub data: *const T,
    pub strides: [isize; 2],
}

impl<T> Numbers<T> {
    pub fn new(matrix: Matrix<T>) -> Self {
        let (data, strides) = matrix.into_parts();
        Self { data, strides }
    }

    pub fn transposed(self) -> Self {
        let [down, right] = self.strides;
        Self { strides: [right, down], ..self }
    }

    pub fn at_row(self, row: usize) -> Self {
        self.at([row, 0])
    }

    /// From a row and a column on.
    pub fn at(self, [row, column]: [usize; 2]) -> Self {
        let [down, right] = self.strides;
        Self { data: self.data.wrapping_offset(row as isize * down + column as isize * right), ..self }
    }
}

impl<T: Packed> Numbers<T> {
    /// The numbers of a row that share lane `lane`, with zeros from column `depth` on.
    ///
    /// # Safety
    /// The row must be there, with `depth` readable columns.
    #[inline(always)]
    unsafe fn lane(self, row: usize, lane: usize, depth: usize) -> u32 {
        let ([_, right], first) = (self.strides, lane * T::PER_LANE);
        T::lane(|k| {
            // SAFETY: as this function asks.
            let number = |j| unsafe { *self.at_row(row).data.offset(j as isize * right) };
            if first + k < depth { number(first + k) } else { T::default() }
        })
    }
}

/// Brings a matrix into strips of as many rows, filled up with zeros: `strips[strip][lane of columns][row]`.
///
/// # Safety
/// The numbers of the matrix must be readable; the processor must have what [`has_strips`] asks for.
pub(crate) unsafe fn pack<T: Packed>(
    strips: &mut Vec<u32>,
    matrix: Numbers<T>,
    rows: usize,
    depth: usize,
) -> &[u32] {
    let strips = sized(strips, rows.div_ceil(COLUMNS) * depth.div_ceil(T::PER_LANE) * COLUMNS);
    // SAFETY: as this function asks.
    unsafe { pack_into(strips, matrix, rows, depth) };
    strips
}

/// The same, into strips that are there.
///
/// # Safety
/// As for [`pack`].
pub(crate) unsafe fn pack_into<T: Packed>(strips: &mut [u32], matrix: Numbers<T>, rows: usize, depth: usize) {
    let lanes = depth.div_ceil(T::PER_LANE);
    for (strip, first) in strips.chunks_exact_mut(lanes * COLUMNS).zip((0..rows).step_by(COLUMNS)) {
        let count = COLUMNS.min(rows - first);
        if count < COLUMNS {
            strip.fill(0);
        }
        // SAFETY: as this function asks.
        run_vectorized(Pack { strip, matrix: matrix.at_row(first), count, depth });
    }
}

struct Pack<'a, T> {
    strip: &'a mut [u32],
    matrix: Numbers<T>,
    count: usize,
    depth: usize,
}

impl<T: Packed> Kernel for Pack<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [down, right] = self.matrix.strides;
        // SAFETY: `pack` is given a matrix that is readable, with such rows and columns.
        let lane_at = |i: usize, lane: usize| unsafe { self.matrix.lane(i, lane, self.depth) };
        let whole = self.depth / T::PER_LANE;
        if right == 1 {
            for first in (0..self.count).step_by(LANES) {
                let rows = self.matrix.at_row(first).data.cast();
                let stride = down * size_of::<T>() as isize;
                // SAFETY: as above; the numbers of a lane are next to each other, the first one lower.
                unsafe { turn(rows, stride, self.count - first, whole, &mut self.strip[first..]) };
            }
        } else if down == 1 && self.count == COLUMNS {
            let column = |j: usize| self.matrix.data.wrapping_offset(j as isize * right);
            for (places, lane) in self.strip.chunks_exact_mut(COLUMNS).zip(0..whole) {
                let lanes = places.try_into().expect("as many");
                // SAFETY: as above; the rows of a column are next to each other.
                unsafe { T::fill(lanes, |k| column(lane * T::PER_LANE + k)) };
            }
        } else {
            for lane in 0..whole {
                for i in 0..self.count {
                    self.strip[lane * COLUMNS + i] = lane_at(i, lane);
                }
            }
        }
        if self.depth > whole * T::PER_LANE {
            for i in 0..self.count {
                self.strip[whole * COLUMNS + i] = lane_at(i, whole);
            }
        }
    }
}

/// Writes number `j` of row `i` to `columns[j * COLUMNS + i]`, and 0 for rows from `count` on; 16 rows at most, `stride`
/// bytes apart.
///
/// # Safety
/// The processor must have AVX-512; each row must have `len` readable numbers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn turn(rows: *const u8, stride: isize, count: usize, len: usize, columns: &mut [u32]) {
    for (first, columns) in (0..len).step_by(LANES).zip(columns.chunks_mut(LANES * COLUMNS)) {
        let mask = u16::MAX >> LANES.saturating_sub(len - first);
        let numbers = std::array::from_fn(|i| {
            let row = rows.wrapping_offset(i as isize * stride).cast::<i32>().wrapping_add(first);
            // SAFETY: the mask leaves out what is behind the end of the row, and rows that are not there.
            unsafe { _mm512_maskz_loadu_epi32(if i < count { mask } else { 0 }, row) }
        });
        for (column, numbers) in columns.chunks_mut(COLUMNS).zip(transpose(numbers)).take(len - first) {
            // SAFETY: the places of a column's rows are checked by the slices.
            unsafe { _mm512_storeu_si512(column[..LANES].as_mut_ptr().cast(), numbers) };
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn turn(_rows: *const u8, _stride: isize, _count: usize, _len: usize, _columns: &mut [u32]) {
    unreachable!("has_strips() is false here");
}

/// Rows and columns of 16 x 16 numbers exchanged.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub(crate) fn transpose(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    // each round makes pairs of registers of others: 2 x 2 numbers and 4 x 4 in each quarter, then the quarters
    let (mut twos, mut fours, mut eights, mut columns) = (rows, rows, rows, rows);
    for i in (0..LANES).step_by(2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for i in (0..LANES).step_by(4) {
        for k in 0..2 {
            fours[i + 2 * k] = _mm512_unpacklo_epi64(twos[i + k], twos[i + k + 2]);
            fours[i + 2 * k + 1] = _mm512_unpackhi_epi64(twos[i + k], twos[i + k + 2]);
        }
    }
    for i in (0..LANES).step_by(8) {
        for k in i..i + 4 {
            eights[k] = _mm512_shuffle_i32x4::<0x88>(fours[k], fours[k + 4]);
            eights[k + 4] = _mm512_shuffle_i32x4::<0xdd>(fours[k], fours[k + 4]);
        }
    }
    for k in 0..8 {
        columns[k] = _mm512_shuffle_i32x4::<0x88>(eights[k], eights[k + 8]);
        columns[k + 8] = _mm512_shuffle_i32x4::<0xdd>(eights[k], eights[k + 8]);
    }
    columns
}

/// Writes a tile of a product, or adds it.
pub(crate) struct Store<'a> {
    /// Its rows.
    pub tile: &'a [[f32; COLUMNS]],
    /// Numbers of a row that are there.
    pub width: usize,
    /// From the tile's first number on.
    pub out: &'a mut [f32],
    /// From row to row of the output.
    pub columns: usize,
    pub adds: bool,
}

impl Kernel for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (row, out) in self.tile.iter().zip(self.out.chunks_mut(self.columns)) {
            let (row, out) = (&row[..self.width], &mut out[..self.width]);
            if self.adds {
                out.iter_mut().zip(row).for_each(|(out, number)| *out += number);
            } else {
                out.copy_from_slice(row);
            }
        }
    }
}

/// Brings a matrix into tiles of 16 rows by 16 pairs of columns, filled up with zeros:
/// `tiles[tile of rows][tile of columns][row][pair]`.
///
/// # Safety
/// The numbers of the matrix must be readable; the processor must have what [`has_strips`] asks for.
pub(crate) unsafe fn pack_tiles(tiles: &mut [u32], matrix: Numbers<Bf16>, rows: usize, depth: usize) {
    let band = depth.div_ceil(LANES * Bf16::PER_LANE) * LANES * LANES;
    for (band, first) in tiles.chunks_exact_mut(band).zip((0..rows).step_by(LANES)) {
        let count = LANES.min(rows - first);
        run_vectorized(PackTiles { band, matrix: matrix.at_row(first), count, depth });
    }
}

struct PackTiles<'a> {
    band: &'a mut [u32],
    matrix: Numbers<Bf16>,
    count: usize,
    depth: usize,
}

impl Kernel for PackTiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [down, right] = self.matrix.strides;
        // SAFETY: `pack_tiles` is given a matrix that is readable, with such rows and columns.
        let lane_at = |i: usize, lane: usize| unsafe { self.matrix.lane(i, lane, self.depth) };
        for (tile, first) in self.band.chunks_exact_mut(LANES * LANES).zip((0..).step_by(2 * LANES)) {
            let whole = ((self.depth - first) / 2).min(LANES);
            if down == 1 && self.count == LANES && whole == LANES {
                let tile: &mut [u32; LANES * LANES] = tile.try_into().expect("16 rows of 16");
                // SAFETY: as above, of 32 columns whose rows are next to each other; the processor has AVX-512.
                unsafe { turn_pairs(self.matrix.data.wrapping_offset(first as isize * right), right, tile) };
                continue;
            }
            tile.fill(0);
            for (i, row) in tile.chunks_exact_mut(LANES).enumerate().take(self.count) {
                for (pair, place) in row.iter_mut().enumerate() {
                    *place = lane_at(i, first / 2 + pair);
                }
            }
        }
    }
}

/// Writes 16 pairs of numbers, of two columns.
///
/// # Safety
/// The processor must have AVX-512, the numbers be readable, and there be 16 lanes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn fill_pairs(lanes: &mut [u32], columns: [*const Bf16; 2]) {
    // SAFETY: as this function asks.
    unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), pairs(columns)) };
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn fill_pairs(_lanes: &mut [u32], _columns: [*const Bf16; 2]) {
    unreachable!("has_strips() is false here");
}

/// 16 pairs of numbers from two columns, the first one's lower.
///
/// # Safety
/// The processor must have AVX-512, and the numbers be readable.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn pairs(columns: [*const Bf16; 2]) -> __m512i {
    // SAFETY: as this function asks.
    let [lower, upper] = columns.map(|column| unsafe { _mm256_loadu_si256(column.cast()) });
    _mm512_or_si512(_mm512_cvtepu16_epi32(lower), _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(upper)))
}

/// Writes 16 rows of 16 pairs, given by 32 columns of 16 numbers, `right` apart.
///
/// # Safety
/// The processor must have AVX-512, and the numbers be readable.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn turn_pairs(columns: *const Bf16, right: isize, tile: &mut [u32; LANES * LANES]) {
    let column = |j: usize| columns.wrapping_offset(j as isize * right);
    // SAFETY: as this function asks.
    let pairs = std::array::from_fn(|pair| unsafe { pairs([column(2 * pair), column(2 * pair + 1)]) });
    for (row, numbers) in tile.chunks_exact_mut(LANES).zip(transpose(pairs)) {
        // SAFETY: a row has 512 bits.
        unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), numbers) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn turn_pairs(_columns: *const Bf16, _right: isize, _tile: &mut [u32; LANES * LANES]) {
    unreachable!("has_strips() is false here");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::amx::Tiles;
    use crate::product::strip::{has_bf16_products, multiply_by_strips};

    /// Whole numbers, whose products and sums are exact.
    fn numbers<T: Element>(len: usize, seed: usize) -> Vec<T> {
        (0..len).map(|i| T::from_f32(((i * 37 + seed * 11) % 17) as f32 - 8.0)).collect()
    }

    /// Products of all layouts, with sizes that fill tiles and strips or do not, and of parts.
    fn check<T: Packed>(multiply: impl Fn(MatrixMut, Matrix<T>, Strips<T>, bool)) {
        for [rows, columns, depth] in
            [[1, 1, 1], [7, 5, 2], [16, 32, 32], [33, 65, 31], [64, 64, 64], [70, 100, 97], [48, 96, 96]]
        {
            for layout in 0..4 {
                let (left, right) = (numbers::<T>(rows * depth, 1), numbers::<T>(depth * columns, 2));
                let strides =
                    |[rows, columns]: [usize; 2], is_turned| if is_turned { [1, rows] } else { [columns, 1] };
                let a = Matrix::new(&left, [rows, depth], strides([rows, depth], layout & 1 != 0));
                let b = Matrix::new(&right, [depth, columns], strides([depth, columns], layout & 2 != 0));
                let mut strips = vec![7; 3];
                let all = Strips::new(b, &mut strips);
                let (from, first) = (depth / 3 / 2 * 2, columns / 2 / COLUMNS * COLUMNS);
                for part in
                    [[0..depth, 0..columns], [from..depth, first..columns], [0..depth - from, 0..columns]]
                {
                    let (a, b) = (a.part([0..rows, part[0].clone()]), b.part(part.clone()));
                    for adds in [false, true] {
                        let mut out = vec![0.5; rows * part[1].len()];
                        let shape = [rows, part[1].len()];
                        multiply(MatrixMut::dense(&mut out, shape), a, all.part(part.clone()), adds);
                        assert_eq!(
                            out,
                            plain(a, b, if adds { 0.5 } else { 0.0 }),
                            "{shape:?} {part:?} {layout}"
                        );
                    }
                }
            }
        }
    }

    fn plain<T: Element>(a: Matrix<T>, b: Matrix<T>, start: f32) -> Vec<f32> {
        let ([rows, depth], [_, columns]) = (a.shape(), b.shape());
        let at = |matrix: &Matrix<T>, i, j| matrix.at(i, j).to_f32();
        let sum = |i, j| start + (0..depth).map(|k| at(&a, i, k) * at(&b, k, j)).sum::<f32>();
        (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))).map(|(i, j)| sum(i, j)).collect()
    }

    #[test]
    fn products_of_float32_are_exact() {
        if has_strips() {
            check::<f32>(multiply_by_strips);
        }
    }

    #[test]
    fn products_of_bfloat16_by_dots_are_exact() {
        if has_bf16_products() {
            check::<Bf16>(multiply_by_strips);
        }
    }

    #[test]
    fn products_of_bfloat16_by_tiles_are_exact() {
        if let Some(tiles) = Tiles::set_up() {
            check::<Bf16>(|out, a, b, adds| tiles.multiply(out, a, b, adds));
        }
    }
}
