#include "error.h"
#include "tensor/abi.h"
#include "hpu/hpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/randperm.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

at::Generator default_generator(int32_t device_type, int32_t device_index) {
  voltaic::hpu::reserve_hooks();
  const auto type = static_cast<c10::DeviceType>(device_type);
  if (type == c10::DeviceType::CPU)
    return at::detail::getDefaultCPUGenerator();
  return at::globalContext().defaultGenerator(c10::Device(type, static_cast<c10::DeviceIndex>(device_index)));
}

} // namespace

vt_error *vt_manual_seed(uint64_t seed) {
  return voltaic::guard([&] {
    voltaic::hpu::reserve_hooks();
    // a card whose plugin has no hooks keeps its generator to itself, and libtorch would refuse to seed it
    const bool has_hpus = c10::impl::hasDeviceGuardImpl(c10::DeviceType::HPU) && voltaic::hpu::has_generators();
    if (has_hpus || c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) {
      at::manual_seed(seed);
      return;
    }
    // at::manual_seed would look up the hooks of accelerators, which libtorch does once: none could be loaded afterwards
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  });
}

vt_error *vt_rng_get_state(int32_t device_type, int32_t device_index, vt_tensor *state) {
  return voltaic::guard([&] {
    at::Generator generator = default_generator(device_type, device_index);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    *state = new at::Tensor(generator.get_state());
  });
}

vt_error *vt_rng_set_state(int32_t device_type, int32_t device_index, vt_tensor state) {
  return voltaic::guard([&] {
    at::Generator generator = default_generator(device_type, device_index);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(*state);
  });
}

vt_error *vt_randperm(int64_t len, uint64_t seed, vt_tensor *permutation) {
  return voltaic::guard([&] {
    at::Generator generator = at::detail::createCPUGenerator(seed);
    *permutation = new at::Tensor(at::randperm(len, generator, at::TensorOptions(at::kLong)));
  });
}
