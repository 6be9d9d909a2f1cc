//! The `accelerator` key: a name, or a class without settings, which becomes the name.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};

/// An accelerator by name, or by the class of Lightning.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
pub(crate) enum AcceleratorConfig {
    /// `auto`, `cpu`, `cuda` or `hpu`.
    Name(String),
    /// By class.
    Class(AcceleratorClass),
}

/// An accelerator by class name.
#[derive(Deserialize, JsonSchema)]
#[serde(tag = "class_path", content = "init_args", deny_unknown_fields)]
pub(crate) enum AcceleratorClass {
    /// The host; `cpu`.
    #[serde(rename = "CPUAccelerator")]
    Cpu,
    /// NVIDIA's GPUs; `cuda`.
    #[serde(rename = "CUDAAccelerator")]
    Cuda,
    /// Intel's Gaudi cards, or emulated ones; `hpu`.
    #[serde(rename = "HPUAccelerator")]
    Hpu,
}

impl AcceleratorConfig {
    /// Reads the name of the accelerator.
    pub(crate) fn name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
        Ok(match Self::deserialize(from)? {
            Self::Name(name) => name,
            Self::Class(AcceleratorClass::Cpu) => "cpu".to_owned(),
            Self::Class(AcceleratorClass::Cuda) => "cuda".to_owned(),
            Self::Class(AcceleratorClass::Hpu) => "hpu".to_owned(),
        })
    }
}
