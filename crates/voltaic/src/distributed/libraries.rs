//! Which library moves the tensors of a device: Gloo is in libtorch, NCCL and HCCL are loaded when they are needed.

use std::env;
use std::path::{Path, PathBuf};

use crate::accelerator::HpuEmulator;
use crate::device::Device;
use crate::error::{ConfigError, Result};
use crate::ffi::{CollectiveApi, CollectiveLibrary};

/// Names NCCL's library.
const NCCL: &str = "VOLTAIC_NCCL";
/// Name HCCL's library and Synapse's.
const HCCL: &str = "VOLTAIC_HCCL";
const SYNAPSE: &str = "VOLTAIC_SYNAPSE";
/// Where Habana's packages put their libraries.
const INSTALLED: &str = "/usr/lib/habanalabs";

/// The library that connects ranks whose tensors are on `device`; none for a rank alone, which exchanges nothing.
pub(super) fn for_ranks(ranks: usize, device: Device) -> Result<Option<CollectiveLibrary>> {
    if ranks == 1 { Ok(None) } else { of(device) }
}

/// The library for tensors of `device`; none for those that Gloo takes.
fn of(device: Device) -> Result<Option<CollectiveLibrary>> {
    let opened = match device {
        Device::Cpu => return Ok(None),
        Device::Hpu(_) if HpuEmulator::get().is_some() => return Ok(None),
        // libtorch_cuda has loaded it, so that its name is enough
        Device::Cuda(_) => CollectiveLibrary::open(CollectiveApi::Nccl, &[named(NCCL, "libnccl.so.2")]),
        Device::Hpu(_) => {
            let libraries = [named(HCCL, "libhcl.so"), named(SYNAPSE, "libSynapse.so")];
            CollectiveLibrary::open(CollectiveApi::Hccl, &libraries)
        }
    };
    opened.map(Some).map_err(|error| {
        let what = format!("several ranks on {device} need a library that cannot be loaded: {error}");
        let remedy = match device {
            Device::Cuda(_) => format!("install NCCL, name its library in {NCCL}, or use one device"),
            _ => format!(
                "install Habana's packages, name the libraries in {HCCL} and {SYNAPSE}, or use one card"
            ),
        };
        ConfigError::new("trainer.devices", what, remedy).into()
    })
}

/// The libraries for collectives, each by name with where it was found, or why it cannot be loaded.
pub(crate) fn found() -> Vec<(&'static str, std::result::Result<String, String>)> {
    let open = |api, paths: &[PathBuf]| {
        let shown: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
        CollectiveLibrary::open(api, paths).map(|_| shown.join(", "))
    };
    vec![
        ("gloo", Ok("part of libtorch".to_owned())),
        ("nccl", open(CollectiveApi::Nccl, &[named(NCCL, "libnccl.so.2")])),
        ("hccl", open(CollectiveApi::Hccl, &[named(HCCL, "libhcl.so"), named(SYNAPSE, "libSynapse.so")])),
    ]
}

/// The library that a variable names; else Habana's own, if there is one; else what the loader finds by its name.
fn named(variable: &str, name: &str) -> PathBuf {
    let given = env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    given.unwrap_or_else(|| {
        let installed = Path::new(INSTALLED).join(name);
        if installed.exists() { installed } else { PathBuf::from(name) }
    })
}
