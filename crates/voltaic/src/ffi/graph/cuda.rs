//! CUDA graphs of libtorch.

use std::cell::Cell;
use std::ptr::{self, NonNull};

use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::check;

thread_local!(static IS_CAPTURING: Cell<bool> = const { Cell::new(false) });

/// Whether a CUDA graph is being captured on this thread.
pub fn is_capturing_on_cuda() -> bool {
    IS_CAPTURING.get()
}

/// What a thread does on a CUDA device, captured by the driver.
#[derive(Debug)]
pub struct CudaGraph {
    raw: NonNull<sys::vt_cuda_graph>,
    is_capturing: bool,
}

// SAFETY: after the capture a graph belongs to no thread; during it, its owner keeps it on the thread that began it.
unsafe impl Send for CudaGraph {}

impl CudaGraph {
    /// Begins a capture on a stream of its own, when the device has done its work.
    ///
    /// # Errors
    /// If libtorch's CUDA library is not loaded, or a capture is in progress.
    pub fn begin(device_index: usize) -> Result<Self, TorchError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the out-pointer is valid for the call.
        check("cuda_graph_begin", unsafe { sys::vt_cuda_graph_begin(device_index as i32, &mut raw) })?;
        IS_CAPTURING.set(true);
        // SAFETY: the call succeeded, so that `raw` is a graph from operator new, which is never null.
        Ok(Self { raw: unsafe { NonNull::new_unchecked(raw) }, is_capturing: true })
    }

    /// Ends the capture; on the thread that began it.
    ///
    /// # Errors
    /// If something ran that a graph cannot hold.
    pub fn end(&mut self) -> Result<(), TorchError> {
        self.leave();
        // SAFETY: the graph is alive and borrowed mutably, here and below.
        check("cuda_graph_end", unsafe { sys::vt_cuda_graph_end(self.raw.as_ptr()) })
    }

    fn leave(&mut self) {
        if std::mem::take(&mut self.is_capturing) {
            IS_CAPTURING.set(false);
        }
    }

    /// Launches what was captured.
    ///
    /// # Errors
    /// CUDA's.
    pub fn replay(&mut self) -> Result<(), TorchError> {
        // SAFETY: as above.
        check("cuda_graph_replay", unsafe { sys::vt_cuda_graph_replay(self.raw.as_ptr()) })
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        self.leave();
        // SAFETY: `raw` came from vt_cuda_graph_begin and is freed here only.
        unsafe { sys::vt_cuda_graph_free(self.raw.as_ptr()) }
    }
}
