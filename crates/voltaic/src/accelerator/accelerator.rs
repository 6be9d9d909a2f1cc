//! What the trainer asks of hardware.

use std::fmt;

use super::cards::Card;
use super::devices::Devices;
use super::memory::{MemoryStats, memory_stats};
use crate::device::Device;
use crate::error::{Problem, Result};

/// A kind of hardware.
///
/// One of your own is given to the trainer as a value ([`AcceleratorChoice`](super::AcceleratorChoice)). It drives devices that libtorch has, so it
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
    /// Why not, and how to fix it.
    fn availability(&self) -> Result<(), Problem>;

    /// Devices that are visible on this machine.
    fn device_count(&self) -> usize;

    /// How many of them `devices=auto` takes; by default all.
    fn auto_device_count(&self) -> usize {
        self.device_count()
    }

    /// Which devices the trainer's `devices` means, by index.
    ///
    /// # Errors
    /// What is wrong, and which values are accepted.
    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, Problem>;

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

    /// Statistics of a device while it works, by name: the metrics of its memory, and what else the hardware reports.
    ///
    /// # Errors
    /// If its memory is not measured.
    fn device_stats(&self, device: Device) -> Result<Vec<(&'static str, f64)>> {
        let metrics = self.memory_stats(device)?.metrics();
        Ok(metrics.map(|(name, value)| (name, value as f64)).to_vec())
    }
}
