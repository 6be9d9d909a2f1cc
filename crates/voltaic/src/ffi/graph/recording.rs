//! Recordings of operators, and graphs that replay them.

use std::ffi::{CStr, CString, c_char, c_void};
use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use tch::Tensor;
use voltaic_sys as sys;

use crate::error::TorchError;
use crate::ffi::check::{check, pointers};
use crate::ffi::tensor::rng::take;
use crate::kernels::ChainStep;

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

    /// The recording as JSON. `peers` are the recordings of the same capture, this one among them: tensors that only they hold are
    /// constants.
    pub fn describe(&self, peers: &[&Self]) -> Result<String, TorchError> {
        let mut text = String::new();
        let peers: Vec<_> = peers.iter().map(|peer| peer.raw.as_ptr().cast_const()).collect();
        // SAFETY: the recordings are alive; `take` gets the string back as `data`, once, during the call and on this thread.
        let error = unsafe {
            sys::vt_recording_describe(
                self.raw.as_ptr(),
                peers.as_ptr(),
                peers.len(),
                take_text,
                (&raw mut text).cast(),
            )
        };
        check("recording_describe", error)?;
        Ok(text)
    }

    /// A hash of what the buffer number `buffer` holds, which was there before the recording.
    pub fn hash_of(&self, buffer: usize) -> u64 {
        // SAFETY: callers name a buffer of the description, one that was there before, which the recording holds.
        unsafe { sys::vt_recording_hash(self.raw.as_ptr(), buffer) }
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

    /// Lets go of the memory of what outlived the recording, which can then only be compared with another one. What was
    /// there before is held on to, so that its addresses are not used again meanwhile.
    pub fn forget_results(&mut self) {
        // SAFETY: the recording is alive and borrowed mutably.
        unsafe { sys::vt_recording_forget_results(self.raw.as_ptr()) }
    }

    /// Makes the recording ready to be replayed by a plan that fits it. `inputs` are the tensors that a replay may be
    /// given others for; `outputs` those that it makes in memory of their own and gives away, which the recording must
    /// have made.
    ///
    /// # Errors
    /// If the recording cannot be replayed, or memory is used up.
    pub fn build(
        self,
        plan: &GraphPlan,
        inputs: &[Tensor],
        outputs: &[Tensor],
    ) -> Result<ReplayGraph, TorchError> {
        let (inputs, outputs) = (pointers(inputs), pointers(outputs));
        let steps: Vec<Vec<sys::vt_chain_step>> = plan.chains.iter().map(PlannedChain::raw_steps).collect();
        let chains: Vec<sys::vt_chain> =
            plan.chains.iter().zip(&steps).map(|(chain, steps)| chain.raw(steps)).collect();
        let repeated_steps: Vec<Vec<sys::vt_chain_step>> =
            plan.repeated.iter().flat_map(|call| &call.chain).map(PlannedChain::raw_steps).collect();
        let repeated_chains: Vec<sys::vt_chain> = plan
            .repeated
            .iter()
            .flat_map(|call| &call.chain)
            .zip(&repeated_steps)
            .map(|(chain, steps)| chain.raw(steps))
            .collect();
        let mut chains_left = repeated_chains.iter();
        let repeated: Vec<sys::vt_repeated_call> =
            plan.repeated.iter().map(|call| call.raw(&mut chains_left)).collect();
        let moved: Vec<sys::vt_moved_value> = plan.moved.iter().map(MovedValue::raw).collect();
        let raw_plan = sys::vt_graph_plan {
            runs: plan.runs.as_ptr(),
            buffer_offsets: plan.buffer_offsets.as_ptr(),
            block_offsets: plan.block_offsets.as_ptr(),
            constants: plan.constants.as_ptr(),
            arena_bytes: plan.arena_bytes,
            uses_out_variants: plan.uses_out_variants.into(),
            inputs: inputs.as_ptr(),
            num_inputs: inputs.len(),
            outputs: outputs.as_ptr(),
            num_outputs: outputs.len(),
            merged: plan.merged.as_ptr(),
            chains: chains.as_ptr(),
            num_chains: chains.len(),
            moved: moved.as_ptr(),
            num_moved: moved.len(),
            repeated: repeated.as_ptr(),
            num_repeated: repeated.len(),
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the plan's arrays, the inputs and the outputs are alive for the call; the lengths of the arrays are those
        // of the recording, which the planner made them from.
        check("graph_build", unsafe { sys::vt_graph_build(self.raw.as_ptr(), &raw_plan, &mut raw) })?;
        // SAFETY: the call succeeded, so that `raw` is a graph from operator new, which is never null.
        let raw = unsafe { NonNull::new_unchecked(raw) };
        Ok(ReplayGraph { raw, num_outputs: outputs.len(), _not_sync: PhantomData })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // SAFETY: `raw` came from vt_recording_end and is freed here only.
        unsafe { sys::vt_recording_free(self.raw.as_ptr()) }
    }
}

extern "C" fn take_text(data: *mut c_void, text: *const c_char) {
    // SAFETY: data is the String of `describe`, to which there is no other reference during the call; text is NUL-terminated.
    unsafe { *data.cast::<String>() = CStr::from_ptr(text).to_string_lossy().into_owned() };
}

/// Whether operators of this thread are being recorded.
pub fn is_recording() -> bool {
    // SAFETY: reads this thread's state.
    unsafe { sys::vt_recording_is_on() != 0 }
}

/// Operators of this thread run unrecorded while this lives. Their results exist before the graph, and each replay reads them.
#[derive(Debug)]
#[must_use = "recording resumes when this is dropped"]
pub struct RecordingPause {
    was_paused: i32,
    _of_this_thread: PhantomData<*const ()>,
}

impl RecordingPause {
    /// Pauses the recording of this thread, if there is one.
    pub fn begin() -> Self {
        // SAFETY: changes this thread's state only, which `drop` restores on the same thread.
        Self { was_paused: unsafe { sys::vt_recording_pause(1) }, _of_this_thread: PhantomData }
    }
}

impl Drop for RecordingPause {
    fn drop(&mut self) {
        // SAFETY: as in `begin`; the type is not Send.
        unsafe { sys::vt_recording_pause(self.was_paused) };
    }
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
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GraphPlan {
    /// Per node: 0 if it is left out, 1 if it runs, [`GraphPlan::FROZEN`] if its result is kept from replay to replay.
    pub runs: Vec<u8>,
    /// Per buffer: its place in the arena, or [`GraphPlan::NOWHERE`].
    pub buffer_offsets: Vec<u64>,
    /// The same for each block that a kernel takes and gives back, over all nodes.
    pub block_offsets: Vec<u64>,
    /// Per buffer: 1 if only the graph needs to hold it.
    pub constants: Vec<u8>,
    /// Size of the arena.
    pub arena_bytes: u64,
    /// Calls variants of operators that write to given tensors.
    pub uses_out_variants: bool,
    /// Per buffer: the buffer whose memory it is, itself or an earlier one.
    pub merged: Vec<u64>,
    /// Operators that run as one, by node.
    pub chains: Vec<PlannedChain>,
    /// Values that lie elsewhere than when they were recorded.
    pub moved: Vec<MovedValue>,
    /// What runs once more, in the order in which it does.
    pub repeated: Vec<RepeatedCall>,
}

/// What runs once more, before a later node.
#[derive(Debug, Clone, PartialEq)]
pub struct RepeatedCall {
    /// The node that ran; that of its chain.
    pub node: usize,
    /// The node before which it runs again.
    pub before: usize,
    /// What runs in place of the node's chain.
    pub chain: Option<PlannedChain>,
}

impl RepeatedCall {
    fn raw<'a>(&self, chains: &mut impl Iterator<Item = &'a sys::vt_chain>) -> sys::vt_repeated_call {
        let chain = self.chain.as_ref().and_then(|_| chains.next()).map_or(ptr::null(), ptr::from_ref);
        sys::vt_repeated_call { node: self.node, before: self.before, chain }
    }
}

/// A value that lies elsewhere than when it was recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct MovedValue {
    /// Which.
    pub value: usize,
    /// Whose memory it is now.
    pub buffer: usize,
    /// Where it begins there, in elements.
    pub offset: i64,
    /// One for each dimension, in elements.
    pub strides: Vec<i64>,
}

impl MovedValue {
    fn raw(&self) -> sys::vt_moved_value {
        let strides = self.strides.as_ptr();
        sys::vt_moved_value { value: self.value, buffer: self.buffer, offset: self.offset, strides }
    }
}

/// Operators element by element and row by row that run as one.
#[derive(Debug, Clone, PartialEq)]
pub struct PlannedChain {
    /// The node in whose place they run.
    pub node: usize,
    /// Numbers that each of them works on.
    pub len: i64,
    /// Those of a row; 0 if nothing goes by rows.
    pub row: i64,
    /// The operators.
    pub steps: Vec<ChainStep>,
    /// Values that are read.
    pub inputs: Vec<i64>,
    /// How many numbers each of them has, which repeat; 0 if each row has one.
    pub periods: Vec<i64>,
    /// Values that are written.
    pub outputs: Vec<i64>,
    /// What is written to each.
    pub registers: Vec<i32>,
    /// How many numbers of it: all, as many as a row for the sums over the rows, 0 for the first of each row.
    pub output_periods: Vec<i64>,
}

impl PlannedChain {
    fn raw_steps(&self) -> Vec<sys::vt_chain_step> {
        let raw = |step: &ChainStep| sys::vt_chain_step {
            op: step.op as i32,
            a: step.a as i32,
            b: step.b as i32,
            number: step.number,
        };
        self.steps.iter().map(raw).collect()
    }

    fn raw(&self, steps: &[sys::vt_chain_step]) -> sys::vt_chain {
        sys::vt_chain {
            node: self.node,
            len: self.len,
            row: self.row,
            steps: steps.as_ptr(),
            num_steps: steps.len(),
            inputs: self.inputs.as_ptr(),
            periods: self.periods.as_ptr(),
            num_inputs: self.inputs.len(),
            outputs: self.outputs.as_ptr(),
            registers: self.registers.as_ptr(),
            output_periods: self.output_periods.as_ptr(),
            num_outputs: self.outputs.len(),
        }
    }
}

impl GraphPlan {
    /// The result of a node is kept.
    pub const FROZEN: u8 = sys::VT_GRAPH_FROZEN;
    /// The memory lies outside the arena.
    pub const NOWHERE: u64 = sys::VT_GRAPH_NOWHERE;
    /// Room before each place in the arena, and what places are aligned to.
    pub const HEADER_BYTES: u64 = sys::VT_BLOCK_HEADER_BYTES as u64;
}

/// How a replay ended.
#[derive(Debug)]
pub enum Replayed {
    /// It is done; the outputs that it gave away.
    Done(Vec<Tensor>),
    /// A buffer of the recording that was there before is gone, or has other memory now. Nothing ran.
    Gone(usize),
    /// The result of this node has another shape than when it was recorded. What came before it has run.
    Misfit(usize),
}

/// Prepared calls of kernels over memory that never moves.
#[derive(Debug)]
pub struct ReplayGraph {
    raw: NonNull<sys::vt_graph>,
    /// Results that a replay gives away.
    num_outputs: usize,
    /// Replays write to the graph's memory.
    _not_sync: PhantomData<std::cell::Cell<()>>,
}

// SAFETY: a graph owns its memory and its handles, whose reference counts are atomic; replaying uses no state of the
// thread that built it.
unsafe impl Send for ReplayGraph {}

impl ReplayGraph {
    /// The first buffer of the recording that was there before and is gone, or has other memory now.
    fn gone_buffer(&self) -> Option<usize> {
        // SAFETY: the graph is alive; it owns what it reads.
        usize::try_from(unsafe { sys::vt_graph_gone_buffer(self.raw.as_ptr()) }).ok()
    }

    /// Calls the kernels, and gives the outputs that the graph was built to give away. `inputs` stand in for those that it
    /// was built with. With `computes_frozen` frozen results are computed, too; else they are those of the replay before.
    ///
    /// # Errors
    /// If an input does not fit, or a kernel fails.
    pub fn replay(
        &mut self,
        inputs: Option<&[Tensor]>,
        computes_frozen: bool,
    ) -> Result<Replayed, TorchError> {
        if let Some(buffer) = self.gone_buffer() {
            return Ok(Replayed::Gone(buffer));
        }
        let pointers = inputs.map(pointers);
        // no inputs at all are a null pointer; an empty list has a dangling one, which is not read
        let (inputs, num_inputs) =
            pointers.as_ref().map_or((ptr::null(), 0), |list| (list.as_ptr(), list.len()));
        let mut outputs: Vec<sys::vt_tensor> = vec![ptr::null_mut(); self.num_outputs];
        // SAFETY: no buffer is gone, as was just seen; the graph is borrowed mutably; the inputs are alive for the call;
        // there is room for the outputs that the graph was built with.
        let error = unsafe {
            sys::vt_graph_replay(
                self.raw.as_ptr(),
                inputs,
                num_inputs,
                outputs.as_mut_ptr(),
                computes_frozen.into(),
            )
        };
        match check("graph_replay", error) {
            Ok(()) => Ok(Replayed::Done(outputs.into_iter().map(take).collect())),
            // SAFETY: the graph is alive.
            Err(error) => match usize::try_from(unsafe { sys::vt_graph_misfit(self.raw.as_ptr()) }) {
                Ok(node) => Ok(Replayed::Misfit(node)),
                Err(_) => Err(error),
            },
        }
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
