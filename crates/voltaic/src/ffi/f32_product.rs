//! Products of float32 matrices by the fused multiplications of AVX-512, for right factors that are used more than once:
//! the left one is read as it is.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps,
    _mm512_set1_ps, _mm512_setzero_ps,
};

use super::lanes::LANES;
use super::matrix::{Matrix, MatrixMut};
use super::strips::{COLUMNS, Numbers, Strips};

/// Rows of a tile.
const ROWS: usize = 8;

/// `out = a b`, or `out += a b` if `adds`, on this thread.
///
/// # Panics
/// If the shapes do not fit.
pub fn multiply_by_strips(out: MatrixMut, a: Matrix, b: Strips<f32>, adds: bool) {
    let ([rows, columns], depth) = (out.shape(), b.check_product(&out, &a));
    let (a, out) = (Numbers::new(a), out.into_data());
    for j in (0..columns).step_by(COLUMNS) {
        let (b, width) = (b.strip(j, depth), COLUMNS.min(columns - j));
        for i in (0..rows).step_by(ROWS) {
            let tile =
                Tile { out: out[i * columns + j..].as_mut_ptr(), columns, width, rows: ROWS.min(rows - i) };
            // SAFETY: the constructor of `a` checked that its numbers lie in its slice, and `out` has such rows and
            // columns; strips are there only on processors with AVX-512.
            unsafe { multiply(a.at_row(i), b, &tile, adds) };
        }
    }
}

/// A part of a product.
struct Tile {
    out: *mut f32,
    /// From row to row of `out`.
    columns: usize,
    /// At most [`COLUMNS`].
    width: usize,
    /// At most [`ROWS`].
    rows: usize,
}

/// The product of rows and a strip.
///
/// # Safety
/// The processor must have AVX-512; `a` must have the rows of the tile, and as many readable columns as `b` has rows; the
/// tile must be writable.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn multiply(a: Numbers<f32>, b: &[u32], tile: &Tile, adds: bool) {
    // rows that are not there are the last one again
    let rows: [*const f32; ROWS] = std::array::from_fn(|i| a.at_row(i.min(tile.rows - 1)).data);
    let mut sums: [[__m512; 2]; ROWS] = [[_mm512_setzero_ps(); 2]; ROWS];
    for (k, b) in b.chunks_exact(COLUMNS).enumerate() {
        // SAFETY: `b` has 32 numbers of 32 bits.
        let [left, right] = [0, LANES].map(|j| unsafe { _mm512_loadu_ps(b.as_ptr().add(j).cast()) });
        for (row, sums) in rows.iter().zip(&mut sums) {
            // SAFETY: as this function asks.
            let number = _mm512_set1_ps(unsafe { *row.offset(k as isize * a.strides[1]) });
            *sums = [_mm512_fmadd_ps(number, left, sums[0]), _mm512_fmadd_ps(number, right, sums[1])];
        }
    }
    let mask = u32::MAX >> (COLUMNS - tile.width);
    for (i, sums) in sums.into_iter().enumerate().take(tile.rows) {
        for (half, mut sum) in sums.into_iter().enumerate() {
            let mask = (mask >> (half * LANES)) as u16;
            // SAFETY: the mask leaves out columns that are not there, and those alone may be outside of `out`.
            unsafe {
                let out = tile.out.wrapping_add(i * tile.columns + half * LANES);
                if adds {
                    sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, out));
                }
                _mm512_mask_storeu_ps(out, mask, sum);
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn multiply(_a: Numbers<f32>, _b: &[u32], _tile: &Tile, _adds: bool) {
    unreachable!("has_strips() is false here");
}
