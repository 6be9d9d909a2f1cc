//! Codes as float16, which processors widen: those of E5M2 are its upper half. Those of E4M3 have one bit less of the exponent, and
//! another bias: the numbers are 2^-8 of theirs.

use std::arch::x86_64::{
    __m256i, __m512i, _mm256_and_si256, _mm256_cmpge_epu8_mask, _mm256_loadu_si256, _mm256_set1_epi8,
    _mm256_storeu_si256, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_si256,
    _mm512_cvtepi32_epi16, _mm512_cvtepu8_epi16, _mm512_cvtph_ps, _mm512_extracti64x4_epi64, _mm512_mul_ps,
    _mm512_set1_epi16, _mm512_set1_ps, _mm512_slli_epi16, _mm512_srai_epi16, _mm512_srli_epi32,
    _mm512_storeu_ps,
};

use crate::element::Element;
use crate::float8::format::{Float8, STEP, decode};
use crate::processor::has_avx512;

/// All bits of 16 but the highest one of the exponent of float16, into which a sign is shifted.
pub(crate) const WITHOUT_COPY: i16 = 0xbfff_u16 as i16;

/// What float16 numbers of codes are multiplied by to be those of the codes.
pub(crate) fn to_number<F: Float8>() -> f32 {
    if F::FRACTION == 3 { 256.0 } else { 1.0 }
}

/// Codes as float16 that are no NaN of E4M3, which float16 has elsewhere.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn halves<F: Float8>(codes: __m256i) -> __m512i {
    let halves = _mm512_slli_epi16::<8>(_mm512_cvtepu8_epi16(codes));
    match F::FRACTION {
        3 => _mm512_and_si512(_mm512_srai_epi16::<1>(halves), _mm512_set1_epi16(WITHOUT_COPY)),
        _ => halves,
    }
}

/// Writes the numbers of codes times `scale`, a power of two, with AVX-512; false, and nothing is done, without it.
pub(super) fn decode_block<F: Float8, T: Element>(input: &[u8], output: &mut [T], scale: f32) -> bool {
    if has_avx512() {
        // SAFETY: the processor has what the function is compiled for, as was just asked.
        unsafe { with_avx512::<F, T>(input, output, scale) };
    }
    has_avx512()
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn with_avx512<F: Float8, T: Element>(input: &[u8], output: &mut [T], scale: f32) {
    let one_by_one = |input: &[u8], output: &mut [T]| {
        for (out, code) in output.iter_mut().zip(input) {
            *out = T::from_f32(decode::<F>(*code) * scale);
        }
    };
    let factor = _mm512_set1_ps(scale * to_number::<F>());
    let (mut codes, mut numbers) = (input.chunks_exact(STEP), output.chunks_exact_mut(STEP));
    for (codes, numbers) in (&mut codes).zip(&mut numbers) {
        // SAFETY: there are 32 codes.
        let some = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
        let magnitudes = _mm256_and_si256(some, _mm256_set1_epi8(0x7f));
        if _mm256_cmpge_epu8_mask(magnitudes, _mm256_set1_epi8(F::NO_NUMBER as i8)) != 0 {
            one_by_one(codes, numbers);
            continue;
        }
        let halves = halves::<F>(some);
        let parts = [_mm512_castsi512_si256(halves), _mm512_extracti64x4_epi64::<1>(halves)];
        for (part, numbers) in parts.into_iter().zip(numbers.chunks_exact_mut(STEP / 2)) {
            let wide = _mm512_mul_ps(_mm512_cvtph_ps(part), factor);
            // SAFETY: there is room for 16 numbers, of 4 or of 2 bytes; those have no bits below the upper half.
            unsafe {
                match size_of::<T>() {
                    4 => _mm512_storeu_ps(numbers.as_mut_ptr().cast(), wide),
                    _ => {
                        let upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(wide)));
                        _mm256_storeu_si256(numbers.as_mut_ptr().cast(), upper);
                    }
                }
            }
        }
    }
    one_by_one(codes.remainder(), numbers.into_remainder());
}
