//! Where tensors live: voltaic's own device names.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::DeviceError;

/// A place where tensors live and operators run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[non_exhaustive]
pub enum Device {
    /// Host memory and host cores.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by index.
    Cuda(usize),
    /// An Intel Gaudi card, or an emulated one, by index.
    Hpu(usize),
}

impl Device {
    /// Type and index as c10 numbers them.
    pub(crate) fn numbers(self) -> (i32, i32) {
        match self {
            Self::Cpu => (voltaic_sys::VT_CPU, 0),
            Self::Cuda(index) => (voltaic_sys::VT_CUDA, index as i32),
            Self::Hpu(index) => (voltaic_sys::VT_HPU, index as i32),
        }
    }

    /// The tch device that stands for this one. tch has no HPU: index 64 and above of its CUDA device mean
    /// `hpu:index-64` (the linker flags of `voltaic-build` make libtorch read them so).
    pub(crate) fn tch(self) -> tch::Device {
        match self {
            Self::Cpu => tch::Device::Cpu,
            Self::Cuda(index) => tch::Device::Cuda(index),
            Self::Hpu(index) => tch::Device::Cuda(voltaic_sys::VT_TCH_HPU + index),
        }
    }
}

impl From<Device> for tch::Device {
    /// What functions of tch take. An HPU is a CUDA device of index 64 and above to tch, which has no name for it.
    fn from(device: Device) -> Self {
        device.tch()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
            Self::Hpu(index) => write!(f, "hpu:{index}"),
        }
    }
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        device.to_string()
    }
}

impl TryFrom<String> for Device {
    type Error = DeviceError;

    fn try_from(text: String) -> Result<Self, DeviceError> {
        text.parse()
    }
}

impl FromStr for Device {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Self, DeviceError> {
        let unknown = || DeviceError::Unknown { text: text.to_owned() };
        let (name, index) = match text.split_once(':') {
            Some((name, index)) => (name, index.parse().map_err(|_| unknown())?),
            None => (text, 0),
        };
        match (name, text.contains(':')) {
            ("cpu", false) => Ok(Self::Cpu),
            ("cuda", _) => Ok(Self::Cuda(index)),
            ("hpu", _) => Ok(Self::Hpu(index)),
            _ => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_print_alike() {
        for (text, device) in [
            ("cpu", Device::Cpu),
            ("cuda:1", Device::Cuda(1)),
            ("hpu:0", Device::Hpu(0)),
            ("hpu:7", Device::Hpu(7)),
        ] {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
        }
        assert_eq!("hpu".parse(), Ok(Device::Hpu(0)));
        for text in ["", "gpu", "cpu:0", "cuda:", "cuda:x", "hpu:-1"] {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
