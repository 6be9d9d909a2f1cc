// The profiler of libtorch (Kineto): what ran when. See voltaic.h for errors, ownership and threads.
#pragma once

#include "voltaic.h"

extern "C" {

typedef struct {
  int32_t record_shapes;
  int32_t profile_memory;
  int32_t with_flops;
  int32_t with_cuda;   // operations of the CUDA devices
  int32_t all_threads; // also of threads that this one has not started
} vt_profile_options;

// One event. Text is valid during the call only.
typedef struct {
  const char *name;
  const char *shapes;  // of the inputs, such as [[2, 3], [], [3]]; empty if they were not recorded
  int64_t start_ns;    // since the epoch
  int64_t duration_ns;
  uint64_t thread;
  int64_t flops;
  int64_t bytes;       // of a "[memory]" event: allocated, or freed if negative
  int32_t scope;       // at::RecordScope: 0 operator, 1 backward, 7 user's range
  int32_t device_type; // c10::DeviceType
  int32_t device_index;
  int32_t is_async;
} vt_profile_event;

// Prepares for a start, which is quicker then.
vt_error *vt_profile_prepare(vt_profile_options options);
vt_error *vt_profile_start(vt_profile_options options);
// Ends what vt_profile_start began on this thread. Writes a Chrome trace to `path` unless it is null, and calls
// visit(data, event) for each event unless that is null.
vt_error *vt_profile_stop(const char *path, void (*visit)(void *data, const vt_profile_event *event), void *data);

// A range of this thread, ended by the one that began it. Ranges are nested.
vt_error *vt_profile_range_begin(const char *name, void **range);
void vt_profile_range_end(void *range);

} // extern "C"
