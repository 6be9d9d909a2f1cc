//! Sixteen float32 in a register of AVX-512, for code that is compiled by [`run_vectorized`](super::run_vectorized).

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m512, _mm512_add_ps, _mm512_loadu_ps, _mm512_mul_ps, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_storeu_ps, _mm512_sub_ps,
};
use std::ops::{Add, Mul, Sub};

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

    /// Reads them.
    ///
    /// # Safety
    /// As for `zero`; they must be readable.
    #[inline(always)]
    pub unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as this function asks.
        Self(unsafe { _mm512_loadu_ps(from) })
    }

    /// Writes them.
    ///
    /// # Safety
    /// They must be writable.
    #[inline(always)]
    pub unsafe fn store(self, to: *mut f32) {
        // SAFETY: as this function asks; who made lanes knows that there is AVX-512.
        unsafe { _mm512_storeu_ps(to, self.0) }
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
    use super::{Add, LANES, Lanes, Mul, Sub};

    impl Lanes {
        pub unsafe fn zero() -> Self {
            Self([0.0; LANES])
        }

        pub unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as this function asks on x86-64.
            Self(unsafe { *from.cast() })
        }

        pub unsafe fn store(self, to: *mut f32) {
            // SAFETY: as above.
            unsafe { *to.cast() = self.0 };
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
