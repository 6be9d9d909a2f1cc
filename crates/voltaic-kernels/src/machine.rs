//! What decides which kernel serves: the processor, libtorch, and what was asked for.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::processor::amx::has_described_amx;
use crate::processor::{has_vectors, has_wide_units, is_intel};
use crate::product::amx::has_tiles;
use crate::product::mkl::{MklFactor, has_mkl_bf16};
use crate::product::strip::has_bf16_products;
use crate::product::strips::has_strips;

/// What the choice knows of the processor, of libtorch, and of what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// AVX2 and FMA, or an aarch64.
    pub has_vectors: bool,
    /// Made by Intel: libtorch's own products come from the MKL at its best.
    pub is_intel: bool,
    /// AVX-512.
    pub has_strips: bool,
    /// AVX-512 that is not split in two: AMD's from Zen 5 on.
    pub has_wide_units: bool,
    /// AVX512_BF16.
    pub has_bf16_products: bool,
    /// AMX that this process may use.
    pub has_tiles: bool,
    /// AMX that oneDNN can use.
    pub has_described_amx: bool,
    /// A libtorch with the MKL.
    pub has_mkl: bool,
    /// Whether kernels are to serve all that they can, also where libtorch's are faster.
    pub asks_for_all: bool,
}

static ASKS_FOR_ALL: AtomicBool = AtomicBool::new(false);

/// What kernels are chosen for in this process.
static CHOSEN_FOR: OnceLock<Machine> = OnceLock::new();

/// Chooses kernels as on another machine, so that tests reach the rows of machines that are not theirs. False, with nothing
/// changed, if this one lacks what it has, or if kernels were chosen before.
pub fn choose_as(machine: Machine) -> bool {
    Machine::found().can_stand_in_for(&machine) && CHOSEN_FOR.set(machine).is_ok()
}

/// Asks for all kernels, or for those alone that are faster than libtorch's, as it is at first.
pub fn ask_for_all(all: bool) {
    ASKS_FOR_ALL.store(all, Ordering::Relaxed);
}

impl Machine {
    /// This one, or the one that [`choose_as`] named.
    pub fn here() -> Self {
        let chosen_for = CHOSEN_FOR.get_or_init(Self::found);
        Self { asks_for_all: chosen_for.asks_for_all || ASKS_FOR_ALL.load(Ordering::Relaxed), ..*chosen_for }
    }

    /// This one, whatever machine kernels are chosen for.
    pub fn found() -> Self {
        Self {
            has_vectors: has_vectors(),
            is_intel: is_intel(),
            has_strips: has_strips(),
            has_wide_units: has_wide_units(),
            has_bf16_products: has_bf16_products(),
            has_tiles: has_tiles(),
            has_described_amx: has_described_amx(),
            has_mkl: has_mkl_bf16() && f32::gemm().is_some(), // another BLAS has no bfloat16
            asks_for_all: false,
        }
    }

    /// Whether all instructions and libraries that another has are here. The width of units does not count as one.
    pub fn can_stand_in_for(&self, other: &Self) -> bool {
        let pairs = [
            (self.has_vectors, other.has_vectors),
            (self.has_strips, other.has_strips || other.has_wide_units),
            (self.has_bf16_products, other.has_bf16_products),
            (self.has_tiles, other.has_tiles),
            (self.has_mkl, other.has_mkl),
        ];
        pairs.into_iter().all(|(here, there)| here || !there)
    }

    /// Whether libtorch keeps what it is best at on Intel's processors.
    pub(crate) fn keeps_intels(&self) -> bool {
        self.is_intel && !self.asks_for_all
    }

    /// Whether dot products of bfloat16 are faster than those of float32: Intel's processors do fewer of them in a cycle.
    pub(crate) fn has_fast_bf16_products(&self) -> bool {
        self.has_bf16_products && !self.is_intel
    }

    /// Whether products of bfloat16 are from strips at full width.
    pub(crate) fn has_wide_bf16_products(&self) -> bool {
        self.has_wide_units && self.has_bf16_products
    }

    /// Whether products and convolutions of bfloat16 are the MKL's. oneDNN, which computes libtorch's, has fast instructions
    /// for them with AMX, or on processors that are not Intel's the dot products of AVX-512.
    pub(crate) fn takes_bf16(&self) -> bool {
        self.has_mkl && (self.asks_for_all || !(self.has_described_amx || self.has_fast_bf16_products()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_machine_stands_in_for_one_with_other_instructions() {
        let found = Machine::found();
        let without = Machine { has_strips: false, has_tiles: false, has_mkl: false, ..found };
        assert!(found.can_stand_in_for(&found) && found.can_stand_in_for(&without));
        for more in [
            Machine { has_strips: true, ..without },
            Machine { has_wide_units: true, ..without },
            Machine { has_tiles: true, ..without },
            Machine { has_mkl: true, ..without },
        ] {
            assert!(!without.can_stand_in_for(&more), "{more:?}");
        }
    }
}
