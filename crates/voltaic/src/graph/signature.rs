//! What makes a call another graph: how its tensors lie in memory, and what autocast does.

use tch::{Kind, Tensor};

use crate::device::Device;
use crate::error::Result;
use crate::ffi;
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

/// What autocast does when code is captured or called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Casts {
    /// On the device of the inputs: whether it casts, and to what.
    state: (bool, i32),
    /// Of the operators that cast.
    lists_version: u64,
    /// Of the recipe by which layers compute in float8.
    fp8: u64,
}

impl Casts {
    pub(super) fn now(device: Device) -> Result<Self> {
        let (is_on, dtype) = ffi::autocast_state(device)?;
        let state = (is_on, if is_on { dtype } else { 0 });
        Ok(Self { state, lists_version: ffi::autocast_lists_version(), fp8: fp8_number() })
    }

    pub(super) fn is_on(self) -> bool {
        self.state.0
    }
}

/// The device of a call: that of its first input.
pub(super) fn device_of(inputs: &[Tensor]) -> Result<Device> {
    inputs.first().map_or(Ok(Device::Cpu), Device::of)
}
