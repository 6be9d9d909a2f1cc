//! The hardware a run uses, behind one trait: is it there, how many are there, what happens around a step.
//!
//! Owns no state of a run. Which device a process takes is decided here; spreading work over devices is not.

#[expect(clippy::module_inception, reason = "the trait of the folder")]
mod accelerator;
mod cards;
mod choice;
mod config;
mod cpu;
mod cuda;
mod devices;
mod find;
mod hpu;
mod inventory;
mod memory;
pub(crate) mod rng;

pub use accelerator::Accelerator;
pub use cards::Card;
pub use choice::AcceleratorChoice;
pub(crate) use config::AcceleratorConfig;
pub use cpu::CpuAccelerator;
pub use cuda::CudaAccelerator;
pub use devices::Devices;
pub use find::{ACCELERATORS, accelerator};
pub use hpu::{FlagReport, Generation, HpuAccelerator, HpuEmulator, HpuSettings, RuntimeFlags};
pub use inventory::{Inventory, Listed};
pub use memory::{
    MemoryStats, max_memory_allocated, mem_get_info, memory_allocated, memory_stats, memory_summary,
    reset_accumulated_memory_stats, reset_peak_memory_stats,
};
