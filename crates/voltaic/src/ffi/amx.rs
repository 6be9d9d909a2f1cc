//! Tiles of Intel's processors (AMX), where a virtual machine offers them and does not say what they are.

use std::env;

use super::backend::set_environment;

/// oneDNN's limit on instructions; it reads one of them at its first operator.
const LIMITS: [&str; 2] = ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"];
/// The most that oneDNN knows without AMX.
const WITHOUT_AMX: &str = "AVX512_CORE_FP16";

/// Keeps oneDNN from AMX if the processor has it without saying what its tiles are, as some virtual machines have it:
/// oneDNN then sets up tiles of no size, and its bfloat16 and int8 operators end the process with an illegal
/// instruction, or with "could not create a primitive". A limit that the environment sets is kept.
///
/// Source: CPUID leaf 0x1D, "Tile Information", of Intel's architecture manual.
pub(super) fn withhold_undescribed_amx() {
    if has_undescribed_amx() && LIMITS.iter().all(|name| env::var_os(name).is_none()) {
        tracing::info!(
            "this machine has AMX but does not say what its tiles are (CPUID leaf 0x1D is empty), so bfloat16 runs \
             without it; {}={WITHOUT_AMX} is set, or set another limit yourself",
            LIMITS[0]
        );
        set_environment(LIMITS[0], WITHOUT_AMX);
    }
}

#[cfg(target_arch = "x86_64")]
fn has_undescribed_amx() -> bool {
    lacks_tiles(|leaf, part| {
        let found = std::arch::x86_64::__cpuid_count(leaf, part);
        [found.eax, found.ebx, found.ecx, found.edx]
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn has_undescribed_amx() -> bool {
    false
}

/// `cpuid` gives the registers of a leaf and its part.
#[cfg(target_arch = "x86_64")]
fn lacks_tiles(cpuid: impl Fn(u32, u32) -> [u32; 4]) -> bool {
    const FEATURES: u32 = 0x7;
    const AMX_TILE: u32 = 1 << 24;
    const TILES: u32 = 0x1d;

    let last = cpuid(0, 0)[0];
    let has_amx = last >= FEATURES && cpuid(FEATURES, 0)[3] & AMX_TILE != 0;
    // of the first palette: the bytes of all tiles, and those of one
    let is_described = last >= TILES && cpuid(TILES, 1)[0] != 0;
    has_amx && !is_described
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::lacks_tiles;

    #[test]
    fn amx_is_refused_only_where_its_tiles_are_not_described() {
        let machine = |last: u32, features: u32, tiles: u32| {
            lacks_tiles(move |leaf, part| match (leaf, part) {
                (0, _) => [last, 0, 0, 0],
                (7, 0) => [0, 0, 0, features],
                (0x1d, 1) => [tiles, 0, 0, 0],
                _ => [0; 4],
            })
        };
        let amx = 1 << 24;
        assert!(!machine(0x10, 0, 0), "no AMX");
        assert!(!machine(0x1e, amx, 0x0400_2000), "AMX as the manual describes it");
        assert!(machine(0x1c, amx, 0x0400_2000), "the leaf is left out");
        assert!(machine(0x1e, amx, 0), "the leaf is empty");
        assert!(!machine(0x4, amx, 0), "too old to say");
    }
}
