#include "hpu/abi.h"
#include "hpu/hpu.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <mutex>

namespace voltaic::hpu {

Backend backend;
constinit thread_local int current_device = 0;

void check_device_index(int64_t index) {
  TORCH_CHECK_INDEX(index >= 0 && index < backend.num_devices, "HPU device index ", index, " out of range [0,",
                    backend.num_devices, "); set VOLTAIC_HPU_DEVICES for more emulated devices");
}

void refuse_dtype(c10::ScalarType dtype) {
  char text[512];
  backend.explain_dtype(static_cast<int32_t>(dtype), text, sizeof(text));
  TORCH_CHECK_TYPE(false, text);
  __builtin_unreachable();
}

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device on(DeviceIndex index) { return Device(DeviceType::HPU, index); }

// ---- memory ----

struct HpuAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    // within a kernel the kernel's device decides, else the thread's current one
    const int device = active_pool != VT_HOST_POOL ? active_pool - pool_of(0) : current_device;
    return allocate_block(pool_of(device), bytes, on(static_cast<DeviceIndex>(device)));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  void copy_data(void *dst, const void *src, size_t bytes) const override { default_copy_data(dst, src, bytes); }
};

// ---- current device; one stream per device, on which everything is done as soon as it is asked for ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::HPU; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return on(static_cast<DeviceIndex>(current_device)); }
  void setDevice(Device device) const override {
    if (device.has_index()) {
      check_device_index(device.index());
      current_device = device.index();
    }
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index())
      current_device = device.index();
  }
  Stream getStream(Device device) const override {
    return Stream(Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void record(void **, const Stream &, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void *, const Stream &) const override {}
  bool queryEvent(void *) const override { return true; }
  bool queryStream(const Stream &) const override { return true; }
  void synchronizeStream(const Stream &) const override {}
  void synchronizeEvent(void *) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(backend.num_devices); }
};

// ---- random numbers: a CPU generator of its own for each device ----

struct HpuGenerator final : c10::GeneratorImpl {
  HpuGenerator(DeviceIndex device, at::Generator cpu)
      : GeneratorImpl(on(device), c10::DispatchKeySet(c10::DispatchKey::HPU)), cpu(std::move(cpu)) {}
  explicit HpuGenerator(DeviceIndex device) : HpuGenerator(device, at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl &state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  HpuGenerator *clone_impl() const override { return new HpuGenerator(device_.index(), cpu.clone()); }

  at::Generator cpu;
};

constexpr int max_devices = VT_HPU_MAX_DEVICES;

const at::Generator &default_generator(DeviceIndex device) {
  static std::array<at::Generator, max_devices> generators;
  static std::once_flag made;
  std::call_once(made, [] {
    // a seed given before the devices were there holds for them too
    const uint64_t seed = at::detail::getDefaultCPUGenerator().current_seed();
    for (int i = 0; i < max_devices; ++i)
      generators[i] = at::Generator(
          c10::make_intrusive<HpuGenerator>(static_cast<DeviceIndex>(i), at::detail::createCPUGenerator(seed)));
  });
  const int index = device < 0 ? current_device : device;
  check_device_index(index);
  return generators[index];
}

// ---- what libtorch asks an accelerator ----

// Of the emulator, and of a plugin that brings none, without which libtorch runs no backward.
struct Hooks final : at::HPUHooksInterface {
  void init() const override {
    TORCH_CHECK(is_there(), "no HPU is set up; use accelerator=hpu, or call HpuEmulator::init first");
  }
  bool isBuilt() const override { return is_there(); }
  bool hasHPU() const override { return is_there(); }
  bool isAvailable() const override { return is_there(); }
  bool hasPrimaryContext(DeviceIndex) const override { return is_there(); }
  DeviceIndex deviceCount() const override { return is_there() ? guard().deviceCount() : DeviceIndex(0); }
  void setCurrentDevice(DeviceIndex device) const override { guard().setDevice(on(device)); }
  DeviceIndex getCurrentDevice() const override { return guard().getDevice().index(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return guard().exchangeDevice(on(device)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator *getPinnedMemoryAllocator() const override { return cpu_allocator(); }
  const at::Generator &getDefaultGenerator(DeviceIndex device) const override {
    check_generators();
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    check_generators();
    const int index = device < 0 ? current_device : device;
    check_device_index(index);
    return at::Generator(c10::make_intrusive<HpuGenerator>(static_cast<DeviceIndex>(index)));
  }

private:
  static bool is_there() { return c10::impl::hasDeviceGuardImpl(DeviceType::HPU); }
  static const c10::impl::DeviceGuardImplInterface &guard() { return *c10::impl::getDeviceGuardImpl(DeviceType::HPU); }
  static void check_generators() {
    TORCH_CHECK(backend.is_active, "this HPU's random number generator cannot be reached from libtorch");
  }
};

} // namespace

c10::Allocator *allocator() {
  static auto *allocator = new HpuAllocator; // never destroyed: static tensors may be freed after it would be
  return allocator;
}

void register_guard() { c10::impl::registerDeviceGuard(DeviceType::HPU, new Guard); }

void reserve_hooks() {
  static std::once_flag registered;
  std::call_once(registered, [] {
    if (at::HPUHooksRegistry()->Has("HPUHooks"))
      return; // a plugin's
    // as a fallback, so that a real plugin that brings hooks replaces these
    at::HPUHooksRegistry()->Register(
        "HPUHooks", [](at::HPUHooksArgs) -> std::unique_ptr<at::HPUHooksInterface> { return std::make_unique<Hooks>(); },
        c10::REGISTRY_FALLBACK);
  });
}

void check_hooks() {
  reserve_hooks();
  // libtorch looks its hooks up once; what it found then stays
  TORCH_CHECK(typeid(at::detail::getHPUHooks()) != typeid(at::HPUHooksInterface),
              "libtorch was used for training before the HPU was set up, and believes that there is none; choose "
              "accelerator=hpu, or call HpuEmulator::init, before the first backward or seeding");
}

bool has_generators() { return backend.is_active || typeid(at::detail::getHPUHooks()) != typeid(Hooks); }

at::Generator cpu_generator(const std::optional<at::Generator> &generator, int device) {
  if (generator.has_value() && generator->defined()) {
    if (generator->device().type() != DeviceType::HPU)
      return *generator;
    return static_cast<HpuGenerator *>(generator->unsafeGetGeneratorImpl())->cpu;
  }
  const at::Generator &own = default_generator(static_cast<DeviceIndex>(device));
  return static_cast<HpuGenerator *>(own.unsafeGetGeneratorImpl())->cpu;
}

} // namespace voltaic::hpu
