// What libtorch's registries say of a kind of device, whichever library registered it.
#include "device/abi.h"
#include "error.h"
#include "hpu/hpu.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

c10::DeviceAllocator *measuring_allocator(c10::DeviceType type) {
  return dynamic_cast<c10::DeviceAllocator *>(c10::GetAllocator(type));
}

uint64_t count(int64_t value) { return value < 0 ? 0 : static_cast<uint64_t>(value); }

} // namespace

int32_t vt_backend_is_loaded(int32_t device_type) {
  return c10::impl::hasDeviceGuardImpl(static_cast<c10::DeviceType>(device_type)) ? 1 : 0;
}

vt_error *vt_backend_device_count(int32_t device_type, int32_t *devices) {
  return voltaic::guard([&] {
    const auto type = static_cast<c10::DeviceType>(device_type);
    *devices = c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type)->deviceCount() : 0;
  });
}

vt_error *vt_backend_synchronize(int32_t device_type, int32_t device_index) {
  return voltaic::guard([&] {
    const auto type = static_cast<c10::DeviceType>(device_type);
    c10::impl::getDeviceGuardImpl(type)->synchronizeDevice(static_cast<c10::DeviceIndex>(device_index));
  });
}

vt_error *vt_backend_has_generators(int32_t device_type, int32_t *has_generators) {
  return voltaic::guard([&] {
    const auto type = static_cast<c10::DeviceType>(device_type);
    const bool is_loaded = type == c10::DeviceType::CPU || c10::impl::hasDeviceGuardImpl(type);
    const bool is_reachable = type != c10::DeviceType::HPU || voltaic::hpu::has_generators();
    *has_generators = is_loaded && is_reachable ? 1 : 0;
  });
}

vt_error *vt_backend_memory(int32_t device_type, int32_t device_index, vt_backend_memory_stats *stats,
                            int32_t *is_measured) {
  return voltaic::guard([&] {
    auto *allocator = measuring_allocator(static_cast<c10::DeviceType>(device_type));
    *is_measured = allocator != nullptr && allocator->initialized() ? 1 : 0;
    if (*is_measured == 0)
      return;
    const auto index = static_cast<c10::DeviceIndex>(device_index);
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto &found = allocator->getDeviceStats(index);
    const auto [free, total] = allocator->getMemoryInfo(index);
    *stats = {
        .total = total,
        .free = free,
        .in_use = count(found.allocated_bytes[all].current),
        .max_in_use = count(found.allocated_bytes[all].peak),
        .num_allocs = count(found.allocation[all].allocated),
        .num_frees = count(found.allocation[all].freed),
    };
  });
}

vt_error *vt_backend_reset_peak_memory(int32_t device_type, int32_t device_index) {
  return voltaic::guard([&] {
    if (auto *allocator = measuring_allocator(static_cast<c10::DeviceType>(device_type)))
      allocator->resetPeakStats(static_cast<c10::DeviceIndex>(device_index));
  });
}
