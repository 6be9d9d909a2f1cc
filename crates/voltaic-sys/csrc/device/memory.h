// Blocks of the memory pools that Rust owns, as libtorch's data pointers.
#pragma once

#include "device/abi.h"

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>

namespace voltaic {

static_assert(offsetof(vt_block_header, twin) == 0 && offsetof(vt_block_header, pool) == 8 &&
              offsetof(vt_block_header, magic) == 12);
static_assert(sizeof(vt_block_header) <= VT_BLOCK_HEADER_BYTES);

// The pool that libtorch's allocator for the CPU takes memory from, on this thread. An HPU operator sets its device's
// pool while a CPU kernel runs, so that outputs and temporaries of the kernel are memory of the device.
extern constinit thread_local int32_t active_pool;

class PoolScope {
public:
  explicit PoolScope(int32_t pool) : before_(active_pool) { active_pool = pool; }
  ~PoolScope() { active_pool = before_; }
  PoolScope(const PoolScope &) = delete;
  PoolScope &operator=(const PoolScope &) = delete;

private:
  int32_t before_;
};

// Told of each block that libtorch takes and gives back on this thread, while it is set. May supply blocks itself.
class BlockWatch {
public:
  // A block of its own in place of a pool's, which is never given back; null leaves it to the pool.
  virtual void *supply(size_t bytes) = 0;
  virtual void taken(void *block, size_t bytes) = 0;
  virtual void given_back(void *block) = 0;

protected:
  ~BlockWatch() = default;
};
extern constinit thread_local BlockWatch *block_watch;

class BlockWatchScope {
public:
  explicit BlockWatchScope(BlockWatch *watch) : before_(block_watch) { block_watch = watch; }
  ~BlockWatchScope() { block_watch = before_; }
  BlockWatchScope(const BlockWatchScope &) = delete;
  BlockWatchScope &operator=(const BlockWatchScope &) = delete;

private:
  BlockWatch *before_;
};

// In the header of a block that a BlockWatch supplied.
inline constexpr uint32_t supplied_magic = 0x76A17A2Eu;

// A block of `pool` that claims to be on `device`. Throws c10::OutOfMemoryError with Rust's explanation.
c10::DataPtr allocate_block(int32_t pool, size_t bytes, c10::Device device);
// Gives a block back to the pool it came from; null is ignored.
void release_block(void *block);

// The header before a block, or null if the memory is not the whole of a block.
inline vt_block_header *header_of(const c10::DataPtr &data) {
  void *block = data.get();
  if (block == nullptr || data.get_deleter() != &release_block || data.get_context() != block)
    return nullptr;
  return reinterpret_cast<vt_block_header *>(static_cast<char *>(block) - VT_BLOCK_HEADER_BYTES);
}

// libtorch's allocator for the CPU once vt_set_cpu_allocator was called.
c10::Allocator *cpu_allocator();
bool has_cpu_allocator();

} // namespace voltaic
