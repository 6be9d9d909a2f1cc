// The emulated HPU: a back end of libtorch under DeviceType::HPU whose memory is host memory and whose kernels are the
// CPU's. Each HPU operator gives its CPU kernel tensors over the same bytes and takes the results over without a copy.
//
//   device.cpp    device guard, hooks and generators
//   alias.cpp     CPU tensors over an HPU tensor's bytes, and the way back
//   direct.cpp    operators that only make tensors, views or copies
//   fast.cpp      hot operators, called without boxing
//   boxed.cpp     all others
//   recurrent.cpp recurrent layers, for which libtorch has other algorithms off the CPU
//   register.cpp  fills libtorch's registries
#pragma once

#include "device/memory.h"
#include "hpu/abi.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_set>

namespace voltaic::hpu {

using at::Tensor;

// What the emulator was set up as; `is_active` is false until then.
struct Backend {
  std::atomic<bool> is_active{false};
  int num_devices = 0;
  uint64_t dtypes = 0; // bit n: c10's dtype n exists
  void (*explain_dtype)(int32_t dtype, char *text, size_t capacity) = nullptr;
  std::atomic<uint64_t> copied_outputs{0};
};
extern Backend backend;

// The calling thread's current device.
extern constinit thread_local int current_device;

inline int32_t pool_of(int device) { return device + 1; }
inline bool is_hpu(const c10::TensorImpl *tensor) {
  return tensor->key_set().has_backend(c10::BackendComponent::HPUBit);
}

void check_device_index(int64_t index);
[[noreturn]] void refuse_dtype(c10::ScalarType dtype);
inline void check_dtype(c10::ScalarType dtype) {
  if (C10_UNLIKELY((backend.dtypes >> static_cast<int>(dtype) & 1) == 0))
    refuse_dtype(dtype);
}

// Puts the hooks in libtorch's registry; they do nothing until the emulator is set up. To be called before libtorch
// looks its hooks up (seeding, backward), since it does so once.
void reserve_hooks();
// The same, and fails if libtorch has looked its hooks up before there were any.
void check_hooks();
// Whether libtorch can reach the devices' generators.
bool has_generators();
void register_guard();
// The CPU generator behind an HPU generator; none means the device's default one.
at::Generator cpu_generator(const std::optional<at::Generator> &generator, int device);

c10::Allocator *allocator();

// Names of the operators that have a kernel already, so that the next file leaves them alone.
using Names = std::unordered_set<std::string>;
void register_direct(torch::Library &library, Names &done);
void register_fast(torch::Library &library, Names &done);
void register_boxed(torch::Library &library, const Names &done);
void register_recurrent(torch::Library &library); // for the keys HPU and AutogradHPU
torch::CppFunction boxed_fallback();

} // namespace voltaic::hpu
