#include "device/abi.h"
#include "error.h"
#include "device/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>

namespace voltaic {

constinit thread_local int32_t active_pool = VT_HOST_POOL;
constinit thread_local BlockWatch *block_watch = nullptr;

namespace {

const vt_allocator *rust = nullptr;

[[noreturn]] void refuse(int32_t pool, size_t bytes) {
  char text[512];
  rust->explain(pool, bytes, text, sizeof(text));
  TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  __builtin_unreachable();
}

// Gives back what raw_allocate gave out. mkldnn asks for the deleter only then, so that a block taken while the pools
// were being installed may be libtorch's own; that has no header, and the memory before it has no such magic number. What
// a BlockWatch supplied belongs to a graph, or to the storage of a tensor.
void release_raw(void *block) {
  if (block == nullptr)
    return;
  vt_block_header header;
  std::memcpy(&header, static_cast<char *>(block) - VT_BLOCK_HEADER_BYTES, sizeof(header));
  if (header.magic == VT_BLOCK_MAGIC)
    release_block(block);
  else if (header.magic != supplied_magic)
    c10::free_cpu(block);
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_block(active_pool, bytes, c10::Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_raw; }
  bool is_simple_data_ptr(const c10::DataPtr &data) const override { return data.get() == data.get_context(); }
  void copy_data(void *dst, const void *src, size_t bytes) const override { default_copy_data(dst, src, bytes); }
};

void keep_supplied(void *) {}

} // namespace

c10::DataPtr allocate_block(int32_t pool, size_t bytes, c10::Device device) {
  void *block = nullptr;
  if (bytes != 0) {
    if (C10_UNLIKELY(block_watch != nullptr))
      if (void *supplied = block_watch->supply(bytes); supplied != nullptr)
        return {supplied, supplied, &keep_supplied, device};
    block = rust->allocate(pool, bytes);
    if (block == nullptr)
      refuse(pool, bytes);
    if (C10_UNLIKELY(block_watch != nullptr))
      block_watch->taken(block, bytes);
  }
  return {block, block, &release_block, device};
}

void release_block(void *block) {
  if (block == nullptr)
    return;
  if (C10_UNLIKELY(block_watch != nullptr))
    block_watch->given_back(block);
  rust->release(block);
}

c10::Allocator *cpu_allocator() {
  // never destroyed: static tensors may be freed after it would be
  static auto *allocator = new PoolAllocator;
  return allocator;
}

bool has_cpu_allocator() { return rust != nullptr; }

} // namespace voltaic

vt_error *vt_set_cpu_allocator(const vt_allocator *allocator) {
  return voltaic::guard([&] {
    TORCH_CHECK(voltaic::rust == nullptr, "the CPU allocator is already set");
    voltaic::rust = allocator;
    c10::SetCPUAllocator(voltaic::cpu_allocator(), /*priority=*/1);
  });
}
