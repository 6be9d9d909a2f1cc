//! What code that runs again in backward depends on beside its inputs: random numbers, autocast, fp8.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tch::Tensor;

use crate::accelerator::rng;
use crate::device::Device;
use crate::error::Result;
use crate::ffi::{self, RecordingPause};
use crate::precision::fp8::Fp8Region;

/// What code that runs again depends on beside its inputs, as it was in the forward pass.
pub(crate) struct Surroundings {
    device: Device,
    /// States of random number generators before the forward pass; after it, of those that it has drawn from.
    rng: Mutex<Vec<(String, Tensor)>>,
    autocast: Vec<(Device, (bool, i32))>,
    fp8: Fp8Region,
}

impl Surroundings {
    pub(crate) fn of(inputs: &[Tensor]) -> Result<Self> {
        let devices = inputs.iter().filter(|input| input.defined()).map(Device::of);
        let devices = devices.collect::<Result<Vec<_>>>()?;
        let device = devices.into_iter().find(|device| *device != Device::Cpu).unwrap_or(Device::Cpu);
        let mut kinds = vec![Device::Cpu];
        kinds.extend(Some(device).filter(|device| *device != Device::Cpu));
        let autocast = kinds.into_iter().map(|kind| Ok((kind, ffi::autocast_state(kind)?)));
        let (rng, autocast) = (Mutex::new(rng::states(device)?), autocast.collect::<Result<_>>()?);
        Ok(Self { device, rng, autocast, fp8: Fp8Region::now() })
    }

    /// That of the inputs, of which one decides that is not on the CPU.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(String, Tensor)>> {
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Only generators that the forward pass has drawn from are put back for a recomputation.
    pub(crate) fn end_forward(&self) -> Result<()> {
        let _pause = RecordingPause::begin();
        let mut known = self.lock();
        let now = rng::states(self.device)?;
        let mut drawn = Vec::new();
        for ((name, before), (_, after)) in known.drain(..).zip(&now) {
            if !before.f_equal(after)? {
                drawn.push((name, before));
            }
        }
        *known = drawn;
        Ok(())
    }

    /// Runs `body` as the forward pass was run. Afterwards all is as before.
    pub(crate) fn within<R>(&self, body: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
        let known = self.lock();
        let _rng = (!known.is_empty()).then(|| RngScope::enter(self.device, &known)).transpose()?;
        let _autocast = AutocastScope::enter(&self.autocast)?;
        let _fp8 = self.fp8.enter();
        body()
    }
}

/// Generators in other states, until this is dropped.
struct RngScope(Vec<(String, Tensor)>);

impl RngScope {
    fn enter(device: Device, states: &[(String, Tensor)]) -> Result<Self> {
        let mut before = rng::states(device)?;
        before.retain(|(name, _)| states.iter().any(|(known, _)| known == name));
        let scope = Self(before);
        rng::set_states(states)?;
        Ok(scope)
    }
}

impl Drop for RngScope {
    fn drop(&mut self) {
        if let Err(error) = rng::set_states(&self.0) {
            tracing::warn!("random numbers could not be put back after a recomputation: {error}");
        }
    }
}

/// Autocast as it was, until this is dropped.
struct AutocastScope(Vec<(Device, (bool, i32))>);

impl AutocastScope {
    fn enter(states: &[(Device, (bool, i32))]) -> Result<Self> {
        let before = states.iter().map(|(device, _)| Ok((*device, ffi::autocast_state(*device)?)));
        let scope = Self(before.collect::<Result<_>>()?);
        ffi::enter_autocast();
        for (device, (enabled, dtype)) in states {
            ffi::set_autocast_state(*device, *enabled, *dtype)?;
        }
        Ok(scope)
    }
}

impl Drop for AutocastScope {
    fn drop(&mut self) {
        for (device, (enabled, dtype)) in &self.0 {
            if let Err(error) = ffi::set_autocast_state(*device, *enabled, *dtype) {
                tracing::warn!("autocast could not be switched back after a recomputation: {error}");
            }
        }
        ffi::leave_autocast();
    }
}

impl fmt::Debug for Surroundings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Surroundings(on {}, autocast {:?})", self.device, self.autocast)
    }
}
