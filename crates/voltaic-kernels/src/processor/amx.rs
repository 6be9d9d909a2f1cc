//! Tiles of Intel's processors (AMX), where a virtual machine offers them and does not say what they are.

/// Whether this is a processor with AMX for bfloat16, described or not.
pub fn has_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    return amx(cpuid) != Amx::Absent;
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether the processor has AMX for bfloat16 that oneDNN can use.
pub fn has_described_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    return amx(cpuid) == Amx::Described;
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether the processor offers AMX and does not say what its tiles are.
pub fn has_undescribed_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    return amx(cpuid) == Amx::Undescribed;
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amx {
    Absent,
    /// There, without a word on its tiles.
    Undescribed,
    /// There, with products of bfloat16.
    Described,
}

/// The registers of a leaf and its part.
#[cfg(target_arch = "x86_64")]
fn cpuid(leaf: u32, part: u32) -> [u32; 4] {
    let found = std::arch::x86_64::__cpuid_count(leaf, part);
    [found.eax, found.ebx, found.ecx, found.edx]
}

#[cfg(target_arch = "x86_64")]
fn amx(cpuid: impl Fn(u32, u32) -> [u32; 4]) -> Amx {
    const FEATURES: u32 = 0x7;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const TILES: u32 = 0x1d;

    let last = cpuid(0, 0)[0];
    let has = |feature| last >= FEATURES && cpuid(FEATURES, 0)[3] & feature != 0;
    // of the first palette: the bytes of all tiles, and those of one
    let is_described = last >= TILES && cpuid(TILES, 1)[0] != 0;
    match (has(AMX_TILE), is_described) {
        (true, false) => Amx::Undescribed,
        (true, true) if has(AMX_BF16) => Amx::Described,
        _ => Amx::Absent,
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn amx_is_described_or_not() {
        let machine = |last: u32, features: u32, tiles: u32| {
            amx(move |leaf, part| match (leaf, part) {
                (0, _) => [last, 0, 0, 0],
                (7, 0) => [0, 0, 0, features],
                (0x1d, 1) => [tiles, 0, 0, 0],
                _ => [0; 4],
            })
        };
        let (tile, both) = (1 << 24, 1 << 22 | 1 << 24);
        assert_eq!(machine(0x10, 0, 0), Amx::Absent);
        assert_eq!(machine(0x1e, tile, 0x0400_2000), Amx::Absent, "without bfloat16");
        assert_eq!(machine(0x1e, both, 0x0400_2000), Amx::Described, "as the manual has it");
        assert_eq!(machine(0x1c, both, 0x0400_2000), Amx::Undescribed, "the leaf is left out");
        assert_eq!(machine(0x1e, both, 0), Amx::Undescribed, "the leaf is empty");
        assert_eq!(machine(0x4, both, 0), Amx::Absent, "too old to say");
    }
}
