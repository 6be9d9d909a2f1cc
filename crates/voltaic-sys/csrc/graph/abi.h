// Graphs: recordings and replays, CUDA's graphs. See voltaic.h for errors, ownership and threads.
#pragma once

#include "kernels/abi.h"
#include "voltaic.h"

extern "C" {

// ---- graphs ----

// Operators of a thread, below autograd, in the order in which they ran.
typedef struct vt_recording vt_recording;

// Operators of this thread are recorded until the end; they run all the same. Backward must run on this thread.
vt_error *vt_recording_begin(void);
vt_error *vt_recording_end(vt_recording **recording);
void vt_recording_free(vt_recording *recording);
// Lets go of the memory of what outlived the recording; it cannot be made ready any more, only compared.
void vt_recording_forget_results(vt_recording *recording);
int32_t vt_recording_is_on(void);
// Operators of this thread run unrecorded from now on, or are recorded again. Gives whether they ran unrecorded before.
int32_t vt_recording_pause(int32_t pauses);
// What follows cannot be replayed; the first reason counts. Nothing if nothing is being recorded, here and below.
void vt_recording_refuse(const char *reason);
// Where the operators that follow are, for messages.
void vt_recording_set_scope(const char *scope);
// Gives the recording as JSON, during the call. What it and its peers alone hold is a constant; peers are recordings of
// the same capture, itself among them.
vt_error *vt_recording_describe(const vt_recording *recording, const vt_recording *const *peers, size_t num_peers,
                                void (*take)(void *data, const char *text), void *data);
// Hash of what a buffer holds that was there before.
uint64_t vt_recording_hash(const vt_recording *recording, size_t buffer);
// Index of the memory of a tensor among the recording's buffers; -1 if no operator touched it.
vt_error *vt_recording_buffer_of(const vt_recording *recording, vt_tensor tensor, int32_t *buffer);

#define VT_GRAPH_NOWHERE UINT64_MAX
#define VT_GRAPH_FROZEN 2

// Operators element by element and row by row that run as one, at the place of their last node.
typedef struct {
  size_t node;
  int64_t len; // numbers that each of them works on
  int64_t row; // those of a row; 0 if nothing goes by rows
  const vt_chain_step *steps;
  size_t num_steps;
  const int64_t *inputs;  // values that are read
  const int64_t *periods; // how many numbers each of them has; 0 if each row has one
  size_t num_inputs;
  const int64_t *outputs;   // values that are written
  const int32_t *registers; // what is written to each
  const int64_t *output_periods; // how many numbers of it, as vt_chain_tensor
  size_t num_outputs;
} vt_chain;

// A value that lies elsewhere than when it was recorded.
typedef struct {
  size_t value, buffer;
  int64_t offset;         // in elements
  const int64_t *strides; // one for each dimension
} vt_moved_value;

// What runs once more.
typedef struct {
  size_t node, before;   // before which node it runs again
  const vt_chain *chain; // what runs in place of the node, if that is a chain; else null
} vt_repeated_call;

typedef struct {
  const uint8_t *runs;            // per node: 0 if it is left out, VT_GRAPH_FROZEN if its result is kept
  const uint64_t *buffer_offsets; // per buffer: its place in the arena; VT_GRAPH_NOWHERE if it keeps its memory
  const uint64_t *block_offsets;  // per block of all nodes: the same for what a kernel takes and gives back
  const uint8_t *constants;       // per buffer: 1 if nobody need hold it but the graph
  uint64_t arena_bytes;           // before each place there is room for a block header
  int32_t uses_out_variants;      // calls variants that write to given tensors where there are real ones
  const vt_tensor *inputs;        // tensors that a replay may be given others for
  size_t num_inputs;
  const vt_tensor *outputs;       // results that each replay makes in memory of their own, for the caller
  size_t num_outputs;
  const uint64_t *merged;         // per buffer: the buffer whose memory it is, itself or an earlier one
  const vt_chain *chains;         // by node; only where kernels are installed
  size_t num_chains;
  const vt_moved_value *moved;
  size_t num_moved;
  const vt_repeated_call *repeated; // in the order in which they run; `before` never falls
  size_t num_repeated;
} vt_graph_plan;

// A recording made ready: its kernels are called over memory that never moves.
typedef struct vt_graph vt_graph;

// Once per recording.
vt_error *vt_graph_build(vt_recording *recording, const vt_graph_plan *plan, vt_graph **graph);
void vt_graph_free(vt_graph *graph);
// The first buffer that was there before the recording and is gone, or has other memory now; -1 if all are there.
int32_t vt_graph_gone_buffer(const vt_graph *graph);
// To be called if no buffer is gone. `inputs` stand for those of the plan, during the call; null: the recorded ones.
// `outputs` has room for those of the plan. With `computes_frozen` what is frozen is computed, too, else it is as before.
vt_error *vt_graph_replay(vt_graph *graph, const vt_tensor *inputs, size_t num_inputs, vt_tensor *outputs,
                          int32_t computes_frozen);
// The node whose result had another shape in a replay that failed than when it was recorded; -1 if there is none.
int32_t vt_graph_misfit(const vt_graph *graph);

typedef struct {
  uint64_t replays;
  uint64_t moved_results; // results that had to be copied to their place, since the kernel put them elsewhere
  uint64_t pool_blocks;   // blocks that kernels took from a pool, since the plan had none of that size for them
} vt_graph_stats;
// Counts of all replays so far.
void vt_graph_get_stats(const vt_graph *graph, vt_graph_stats *stats);

// ---- CUDA graphs ----

// A graph of libtorch's CUDA library, which must be loaded.
typedef struct vt_cuda_graph vt_cuda_graph;
// Captures what this thread does on the device from now on, on a stream of its own.
vt_error *vt_cuda_graph_begin(int32_t device_index, vt_cuda_graph **graph);
// Ends the capture, on the thread that began it.
vt_error *vt_cuda_graph_end(vt_cuda_graph *graph);
// On the current stream, after the capture has ended.
vt_error *vt_cuda_graph_replay(vt_cuda_graph *graph);
void vt_cuda_graph_free(vt_cuda_graph *graph);

} // extern "C"
