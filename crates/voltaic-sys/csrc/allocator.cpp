#include "error.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

namespace {

// Forwards to the allocator given by Rust. mkldnn takes memory through raw_allocate, hence raw_deleter.
struct HostAllocator final : c10::Allocator {
  const vt_allocator *rust = nullptr;

  c10::DataPtr allocate(size_t bytes) override {
    void *block = nullptr;
    if (bytes != 0) {
      block = rust->allocate(bytes);
      if (block == nullptr)
        refuse(bytes);
    }
    return {block, block, rust->release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return rust->release; }
  bool is_simple_data_ptr(const c10::DataPtr &data) const override { return data.get() == data.get_context(); }
  void copy_data(void *dst, const void *src, size_t bytes) const override { default_copy_data(dst, src, bytes); }

private:
  [[noreturn]] void refuse(size_t bytes) const {
    char text[512];
    rust->explain(bytes, text, sizeof(text));
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    __builtin_unreachable();
  }
};

// Never destroyed: static tensors may be freed after it would be.
HostAllocator &host_allocator() {
  static auto *allocator = new HostAllocator;
  return *allocator;
}

} // namespace

vt_error *vt_set_cpu_allocator(const vt_allocator *allocator) {
  return voltaic::guard([&] {
    HostAllocator &host = host_allocator();
    TORCH_CHECK(host.rust == nullptr, "the CPU allocator is already set");
    host.rust = allocator;
    c10::SetCPUAllocator(&host, /*priority=*/1);
  });
}
