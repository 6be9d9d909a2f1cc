// Devices: numbers, back ends, and the memory that tensors lie in. See voltaic.h for errors, ownership and threads.
#pragma once

#include "voltaic.h"

extern "C" {

// ---- devices and dtypes ----

enum vt_device_type : int32_t { VT_CPU = 0, VT_CUDA = 1, VT_HPU = 15 };

// tch names an HPU by its CUDA device: index VT_TCH_HPU + i is hpu:i (see voltaic-build).
#define VT_TCH_HPU 64
// 1 if this program was linked so that tch does.
int32_t vt_tch_names_hpu(void);

vt_error *vt_tensor_device(vt_tensor tensor, int32_t *device_type, int32_t *device_index);
// Version of the libtorch that the shim was compiled with, such as "2.11.0"; static storage.
const char *vt_libtorch_version(void);
// The number c10 gives a dtype, by the name PyTorch gives it ("float32"); -1 for an unknown name.
int32_t vt_dtype_number(const char *name);

// ---- back ends of devices ----

// 1 if a back end of this device type is in libtorch's registries.
int32_t vt_backend_is_loaded(int32_t device_type);
vt_error *vt_backend_device_count(int32_t device_type, int32_t *devices); // 0 if there is no back end
// Waits until the device has done its work. The back end must be loaded, here and below.
vt_error *vt_backend_synchronize(int32_t device_type, int32_t device_index);
// 1 if libtorch can reach default generators of this device type.
vt_error *vt_backend_has_generators(int32_t device_type, int32_t *has_generators);

typedef struct {
  uint64_t total, free; // bytes of the device, all processes together
  uint64_t in_use, max_in_use;
  uint64_t num_allocs, num_frees;
} vt_backend_memory_stats;
// is_measured is 0, and stats is not written, if the back end's allocator keeps no statistics.
vt_error *vt_backend_memory(int32_t device_type, int32_t device_index, vt_backend_memory_stats *stats,
                            int32_t *is_measured);
vt_error *vt_backend_reset_peak_memory(int32_t device_type, int32_t device_index);

// ---- memory ----

// Pools of blocks, by number: the host's, and from 1 on those of the emulated HPUs.
#define VT_HOST_POOL 0
#define VT_HPU_MAX_DEVICES 8

// Lies VT_BLOCK_HEADER_BYTES before each block; the rest of that room is the allocator's own.
typedef struct {
  void *twin; // kept with the block for the HPU back end, see vt_hpu_drop_twin; null at first
  int32_t pool;
  uint32_t magic; // VT_BLOCK_MAGIC
} vt_block_header;
#define VT_BLOCK_HEADER_BYTES 64
#define VT_BLOCK_MAGIC 0x76A17A1Cu

typedef struct {
  // A 64-byte aligned block of a pool; null if there is no memory. Never called with 0 bytes.
  void *(*allocate)(int32_t pool, size_t bytes);
  void (*release)(void *block);
  // Writes why `bytes` could not be allocated to `text`: at most `capacity` bytes, the last of them 0.
  void (*explain)(int32_t pool, size_t bytes, char *text, size_t capacity);
} vt_allocator;

// Makes `allocator` libtorch's allocator for the CPU device. Blocks that libtorch's own allocator gave out before
// stay valid and are freed by it. `allocator` must live as long as the process.
vt_error *vt_set_cpu_allocator(const vt_allocator *allocator);

} // extern "C"
