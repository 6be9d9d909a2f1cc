//! Products of bfloat16 matrices by the dot products of AVX-512: pairs of numbers are multiplied and added to a float32.
//!
//! Both matrices are brought into strips whose columns hold the pairs one after the other, [`ROWS`] rows of the left one
//! and [`COLUMNS`] columns of the right one to a strip; a tile of the product is the sum over two strips.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm256_storeu_si256, _mm512_castsi512_si256, _mm512_dpbf16_ps,
    _mm512_loadu_si512, _mm512_maskz_loadu_epi32, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_shuffle_i32x4, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};
use std::cell::RefCell;

use super::matrix::{Matrix, MatrixMut};
use super::simd::{is_intel, run_vectorized};
use crate::kernels::{Bf16, Kernel};

const ROWS: usize = 8;
const COLUMNS: usize = 32;
/// Numbers of 32 bits in a register.
const LANES: usize = 16;
/// Pairs of the left matrix that are worked on at a time: half a megabyte, which the second cache holds.
const MAX_BLOCK: usize = 1 << 17;

/// A matrix of bfloat16 by its address; strides in numbers, from row to row and from column to column.
#[derive(Debug, Clone, Copy)]
struct Bf16Matrix {
    data: *const Bf16,
    strides: [isize; 2],
}

impl Bf16Matrix {
    fn new(matrix: Matrix<Bf16>) -> Self {
        let (data, strides) = matrix.into_parts();
        Self { data, strides }
    }
}

/// A right factor in strips, for any number of products.
#[derive(Debug, Clone, Copy)]
pub struct Bf16Strips<'a> {
    strips: &'a [u32],
    shape: [usize; 2],
}

impl<'a> Bf16Strips<'a> {
    /// Brings a matrix into `strips`.
    ///
    /// # Panics
    /// If the processor does not have [`has_bf16_products`].
    pub fn new(matrix: Matrix<Bf16>, strips: &'a mut Vec<u32>) -> Self {
        assert!(has_bf16_products(), "no AVX512_BF16");
        let shape = matrix.shape();
        // SAFETY: the constructor of the matrix checked that its numbers lie in its slice.
        unsafe { pack::<COLUMNS>(strips, Bf16Matrix::new(matrix).transposed(), shape[1], shape[0]) };
        Self { strips, shape }
    }
}

/// `out = a b`, or `out += a b` if `adds`, on this thread, with sums in float32. Of `b` there are taken the first rows and
/// columns, as many as `a` has columns and `out` has.
///
/// # Panics
/// If the shapes do not fit.
pub fn multiply_bf16(out: MatrixMut, a: Matrix<Bf16>, b: Bf16Strips, adds: bool) {
    let ([rows, columns], [height, depth]) = (out.shape(), a.shape());
    assert!(
        rows == height && depth <= b.shape[0] && columns <= b.shape[1],
        "{:?} of {:?} and {:?}",
        out.shape(),
        a.shape(),
        b.shape
    );
    let product =
        Bf16Product { shape: [rows, columns, depth], out: out.into_data(), a: Bf16Matrix::new(a), b, adds };
    // SAFETY: the constructor of `a` checked that its numbers lie in its slice; strips are there only on processors
    // with these products.
    unsafe { product.run() };
}

/// A product of matrices.
struct Bf16Product<'a> {
    /// Rows, columns, depth.
    shape: [usize; 3],
    /// One row after the other.
    out: &'a mut [f32],
    a: Bf16Matrix,
    b: Bf16Strips<'a>,
    adds: bool,
}

/// Whether the processor has these dot products.
pub fn has_bf16_products() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512bf16")
        && std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether they are faster than those of float32: Intel's processors do fewer of them in a cycle.
pub(super) fn has_fast_bf16_products() -> bool {
    has_bf16_products() && !is_intel()
}

thread_local! {
    /// Of the left matrix.
    static STRIPS: RefCell<Vec<u32>> = RefCell::default();
}

impl Bf16Product<'_> {
    /// # Safety
    /// The processor must have [`has_bf16_products`]; all numbers of `a` must be readable.
    unsafe fn run(self) {
        let [rows, columns, depth] = self.shape;
        let [pairs, all_pairs] = [depth, self.b.shape[0]].map(|depth| depth.div_ceil(2));
        let block = (MAX_BLOCK / pairs.max(1)).max(ROWS) / ROWS * ROWS;
        STRIPS.with_borrow_mut(|a| {
            for first in (0..rows).step_by(block) {
                let count = block.min(rows - first);
                // SAFETY: as this function asks.
                unsafe { pack::<ROWS>(a, self.a.at_row(first), count, depth) };
                for j in (0..columns).step_by(COLUMNS) {
                    let width = COLUMNS.min(columns - j);
                    let b = &self.b.strips[j * all_pairs..][..pairs * COLUMNS];
                    for (i, a) in (first..first + count).step_by(ROWS).zip(a.chunks_exact(pairs * ROWS)) {
                        let mut tile = [[0.0; COLUMNS]; ROWS];
                        // SAFETY: the processor has what this is compiled for.
                        unsafe { multiply(a, b, &mut tile) };
                        for (row, numbers) in (i..first + count).zip(&tile) {
                            let start = row * columns + j;
                            let out = &mut self.out[start..start + width];
                            run_vectorized(Store { numbers: &numbers[..width], out, adds: self.adds });
                        }
                    }
                }
            }
        });
    }
}

struct Store<'a> {
    numbers: &'a [f32],
    out: &'a mut [f32],
    adds: bool,
}

impl Kernel for Store<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        if self.adds {
            self.out.iter_mut().zip(self.numbers).for_each(|(out, number)| *out += number);
        } else {
            self.out.copy_from_slice(self.numbers);
        }
    }
}

impl Bf16Matrix {
    fn transposed(self) -> Self {
        let [down, right] = self.strides;
        Self { strides: [right, down], ..self }
    }

    fn at_row(self, row: usize) -> Self {
        Self { data: self.data.wrapping_offset(row as isize * self.strides[0]), ..self }
    }
}

/// Brings a matrix into strips of `N` rows, filled up with zeros: `strips[strip][pair of columns][row]`.
///
/// # Safety
/// The numbers of the matrix must be readable.
unsafe fn pack<const N: usize>(strips: &mut Vec<u32>, matrix: Bf16Matrix, rows: usize, depth: usize) {
    let pairs = depth.div_ceil(2);
    let len = rows.div_ceil(N) * pairs * N;
    if strips.len() < len {
        strips.resize(len, 0);
    }
    strips.truncate(len);
    for (strip, first) in strips.chunks_exact_mut(pairs * N).zip((0..rows).step_by(N)) {
        let count = N.min(rows - first);
        if count < N {
            strip.fill(0);
        }
        // SAFETY: as this function asks.
        run_vectorized(Pack::<N> { strip, matrix: matrix.at_row(first), count, depth });
    }
}

struct Pack<'a, const N: usize> {
    strip: &'a mut [u32],
    matrix: Bf16Matrix,
    count: usize,
    depth: usize,
}

impl<const N: usize> Kernel for Pack<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let [down, right] = self.matrix.strides;
        // SAFETY: `pack` is given a matrix that is readable, and asks for rows and columns that it has.
        let at = |i: usize, j: usize| unsafe {
            u32::from((*self.matrix.data.offset(i as isize * down + j as isize * right)).0)
        };
        let (whole, is_odd) = (self.depth / 2, self.depth % 2 == 1);
        if right == 1 {
            for first in (0..self.count).step_by(LANES) {
                let rows = std::array::from_fn(|i| {
                    let row = first + i;
                    (row < self.count).then(|| self.matrix.at_row(row).data.cast::<u32>())
                });
                // SAFETY: as above; the two numbers of a pair are next to each other, the first one lower; products are
                // made on processors with AVX-512 only.
                unsafe { turn::<N>(&rows, whole, &mut self.strip[first..]) };
            }
        } else if down == 1 && self.count == N {
            for (p, column) in self.strip.chunks_exact_mut(N).take(whole).enumerate() {
                // SAFETY: as above; the rows of a column are next to each other.
                let [low, high] = [0, 1].map(|k| unsafe {
                    &*self.matrix.data.offset((2 * p + k) as isize * right).cast::<[Bf16; N]>()
                });
                for i in 0..N {
                    column[i] = u32::from(low[i].0) | u32::from(high[i].0) << 16;
                }
            }
        } else {
            for p in 0..whole {
                for i in 0..self.count {
                    self.strip[p * N + i] = at(i, 2 * p) | at(i, 2 * p + 1) << 16;
                }
            }
        }
        if is_odd {
            for i in 0..self.count {
                self.strip[whole * N + i] = at(i, 2 * whole);
            }
        }
    }
}

/// Writes number `j` of row `i` to `columns[j * N + i]`, and 0 for rows that are not there; at most `N` rows.
///
/// # Safety
/// The processor must have AVX-512; each row must have `len` readable numbers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn turn<const N: usize>(rows: &[Option<*const u32>; LANES], len: usize, columns: &mut [u32]) {
    for (first, columns) in (0..len).step_by(LANES).zip(columns.chunks_mut(LANES * N)) {
        let mask = u16::MAX >> LANES.saturating_sub(len - first);
        let mut numbers = [_mm512_setzero_si512(); LANES];
        for (numbers, row) in numbers.iter_mut().zip(rows) {
            if let Some(row) = row {
                // SAFETY: the mask leaves out what is behind the end of the row.
                *numbers = unsafe { _mm512_maskz_loadu_epi32(mask, row.add(first).cast()) };
            }
        }
        for (column, numbers) in columns.chunks_mut(N).zip(transpose(numbers)).take(len - first) {
            // SAFETY: the places of a column's rows are checked by the slices.
            unsafe {
                if N < LANES {
                    _mm256_storeu_si256(column[..8].as_mut_ptr().cast(), _mm512_castsi512_si256(numbers));
                } else {
                    _mm512_storeu_si512(column[..LANES].as_mut_ptr().cast(), numbers);
                }
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn turn<const N: usize>(_rows: &[Option<*const u32>; LANES], _len: usize, _columns: &mut [u32]) {
    unreachable!("has_bf16_products() is false here");
}

/// Rows and columns of 16 x 16 numbers exchanged.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn transpose(rows: [__m512i; LANES]) -> [__m512i; LANES] {
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

/// The product of two strips.
///
/// # Safety
/// The processor must have [`has_bf16_products`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply(a: &[u32], b: &[u32], tile: &mut [[f32; COLUMNS]; ROWS]) {
    let mut sums: [[__m512; 2]; ROWS] = [[_mm512_setzero_ps(); 2]; ROWS];
    let dot = |sum: __m512, a: __m512i, b: __m512i| {
        // SAFETY: all are 512 bits of numbers.
        let [a, b] = [a, b].map(|bits| unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) });
        _mm512_dpbf16_ps(sum, a, b)
    };
    for (a, b) in a.chunks_exact(ROWS).zip(b.chunks_exact(COLUMNS)) {
        // SAFETY: `b` has 32 numbers of 32 bits.
        let [left, right] = [0, 16].map(|j| unsafe { _mm512_loadu_si512(b.as_ptr().add(j).cast()) });
        for i in 0..ROWS {
            let pair = _mm512_set1_epi32(a[i].cast_signed());
            sums[i] = [dot(sums[i][0], pair, left), dot(sums[i][1], pair, right)];
        }
    }
    for (row, sums) in tile.iter_mut().zip(sums) {
        // SAFETY: a row has 32 float32.
        unsafe {
            _mm512_storeu_ps(row.as_mut_ptr(), sums[0]);
            _mm512_storeu_ps(row.as_mut_ptr().add(16), sums[1]);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn multiply(_a: &[u32], _b: &[u32], _tile: &mut [[f32; COLUMNS]; ROWS]) {
    unreachable!("has_bf16_products() is false here");
}
