//! Products of few rows with a matrix whose columns lie in one piece each, as of a layer that computes a token: each number of the
//! matrix is read once, where it lies, and memory is the limit.

use crate::element::Element;

/// Rows that a number of the matrix is read for at a time.
pub(crate) const ROWS: usize = 4;
/// Columns that are read at a time.
pub(crate) const COLUMNS: usize = 4;

/// The sums of the products of up to four rows in float32, one after the other, with four columns of `depth` numbers; `next` is from
/// a column to the one that is read after it, in numbers.
///
/// # Safety
/// There must be as many numbers from the first one of each row and column on, and the processor must have AVX-512.
pub(crate) unsafe fn dots<T: Element>(
    rows: &[f32],
    columns: [*const T; COLUMNS],
    depth: usize,
    next: isize,
) -> [[f32; COLUMNS]; ROWS] {
    let mut sums = [[0.0; COLUMNS]; ROWS];
    let row = |row: usize| rows[row * depth..][..depth].as_ptr();
    // SAFETY: the processor has the instructions and the numbers are there, says the caller.
    unsafe {
        match rows.len() / depth {
            1 => sums[..1].copy_from_slice(&x86::dots([row(0)], columns, depth, next)),
            2 => sums[..2].copy_from_slice(&x86::dots([row(0), row(1)], columns, depth, next)),
            3 => sums[..3].copy_from_slice(&x86::dots([row(0), row(1), row(2)], columns, depth, next)),
            _ => sums = x86::dots([row(0), row(1), row(2), row(3)], columns, depth, next),
        }
    }
    sums
}

mod x86 {
    use std::arch::x86_64::{
        __m512, _mm256_loadu_si256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_fmadd_ps,
        _mm512_loadu_ps, _mm512_reduce_add_ps, _mm512_setzero_ps, _mm512_slli_epi32,
    };

    use crate::element::Element;
    use crate::processor::prefetch;
    use crate::product::few_rows::COLUMNS;

    /// Numbers of a vector.
    const STEP: usize = 16;

    /// Sixteen numbers of float32 or bfloat16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    unsafe fn load<T: Element>(numbers: *const T) -> __m512 {
        // SAFETY: the caller has as many numbers there.
        unsafe {
            if size_of::<T>() == size_of::<f32>() {
                _mm512_loadu_ps(numbers.cast())
            } else {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(numbers.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    pub(super) unsafe fn dots<T: Element, const R: usize>(
        rows: [*const f32; R],
        columns: [*const T; COLUMNS],
        depth: usize,
        next: isize,
    ) -> [[f32; COLUMNS]; R] {
        let mut sums = [[_mm512_setzero_ps(); COLUMNS]; R];
        let whole = depth - depth % STEP;
        for at in (0..whole).step_by(STEP) {
            for column in columns {
                prefetch(column.wrapping_offset(next).wrapping_add(at), STEP);
            }
            // no closures and no `map`: they would be compiled without the instructions
            let mut numbers = [_mm512_setzero_ps(); COLUMNS];
            for (number, column) in numbers.iter_mut().zip(columns) {
                // SAFETY: there are sixteen more numbers of each row and column.
                *number = unsafe { load(column.add(at)) };
            }
            for (sums, row) in sums.iter_mut().zip(rows) {
                // SAFETY: as above.
                let a = unsafe { _mm512_loadu_ps(row.add(at)) };
                for (sum, b) in sums.iter_mut().zip(numbers) {
                    *sum = _mm512_fmadd_ps(a, b, *sum);
                }
            }
        }
        let mut totals = [[0.0; COLUMNS]; R];
        for (totals, sums) in totals.iter_mut().zip(sums) {
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total = _mm512_reduce_add_ps(sum);
            }
        }
        for at in whole..depth {
            for (totals, row) in totals.iter_mut().zip(rows) {
                for (total, column) in totals.iter_mut().zip(columns) {
                    // SAFETY: `at` is below the depth.
                    *total += unsafe { *row.add(at) * (*column.add(at)).to_f32() };
                }
            }
        }
        totals
    }
}
