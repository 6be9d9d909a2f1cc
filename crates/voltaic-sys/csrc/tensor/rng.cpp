#include "error.h"
#include "tensor/abi.h"
#include "hpu/hpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/randperm.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <optional>

namespace {

at::Generator default_generator(int32_t device_type, int32_t device_index) {
  voltaic::hpu::reserve_hooks();
  const auto type = static_cast<c10::DeviceType>(device_type);
  if (type == c10::DeviceType::CPU)
    return at::detail::getDefaultCPUGenerator();
  return at::globalContext().defaultGenerator(c10::Device(type, static_cast<c10::DeviceIndex>(device_index)));
}

at::Tensor state_of(const std::optional<at::Generator> &given) {
  at::Generator generator = given.has_value() ? *given : at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state_of(const at::Tensor &state, const std::optional<at::Generator> &given) {
  at::Generator generator = given.has_value() ? *given : at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

// As operators, so that a graph has them: a replay puts its generator where the capture did.
TORCH_LIBRARY(voltaic, library) {
  library.def("rng_state(Generator? generator) -> Tensor",
              torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &state_of));
  library.def("set_rng_state(Tensor state, Generator? generator) -> ()",
              torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, &set_state_of));
}

template <typename Signature> auto operator_named(const char *name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
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
    static const auto get = operator_named<at::Tensor(const std::optional<at::Generator> &)>("voltaic::rng_state");
    *state = new at::Tensor(get.call(default_generator(device_type, device_index)));
  });
}

vt_error *vt_rng_set_state(int32_t device_type, int32_t device_index, vt_tensor state) {
  return voltaic::guard([&] {
    static const auto set =
        operator_named<void(const at::Tensor &, const std::optional<at::Generator> &)>("voltaic::set_rng_state");
    set.call(*state, default_generator(device_type, device_index));
  });
}

vt_error *vt_randperm(int64_t len, uint64_t seed, vt_tensor *permutation) {
  return voltaic::guard([&] {
    at::Generator generator = at::detail::createCPUGenerator(seed);
    *permutation = new at::Tensor(at::randperm(len, generator, at::TensorOptions(at::kLong)));
  });
}
