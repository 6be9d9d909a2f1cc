//! Intel Gaudi cards, or emulated ones in their place.

mod accelerator;
pub(super) mod emulator;
mod flags;
pub(super) mod gaudi;

pub use accelerator::HpuAccelerator;
pub use emulator::{Generation, HpuEmulator, HpuSettings};
pub use flags::{FlagReport, RuntimeFlags};
