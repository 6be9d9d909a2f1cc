//! What makes a call another graph: how its tensors lie in memory, and what holds on the thread.

use tch::{Kind, Tensor};

use crate::device::Device;
use crate::dtype::DtypeNames;
use crate::error::Result;
use crate::ffi;
use crate::nn::{Module, interceptors_now, te};
use crate::precision::fp8::fp8_number;

/// What a graph takes for granted of an input.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct InputSignature {
    pub(crate) size: Vec<i64>,
    /// Kernels may do their work otherwise on another layout.
    pub(crate) stride: Vec<i64>,
    kind: Kind,
    pub(super) device: Device,
    pub(super) requires_grad: bool,
}

impl InputSignature {
    pub(crate) fn of(input: &Tensor) -> Result<Self> {
        Ok(Self {
            size: input.size(),
            stride: input.stride(),
            kind: input.kind(),
            device: Device::of(input)?,
            requires_grad: ffi::grad_is_enabled() && input.requires_grad(),
        })
    }
}

/// What holds on this thread when code is captured or called: one key of all graphs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Conditions {
    /// Gradients are wanted.
    with_grad: bool,
    /// Of autocast on each device: whether it casts, and to what.
    casts: Vec<(bool, i32)>,
    /// Of the operators that cast.
    lists_version: u64,
    /// Of the recipe by which layers compute in float8.
    fp8: u64,
    /// Hash of which layers in float8 have measured in the last passes, of which the next ones make scales.
    measured: u64,
    /// Interceptors of calls.
    interceptors: Vec<u64>,
}

impl Conditions {
    pub(crate) fn now(devices: &[Device], with_grad: bool) -> Result<Self> {
        let casts = |device: &Device| {
            let (is_on, dtype) = ffi::autocast_state(*device)?;
            Ok((is_on, if is_on { dtype } else { 0 }))
        };
        Ok(Self {
            with_grad,
            casts: devices.iter().map(casts).collect::<Result<_>>()?,
            lists_version: ffi::autocast_lists_version(),
            fp8: fp8_number(),
            measured: 0,
            interceptors: interceptors_now(),
        })
    }

    /// What holds for a call of `module`.
    pub(crate) fn of_call(module: &dyn Module, device: Device, with_grad: bool) -> Result<Self> {
        let measured = if with_grad { te::measured_hash(module) } else { 0 };
        Ok(Self { measured, ..Self::now(&[device], with_grad)? })
    }

    /// Whether a call has left what the next one of its kind finds.
    pub(super) fn holds_again(&self, module: &dyn Module) -> bool {
        !self.with_grad || self.measured == te::measured_hash(module)
    }

    /// Takes the lists of operators that cast as they are now.
    pub(super) fn take_lists(&mut self) {
        self.lists_version = ffi::autocast_lists_version();
    }

    pub(super) fn has_interceptors_of(&self, other: &Self) -> bool {
        self.interceptors == other.interceptors
    }

    /// In what a capture and a call differ, as the end of "was captured"; none if they do not.
    pub(super) fn difference(&self, now: &Self) -> Option<String> {
        let grad = |with_grad| if with_grad { "with grad" } else { "without grad" };
        if self.with_grad != now.with_grad {
            return Some(format!("{}, and is used {}", grad(self.with_grad), grad(now.with_grad)));
        }
        if let Some((then, now)) = self.casts.iter().zip(&now.casts).find(|(then, now)| then != now) {
            return Some(format!("{}, and is used {}", autocast_of(*then), autocast_of(*now)));
        }
        if self.lists_version != now.lists_version {
            return Some("under other lists of operators that cast".to_owned());
        }
        if self.fp8 != now.fp8 {
            return Some("under another recipe for fp8, or another measurement mode".to_owned());
        }
        if self.measured != now.measured {
            return Some("after passes in float8 that measured otherwise".to_owned());
        }
        let new = now.interceptors.iter().filter(|id| !self.interceptors.contains(id)).count();
        let gone = self.interceptors.iter().filter(|id| !now.interceptors.contains(id)).count();
        let is_other = self.interceptors != now.interceptors;
        is_other.then(|| {
            format!("under other interceptors of calls ({new} were registered since, {gone} are gone)")
        })
    }
}

fn autocast_of((is_on, dtype): (bool, i32)) -> String {
    if !is_on {
        return "without autocast".to_owned();
    }
    let name = DtypeNames::of_number(dtype).map_or("another dtype", |names| names.name);
    format!("within autocast to {name}")
}

/// The device of a call: that of its first input.
pub(super) fn device_of(inputs: &[Tensor]) -> Result<Device> {
    inputs.first().map_or(Ok(Device::Cpu), Device::of)
}
