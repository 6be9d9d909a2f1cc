//! Sixteen float32 in a register of AVX-512, for code that is compiled by [`run_vectorized`](super::run_vectorized).

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256i, __m512, __m512bh, _CMP_UNORD_Q, _mm256_loadu_si256, _mm256_mask_storeu_epi16,
    _mm256_maskz_loadu_epi16, _mm256_storeu_si256, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512,
    _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_epi16,
    _mm512_cvtepu16_epi32, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_mov_epi32,
    _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_ps,
};
#[cfg(target_arch = "x86_64")]
use std::mem::transmute;
#[cfg(target_arch = "x86_64")]
use std::ops::{Add, Mul, Sub};

#[cfg(target_arch = "x86_64")]
use crate::element::Bf16;
use crate::element::Element;

/// How many.
pub(crate) const LANES: usize = 16;

#[cfg(target_arch = "x86_64")]
type Register = __m512;
#[cfg(not(target_arch = "x86_64"))]
type Register = [f32; LANES];

/// The numbers. Whoever makes them knows that the processor has AVX-512, where they are registers.
#[derive(Clone, Copy)]
pub struct Lanes(Register);

#[cfg(target_arch = "x86_64")]
impl Lanes {
    /// Zeros.
    ///
    /// # Safety
    /// On x86-64 the processor must have AVX-512.
    #[inline(always)]
    pub unsafe fn zero() -> Self {
        // SAFETY: as this function asks.
        Self(unsafe { _mm512_setzero_ps() })
    }

    /// These and `left` times `right`, rounded once.
    #[inline(always)]
    pub fn add_product(self, left: f32, right: Self) -> Self {
        // SAFETY: who made lanes knows that there is AVX-512.
        Self(unsafe { _mm512_fmadd_ps(_mm512_set1_ps(left), right.0, self.0) })
    }

    /// Whether all are finite.
    #[inline(always)]
    pub fn are_finite(self) -> bool {
        // SAFETY: as above. 0 times what is not finite is not a number.
        unsafe {
            let zeros = _mm512_mul_ps(self.0, _mm512_setzero_ps());
            _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(zeros, zeros) == 0
        }
    }

    /// These and the dot products of a pair of bfloat16 and the pairs that fill the lanes of `right`.
    ///
    /// # Safety
    /// The processor must have AVX512_BF16.
    #[inline(always)]
    pub unsafe fn add_dots(self, left: u32, right: Self) -> Self {
        // SAFETY: as this function asks; all are 512 bits of numbers.
        Self(unsafe {
            let left: __m512bh = transmute(_mm512_set1_epi32(left.cast_signed()));
            _mm512_dpbf16_ps(self.0, left, transmute::<__m512, __m512bh>(right.0))
        })
    }
}

/// Bits of the first `count` lanes.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn mask(count: usize) -> u16 {
    ((1_u32 << count.min(LANES)) - 1) as u16
}

/// A number format that lanes are read from and written to.
pub(crate) trait InLanes: Element {
    /// Reads as many numbers.
    ///
    /// # Safety
    /// As for [`Lanes::zero`]; they must be readable.
    unsafe fn load(from: *const Self) -> Lanes;

    /// Reads the first `count` of them; the others are 0.
    ///
    /// # Safety
    /// As for [`InLanes::load`], with as many.
    unsafe fn load_some(from: *const Self, count: usize) -> Lanes;

    /// Writes the nearest numbers, ties to even.
    ///
    /// # Safety
    /// They must be writable.
    unsafe fn store(lanes: Lanes, to: *mut Self);

    /// Writes the first `count` of them.
    ///
    /// # Safety
    /// As for [`InLanes::store`], with as many.
    unsafe fn store_some(lanes: Lanes, to: *mut Self, count: usize);
}

#[cfg(target_arch = "x86_64")]
impl InLanes for f32 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> Lanes {
        // SAFETY: as this function asks.
        Lanes(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_some(from: *const Self, count: usize) -> Lanes {
        // SAFETY: as this function asks.
        Lanes(unsafe { _mm512_maskz_loadu_ps(mask(count), from) })
    }

    #[inline(always)]
    unsafe fn store(lanes: Lanes, to: *mut Self) {
        // SAFETY: as this function asks; who made lanes knows that there is AVX-512.
        unsafe { _mm512_storeu_ps(to, lanes.0) }
    }

    #[inline(always)]
    unsafe fn store_some(lanes: Lanes, to: *mut Self, count: usize) {
        // SAFETY: as above.
        unsafe { _mm512_mask_storeu_ps(to, mask(count), lanes.0) }
    }
}

#[cfg(target_arch = "x86_64")]
impl InLanes for Bf16 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> Lanes {
        // SAFETY: as this function asks.
        unsafe { widen(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_some(from: *const Self, count: usize) -> Lanes {
        // SAFETY: as this function asks; a processor with AVX-512 has it for registers of 256 bits, too.
        unsafe { widen(_mm256_maskz_loadu_epi16(mask(count), from.cast())) }
    }

    #[inline(always)]
    unsafe fn store(lanes: Lanes, to: *mut Self) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_si256(to.cast(), round(lanes)) }
    }

    #[inline(always)]
    unsafe fn store_some(lanes: Lanes, to: *mut Self, count: usize) {
        // SAFETY: as above.
        unsafe { _mm256_mask_storeu_epi16(to.cast(), mask(count), round(lanes)) }
    }
}

/// Of 16 bfloat16.
///
/// # Safety
/// The processor must have AVX-512.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn widen(numbers: __m256i) -> Lanes {
    // SAFETY: as this function asks.
    Lanes(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(numbers))) })
}

/// The nearest bfloat16, ties to even.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn round(lanes: Lanes) -> __m256i {
    // SAFETY: who made lanes knows that there is AVX-512.
    unsafe {
        let bits = _mm512_castps_si512(lanes.0);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lanes.0, lanes.0);
        let nan = _mm512_set1_epi32(i32::from(Bf16::NAN.0));
        let upper = _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(rounded), is_nan, nan);
        _mm512_cvtepi32_epi16(upper)
    }
}

#[cfg(target_arch = "x86_64")]
impl Add for Lanes {
    type Output = Self;

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: who made lanes knows that there is AVX-512.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }
}

#[cfg(target_arch = "x86_64")]
impl Sub for Lanes {
    type Output = Self;

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }
}

#[cfg(target_arch = "x86_64")]
impl Mul<f32> for Lanes {
    type Output = Self;

    #[inline(always)]
    fn mul(self, factor: f32) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm512_mul_ps(self.0, _mm512_set1_ps(factor)) })
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod plain {
    use std::ops::{Add, Mul, Sub};

    use crate::element::Element;
    use crate::processor::lanes::{InLanes, LANES, Lanes};

    impl Lanes {
        pub unsafe fn zero() -> Self {
            Self([0.0; LANES])
        }

        pub fn add_product(self, left: f32, right: Self) -> Self {
            Self(std::array::from_fn(|i| left.mul_add(right.0[i], self.0[i])))
        }

        pub fn are_finite(self) -> bool {
            self.0.iter().all(|number| number.is_finite())
        }

        pub unsafe fn add_dots(self, left: u32, right: Self) -> Self {
            let halves = |bits: u32| [bits << 16, bits & 0xffff_0000].map(f32::from_bits);
            let [lower, upper] = halves(left);
            Self(std::array::from_fn(|i| {
                let [first, second] = halves(right.0[i].to_bits());
                self.0[i] + lower * first + upper * second
            }))
        }
    }

    impl<T: Element> InLanes for T {
        unsafe fn load(from: *const Self) -> Lanes {
            // SAFETY: as this function asks on x86-64.
            unsafe { Self::load_some(from, LANES) }
        }

        unsafe fn load_some(from: *const Self, count: usize) -> Lanes {
            // SAFETY: as above.
            let number = |i| unsafe { (*from.wrapping_add(i)).to_f32() };
            Lanes(std::array::from_fn(|i| if i < count { number(i) } else { 0.0 }))
        }

        unsafe fn store(lanes: Lanes, to: *mut Self) {
            // SAFETY: as above.
            unsafe { Self::store_some(lanes, to, LANES) };
        }

        unsafe fn store_some(lanes: Lanes, to: *mut Self, count: usize) {
            for (i, number) in lanes.0.into_iter().enumerate().take(count) {
                // SAFETY: as above.
                unsafe { *to.wrapping_add(i) = T::from_f32(number) };
            }
        }
    }

    impl Add for Lanes {
        type Output = Self;

        fn add(self, other: Self) -> Self {
            Self(std::array::from_fn(|i| self.0[i] + other.0[i]))
        }
    }

    impl Sub for Lanes {
        type Output = Self;

        fn sub(self, other: Self) -> Self {
            Self(std::array::from_fn(|i| self.0[i] - other.0[i]))
        }
    }

    impl Mul<f32> for Lanes {
        type Output = Self;

        fn mul(self, factor: f32) -> Self {
            Self(self.0.map(|number| number * factor))
        }
    }
}
