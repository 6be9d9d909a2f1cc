// A library with NCCL's C interface: its functions, a rank's end of its communicator, and how its operations reach tensors.
#pragma once

#include "device/abi.h"
#include "ranks/abi.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace voltaic::libraries {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// At least as large as the id of any library, which is passed by value: what a function does not know it does not read.
struct Id {
  uint8_t bytes[VT_COLLECTIVE_ID_BYTES];
};
using GetId = int (*)(Id *);
using InitRank = int (*)(void **comm, int size, Id id, int rank);
using AllReduce = int (*)(const void *, void *, size_t count, int dtype, int op, void *comm, void *stream);
using Rooted = int (*)(const void *, void *, size_t count, int dtype, int root, void *comm, void *stream);
using AllGather = int (*)(const void *, void *, size_t count, int dtype, void *comm, void *stream);
using Send = int (*)(const void *, size_t count, int dtype, int peer, void *comm, void *stream);
using Receive = int (*)(void *, size_t count, int dtype, int peer, void *comm, void *stream);
using Reduce = int (*)(const void *, void *, size_t count, int dtype, int op, int root, void *comm, void *stream);
using OfComm = int (*)(void *comm);
using Plain = int (*)();
using AsyncError = int (*)(void *comm, int *result);
using ErrorText = const char *(*)(int);

using DeviceMalloc = int (*)(uint32_t device, uint64_t bytes, uint64_t address, uint32_t flags, uint64_t *buffer);
using DeviceFree = int (*)(uint32_t device, uint64_t buffer, uint32_t flags);
using HostMalloc = int (*)(uint32_t device, uint64_t bytes, uint32_t flags, void **buffer);
using HostFree = int (*)(uint32_t device, const void *buffer, uint32_t flags);
using Copy = int (*)(void *stream, uint64_t from, uint64_t bytes, uint64_t to, int direction);
using StreamCreate = int (*)(void **stream, uint32_t device, uint32_t flags);
using OfStream = int (*)(void *stream);

enum { HOST_TO_DEVICE = 0, DEVICE_TO_HOST = 1 };
// A process has one Gaudi card, the first.
constexpr uint32_t GAUDI = 0;

template <typename F> F as(void (*function)(void)) { return reinterpret_cast<F>(function); }

inline void check_synapse(int status, const char *what) { TORCH_CHECK(status == 0, what, " gave ", status); }

// ncclDataType_t and hcclDataType_t, which have the same numbers.
inline int dtype_number(at::ScalarType dtype) {
  switch (dtype) {
  case at::kChar:
    return 0;
  case at::kByte:
  case at::kBool:
    return 1;
  case at::kInt:
    return 2;
  case at::kLong:
    return 4;
  case at::kHalf:
    return 6;
  case at::kFloat:
    return 7;
  case at::kDouble:
    return 8;
  case at::kBFloat16:
    return 9;
  default:
    TORCH_CHECK(false, "collectives take no tensors of ", dtype, "; convert them first");
  }
}

constexpr int SUM = 0, PRODUCT = 1, MAX = 2, MIN = 3, AVERAGE = 4;

inline int op_number(const c10d::ReduceOp &op) {
  switch (op) {
  case c10d::ReduceOp::SUM:
    return SUM;
  case c10d::ReduceOp::AVG:
    return AVERAGE;
  case c10d::ReduceOp::MIN:
    return MIN;
  case c10d::ReduceOp::MAX:
    return MAX;
  case c10d::ReduceOp::PRODUCT:
    return PRODUCT;
  default:
    TORCH_CHECK(false, "the library has sum, average, minimum, maximum and product");
  }
}

// A rank's end of the library's communicator.
class Communicator {
public:
  Communicator(const vt_collective_library &library, void *comm, c10::Device device, milliseconds timeout)
      : library(library), device(device), timeout(timeout), comm(comm) {}

  ~Communicator() {
    if (comm != nullptr)
      as<OfComm>(library.destroy)(comm);
  }

  void check(int result, const char *op) const {
    TORCH_CHECK(result == 0, op, " of ", library.name, ": ", as<ErrorText>(library.error_text)(result));
  }

  // Waits until `is_done`; an error of the library or a time-out breaks the communicator, so that nothing runs on.
  template <typename IsDone> void wait(IsDone &&is_done) {
    const milliseconds limit = timeout;
    const auto deadline = steady_clock::now() + limit;
    for (size_t round = 0; !is_done(); ++round) {
      int result = 0;
      if (library.async_error != nullptr) {
        as<AsyncError>(library.async_error)(handle(), &result);
        if (result != 0)
          give_up();
        check(result, "an operation");
      }
      if (steady_clock::now() > deadline) {
        give_up();
        TORCH_CHECK(false, "timed out after ", limit.count(), " ms");
      }
      if (round > 1000)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  void *handle() const {
    TORCH_CHECK(comm != nullptr, "an operation before this one has failed");
    return comm;
  }

  const vt_collective_library library;
  const c10::Device device;
  std::atomic<milliseconds> timeout;

private:
  // A library without abort keeps what it has until the process ends.
  void give_up() {
    if (library.abort != nullptr)
      as<OfComm>(library.abort)(comm);
    comm = nullptr;
  }

  void *comm;
};

// An operation of the library on memory that it reaches: `from` and `to` may be the same.
using Operation = std::function<int(const void *from, void *to, void *stream)>;

struct Tensors {
  at::Tensor from, to; // contiguous; undefined for an operation that only sends or only receives
};

// Operations on the tensors' own memory, on a stream beside the computation's.
class Direct {
public:
  explicit Direct(std::shared_ptr<Communicator> communicator) : communicator(std::move(communicator)) {
    if (!device().is_cpu())
      stream = c10::impl::VirtualGuardImpl(device().type()).getStreamFromGlobalPool(device(), true);
  }

  // Returns what waits for it. A tensor on the host takes a way over the device.
  std::function<void()> run(const char *name, const Tensors &tensors, const Operation &operation) {
    const c10::OptionalDeviceGuard guard(device());
    const auto on_device = [&](const at::Tensor &tensor) {
      return tensor.defined() ? tensor.to(device()) : tensor;
    };
    const at::Tensor from = on_device(tensors.from);
    const at::Tensor to = tensors.to.is_same(tensors.from) ? from : on_device(tensors.to);
    const auto address = [](const at::Tensor &tensor) { return tensor.defined() ? tensor.data_ptr() : nullptr; };
    auto communicator = this->communicator;
    const auto start = [&](void *raw_stream) {
      communicator->check(operation(address(from), address(to), raw_stream), name);
    };
    auto back = [to, home = tensors.to] {
      if (home.defined() && !to.is_same(home))
        home.copy_(to);
    };
    if (!stream) { // memory of the host
      start(nullptr);
      return back;
    }
    const c10::impl::VirtualGuardImpl implementation(device().type());
    c10::Event ready(device().type()), done(device().type());
    ready.record(implementation.getStream(device()));
    ready.block(*stream);
    start(stream->native_handle());
    done.record(*stream);
    auto event = std::make_shared<c10::Event>(std::move(done));
    return [communicator, event, back, from] {
      communicator->wait([&] { return event->query(); });
      back();
    };
  }

private:
  c10::Device device() const { return communicator->device; }

  std::shared_ptr<Communicator> communicator;
  std::optional<c10::Stream> stream;
};

// Memory of the card and of the host that Synapse copies between.
class Buffer {
public:
  explicit Buffer(const vt_collective_library &library) : library(library) {}
  Buffer(const Buffer &) = delete;

  ~Buffer() { release(); }

  void reserve(size_t bytes) {
    if (bytes <= size)
      return;
    release();
    check_synapse(as<DeviceMalloc>(library.device_malloc)(GAUDI, bytes, 0, 0, &card), "synDeviceMalloc");
    check_synapse(as<HostMalloc>(library.host_malloc)(GAUDI, bytes, 0, &host), "synHostMalloc");
    size = bytes;
  }

  void *on_card() const { return reinterpret_cast<void *>(card); }
  void *on_host() const { return host; }

  void copy(void *stream, size_t bytes, int direction) const {
    const auto at_host = reinterpret_cast<uint64_t>(host);
    const bool is_up = direction == HOST_TO_DEVICE;
    check_synapse(as<Copy>(library.copy)(stream, is_up ? at_host : card, bytes, is_up ? card : at_host, direction),
                  "synMemCopyAsync");
  }

private:
  void release() {
    if (card != 0)
      as<DeviceFree>(library.device_free)(GAUDI, card, 0);
    if (host != nullptr)
      as<HostFree>(library.host_free)(GAUDI, host, 0);
    card = 0, host = nullptr, size = 0;
  }

  const vt_collective_library &library;
  uint64_t card = 0;
  void *host = nullptr;
  size_t size = 0;
};

// Operations on copies in memory of our own. An operation ends before the next one starts.
class Staged {
public:
  explicit Staged(std::shared_ptr<Communicator> given)
      : communicator(std::move(given)), input(communicator->library), output(communicator->library) {
    check_synapse(as<StreamCreate>(communicator->library.stream_create)(&stream, GAUDI, 0), "synStreamCreateGeneric");
  }

  // Bytes of the parts at each end, one behind the other. Libraries that count in words need room up to the next one.
  struct Shape {
    std::vector<size_t> from, to;
    bool pads;

    size_t pitch(size_t bytes) const { return pads ? (bytes + 3) / 4 * 4 : bytes; }

    size_t room(const std::vector<size_t> &parts) const {
      size_t sum = 0;
      for (const size_t bytes : parts)
        sum += pitch(bytes);
      return sum;
    }
  };

  void run(const char *name, const Tensors &tensors, const Shape &shape, const Operation &operation) {
    const size_t from_bytes = shape.room(shape.from), to_bytes = shape.room(shape.to);
    if (from_bytes + to_bytes == 0)
      return;
    input.reserve(from_bytes);
    output.reserve(to_bytes);
    if (from_bytes != 0) {
      const at::Tensor host = tensors.from.cpu();
      spread(static_cast<const char *>(host.data_ptr()), static_cast<char *>(input.on_host()), shape);
      input.copy(stream, from_bytes, HOST_TO_DEVICE);
    }
    communicator->check(operation(input.on_card(), output.on_card(), stream), name);
    if (to_bytes != 0)
      output.copy(stream, to_bytes, DEVICE_TO_HOST);
    communicator->wait([&] { return as<OfStream>(communicator->library.stream_query)(stream) == 0; });
    if (to_bytes != 0) {
      at::Tensor host = at::empty_like(tensors.to, tensors.to.options().device(at::kCPU));
      collect(static_cast<const char *>(output.on_host()), static_cast<char *>(host.data_ptr()), shape);
      tensors.to.copy_(host);
    }
  }

private:
  static void spread(const char *host, char *to, const Shape &shape) {
    for (const size_t bytes : shape.from) {
      std::memcpy(to, host, bytes);
      std::memset(to + bytes, 0, shape.pitch(bytes) - bytes);
      host += bytes, to += shape.pitch(bytes);
    }
  }

  static void collect(const char *from, char *host, const Shape &shape) {
    for (const size_t bytes : shape.to) {
      std::memcpy(host, from, bytes);
      host += bytes, from += shape.pitch(bytes);
    }
  }

  std::shared_ptr<Communicator> communicator;
  Buffer input, output;
  void *stream = nullptr;
};

} // namespace voltaic::libraries
