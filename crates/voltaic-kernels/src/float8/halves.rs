//! Codes as float16, which processors widen: those of E5M2 are its upper half. Those of E4M3 have one bit less of the exponent, and
//! another bias: the numbers are 2^-8 of theirs.

use std::arch::x86_64::{
    __m256i, __m512i, _mm512_and_si512, _mm512_cvtepu8_epi16, _mm512_set1_epi16, _mm512_slli_epi16,
    _mm512_srai_epi16,
};

use crate::float8::format::Float8;

/// All bits of 16 but the highest one of the exponent of float16, into which a sign is shifted.
pub(crate) const WITHOUT_COPY: i16 = 0xbfff_u16 as i16;

/// What float16 numbers of codes are multiplied by to be those of the codes.
pub(crate) fn to_number<F: Float8>() -> f32 {
    if F::FRACTION == 3 { 256.0 } else { 1.0 }
}

/// Codes as float16 that are no NaN of E4M3, which float16 has elsewhere.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(crate) fn halves<F: Float8>(codes: __m256i) -> __m512i {
    let halves = _mm512_slli_epi16::<8>(_mm512_cvtepu8_epi16(codes));
    match F::FRACTION {
        3 => _mm512_and_si512(_mm512_srai_epi16::<1>(halves), _mm512_set1_epi16(WITHOUT_COPY)),
        _ => halves,
    }
}
