//! Products of bfloat16 matrices by the dot products of AVX-512: pairs of numbers are multiplied and added to a float32.
//!
//! Both matrices are in strips, the left one of [`ROWS`] rows; a tile of the product is the sum over two strips.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps,
    _mm512_storeu_ps,
};
use std::cell::RefCell;

use super::matrix::{Matrix, MatrixMut};
use super::simd::{is_intel, run_vectorized};
use super::strips::{COLUMNS, Numbers, Store, Strips, pack};
use crate::kernels::Bf16;

const ROWS: usize = 8;
/// Pairs of the left matrix that are worked on at a time: half a megabyte, which the second cache holds.
const MAX_BLOCK: usize = 1 << 17;

/// `out = a b`, or `out += a b` if `adds`, on this thread, with sums in float32.
///
/// # Panics
/// If the shapes do not fit, or the processor does not have [`has_bf16_products`].
pub fn multiply_by_dots(out: MatrixMut, a: Matrix<Bf16>, b: Strips<Bf16>, adds: bool) {
    assert!(has_bf16_products(), "no AVX512_BF16");
    let (shape, depth) = (out.shape(), a.shape()[1]);
    b.check_product(&out, &a);
    let product =
        Bf16Product { shape: [shape[0], shape[1], depth], out: out.into_data(), a: Numbers::new(a), b, adds };
    // SAFETY: the constructor of `a` checked that its numbers lie in its slice.
    unsafe { product.run() };
}

/// A product of matrices.
struct Bf16Product<'a> {
    /// Rows, columns, depth.
    shape: [usize; 3],
    /// One row after the other.
    out: &'a mut [f32],
    a: Numbers<Bf16>,
    b: Strips<'a, Bf16>,
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
        let pairs = depth.div_ceil(2);
        let block = (MAX_BLOCK / pairs.max(1)).max(ROWS) / ROWS * ROWS;
        STRIPS.with_borrow_mut(|a| {
            for first in (0..rows).step_by(block) {
                let count = block.min(rows - first);
                // SAFETY: as this function asks.
                let a = unsafe { pack::<ROWS, Bf16>(a, self.a.at_row(first), count, depth) };
                for j in (0..columns).step_by(COLUMNS) {
                    let width = COLUMNS.min(columns - j);
                    let b = self.b.strip(j, pairs);
                    for (i, a) in (first..first + count).step_by(ROWS).zip(a.chunks_exact(pairs * ROWS)) {
                        let mut tile = [[0.0; COLUMNS]; ROWS];
                        // SAFETY: the processor has what this is compiled for.
                        unsafe { multiply(a, b, &mut tile) };
                        let out = &mut self.out[i * columns + j..];
                        let rows = ROWS.min(first + count - i);
                        run_vectorized(Store { tile: &tile[..rows], width, out, columns, adds: self.adds });
                    }
                }
            }
        });
    }
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
