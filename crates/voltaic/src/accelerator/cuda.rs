//! NVIDIA GPUs, through libtorch's own back end.

use super::{Accelerator, Devices};
use crate::device::Device;
use crate::error::Result;

/// The NVIDIA GPUs of this machine.
#[derive(Debug, Clone, Copy)]
pub struct CudaAccelerator;

const ACCEPTED: &str = "a number of GPUs from 1, a list of indices, -1 for all, or auto";

impl Accelerator for CudaAccelerator {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn description(&self) -> String {
        format!("{} GPUs", self.device_count())
    }

    fn availability(&self) -> Result<(), String> {
        if tch::Cuda::is_available() {
            return Ok(());
        }
        Err("libtorch has no CUDA back end here, or finds no GPU; use accelerator=cpu or hpu".to_owned())
    }

    fn device_count(&self) -> usize {
        usize::try_from(tch::Cuda::device_count()).unwrap_or(0)
    }

    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, String> {
        let available = self.device_count();
        devices.wanted(ACCEPTED)?.resolve(self.name(), available, available)
    }

    fn device(&self, index: usize) -> Device {
        Device::Cuda(index)
    }

    fn setup(&self) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self, device: Device) -> Result<()> {
        if let Device::Cuda(index) = device {
            tch::Cuda::synchronize(index as i64);
        }
        Ok(())
    }
}
