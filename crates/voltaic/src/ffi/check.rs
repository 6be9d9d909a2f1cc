//! What every wrapper does: an error of the shim becomes a `Result`, tensors become pointers, a panic becomes a text.

use std::any::Any;
use std::ffi::CStr;

use voltaic_sys as sys;

use crate::error::{TorchError, TorchErrorKind};

/// Turns what a shim function returned into a `Result`, freeing the error.
///
/// `error` must come straight from the shim function `op`, and must not be used afterwards.
pub(super) fn check(op: &'static str, error: *mut sys::vt_error) -> Result<(), TorchError> {
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: a non-null vt_error from the shim is valid until vt_error_free, which is called once, here; the
    // message is copied before that.
    let (kind, message) = unsafe {
        let kind = sys::vt_error_kind_of(error);
        let message = CStr::from_ptr(sys::vt_error_message(error)).to_string_lossy().into_owned();
        sys::vt_error_free(error);
        (kind, message)
    };
    let kind = match kind {
        sys::VT_ERROR_OUT_OF_MEMORY => TorchErrorKind::OutOfMemory,
        sys::VT_ERROR_INDEX => TorchErrorKind::Index,
        sys::VT_ERROR_NOT_IMPLEMENTED => TorchErrorKind::NotImplemented,
        _ => TorchErrorKind::Other,
    };
    Err(TorchError::new(op, kind, &message))
}

/// The C++ objects behind tensors, for one call. Borrows the tensors, so the pointers stay valid.
pub(super) fn pointers<'a>(tensors: impl IntoIterator<Item = &'a tch::Tensor>) -> Vec<sys::vt_tensor> {
    tensors.into_iter().map(|tensor| tensor.as_ptr().cast_mut()).collect()
}

/// The message of a caught panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "no message".to_owned()
    }
}
