#include "error.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace {

const vt_allocator *rust_allocator = nullptr;

void release_block(void *block) {
  if (block != nullptr)
    rust_allocator->release(block);
}

// Forwards to the allocator given by Rust. mkldnn takes memory through raw_allocate, hence raw_deleter.
struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void *block = nullptr;
    if (bytes != 0) {
      block = rust_allocator->allocate(bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "out of host memory: could not allocate ", bytes, " bytes");
    }
    return {block, block, &release_block, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release_block; }
  bool is_simple_data_ptr(const c10::DataPtr &data) const override { return data.get() == data.get_context(); }
  void copy_data(void *dst, const void *src, size_t bytes) const override { default_copy_data(dst, src, bytes); }
};

HostAllocator host_allocator;

} // namespace

vt_error *vt_set_cpu_allocator(const vt_allocator *allocator) {
  return voltaic::guard([&] {
    TORCH_CHECK(rust_allocator == nullptr, "the CPU allocator is already set");
    rust_allocator = allocator;
    c10::SetCPUAllocator(&host_allocator, /*priority=*/1);
  });
}
