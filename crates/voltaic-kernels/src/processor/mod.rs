//! Code compiled for the processor that is there.

pub(crate) mod amx;
pub(crate) mod lanes;

use crate::kernel::Kernel;

/// Whether the processor has vectors and fused multiplication as the loops need them: on
/// x86-64 AVX2 and FMA.
pub fn has_vectors() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    return cfg!(target_arch = "aarch64");
}

/// Whether this is a processor by Intel, for which libtorch's own products and random masks come from the MKL at its best.
pub fn is_intel() -> bool {
    is_made_by(b"GenuineIntel")
}

/// Whether this is a processor by AMD that computes vectors of 512 bits at once, and from the strips that products are made
/// of does so at its limit: a Zen 5 or a later one. A Zen 4 splits them in two.
///
/// The processor's own statement about it (FP512 of CPUID leaf 0x8000001A) is missing on virtual machines.
pub fn has_wide_units() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        const ZEN_5: u32 = 0x1a;
        let version = std::arch::x86_64::__cpuid(1).eax;
        let [family, extended] = [version >> 8 & 0xf, version >> 20 & 0xff];
        has_avx512() && is_made_by(b"AuthenticAMD") && family + extended >= ZEN_5
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn is_made_by(name: &[u8; 12]) -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == name
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = name;
        false
    }
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

/// Whether the processor has AVX-512 with all that its loops are compiled for.
pub fn has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as detected;

        detected!("avx512f")
            && detected!("avx512bw")
            && detected!("avx512dq")
            && detected!("avx512vl")
            && has_vectors()
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Runs a kernel compiled for AVX-512 or AVX2 where the processor has it.
#[inline]
pub fn run_vectorized<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
            kernel.run()
        }

        #[target_feature(enable = "avx2,fma")]
        fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
            kernel.run()
        }

        if has_avx512() {
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

/// Runs a kernel compiled for the dot products of bfloat16 of AVX-512.
///
/// # Panics
/// If the processor does not have them.
pub(crate) fn run_with_dots<K: Kernel>(kernel: K) -> K::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn with_dots<K: Kernel>(kernel: K) -> K::Output {
            kernel.run()
        }

        assert!(has_avx512() && std::arch::is_x86_feature_detected!("avx512bf16"), "no AVX512_BF16");
        // SAFETY: the processor has what the function is compiled for, as was just asked.
        unsafe { with_dots(kernel) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    kernel.run()
}
