// The emulated HPU. See voltaic.h for errors, ownership and threads.
#pragma once

#include "voltaic.h"

extern "C" {

// ---- the emulated HPU ----

typedef struct {
  int32_t num_devices; // 1 to VT_HPU_MAX_DEVICES
  uint64_t dtypes;     // bit n is set if tensors may have the dtype that c10 numbers n
  // Writes why a dtype is refused to `text`: at most `capacity` bytes, the last of them 0.
  void (*explain_dtype)(int32_t dtype, char *text, size_t capacity);
} vt_hpu_options;

// Registers the emulator as libtorch's back end for DeviceType::HPU; once per process, after vt_set_cpu_allocator.
// Fails if there is another HPU back end.
vt_error *vt_hpu_emulator_init(const vt_hpu_options *options);
// To be called once after a library that registers an HPU back end was loaded. Fails if it registered none. Supplies
// what libtorch needs beyond what the library brings.
vt_error *vt_hpu_adopt_plugin(void);
// To be called with a block's twin, if it has one, before the block goes back to the system.
void vt_hpu_drop_twin(void *twin);
// How many results of operators had to be copied because their memory was not of the device.
uint64_t vt_hpu_copied_outputs(void);
// Calls each operator that has a CPU kernel with several made-up arguments, on the CPU and on hpu:0. report(data, name,
// null) tells of a call that gave the same bytes, report(data, name, text) of one that did not; on this thread, and an
// operator may be reported several times. Operators that take none of the arguments are not reported. Seeds libtorch.
vt_error *vt_hpu_compare_operators(void (*report)(void *data, const char *op, const char *difference), void *data);

} // extern "C"
