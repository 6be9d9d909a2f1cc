//! States that are moved to memory of the host between phases of training, and back.

use tch::Tensor;

use crate::dtype::bytes_of;
use crate::error::Result;
use crate::ffi;

/// Something that training keeps on its device between steps. The names are DeepSpeed's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffloadState {
    /// What the optimizer keeps of each parameter, such as its moments.
    OptimStates,
    /// Master weights: the float32 copies of weights of 16 bits that are updated.
    HpParams,
    /// The weights that the module computes with; with ZeRO's stage 3 this rank's shards of them.
    LpParams,
    /// Gradients, such as those of an open accumulation window.
    LpGrads,
}

impl OffloadState {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::OptimStates, Self::HpParams, Self::LpParams, Self::LpGrads];
}

/// Which states go to memory of the host, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffloadStates {
    /// The states; all by default.
    pub include: Vec<OffloadState>,
    /// Host memory is pinned, where the device can copy from pinned memory faster.
    pub pin_memory: bool,
}

impl Default for OffloadStates {
    fn default() -> Self {
        OffloadState::ALL.into()
    }
}

impl<const N: usize> From<[OffloadState; N]> for OffloadStates {
    fn from(include: [OffloadState; N]) -> Self {
        Self { include: include.into(), pin_memory: true }
    }
}

impl OffloadStates {
    /// Whether this one is to be moved.
    pub(crate) fn includes(&self, state: OffloadState) -> bool {
        self.include.contains(&state)
    }
}

/// A copy of a tensor on another device, laid out as it is. On the host it is in pinned memory, if that is asked for and can be.
pub(crate) fn moved(tensor: &Tensor, device: tch::Device, pins: bool) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    if !pins || device != tch::Device::Cpu || ffi::cannot_pin().is_some() {
        return Ok(tensor.f_detach()?.f_to_device(device)?);
    }
    let mut pinned = ffi::empty_pinned(tensor)?;
    pinned.f_copy_(tensor)?;
    Ok(pinned)
}

/// Gives a tensor, and all that have a handle to it, the values of another one in its place, perhaps on another device.
pub(crate) fn take_place(tensor: &Tensor, data: &Tensor) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    Ok(tensor.shallow_clone().f_set_data(data)?)
}

/// Moves the gradient of a leaf. One that lies in memory with others, such as in a bucket, stays, since that memory does.
pub(crate) fn move_grad(leaf: &Tensor, device: tch::Device, pins: bool) -> Result<()> {
    let grad = leaf.grad();
    if !grad.defined() || grad.device() == device || grad.is_sparse() {
        return Ok(());
    }
    if ffi::describe_storage(&grad)?.1 > bytes_of(&grad) {
        return Ok(());
    }
    Ok(ffi::set_grad(leaf, &moved(&grad, device, pins)?)?)
}

/// Tensors that are in memory of the host for a while.
#[derive(Debug, Default)]
pub(crate) struct Offloaded(Vec<(OffloadState, Tensor, tch::Device)>);

impl Offloaded {
    /// Moves a tensor, if it is not on the host.
    pub fn offload(&mut self, state: OffloadState, tensor: &Tensor, pins: bool) -> Result<()> {
        let home = tensor.device();
        if home == tch::Device::Cpu {
            return Ok(());
        }
        take_place(tensor, &moved(tensor, tch::Device::Cpu, pins)?)?;
        self.0.push((state, tensor.shallow_clone(), home));
        Ok(())
    }

    /// Moves those of these states back.
    pub fn reload(&mut self, states: &[OffloadState]) -> Result<()> {
        for (_, tensor, home) in self.0.extract_if(.., |(state, ..)| states.contains(state)) {
            take_place(&tensor, &moved(&tensor, home, false)?)?;
        }
        Ok(())
    }
}
