//! Products of float8 numbers. Of few rows with a matrix of codes, whose numbers are widened in registers: memory gives one byte for
//! each. Of others in bfloat16, which holds float8 exactly, with sums in float32.

use crate::element::Bf16;
use crate::float8::cast::Float8Format;
use crate::float8::format::{E4m3, E5m2, Float8, STEP, decode};
use crate::kernel::Kernel;
use crate::processor::run_vectorized;
use crate::product::amx::has_tiles;
use crate::product::matrix::{Matrix, MatrixMut};
use crate::product::mkl::{has_mkl_bf16, is_for_mkl, multiply_by_mkl};
use crate::product::strip::{has_bf16_products, multiply_by_strips};
use crate::product::strips::Strips;
use crate::threads::parallel_for;
use crate::views::Shared;

/// With more rows it is faster to widen the matrix once, and to multiply then.
const MOST_ROWS: usize = 8;
/// Multiplications that are worth a thread.
const GRAIN: usize = 1 << 18;
/// Rows that the codes are widened for together.
const TOGETHER: usize = 4;

/// Whether a left factor has so few rows that its product is better computed from codes.
pub fn multiplies_float8(rows: usize) -> bool {
    (1..=MOST_ROWS).contains(&rows)
}

/// Rows times the rows of a matrix of codes: `out[i][j] = sum of a[i][k] codes[j][k]`, summed in float32. Each row has `depth` numbers.
///
/// # Panics
/// If the lengths do not fit together.
pub fn multiply_by_float8(a: &[f32], codes: &[u8], format: Float8Format, depth: usize, out: &mut [f32]) {
    assert!(depth > 0 && a.len().is_multiple_of(depth) && codes.len().is_multiple_of(depth), "{depth}");
    let (rows, columns) = (a.len() / depth, codes.len() / depth);
    assert_eq!(out.len(), rows * columns);
    match format {
        Float8Format::E4m3 => multiply::<E4m3>(a, codes, depth, out),
        Float8Format::E5m2 => multiply::<E5m2>(a, codes, depth, out),
    }
}

fn multiply<F: Float8>(a: &[f32], codes: &[u8], depth: usize, out: &mut [f32]) {
    let (rows, columns) = (a.len() / depth, codes.len() / depth);
    #[cfg(target_arch = "x86_64")]
    let tables = tables::Tables::new::<F>(a, depth);
    let out = Shared(out.as_mut_ptr());
    parallel_for(columns, GRAIN.div_ceil(rows.max(1) * depth), |part| {
        for column in part {
            let codes = &codes[column * depth..][..depth];
            for first in (0..rows).step_by(TOGETHER) {
                let count = TOGETHER.min(rows - first);
                let some = &a[first * depth..][..count * depth];
                #[cfg(target_arch = "x86_64")]
                let known = tables.as_ref().map(|tables| tables.dots::<F>(first..first + count, some, codes));
                #[cfg(not(target_arch = "x86_64"))]
                let known = None;
                let sums = known.unwrap_or_else(|| dots::<F>(some, codes));
                for (row, sum) in (first..rows).zip(sums) {
                    // SAFETY: the place is one of `rows * columns`, and each column belongs to one thread.
                    unsafe { *out.at((row * columns + column) as isize) = sum };
                }
            }
        }
    });
}

/// The sums of the products of each of up to four rows and the codes; the rest is 0.
fn dots<F: Float8>(rows: &[f32], codes: &[u8]) -> [f32; TOGETHER] {
    let mut sums = [0.0; TOGETHER];
    let row = |row: usize| &rows[row * codes.len()..][..codes.len()];
    let count = rows.len() / codes.len();
    #[cfg(target_arch = "x86_64")]
    {
        let known = match count {
            1 => x86::dots::<F, 1>([row(0)], codes).map(|found| sums[..1].copy_from_slice(&found)),
            2 => x86::dots::<F, 2>([row(0), row(1)], codes).map(|found| sums[..2].copy_from_slice(&found)),
            3 => x86::dots::<F, 3>([row(0), row(1), row(2)], codes)
                .map(|found| sums[..3].copy_from_slice(&found)),
            _ => x86::dots::<F, 4>([row(0), row(1), row(2), row(3)], codes).map(|found| sums = found),
        };
        if known.is_some() {
            return sums;
        }
    }
    for (at, sum) in sums.iter_mut().enumerate().take(count) {
        *sum = run_vectorized(Dot { format: std::marker::PhantomData::<F>, a: row(at), codes });
    }
    sums
}

/// Whether the processor multiplies bfloat16 faster than float32.
pub fn multiplies_bf16() -> bool {
    has_tiles() && has_mkl_bf16() || has_bf16_products()
}

/// `out = a b`, or `out += a b` if `adds`, of bfloat16 matrices that have numbers, with sums in float32: by the MKL with AMX, else by
/// strips on all threads.
///
/// # Panics
/// If the shapes do not fit, or without [`multiplies_bf16`].
pub fn multiply_bf16(out: MatrixMut, a: Matrix<Bf16>, b: Matrix<Bf16>, adds: bool) {
    if has_tiles() && has_mkl_bf16() && is_for_mkl(&a) && is_for_mkl(&b) {
        return multiply_by_mkl(out, a, b, adds);
    }
    let ([rows, columns], depth) = (out.shape(), a.shape()[1]);
    assert!(
        a.shape()[0] == rows && b.shape() == [depth, columns],
        "{:?} of {:?}",
        [rows, columns],
        [a.shape(), b.shape()]
    );
    let mut strips = Vec::new();
    let b = Strips::new(b, &mut strips);
    let out = Shared(out.into_data().as_mut_ptr());
    parallel_for(rows, GRAIN.div_ceil(columns * depth), |part| {
        // SAFETY: the place of each row is within the output, and belongs to one thread.
        let own = unsafe { out.slice_mut(part.start * columns..part.end * columns) };
        let own = MatrixMut::dense(own, [part.len(), columns]);
        multiply_by_strips(own, a.part([part, 0..depth]), b, adds);
    });
}

struct Dot<'a, F> {
    format: std::marker::PhantomData<F>,
    a: &'a [f32],
    codes: &'a [u8],
}

impl<F: Float8> Kernel for Dot<'_, F> {
    type Output = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let mut sums = [0.0; STEP];
        let (a, codes) = (self.a.chunks_exact(STEP), self.codes.chunks_exact(STEP));
        let rest = a.remainder().iter().zip(codes.remainder());
        let rest: f32 = rest.map(|(a, code)| a * decode::<F>(*code)).sum();
        for (a, codes) in a.zip(codes) {
            for (sum, (a, code)) in sums.iter_mut().zip(a.iter().zip(codes)) {
                *sum += a * decode::<F>(*code);
            }
        }
        sums.iter().sum::<f32>() + rest
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, _mm256_add_ps, _mm256_and_si256, _mm256_castsi256_si128, _mm256_cmpeq_epi8,
        _mm256_cvtepu8_epi16, _mm256_cvtph_ps, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_loadu_ps,
        _mm256_loadu_si256, _mm256_max_epu8, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_setzero_ps,
        _mm256_setzero_si256, _mm256_slli_epi16, _mm256_srai_epi16, _mm256_storeu_ps, _mm256_testz_si256,
    };

    use crate::float8::format::{Float8, STEP, decode};
    use crate::float8::halves::{WITHOUT_COPY, to_number};
    use crate::processor::{has_vectors, prefetch};

    /// Bytes that are asked for ahead.
    const AHEAD: usize = 2048;

    /// The sums of the products of each row and the codes; none if the processor does not widen float16, or a code of E4M3 is NaN,
    /// which float16 has elsewhere.
    pub(super) fn dots<F: Float8, const R: usize>(rows: [&[f32]; R], codes: &[u8]) -> Option<[f32; R]> {
        assert!(rows.iter().all(|row| row.len() == codes.len()));
        if !(has_vectors() && std::arch::is_x86_feature_detected!("f16c")) {
            return None;
        }
        // SAFETY: the processor has what the function is compiled for, as was just asked.
        let found = unsafe { with_avx2::<F, R>(rows, codes) };
        let whole = codes.len() - codes.len() % STEP;
        let scale = to_number::<F>();
        let mut sums = found?;
        for (sum, row) in sums.iter_mut().zip(rows) {
            let rest = row[whole..].iter().zip(&codes[whole..]);
            *sum = *sum * scale + rest.map(|(a, code)| a * decode::<F>(*code)).sum::<f32>();
        }
        Some(sums)
    }

    /// Whether the largest magnitude of each place of codes is never NaN.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn are_numbers<F: Float8>(largest: __m256i) -> bool {
        let nans = _mm256_cmpeq_epi8(largest, _mm256_set1_epi8(0x7f));
        F::FRACTION != 3 || _mm256_testz_si256(nans, nans) == 1
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn with_avx2<F: Float8, const R: usize>(rows: [&[f32]; R], codes: &[u8]) -> Option<[f32; R]> {
        let mut sums = [[_mm256_setzero_ps(); 2]; R];
        let mut largest = _mm256_setzero_si256();
        for first in (0..codes.len() - codes.len() % STEP).step_by(STEP) {
            prefetch(codes.as_ptr().wrapping_add(first + AHEAD), STEP);
            // SAFETY: there are 32 codes from `first` on.
            let some = unsafe { _mm256_loadu_si256(codes.as_ptr().add(first).cast()) };
            if F::FRACTION == 3 {
                largest = _mm256_max_epu8(largest, _mm256_and_si256(some, _mm256_set1_epi8(0x7f)));
            }
            let parts = [_mm256_castsi256_si128(some), _mm256_extracti128_si256::<1>(some)];
            for (part, at) in parts.into_iter().zip([first, first + 16]) {
                let mut halves = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(part));
                if F::FRACTION == 3 {
                    halves =
                        _mm256_and_si256(_mm256_srai_epi16::<1>(halves), _mm256_set1_epi16(WITHOUT_COPY));
                }
                let lower = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
                let upper = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves));
                for (sums, row) in sums.iter_mut().zip(rows) {
                    // SAFETY: as above.
                    let (low, high) = unsafe {
                        let a = row.as_ptr().add(at);
                        (_mm256_loadu_ps(a), _mm256_loadu_ps(a.add(8)))
                    };
                    sums[0] = _mm256_fmadd_ps(low, lower, sums[0]);
                    sums[1] = _mm256_fmadd_ps(high, upper, sums[1]);
                }
            }
        }
        let total = sums.map(|[low, high]| {
            let mut lanes = [0.0_f32; 8];
            // SAFETY: there are eight lanes.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_add_ps(low, high)) };
            lanes.iter().sum()
        });
        are_numbers::<F>(largest).then_some(total)
    }
}

/// Products by dot products of bfloat16: of each code, tables give the two bytes of its bfloat16.
#[cfg(target_arch = "x86_64")]
mod tables {
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_permutex2var_epi8,
        _mm512_reduce_add_ps, _mm512_set1_epi8, _mm512_setzero_ps, _mm512_ternarylogic_epi64,
        _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
    };
    use std::mem::transmute;
    use std::ops::Range;

    use crate::float8::format::{Float8, decode};
    use crate::processor::prefetch;
    use crate::product::float8::TOGETHER;
    use crate::product::strip::has_bf16_products;

    /// Codes of a vector.
    pub(super) const STEP: usize = 64;
    /// Bytes that are asked for ahead.
    const AHEAD: usize = 8192;
    /// `a | b & c` of bits.
    const OR_AND: i32 = 0b1111_1000;

    /// The left factor in bfloat16, and the bytes of the magnitudes of all codes.
    pub(super) struct Tables {
        /// Of each row, vectors in the order in which bytes of codes meet.
        rows: Vec<[u16; STEP]>,
        steps: usize,
        upper: [u8; 128],
        lower: [u8; 128],
    }

    impl Tables {
        /// None if the processor lacks the instructions, or `a` has other numbers than those of bfloat16.
        pub(super) fn new<F: Float8>(a: &[f32], depth: usize) -> Option<Self> {
            let has_instructions = has_bf16_products() && std::arch::is_x86_feature_detected!("avx512vbmi");
            if !has_instructions || a.iter().any(|number| number.to_bits() & 0xffff != 0) {
                return None;
            }
            let upper_half = |number: f32| (number.to_bits() >> 16) as u16;
            // the lower bytes of each 16, then the upper ones, as the instructions join bytes
            let met = |at: usize| at % STEP / 32 * 8 + at % 32 / 8 * 16 + at % 8;
            let vector = |some: &[f32]| std::array::from_fn(|at| upper_half(some[met(at)]));
            let rows = a.chunks(depth).flat_map(|row| row.chunks_exact(STEP).map(vector)).collect();
            let [upper, lower] = [8, 0].map(|shift| {
                std::array::from_fn(|code| (upper_half(decode::<F>(code as u8)) >> shift) as u8)
            });
            Some(Self { rows, steps: depth / STEP, upper, lower })
        }

        /// The sums of the products of the codes and up to four rows, which are `a` in float32.
        pub(super) fn dots<F: Float8>(&self, rows: Range<usize>, a: &[f32], codes: &[u8]) -> [f32; TOGETHER] {
            let count = rows.len();
            let vectors = &self.rows[rows.start * self.steps..rows.end * self.steps];
            let whole = &codes[..self.steps * STEP];
            // SAFETY: `new` asked whether the processor has the instructions.
            let mut sums = unsafe {
                match count {
                    1 => self.add::<1>(vectors, whole),
                    2 => self.add::<2>(vectors, whole),
                    3 => self.add::<3>(vectors, whole),
                    _ => self.add::<4>(vectors, whole),
                }
            };
            if whole.len() < codes.len() {
                for (row, sum) in a.chunks(codes.len()).zip(&mut sums) {
                    let rest = row[whole.len()..].iter().zip(&codes[whole.len()..]);
                    *sum += rest.map(|(a, code)| a * decode::<F>(*code)).sum::<f32>();
                }
            }
            sums
        }

        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma")]
        fn add<const R: usize>(&self, rows: &[[u16; STEP]], codes: &[u8]) -> [f32; TOGETHER] {
            // SAFETY: there are 64 bytes.
            let load = |from: &[u8]| unsafe { _mm512_loadu_si512(from[..STEP].as_ptr().cast()) };
            let upper = [load(&self.upper), load(&self.upper[STEP..])];
            let lower = [load(&self.lower), load(&self.lower[STEP..])];
            let sign = _mm512_set1_epi8(i8::MIN);
            let mut sums = [[_mm512_setzero_ps(); 2]; R];
            for (step, codes) in codes.chunks_exact(STEP).enumerate() {
                prefetch(codes.as_ptr().wrapping_add(AHEAD), STEP);
                let codes = load(codes);
                let lower = _mm512_permutex2var_epi8(lower[0], codes, lower[1]);
                let upper = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);
                let upper = _mm512_ternarylogic_epi64::<OR_AND>(upper, codes, sign);
                let numbers = [_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)];
                for (row, sums) in sums.iter_mut().enumerate() {
                    let vector = &rows[row * self.steps + step];
                    for (half, sum) in sums.iter_mut().enumerate() {
                        // SAFETY: there are 64 numbers; both types are 512 bits of numbers.
                        *sum = unsafe {
                            let a = _mm512_loadu_si512(vector.as_ptr().add(half * STEP / 2).cast());
                            let [a, b] = transmute::<[__m512i; 2], [__m512bh; 2]>([a, numbers[half]]);
                            _mm512_dpbf16_ps(*sum, a, b)
                        };
                    }
                }
            }
            let mut totals = [0.0; TOGETHER];
            for (total, [even, odd]) in totals.iter_mut().zip(sums) {
                *total = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
            }
            totals
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;

    fn by_definition(a: &[f32], codes: &[u8], decoded: impl Fn(u8) -> f32) -> f64 {
        a.iter().zip(codes).map(|(a, code)| f64::from(*a) * f64::from(decoded(*code))).sum()
    }

    #[test]
    fn products_are_those_of_the_numbers() {
        for (rows, columns, depth) in [(1, 1, 1), (1, 5, 31), (2, 7, 64), (8, 3, 257), (3, 64, 1000)] {
            let a: Vec<f32> = (0..rows * depth).map(|i| ((i * 37 % 101) as f32 - 50.0) / 16.0).collect();
            for format in [Float8Format::E4m3, Float8Format::E5m2] {
                let is_number = |code: &u8| match format {
                    Float8Format::E4m3 => decode::<E4m3>(*code).is_finite(),
                    Float8Format::E5m2 => decode::<E5m2>(*code).abs() < 100.0,
                };
                let all: Vec<u8> = (0..=255).filter(is_number).collect();
                let codes: Vec<u8> = (0..columns * depth).map(|i| all[i * 7 % all.len()]).collect();
                let mut out = vec![0.0; rows * columns];
                multiply_by_float8(&a, &codes, format, depth, &mut out);
                for (i, a) in a.chunks(depth).enumerate() {
                    for (j, codes) in codes.chunks(depth).enumerate() {
                        let decoded = |code| match format {
                            Float8Format::E4m3 => decode::<E4m3>(code),
                            Float8Format::E5m2 => decode::<E5m2>(code),
                        };
                        let expected = by_definition(a, codes, decoded);
                        let most: Vec<f32> = a.iter().map(|a| a.abs()).collect();
                        let bound = by_definition(&most, codes, |code| decoded(code).abs()) * 1e-6;
                        let found = f64::from(out[i * columns + j]);
                        assert!(
                            (found - expected).abs() <= bound,
                            "{format:?} {rows} {depth}: {found} {expected}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn products_of_bfloat16_are_exact_and_rows_apart() {
        if !multiplies_bf16() {
            return;
        }
        for [rows, columns, depth] in [[1, 1, 1], [3, 70, 4], [45, 33, 37], [64, 96, 128]] {
            let some = |len: usize, step: usize| -> Vec<Bf16> {
                (0..len).map(|i| Bf16::from_f32((i * step % 17) as f32 - 8.0)).collect()
            };
            let (mut a, b) = (some(rows * depth, 5), some(columns * depth, 7));
            a[(rows - 1) * depth] = Bf16::from_f32(f32::NAN);
            for turned in 0..4 {
                let order =
                    |[rows, columns]: [usize; 2], is_turned| if is_turned { [1, rows] } else { [columns, 1] };
                let by_rows = order([rows, depth], false);
                let left = Matrix::new(&a, [rows, depth], by_rows);
                let turned_a: Vec<Bf16> =
                    (0..depth * rows).map(|at| a[at % rows * depth + at / rows]).collect();
                let left =
                    if turned & 1 != 0 { Matrix::new(&turned_a, [rows, depth], [1, rows]) } else { left };
                let right = Matrix::new(&b, [depth, columns], order([depth, columns], turned & 2 != 0));
                for adds in [false, true] {
                    let mut out = vec![0.5; rows * columns];
                    multiply_bf16(MatrixMut::dense(&mut out, [rows, columns]), left, right, adds);
                    let [down, right] = right.strides();
                    for (i, j) in (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))) {
                        let pair = |k: usize| a[i * depth + k].to_f32() * b[k * down + j * right].to_f32();
                        let exact = (0..depth).map(pair).sum::<f32>() + if adds { 0.5 } else { 0.0 };
                        let found = out[i * columns + j];
                        assert!(
                            found == exact || found.is_nan() && i == rows - 1,
                            "{i} {j}: {found} {exact}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_none() {
        let a = vec![1.0; 64];
        for (format, code, expected) in [
            (Float8Format::E4m3, 0x7f, f32::NAN),
            (Float8Format::E4m3, 0xff, f32::NAN),
            (Float8Format::E5m2, 0x7c, f32::INFINITY),
            (Float8Format::E5m2, 0x7e, f32::NAN),
        ] {
            for at in [0, 17, 63] {
                let mut codes = vec![0; 64];
                codes[at] = code;
                let mut out = [0.0];
                multiply_by_float8(&a, &codes, format, 64, &mut out);
                assert!(out[0].is_nan() == expected.is_nan() && (expected.is_nan() || out[0] == expected));
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn check_both_ways<F: Float8>() {
        let codes: Vec<u8> =
            (0..330_u32).map(|i| (i * 37 % 120) as u8 | if i % 3 == 0 { 0x80 } else { 0 }).collect();
        let a: Vec<f32> = (0..660).map(|i| (i % 23) as f32 - 11.0).collect();
        let Some(tables) = tables::Tables::new::<F>(&a, codes.len()) else { return };
        let [narrow, wide] = [dots::<F>(&a, &codes), tables.dots::<F>(0..2, &a, &codes)];
        for (row, a) in a.chunks(codes.len()).enumerate() {
            let most: f32 = a.iter().zip(&codes).map(|(a, code)| (a * decode::<F>(*code)).abs()).sum();
            assert!((narrow[row] - wide[row]).abs() <= 1e-6 * most, "{narrow:?} {wide:?} {most}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn processors_without_dot_products_get_the_same() {
        check_both_ways::<E4m3>();
        check_both_ways::<E5m2>();
    }
}
