//! Accelerators by name.

use super::accelerator::Accelerator;
use super::cpu::CpuAccelerator;
use super::cuda::CudaAccelerator;
use super::hpu::HpuAccelerator;
use crate::error::{DeviceError, Problem};

/// Names that [`accelerator`] accepts.
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
            let remedy = format!("use {}", ACCELERATORS.join(", "));
            let problem = Problem::new("there is no accelerator of this name", remedy);
            return Err(DeviceError::Unavailable { device: format!("`{name}`"), problem });
        }
    };
    check_available(found.as_ref())?;
    Ok(found)
}

pub(super) fn check_available(accelerator: &dyn Accelerator) -> Result<(), DeviceError> {
    let refuse = |problem| DeviceError::Unavailable { device: accelerator.name().to_owned(), problem };
    accelerator.availability().map_err(refuse)
}

fn choose() -> Result<Box<dyn Accelerator>, DeviceError> {
    let hpu = HpuAccelerator::from_env()?;
    let no_hpu = match hpu.availability() {
        Ok(()) if hpu.is_real() => return Ok(taken(hpu, "")),
        Ok(()) => "there is no Gaudi card, only emulated ones".to_owned(),
        Err(problem) => problem.to_string(),
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
