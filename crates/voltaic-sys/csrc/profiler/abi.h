// The profiler of libtorch (Kineto): what ran when. See voltaic.h for errors, ownership and threads.
#pragma once

#include "voltaic.h"

extern "C" {

typedef struct {
  int32_t record_shapes;
  int32_t profile_memory;
  int32_t with_flops;
  int32_t with_cuda; // operations of the CUDA devices
  int32_t operators; // operators; without them only ranges
  int32_t records;   // what libtorch does not see, as vt_profile_records
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
  int64_t system_thread; // as the trace names it
  uint64_t id;           // the trace's "External id"
} vt_profile_event;

// What libtorch's profiler does not see.
enum vt_profile_records : int32_t {
  VT_RECORD_DEVICES = 1,
  VT_RECORD_MEMORY = 2,
  VT_RECORD_KERNELS = 4,
  VT_RECORD_RANGES = 8, // of threads other than the one that started the profiler
};

// A device's rows in a trace, and the host's kernels, which stand below the operator that they serve.
enum vt_activity_row : int32_t {
  VT_ROW_OPERATORS = 0,
  VT_ROW_COPIES = 1,
  VT_ROW_GRAPHS = 2,
  VT_ROW_COLLECTIVES = 3,
  VT_ROW_KERNELS = 4,
  VT_ROW_RANGES = 5, // of a thread that libtorch's profiler does not see
};

// Something that a device, or a kernel of the host, did. Text is valid during the call only. Times are ticks where it is
// added, and nanoseconds since the epoch where it is visited.
typedef struct {
  const char *name;
  const char *details; // members of a JSON object, such as "bytes": 4; may be empty
  int64_t launched;    // when the host began to ask for it; 0 if that took no time
  int64_t began, ended;
  int32_t row;         // vt_activity_row
  int32_t device;      // number of the HPU; -1 for the host
  uint64_t thread;        // that asked for it, as libtorch counts them; where visited
  int64_t system_thread;  // where visited
} vt_activity;

// Memory that a pool handed out or took back.
typedef struct {
  int32_t pool;
  int64_t bytes; // given back if negative
  uint64_t address;
  uint64_t allocated, reserved; // of the pool, afterwards
  int64_t at;                   // nanoseconds since the epoch; where visited
  uint64_t thread;              // where visited
  int64_t system_thread;        // where visited
} vt_memory_change;

typedef struct {
  void *data;
  void (*event)(void *data, const vt_profile_event *event);
  void (*activity)(void *data, const vt_activity *activity);
  void (*memory)(void *data, const vt_memory_change *change);
} vt_profile_visitor;

// libtorch's profiler sees the operators of the thread that starts it, and those of the threads that autograd uses for its
// backward passes. Prepares for a start, which is quicker then.
vt_error *vt_profile_prepare(vt_profile_options options);
vt_error *vt_profile_start(vt_profile_options options);
// Ends what vt_profile_start began on this thread. Writes a Chrome trace of libtorch's own events to `path` unless it is
// null, and tells the visitor of all events unless that is null. `left_out` is how many were too many.
vt_error *vt_profile_stop(const char *path, const vt_profile_visitor *visitor, uint64_t *left_out);

// The clock of vt_profile_add_activity.
uint64_t vt_profile_ticks(void);
// To be called between start and stop, on any thread; else nothing happens.
void vt_profile_add_activity(const vt_activity *activity);
void vt_profile_add_memory(const vt_memory_change *change);

// A range of this thread, ended by the one that began it. Ranges are nested.
vt_error *vt_profile_range_begin(const char *name, void **range);
void vt_profile_range_end(void *range);

} // extern "C"
