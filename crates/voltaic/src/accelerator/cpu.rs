//! The host.

use super::{Accelerator, Devices};
use crate::device::Device;
use crate::error::Result;
use crate::ffi;

/// Host memory and host cores.
#[derive(Debug, Clone, Copy)]
pub struct CpuAccelerator;

const ACCEPTED: &str = "the number of processes, from 1, or auto";

impl Accelerator for CpuAccelerator {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn description(&self) -> String {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        format!("{cores} cores, {} threads per operator", tch::get_num_threads())
    }

    fn availability(&self) -> Result<(), String> {
        Ok(())
    }

    fn device_count(&self) -> usize {
        1
    }

    /// A number of processes that share the cores; they are numbered from 0.
    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, String> {
        use super::devices::Wanted;
        match devices.wanted(ACCEPTED)? {
            Wanted::Auto => Ok(vec![0]),
            Wanted::Count(count) => Ok((0..count).collect()),
            Wanted::All | Wanted::Indices(_) => {
                Err(format!("the cpu has no devices to choose from; use {ACCEPTED}"))
            }
        }
    }

    fn device(&self, _index: usize) -> Device {
        Device::Cpu
    }

    fn setup(&self) -> Result<()> {
        ffi::install_host_pool()?;
        Ok(())
    }

    fn synchronize(&self, _device: Device) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_the_cpu_are_processes() {
        assert_eq!(CpuAccelerator.parse_devices(&Devices::from(3)), Ok(vec![0, 1, 2]));
        assert_eq!(CpuAccelerator.parse_devices(&Devices::from("auto")), Ok(vec![0]));
        for refused in [Devices::from(-1), Devices::from(vec![0]), Devices::from(0)] {
            let message = CpuAccelerator.parse_devices(&refused).unwrap_err();
            assert!(message.ends_with(ACCEPTED), "{message}");
        }
    }
}
