//! How libtorch runs operations: inference mode, deterministic kernels, and a watch for results that are not finite.

use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ptr;

use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::check;

/// Inference mode of this thread until dropped: as without grad, and tensors made meanwhile can never have one.
pub struct InferenceMode {
    guard: *mut c_void,
}

impl InferenceMode {
    /// Enters it.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn enter() -> Result<Self, TorchError> {
        let mut guard = ptr::null_mut();
        // SAFETY: the out-pointer is a valid pointer on this stack.
        check("inference_mode", unsafe { sys::vt_inference_mode_enter(&mut guard) })?;
        Ok(Self { guard })
    }
}

impl Drop for InferenceMode {
    fn drop(&mut self) {
        // SAFETY: the guard came from enter, on this thread (the pointer makes Self !Send), and is freed once.
        unsafe { sys::vt_inference_mode_leave(self.guard) };
    }
}

/// Watches the operations of this thread, until dropped, for the first that makes NaN or infinity of arguments without.
/// Every operation is looked at, so that training takes several times as long.
pub struct AnomalyWatch {
    /// The watch belongs to its thread.
    not_send: PhantomData<*const ()>,
}

impl AnomalyWatch {
    /// Starts to watch.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn begin() -> Result<Self, TorchError> {
        // SAFETY: takes a plain integer and changes this thread's callbacks only.
        check("anomaly_watch", unsafe { sys::vt_anomaly_watch(1) })?;
        Ok(Self { not_send: PhantomData })
    }

    /// The operation found since the last call, such as `aten::log (infinity)`; `None` if there is none.
    ///
    /// # Errors
    /// If libtorch refuses.
    pub fn take(&self) -> Result<Option<String>, TorchError> {
        let mut text = [0 as c_char; 256];
        // SAFETY: the buffer is valid for writes of its length for the duration of the call.
        check("anomaly_take", unsafe { sys::vt_anomaly_take(text.as_mut_ptr(), text.len()) })?;
        // SAFETY: the shim ends the text with a zero within the buffer.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
        Ok((!text.is_empty()).then_some(text))
    }
}

impl Drop for AnomalyWatch {
    fn drop(&mut self) {
        // SAFETY: takes a plain integer and changes this thread's callbacks only.
        if let Err(error) = check("anomaly_watch", unsafe { sys::vt_anomaly_watch(0) }) {
            tracing::warn!("the watch for anomalies could not be removed: {error}");
        }
    }
}

/// What happens to operations that have no deterministic kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeterministicMode {
    /// They run.
    Off,
    /// They fail.
    Error,
    /// They run with a warning.
    Warn,
}

/// Sets it for the whole process.
///
/// # Errors
/// If libtorch refuses.
pub fn set_deterministic(mode: DeterministicMode) -> Result<(), TorchError> {
    let mode = match mode {
        DeterministicMode::Off => 0,
        DeterministicMode::Error => 1,
        DeterministicMode::Warn => 2,
    };
    // SAFETY: takes a plain integer.
    check("set_deterministic", unsafe { sys::vt_set_deterministic(mode) })
}

/// What is set for the process.
///
/// # Errors
/// If libtorch refuses.
pub fn deterministic() -> Result<DeterministicMode, TorchError> {
    let mut mode = 0;
    // SAFETY: the out-pointer is a valid i32 on this stack.
    check("deterministic", unsafe { sys::vt_deterministic(&mut mode) })?;
    Ok(match mode {
        0 => DeterministicMode::Off,
        1 => DeterministicMode::Error,
        _ => DeterministicMode::Warn,
    })
}

/// Whether cuDNN tries its kernels out to find the fastest. For the whole process.
///
/// # Errors
/// If libtorch refuses.
pub fn set_cudnn_benchmark(on: bool) -> Result<(), TorchError> {
    // SAFETY: takes a plain integer.
    check("set_cudnn_benchmark", unsafe { sys::vt_set_cudnn_benchmark(on.into()) })
}
