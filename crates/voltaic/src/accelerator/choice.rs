//! The accelerator that a program asks for: by name, or as a value.

use std::fmt;
use std::sync::Arc;

use super::accelerator::Accelerator;
use super::find::{ACCELERATORS, accelerator, check_available};
use crate::config::conversions;
use crate::device::Device;
use crate::error::{DeviceError, Problem};

/// An accelerator by name, such as `"hpu"` or `"auto"`, or as a value, such as [`HpuAccelerator`](super::HpuAccelerator) or
/// one of your own.
pub enum AcceleratorChoice {
    /// By name; see [`accelerator`].
    Name(String),
    /// This one.
    Value(Arc<dyn Accelerator>),
}

impl AcceleratorChoice {
    /// The accelerator, if this machine has it.
    ///
    /// # Errors
    /// As [`accelerator`]; a value whose name is not the kind of its devices.
    pub fn resolve(self) -> Result<Arc<dyn Accelerator>, DeviceError> {
        let found = match self {
            Self::Name(name) => return Ok(accelerator(&name)?.into()),
            Self::Value(found) => found,
        };
        let (name, device) = (found.name(), found.device(0));
        let refuse = |what: String, remedy: String| {
            let device = format!("the accelerator `{name}` that the program gives");
            Err(DeviceError::Unavailable { device, problem: Problem::new(what, remedy) })
        };
        let kinds = &ACCELERATORS[1..];
        if !kinds.contains(&name) {
            let kinds = kinds.join(", ");
            let remedy = format!("let Accelerator::name return one of {kinds}");
            return refuse("its name is not a kind of device".to_owned(), remedy);
        }
        let kind = kind(device);
        if kind != name {
            let remedy = format!("let Accelerator::name return {kind}");
            return refuse(format!("its devices are of another kind ({device})"), remedy);
        }
        check_available(found.as_ref())?;
        Ok(found)
    }
}

/// The name of the accelerator whose device it is.
fn kind(device: Device) -> &'static str {
    match device {
        Device::Cpu => "cpu",
        Device::Cuda(_) => "cuda",
        Device::Hpu(_) => "hpu",
    }
}

impl fmt::Debug for AcceleratorChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => name.fmt(f),
            Self::Value(value) => value.fmt(f),
        }
    }
}

conversions! { AcceleratorChoice:
    &str => |name| Self::Name(name.to_owned()),
    &String => |name| Self::Name(name.clone()),
    String => |name| Self::Name(name),
}

impl<A: Accelerator + 'static> From<A> for AcceleratorChoice {
    fn from(value: A) -> Self {
        Self::Value(Arc::new(value))
    }
}

conversions! { AcceleratorChoice:
    Box<dyn Accelerator> => |value| Self::Value(value.into()),
    Arc<dyn Accelerator> => |value| Self::Value(value),
}
