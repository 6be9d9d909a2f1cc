//! Sixteen float32 in a register of AVX-512, for code that is compiled by [`run_vectorized`](super::run_vectorized).

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _CMP_UNORD_Q, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_add_epi32, _mm512_add_ps,
    _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_epi16,
    _mm512_cvtepu16_epi32, _mm512_loadu_ps, _mm512_mask_mov_epi32, _mm512_mul_ps, _mm512_set1_epi32,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_ps,
};
use std::ops::{Add, Mul, Sub};

use crate::kernels::{Bf16, Element};

/// How many.
pub(super) const LANES: usize = 16;

#[cfg(target_arch = "x86_64")]
type Register = __m512;
#[cfg(not(target_arch = "x86_64"))]
type Register = [f32; LANES];

/// The numbers. Whoever makes them knows that the processor has AVX-512, where they are registers.
#[derive(Clone, Copy)]
pub(super) struct Lanes(Register);

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
}

/// A number format that lanes are read from and written to.
pub(super) trait InLanes: Element {
    /// Reads as many numbers.
    ///
    /// # Safety
    /// As for [`Lanes::zero`]; they must be readable.
    unsafe fn load(from: *const Self) -> Lanes;

    /// Writes the nearest numbers, ties to even.
    ///
    /// # Safety
    /// They must be writable.
    unsafe fn store(lanes: Lanes, to: *mut Self);
}

#[cfg(target_arch = "x86_64")]
impl InLanes for f32 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> Lanes {
        // SAFETY: as this function asks.
        Lanes(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn store(lanes: Lanes, to: *mut Self) {
        // SAFETY: as this function asks; who made lanes knows that there is AVX-512.
        unsafe { _mm512_storeu_ps(to, lanes.0) }
    }
}

#[cfg(target_arch = "x86_64")]
impl InLanes for Bf16 {
    #[inline(always)]
    unsafe fn load(from: *const Self) -> Lanes {
        // SAFETY: as this function asks.
        Lanes(unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        })
    }

    #[inline(always)]
    unsafe fn store(lanes: Lanes, to: *mut Self) {
        // SAFETY: as above.
        unsafe {
            let bits = _mm512_castps_si512(lanes.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(lanes.0, lanes.0);
            let nan = _mm512_set1_epi32(0x7fc0);
            let upper = _mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(rounded), is_nan, nan);
            _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(upper));
        }
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
    use super::{Add, Element, InLanes, LANES, Lanes, Mul, Sub};

    impl Lanes {
        pub unsafe fn zero() -> Self {
            Self([0.0; LANES])
        }
    }

    impl<T: Element> InLanes for T {
        unsafe fn load(from: *const Self) -> Lanes {
            // SAFETY: as this function asks on x86-64.
            let numbers: [T; LANES] = unsafe { *from.cast() };
            Lanes(numbers.map(T::to_f32))
        }

        unsafe fn store(lanes: Lanes, to: *mut Self) {
            // SAFETY: as above.
            unsafe { *to.cast() = lanes.0.map(T::from_f32) };
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
