//! Segments of a forward pass whose saved tensors are dropped, and made again in backward, or go to the host meanwhile.

use std::ffi::{CString, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Mutex, PoisonError};

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::{check, panic_text, pointers};
use crate::ffi::device::allocator::write_text;

type RecomputeFn = dyn FnMut(&[Tensor]) -> anyhow::Result<()> + Send;

/// Operators by name, whose results segments keep.
#[derive(Debug)]
pub struct SavePolicy {
    policy: *mut sys::vt_save_policy,
}

// SAFETY: a set of operators that changes by `&mut self` only; libtorch never moves or frees its operators' entries.
unsafe impl Send for SavePolicy {}
// SAFETY: as above.
unsafe impl Sync for SavePolicy {}

impl Default for SavePolicy {
    fn default() -> Self {
        // SAFETY: takes nothing, and gives a policy that this owns.
        Self { policy: unsafe { sys::vt_save_policy_new() } }
    }
}

impl SavePolicy {
    /// Adds the operators of a name, such as `aten::mm`, in all overloads that compute new tensors; returns how many there are. Operators
    /// that are made of others, and views, are none.
    ///
    /// # Errors
    /// libtorch's.
    pub fn add(&mut self, name: &str) -> Result<usize, TorchError> {
        let Ok(name) = CString::new(name) else { return Ok(0) };
        let mut found = 0;
        // SAFETY: the policy lives until this is dropped, and no other code reads it; name and out-pointer are valid for the call.
        check("save_policy", unsafe { sys::vt_save_policy_add(self.policy, name.as_ptr(), &mut found) })?;
        Ok(found)
    }
}

impl Drop for SavePolicy {
    fn drop(&mut self) {
        // SAFETY: made by vt_save_policy_new, and freed once.
        unsafe { sys::vt_save_policy_free(self.policy) };
    }
}

/// While this lives, what operators of this thread save for the backward pass is dropped, but for trained leaves. The first of these
/// tensors that backward asks for brings all of them back: the segment's code runs again.
#[must_use = "the segment ends when this is dropped"]
pub struct Segment {
    segment: *mut sys::vt_segment,
}

impl Segment {
    /// Begins a segment, whose inputs are kept, with `inputs_on_host` as copies in the host's memory. `recompute` runs its code on the same
    /// inputs, on the thread that runs backward, with grad on, and again if backward runs again. What it computes is dropped. Results of
    /// the operators of `policy` are kept, and it takes them in place of computing them. An error or a panic of it makes backward fail,
    /// unless all that backward needs is there by then ([`recompute_is_complete`]).
    ///
    /// # Errors
    /// libtorch's.
    ///
    /// Source: `torch.utils.checkpoint` with `use_reentrant=False`.
    pub fn enter(
        inputs: &[Tensor],
        inputs_on_host: bool,
        policy: Option<&SavePolicy>,
        recompute: impl FnMut(&[Tensor]) -> anyhow::Result<()> + Send + 'static,
    ) -> Result<Self, TorchError> {
        let recompute: Box<RecomputeFn> = Box::new(recompute);
        let callbacks = sys::vt_recompute_callbacks {
            recompute: call_recompute,
            release,
            data: Box::into_raw(Box::new(Mutex::new(recompute))).cast(),
        };
        let (inputs, mut segment) = (pointers(inputs), ptr::null_mut());
        let policy = policy.map_or(ptr::null(), |policy| policy.policy.cast_const());
        // SAFETY: the tensors are borrowed for the call, and so is the policy, whose set the segment shares. The out-pointer is valid. The shim takes ownership of the data whether or
        // not it succeeds, and gives it back once to `release`; both trampolines cast it to the type it was made from.
        let error = unsafe {
            let on_host = i32::from(inputs_on_host);
            sys::vt_segment_enter(inputs.as_ptr(), inputs.len(), on_host, policy, callbacks, &mut segment)
        };
        check("checkpoint", error)?;
        Ok(Self { segment })
    }

    /// Bytes of the results that were kept so far.
    pub fn saved_bytes(&self) -> i64 {
        // SAFETY: the segment lives until this is dropped.
        unsafe { sys::vt_segment_saved_bytes(self.segment) }
    }

    /// Bytes of what was dropped so far, without inputs and weights.
    pub fn bytes(&self) -> i64 {
        // SAFETY: the segment lives until this is dropped.
        unsafe { sys::vt_segment_bytes(self.segment) }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: made by vt_segment_enter on this thread (the pointer makes Self !Send), and left once.
        unsafe { sys::vt_segment_leave(self.segment) };
    }
}

extern "C" fn call_recompute(
    data: *mut c_void,
    inputs: *const sys::vt_tensor,
    len: usize,
    text: *mut c_char,
    capacity: usize,
) -> i32 {
    // SAFETY: data is the closure given at registration, which the segment owns and keeps alive for this call.
    let recompute = unsafe { &*data.cast::<Mutex<Box<RecomputeFn>>>() };
    // SAFETY: the shim gives `len` tensors, alive for this call.
    let inputs: Vec<Tensor> = (0..len).map(|i| unsafe { Tensor::clone_from_ptr(*inputs.add(i)) }).collect();
    let mut recompute = recompute.lock().unwrap_or_else(PoisonError::into_inner);
    let failure = match catch_unwind(AssertUnwindSafe(|| recompute(&inputs))) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => format!("{error:#}"),
        Err(panic) => format!("the recomputation panicked: {}", panic_text(panic.as_ref())),
    };
    write_text(&failure, text, capacity);
    1
}

extern "C" fn release(data: *mut c_void) {
    // SAFETY: called once, by the segment's destructor, with the pointer that Box::into_raw gave.
    drop(unsafe { Box::from_raw(data.cast::<Mutex<Box<RecomputeFn>>>()) });
}

/// Whether the recomputation in progress on this thread has made all that backward needs: the rest of its code is of no use.
pub fn recompute_is_complete() -> bool {
    // SAFETY: reads this thread's state.
    unsafe { sys::vt_recompute_is_complete() != 0 }
}

/// Whether the recomputation in progress on this thread may end within an operator, by an error of that, as soon as it is complete.
/// Gives what held before.
pub fn set_recompute_may_end(may_end: bool) -> bool {
    // SAFETY: changes this thread's state.
    unsafe { sys::vt_recompute_may_end(i32::from(may_end)) != 0 }
}

/// While this lives, what operators of this thread save for the backward pass in a device's memory goes to the host's, but for weights,
/// and comes back when backward asks for it. Each brings the one along that was saved before it, which backward needs next.
#[must_use = "it ends when this is dropped"]
pub struct Offload {
    offload: *mut sys::vt_offload,
}

impl Offload {
    /// Begins it.
    ///
    /// # Errors
    /// libtorch's.
    ///
    /// Source: `torch.autograd.graph.save_on_cpu`.
    pub fn enter() -> Result<Self, TorchError> {
        let mut offload = ptr::null_mut();
        // SAFETY: the out-pointer is valid for the call.
        check("offload", unsafe { sys::vt_offload_enter(&mut offload) })?;
        Ok(Self { offload })
    }

    /// Bytes that went to the host so far.
    pub fn bytes(&self) -> i64 {
        // SAFETY: it lives until this is dropped.
        unsafe { sys::vt_offload_bytes(self.offload) }
    }
}

impl Drop for Offload {
    fn drop(&mut self) {
        // SAFETY: made by vt_offload_enter on this thread (the pointer makes Self !Send), and left once.
        unsafe { sys::vt_offload_leave(self.offload) };
    }
}
