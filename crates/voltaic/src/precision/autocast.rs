//! Autocast for a region of code: operators cast their arguments by lists.

use std::marker::PhantomData;

use tch::Kind;

use super::op_lists::ensure_op_lists;
use crate::accelerator::HpuEmulator;
use crate::device::Device;
use crate::dtype::DtypeNames;
use crate::error::{ConfigError, DeviceError, Problem, Result};
use crate::ffi;

/// What autocast casts to.
const LOWER: [Kind; 2] = [Kind::Half, Kind::BFloat16];

/// A region with autocast, which ends when the guard is dropped; what held before then holds again. Belongs to its
/// thread.
#[must_use = "autocast ends when the guard is dropped"]
#[derive(Debug)]
pub struct AutocastGuard {
    device: Device,
    before: (bool, i32),
    _of_this_thread: PhantomData<*const ()>,
}

/// Lets operators on `device` cast to `dtype`, [`Kind::BFloat16`] or [`Kind::Half`], until the guard is dropped.
///
/// Weights are cast once in the outermost region, not at each use. Regions may be nested. Gradients have the dtype of
/// their parameters.
///
/// ```
/// use voltaic::precision::autocast;
/// use voltaic::{Device, Kind, Tensor};
///
/// # fn main() -> voltaic::Result<()> {
/// let weights = Tensor::ones([4, 4], (Kind::Float, tch::Device::Cpu));
/// {
///     let _bf16 = autocast(Device::Cpu, Kind::BFloat16)?;
///     assert_eq!(weights.matmul(&weights).kind(), Kind::BFloat16);
/// }
/// assert_eq!(weights.matmul(&weights).kind(), Kind::Float);
/// # Ok(())
/// # }
/// ```
///
/// Source: `torch.autocast`.
///
/// # Errors
/// If `dtype` is another one, or the device has not got it.
pub fn autocast(device: Device, dtype: Kind) -> Result<AutocastGuard> {
    autocast_enabled(device, dtype, true)
}

/// [`autocast()`], or with `enabled` false a region without casts.
///
/// # Errors
/// As [`autocast()`].
pub fn autocast_enabled(device: Device, dtype: Kind, enabled: bool) -> Result<AutocastGuard> {
    let Some(names) = DtypeNames::of_kind(dtype).filter(|_| LOWER.contains(&dtype)) else {
        let what = format!("operators cannot cast to {dtype:?}");
        return Err(ConfigError::new("autocast", what, "use bfloat16 or float16").into());
    };
    let lacks_it = |emulator: &HpuEmulator| dtype == Kind::Half && !emulator.settings().has_float16();
    if matches!(device, Device::Hpu(_)) && HpuEmulator::get().is_some_and(lacks_it) {
        let problem =
            Problem::new("the first generation of Gaudi has no float16", "use bfloat16, or a Gaudi2");
        return Err(DeviceError::Unavailable { device: format!("float16 on {device}"), problem }.into());
    }
    ensure_op_lists(device)?;
    enter(device, enabled, names.number)
}

/// A region in which operators on `device` do not cast, such as around an optimizer's step with HMP.
///
/// # Errors
/// If libtorch has no autocast for this kind of device.
pub fn disable_casts(device: Device) -> Result<AutocastGuard> {
    let (_, dtype) = ffi::autocast_state(device)?;
    enter(device, false, dtype)
}

fn enter(device: Device, enabled: bool, dtype: i32) -> Result<AutocastGuard> {
    let before = ffi::autocast_state(device)?;
    ffi::set_autocast_state(device, enabled, dtype)?;
    ffi::enter_autocast();
    Ok(AutocastGuard { device, before, _of_this_thread: PhantomData })
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        ffi::leave_autocast();
        // the state was read from libtorch for the same device, so that it is taken back
        let _ = ffi::set_autocast_state(self.device, self.before.0, self.before.1);
    }
}

/// Calls `f` with autocast: `with_autocast(device, Kind::BFloat16, || net.forward(&x))`.
///
/// # Errors
/// As [`autocast()`].
pub fn with_autocast<T>(device: Device, dtype: Kind, f: impl FnOnce() -> T) -> Result<T> {
    let _region = autocast(device, dtype)?;
    Ok(f())
}

/// Whether operators on `device` cast, on this thread.
///
/// # Errors
/// If libtorch has no autocast for this kind of device.
pub fn is_autocast_enabled(device: Device) -> Result<bool> {
    Ok(ffi::autocast_state(device)?.0)
}

/// What operators on `device` cast to while autocast is enabled.
///
/// # Errors
/// If libtorch has no autocast for this kind of device.
pub fn autocast_dtype(device: Device) -> Result<Kind> {
    let (_, number) = ffi::autocast_state(device)?;
    let kind = DtypeNames::of_number(number).and_then(|dtype| dtype.kind);
    Ok(kind.filter(|kind| LOWER.contains(kind)).unwrap_or(Kind::Float))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Tensor;

    const CPU: Device = Device::Cpu;

    fn product() -> Kind {
        let x = Tensor::ones([2, 2], (Kind::Float, tch::Device::Cpu));
        x.matmul(&x).kind()
    }

    #[test]
    fn regions_nest_and_end() {
        assert!(!is_autocast_enabled(CPU).unwrap());
        {
            let _outer = autocast(CPU, Kind::BFloat16).unwrap();
            assert_eq!((product(), autocast_dtype(CPU).unwrap()), (Kind::BFloat16, Kind::BFloat16));
            {
                let _off = autocast_enabled(CPU, Kind::BFloat16, false).unwrap();
                assert_eq!(product(), Kind::Float);
                let _half = autocast(CPU, Kind::Half).unwrap();
                assert_eq!(product(), Kind::Half);
                let _off = disable_casts(CPU).unwrap();
                assert_eq!(product(), Kind::Float);
            }
            assert_eq!(product(), Kind::BFloat16);
        }
        assert_eq!(product(), Kind::Float);
        assert!(!is_autocast_enabled(CPU).unwrap());
    }

    #[test]
    fn a_region_belongs_to_its_thread() {
        let _here = autocast(CPU, Kind::BFloat16).unwrap();
        assert_eq!(std::thread::spawn(product).join().unwrap(), Kind::Float);
    }

    #[test]
    fn a_region_ends_with_a_panic_too() {
        let result = std::panic::catch_unwind(|| {
            let _region = autocast(CPU, Kind::BFloat16).unwrap();
            panic!("on purpose");
        });
        assert!(result.is_err() && product() == Kind::Float);
    }

    #[test]
    fn dtypes_that_are_no_lower_ones_are_refused() {
        let message = autocast(CPU, Kind::Double).unwrap_err().to_string();
        assert!(message.contains("Double") && message.contains("bfloat16 or float16"), "{message}");
    }

    #[test]
    fn gradients_have_the_dtype_of_the_weights() {
        let weights = Tensor::ones([3, 3], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let loss = with_autocast(CPU, Kind::BFloat16, || weights.matmul(&weights).sum(Kind::Float)).unwrap();
        loss.backward();
        assert_eq!(weights.grad().kind(), Kind::Float);
    }
}
