//! NVIDIA GPUs, through libtorch's own back end, which is loaded on first use.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::error::NvmlError;

use super::accelerator::Accelerator;
use super::cards::Card;
use super::devices::Devices;
use crate::config::format_size;
use crate::device::Device;
use crate::error::{DeviceError, Error, Problem, Result};
use crate::ffi;

/// The NVIDIA GPUs of this machine.
#[derive(Debug, Clone, Copy)]
pub struct CudaAccelerator;

const ACCEPTED: &str = "a number of GPUs from 1, a list of indices, -1 for all, or auto";
/// Names the library to load, or the folder it is in.
const LIBRARY: &str = "VOLTAIC_LIBTORCH_CUDA";

impl Accelerator for CudaAccelerator {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn description(&self) -> String {
        let cards = self.cards();
        let driver =
            cards.first().and_then(|card| card.driver.clone()).unwrap_or_else(|| "unknown".to_owned());
        match &cards[..] {
            [card] => format!("{}, driver {driver}", card.name),
            cards => format!("{} GPUs, driver {driver}", cards.len()),
        }
    }

    fn availability(&self) -> Result<(), Problem> {
        if ffi::backend_is_loaded(Device::Cuda(0)) {
            return match ffi::backend_device_count(Device::Cuda(0)) {
                Ok(0) => Err(Problem::new("libtorch's CUDA back end finds no GPU", "use cpu")),
                Ok(_) => Ok(()),
                Err(error) => Err(Error::from(error).into_problem("use cpu")),
            };
        }
        let nvml = nvml()?;
        match nvml.device_count() {
            Ok(0) => return Err(Problem::new("NVIDIA's driver lists no GPU", "use cpu")),
            Ok(_) => {}
            Err(error) => {
                let what = format!("NVIDIA's driver does not list its GPUs: {error}");
                return Err(Problem::new(what, "use cpu"));
            }
        }
        if self.device_count() == 0 {
            return Err(Problem::new("CUDA_VISIBLE_DEVICES hides all GPUs", "unset it, or name some"));
        }
        libtorch_cuda().map(drop)
    }

    fn device_count(&self) -> usize {
        if ffi::backend_is_loaded(Device::Cuda(0)) {
            return ffi::backend_device_count(Device::Cuda(0)).unwrap_or(0);
        }
        let all = nvml().ok().and_then(|nvml| nvml.device_count().ok()).unwrap_or(0) as usize;
        match env::var("CUDA_VISIBLE_DEVICES") {
            // CUDA ignores what stands behind the first entry that is no GPU
            Ok(visible) => {
                let names_a_gpu = |entry: &&str| {
                    let entry = entry.trim();
                    entry
                        .parse::<usize>()
                        .map_or(entry.starts_with("GPU-") || entry.starts_with("MIG-"), |i| i < all)
                };
                visible.split(',').take_while(names_a_gpu).count()
            }
            Err(_) => all,
        }
    }

    fn parse_devices(&self, devices: &Devices) -> Result<Vec<usize>, Problem> {
        let wanted = devices.wanted(ACCEPTED)?;
        wanted
            .resolve(self.name(), self.device_count(), self.auto_device_count())
            .map_err(|what| Problem::new(what, "use a number from 1, or auto"))
    }

    fn device(&self, index: usize) -> Device {
        Device::Cuda(index)
    }

    fn cards(&self) -> Vec<Card> {
        let Ok(nvml) = nvml() else { return Vec::new() };
        let count = nvml.device_count().unwrap_or(0);
        (0..count).filter_map(|index| card(&nvml, index)).collect()
    }

    fn setup(&self) -> Result<()> {
        if ffi::backend_is_loaded(Device::Cuda(0)) {
            return Ok(());
        }
        let refuse = |problem| DeviceError::Unavailable { device: "cuda".to_owned(), problem };
        if ffi::backend_is_loaded(Device::Hpu(0)) {
            let what = "this process has HPUs already, and libtorch supports one accelerator";
            return Err(refuse(Problem::new(what, "use another process")).into());
        }
        let library = libtorch_cuda().map_err(refuse)?;
        ffi::load_library(&library).map_err(|error| {
            let remedy = "run `make setup-cuda` in voltaic's folder, install the nvidia-* packages of the same PyTorch \
                          beside it, or add CUDA's libraries to LD_LIBRARY_PATH";
            refuse(Problem::new(format!("{} cannot be loaded: {error}", library.display()), remedy))
        })?;
        if tch::Cuda::device_count() == 0 {
            let remedy = "see what nvidia-smi says, and whether libtorch was used before accelerator=cuda was \
                          chosen, which it then never notices";
            return Err(refuse(Problem::new("libtorch's CUDA back end finds no GPU", remedy)).into());
        }
        Ok(())
    }

    fn synchronize(&self, device: Device) -> Result<()> {
        Ok(ffi::synchronize(device)?)
    }
}

/// NVIDIA's management library, which comes with the driver.
fn nvml() -> Result<Nvml, Problem> {
    Nvml::init().map_err(|error| {
        let error = match error {
            NvmlError::LibloadingError(_) => "libnvidia-ml.so.1 is not found".to_owned(),
            error => error.to_string(),
        };
        let remedy = "install it, and in a container, pass the GPUs to it (--gpus all)";
        Problem::new(format!("no NVIDIA driver: {error}"), remedy)
    })
}

fn card(nvml: &Nvml, index: u32) -> Option<Card> {
    let gpu = nvml.device_by_index(index).ok()?;
    let memory = gpu.memory_info().ok();
    let size = |bytes: u64| format_size(bytes as usize);
    Some(Card {
        device: Device::Cuda(index as usize).to_string(),
        name: gpu.name().ok()?,
        uuid: gpu.uuid().ok(),
        module_id: None,
        memory: memory.as_ref().map(|memory| size(memory.total)),
        memory_used: memory.as_ref().map(|memory| size(memory.used)),
        driver: nvml.sys_driver_version().ok(),
        utilization: gpu.utilization_rates().ok().map(|rates| rates.gpu),
        temperature: gpu.temperature(TemperatureSensor::Gpu).ok(),
        power_watts: gpu.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1000.0),
    })
}

/// libtorch's CUDA library: the one that `VOLTAIC_LIBTORCH_CUDA` names, else that beside the loaded libtorch.
fn libtorch_cuda() -> Result<PathBuf, Problem> {
    const NAME: &str = "libtorch_cuda.so";
    if let Some(given) = env::var_os(LIBRARY) {
        let given = PathBuf::from(given);
        let library = if given.is_dir() { given.join(NAME) } else { given };
        return if library.is_file() {
            Ok(library)
        } else {
            let what = format!("{LIBRARY} names {}, which is not there", library.display());
            Err(Problem::new(what, "fix or unset it"))
        };
    }
    let beside = ffi::libtorch_library().as_deref().and_then(Path::parent).map(|folder| folder.join(NAME));
    match beside.and_then(|library| fs::canonicalize(library).ok()) {
        Some(library) => Ok(library),
        None => Err(Problem::new(
            format!("{NAME} is not beside the libtorch in use"),
            format!(
                "set LIBTORCH to a PyTorch with CUDA and build again, or name the library of the same version in \
                 {LIBRARY}"
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_has_a_reason_and_a_remedy() {
        if let Err(problem) = CudaAccelerator.availability() {
            assert!(!problem.what.is_empty() && !problem.remedy.is_empty(), "{problem}");
            assert!(CudaAccelerator.setup().is_err());
        } else {
            assert!(CudaAccelerator.device_count() > 0);
        }
    }
}
