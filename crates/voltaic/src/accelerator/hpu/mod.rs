//! Intel Gaudi cards, or emulated ones in their place.
//!
//! [`HpuAccelerator`] takes the cards that `gaudi` finds. Without any it takes [`HpuEmulator`], which libtorch sees as a device of its
//! own. `flags` reads the environment variables of Habana's software.

mod accelerator;
pub(super) mod emulator;
mod flags;
pub(super) mod gaudi;

pub use accelerator::HpuAccelerator;
pub use emulator::{Generation, HpuEmulator, HpuSettings};
pub use flags::{FlagReport, RuntimeFlags};
