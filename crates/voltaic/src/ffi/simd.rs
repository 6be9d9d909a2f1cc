//! Code compiled for the processor that is there.

use crate::kernels::Kernel;

/// Whether the processor has vectors and fused multiplication as loops of [`kernels`](crate::kernels) need them: on
/// x86-64 AVX2 and FMA.
pub fn has_vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    return cfg!(target_arch = "aarch64");
}

/// Whether this is a processor by Intel, for which libtorch's own products and random masks come from the MKL at its best.
pub fn is_intel() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Asks for memory that is to be in the cache soon. Processors do by themselves what comes next in a page, and lose time at
/// the start of each.
#[inline]
pub fn prefetch<T>(address: *const T, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len * size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: it is a hint, which does nothing if there is no memory at the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast::<i8>().wrapping_add(offset)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (address, len); // processors of which none was measured
}

/// Runs a kernel compiled for AVX-512 or AVX2 where the processor has it.
#[inline]
pub fn run_vectorized<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as detected;

        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
            kernel.run()
        }

        #[target_feature(enable = "avx2,fma")]
        fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
            kernel.run()
        }

        let is_512_bits_wide =
            detected!("avx512f") && detected!("avx512bw") && detected!("avx512dq") && detected!("avx512vl");
        if is_512_bits_wide && has_vectors() {
            // SAFETY: the processor has what the function is compiled for, as was just asked.
            return unsafe { with_avx512(kernel) };
        }
        if has_vectors() {
            // SAFETY: as above.
            return unsafe { with_avx2(kernel) };
        }
    }
    kernel.run()
}
