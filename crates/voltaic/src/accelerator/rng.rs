//! Seeds: one number decides weights, dropout and the order of batches.

use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use crate::device::Device;
use crate::error::Result;
use crate::ffi;

/// The seed given last; 0 before that, as in Lightning.
static SEED: AtomicU64 = AtomicU64::new(0);

/// Seeds libtorch's generators on all devices, and the shuffling of loaders that have no seed of their own.
///
/// Call it before the module is made, so that its weights are the same in each run.
///
/// # Errors
/// If libtorch refuses.
pub fn seed_everything(seed: u64) -> Result<()> {
    SEED.store(seed, Ordering::Relaxed);
    Ok(ffi::manual_seed(seed)?)
}

/// The seed given to [`seed_everything`] last, 0 if it was never called.
pub fn global_seed() -> u64 {
    SEED.load(Ordering::Relaxed)
}

/// States of the generators that training on `device` uses, by device name. A device whose generator libtorch cannot
/// reach is left out.
pub(crate) fn states(device: Device) -> Result<Vec<(String, Tensor)>> {
    let mut devices = vec![Device::Cpu];
    if device != Device::Cpu && ffi::has_generator(device)? {
        devices.push(device);
    }
    devices
        .into_iter()
        .map(|device| {
            let (device_type, index) = device.numbers();
            Ok((device.to_string(), ffi::rng_state(device_type, index)?))
        })
        .collect()
}

/// Puts generators into saved states. States of devices that this run does not have are ignored: a run may resume on another
/// accelerator, whose random numbers differ anyway.
pub(crate) fn set_states(states: &[(String, Tensor)]) -> Result<()> {
    for (name, state) in states {
        let device: Device = name.parse()?;
        if !ffi::has_generator(device)? {
            tracing::warn!(
                "the saved state of {device}'s random numbers is not used: there is no such generator here"
            );
            continue;
        }
        let (device_type, index) = device.numbers();
        ffi::set_rng_state(device_type, index, state)?;
    }
    Ok(())
}
