//! The hardware a run uses, behind one trait: is it there, how many are there, what happens around a step.
//!
//! Owns no state of a run. Which device a process takes is decided here; spreading work over devices is not.

mod cards;
mod choice;
mod config;
mod cpu;
mod cuda;
mod devices;
mod hpu;
mod memory;
pub(crate) mod rng;

use std::fmt;

pub use cards::{Card, Inventory, Listed};
pub use choice::AcceleratorChoice;
pub(crate) use config::AcceleratorConfig;
pub use cpu::CpuAccelerator;
pub use cuda::CudaAccelerator;
pub use devices::Devices;
pub use hpu::{FlagReport, Generation, HpuAccelerator, HpuEmulator, HpuSettings, RuntimeFlags};
pub use memory::{
    MemoryStats, max_memory_allocated, mem_get_info, memory_allocated, memory_stats, memory_summary,
    reset_accumulated_memory_stats, reset_peak_memory_stats,
};

use crate::device::Device;
use crate::error::{DeviceError, Result};

/// A kind of hardware.
///
/// One of your own is given to the trainer as a value ([`AcceleratorChoice`]). It drives devices that libtorch has, so it
/// takes the name of their kind, by which the trainer chooses precision, strategy and how checkpoints are stored: around
/// another accelerator, that one's name. Any other name, and devices of another kind than the name, are refused.
pub trait Accelerator: fmt::Debug + Send + Sync {
    /// The name that chooses it, and the kind of its devices: `cpu`, `cuda` or `hpu`.
    fn name(&self) -> &'static str;

    /// One line on what stands behind the name, such as `emulated gaudi2, 96 GiB per device`.
    fn description(&self) -> String;

    /// Whether it can be used on this machine.
    ///
    /// # Errors
    /// Why not, and what to do about it.
    fn availability(&self) -> Result<(), String>;

    /// Devices that are visible on this machine.
    fn device_count(&self) -> usize;

    /// How many of them `devices=auto` takes; all unless told otherwise.
    fn auto_device_count(&self) -> usize {
        self.device_count()
    }

    /// Which devices the trainer's `devices` means, by index.
    ///
    /// # Errors
    /// What is wrong, and which values are accepted.
    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, String>;

    /// Why `devices=auto` takes [`Accelerator::auto_device_count`] devices, if that needs saying.
    fn auto_devices(&self) -> Option<String> {
        None
    }

    /// The device of an index.
    fn device(&self, index: usize) -> Device;

    /// The devices of this machine as their driver describes them, without taking one.
    fn cards(&self) -> Vec<Card> {
        Vec::new()
    }

    /// Whether the devices have float16.
    fn has_float16(&self) -> bool {
        true
    }

    /// Makes the devices usable in this process. Called once before anything is put on them; later calls change
    /// nothing.
    ///
    /// # Errors
    /// If the hardware, its driver or libtorch refuses.
    fn setup(&self) -> Result<()>;

    /// Called after each optimizer step: where a device that collects work starts it.
    ///
    /// # Errors
    /// If the device refuses.
    fn step_boundary(&self) -> Result<()> {
        Ok(())
    }

    /// Waits until the device has done all its work.
    ///
    /// # Errors
    /// If the device reports that work failed.
    fn synchronize(&self, device: Device) -> Result<()>;

    /// What the memory of a device is used for.
    ///
    /// # Errors
    /// If its memory is not measured.
    fn memory_stats(&self, device: Device) -> Result<MemoryStats> {
        memory_stats(device)
    }

    /// What can be measured of a device while it works, by name: the metrics of its memory, and what else the
    /// hardware tells.
    ///
    /// # Errors
    /// If its memory is not measured.
    fn device_stats(&self, device: Device) -> Result<Vec<(&'static str, f64)>> {
        let metrics = self.memory_stats(device)?.metrics();
        Ok(metrics.map(|(name, value)| (name, value as f64)).to_vec())
    }
}

/// Names that [`accelerator`] knows.
pub const ACCELERATORS: [&str; 4] = ["auto", "cpu", "cuda", "hpu"];

/// The accelerator of a name in any case; `auto` takes the first that is there of Gaudi cards, cuda and cpu, and logs
/// its choice. An emulated HPU is never taken unasked.
///
/// # Errors
/// [`DeviceError::Unavailable`] if there is no accelerator of this name, or this machine has not got it.
pub fn accelerator(name: &str) -> Result<Box<dyn Accelerator>, DeviceError> {
    let found: Box<dyn Accelerator> = match name.to_lowercase().as_str() {
        "auto" => return choose(),
        "cpu" => Box::new(CpuAccelerator),
        "cuda" | "gpu" => Box::new(CudaAccelerator),
        "hpu" => Box::new(HpuAccelerator::from_env()?),
        _ => {
            let reason = format!("there is no accelerator of this name; use {}", ACCELERATORS.join(", "));
            return Err(DeviceError::Unavailable { device: format!("`{name}`"), reason });
        }
    };
    check_available(found.as_ref())?;
    Ok(found)
}

fn check_available(accelerator: &dyn Accelerator) -> Result<(), DeviceError> {
    let refuse = |reason| DeviceError::Unavailable { device: accelerator.name().to_owned(), reason };
    accelerator.availability().map_err(refuse)
}

fn choose() -> Result<Box<dyn Accelerator>, DeviceError> {
    let hpu = HpuAccelerator::from_env()?;
    let no_hpu = match hpu.availability() {
        Ok(()) if hpu.is_real() => return Ok(taken(hpu, "")),
        Ok(()) => "there is no Gaudi card, only emulated ones".to_owned(),
        Err(reason) => reason,
    };
    match CudaAccelerator.availability() {
        Ok(()) => Ok(taken(CudaAccelerator, &format!("; not hpu: {no_hpu}"))),
        Err(reason) => Ok(taken(CpuAccelerator, &format!("; not hpu: {no_hpu}; not cuda: {reason}"))),
    }
}

fn taken(accelerator: impl Accelerator + 'static, why: &str) -> Box<dyn Accelerator> {
    tracing::info!("accelerator=auto: {}, {}{why}", accelerator.name(), accelerator.description());
    Box::new(accelerator)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accelerators_are_found_by_name() {
        assert_eq!(accelerator("CPU").unwrap().name(), "cpu");
        assert_eq!(accelerator("hpu").unwrap().name(), "hpu");
        let error = accelerator("tpu").unwrap_err().to_string();
        assert_eq!(
            error,
            "`tpu` is not available: there is no accelerator of this name; use auto, cpu, cuda, hpu"
        );
    }

    #[test]
    fn auto_takes_no_emulated_device() {
        assert_ne!(accelerator("auto").unwrap().name(), "hpu");
    }
}
