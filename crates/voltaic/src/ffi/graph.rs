//! Recordings of operators, and graphs that replay them.

use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use tch::Tensor;
use voltaic_sys as sys;

use super::{check, pointers};
use crate::error::TorchError;

/// The operators that ran on a thread, below autograd, in order.
#[derive(Debug)]
pub struct Recording {
    raw: NonNull<sys::vt_recording>,
}

// SAFETY: what a recording holds are libtorch's handles, whose reference counts are atomic; nothing in it belongs to
// the thread that recorded.
unsafe impl Send for Recording {}

impl Recording {
    /// Records the operators of this thread from now on.
    ///
    /// # Errors
    /// If they are being recorded already.
    pub fn begin() -> Result<(), TorchError> {
        // SAFETY: takes no arguments; changes this thread's state only.
        check("recording_begin", unsafe { sys::vt_recording_begin() })
    }

    /// Ends what [`Recording::begin`] began.
    ///
    /// # Errors
    /// If nothing is being recorded.
    pub fn end() -> Result<Self, TorchError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the out-pointer is valid for the call.
        check("recording_end", unsafe { sys::vt_recording_end(&mut raw) })?;
        // SAFETY: the call succeeded, so that `raw` is a recording from operator new, which is never null.
        Ok(Self { raw: unsafe { NonNull::new_unchecked(raw) } })
    }

    /// The recording as JSON.
    pub fn describe(&self) -> Result<String, TorchError> {
        let mut text = String::new();
        // SAFETY: `take` gets the string back as `data`, once, during the call and on this thread.
        let error =
            unsafe { sys::vt_recording_describe(self.raw.as_ptr(), take_text, (&raw mut text).cast()) };
        check("recording_describe", error)?;
        Ok(text)
    }

    /// Which of the recording's buffers is a tensor's memory; none if no operator touched it.
    pub fn buffer_of(&self, tensor: &Tensor) -> Result<Option<usize>, TorchError> {
        let mut buffer = 0;
        // SAFETY: recording and tensor are borrowed for the call; the out-pointer is valid.
        let error = unsafe {
            sys::vt_recording_buffer_of(self.raw.as_ptr(), tensor.as_ptr().cast_mut(), &mut buffer)
        };
        check("recording_buffer_of", error)?;
        Ok(usize::try_from(buffer).ok())
    }

    /// Makes the recording ready to be replayed by a plan that fits it. `inputs` are the tensors that a replay may be
    /// given others for.
    ///
    /// # Errors
    /// If the recording cannot be replayed, or memory is used up.
    pub fn build(self, plan: &GraphPlan, inputs: &[Tensor]) -> Result<ReplayGraph, TorchError> {
        let inputs = pointers(inputs);
        let raw_plan = sys::vt_graph_plan {
            runs: plan.runs.as_ptr(),
            buffer_offsets: plan.buffer_offsets.as_ptr(),
            block_offsets: plan.block_offsets.as_ptr(),
            arena_bytes: plan.arena_bytes,
            uses_out_variants: plan.uses_out_variants.into(),
            inputs: inputs.as_ptr(),
            num_inputs: inputs.len(),
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the plan's arrays and the inputs are alive for the call; their lengths are those of the recording,
        // which the planner made them from.
        check("graph_build", unsafe { sys::vt_graph_build(self.raw.as_ptr(), &raw_plan, &mut raw) })?;
        // SAFETY: the call succeeded, so that `raw` is a graph from operator new, which is never null.
        Ok(ReplayGraph { raw: unsafe { NonNull::new_unchecked(raw) }, _not_sync: PhantomData })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: `raw` came from vt_recording_end and is freed here only.
        unsafe { sys::vt_recording_free(self.raw.as_ptr()) }
    }
}

extern "C" fn take_text(data: *mut c_void, text: *const c_char) {
    // SAFETY: data is the String of `describe`, which nobody else refers to during the call; text is NUL-terminated.
    unsafe { *data.cast::<String>() = CStr::from_ptr(text).to_string_lossy().into_owned() };
}

/// Whether operators of this thread are being recorded.
pub fn is_recording() -> bool {
    // SAFETY: reads this thread's state.
    unsafe { sys::vt_recording_is_on() != 0 }
}

/// Notes that what is being recorded cannot be replayed, if something is. The first reason counts.
pub fn refuse_recording(reason: &str) {
    if is_recording()
        && let Ok(reason) = CString::new(reason)
    {
        // SAFETY: the string is NUL-terminated and copied during the call.
        unsafe { sys::vt_recording_refuse(reason.as_ptr()) }
    }
}

/// Names the place of the operators that are recorded from now on.
pub fn set_recording_scope(scope: &str) {
    if let Ok(scope) = CString::new(scope) {
        // SAFETY: as above.
        unsafe { sys::vt_recording_set_scope(scope.as_ptr()) }
    }
}

/// What of a recording is replayed, and where its memory lies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GraphPlan {
    /// Per node: 0 if it is left out.
    pub runs: Vec<u8>,
    /// Per buffer: its place in the arena, or [`GraphPlan::NOWHERE`].
    pub buffer_offsets: Vec<u64>,
    /// The same for each block that a kernel takes and gives back, over all nodes.
    pub block_offsets: Vec<u64>,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Calls variants of operators that write to given tensors.
    pub uses_out_variants: bool,
}

impl GraphPlan {
    /// The memory lies outside the arena.
    pub const NOWHERE: u64 = sys::VT_GRAPH_NOWHERE;
    /// Room before each place in the arena, and what places are aligned to.
    pub const HEADER_BYTES: u64 = sys::VT_BLOCK_HEADER_BYTES as u64;
}

/// Prepared calls of kernels over memory that never moves.
#[derive(Debug)]
pub struct ReplayGraph {
    raw: NonNull<sys::vt_graph>,
    /// Replays write to the graph's memory.
    _not_sync: PhantomData<std::cell::Cell<()>>,
}

// SAFETY: a graph owns its memory and its handles, whose reference counts are atomic; replaying uses no state of the
// thread that built it.
unsafe impl Send for ReplayGraph {}

impl ReplayGraph {
    /// The first buffer of the recording that was there before and is gone, or has other memory now.
    fn gone_buffer(&self) -> Option<usize> {
        // SAFETY: the graph is alive; it holds what it looks at.
        usize::try_from(unsafe { sys::vt_graph_gone_buffer(self.raw.as_ptr()) }).ok()
    }

    /// Calls the kernels. `inputs` stand in for those that the graph was built with. If a buffer of the recording that was
    /// there before is gone, or has other memory now, nothing runs, and its number is given.
    ///
    /// # Errors
    /// If an input does not fit, or a kernel fails.
    pub fn replay(&mut self, inputs: Option<&[Tensor]>) -> Result<Option<usize>, TorchError> {
        if let Some(buffer) = self.gone_buffer() {
            return Ok(Some(buffer));
        }
        let error = match inputs {
            // SAFETY: no buffer is gone, as was just seen; the graph is borrowed mutably.
            None => unsafe { sys::vt_graph_replay(self.raw.as_ptr(), ptr::null(), 0) },
            Some(inputs) => {
                let inputs = pointers(inputs);
                // SAFETY: as above; the inputs are alive for the call. An empty list has a dangling pointer that is
                // not null and not read.
                unsafe { sys::vt_graph_replay(self.raw.as_ptr(), inputs.as_ptr(), inputs.len()) }
            }
        };
        check("graph_replay", error).map(|()| None)
    }

    /// Counts of all replays so far.
    pub fn stats(&self) -> ReplayStats {
        let mut stats = sys::vt_graph_stats::default();
        // SAFETY: the graph is alive; the out-pointer is valid.
        unsafe { sys::vt_graph_get_stats(self.raw.as_ptr(), &mut stats) };
        let sys::vt_graph_stats { replays, moved_results, pool_blocks } = stats;
        ReplayStats { replays, moved_results, pool_blocks }
    }
}

/// Counts of all replays of a graph.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayStats {
    /// Replays.
    pub replays: u64,
    /// Results that had to be copied to their place, since the kernel put them elsewhere.
    pub moved_results: u64,
    /// Blocks that kernels took from a pool, since the plan had none of that size for them.
    pub pool_blocks: u64,
}

impl Drop for ReplayGraph {
    fn drop(&mut self) {
        // SAFETY: `raw` came from vt_graph_build and is freed here only.
        unsafe { sys::vt_graph_free(self.raw.as_ptr()) }
    }
}
