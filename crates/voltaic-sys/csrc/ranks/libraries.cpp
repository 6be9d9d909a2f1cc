// A back end of c10d over a library with NCCL's C interface: NCCL itself, or HCCL. The functions come from Rust, which
// has loaded the library.
//
// GPUs: operations run on a stream of their own beside the computation, with the tensors' memory. Gaudi: what libtorch
// takes for an address is a handle of Habana's plugin, so that data goes through memory of our own, by Synapse.
#include "ranks/c10d.h"
#include "error.h"
#include "device/abi.h"
#include "ranks/abi.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

namespace {

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

void check_synapse(int status, const char *what) { TORCH_CHECK(status == 0, what, " gave ", status); }

// ncclDataType_t and hcclDataType_t, which have the same numbers.
int dtype_number(at::ScalarType dtype) {
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

int op_number(const c10d::ReduceOp &op) {
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
    const auto deadline = steady_clock::now() + timeout;
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
        TORCH_CHECK(false, "timed out after ", timeout.count(), " ms");
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
  const milliseconds timeout;

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

class LibraryWork : public c10d::Work {
public:
  explicit LibraryWork(std::function<void()> finish) : finish(std::move(finish)) {}

  bool wait(milliseconds) override {
    if (auto body = std::exchange(finish, nullptr))
      body();
    return true;
  }

private:
  std::function<void()> finish;
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

class LibraryBackend : public c10d::Backend {
public:
  LibraryBackend(std::shared_ptr<Communicator> given, int rank, int size)
      : c10d::Backend(rank, size), communicator(std::move(given)) {
    if (communicator->library.device_malloc != nullptr)
      staged = std::make_unique<Staged>(communicator);
    else
      direct = std::make_unique<Direct>(communicator);
  }

  const std::string getBackendName() const override { return communicator->library.name; }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor> &tensors,
                                           const c10d::AllreduceOptions &options) override {
    const at::Tensor &tensor = tensors.at(0);
    return reduce("all_reduce", {tensor, tensor}, 1, options.reduceOp, [this](const Reduction &it) {
      return as<AllReduce>(library().all_reduce)(it.from, it.to, it.count, it.dtype, it.op, handle(), it.stream);
    });
  }

  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor> &tensors, const c10d::ReduceOptions &options) override {
    const at::Tensor &tensor = tensors.at(0);
    const int root = static_cast<int>(options.rootRank);
    return reduce("reduce", {tensor, tensor}, 1, options.reduceOp, [root, this](const Reduction &it) {
      return as<Reduce>(library().reduce)(it.from, it.to, it.count, it.dtype, it.op, root, handle(), it.stream);
    });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor &output, at::Tensor &input,
                                                      const c10d::ReduceScatterOptions &options) override {
    return reduce("reduce_scatter", {input, output}, getSize(), options.reduceOp, [this](const Reduction &it) {
      return as<AllReduce>(library().reduce_scatter)(it.from, it.to, it.count, it.dtype, it.op, handle(), it.stream);
    });
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor> &tensors,
                                           const c10d::BroadcastOptions &options) override {
    const at::Tensor &tensor = tensors.at(0);
    const int root = static_cast<int>(options.rootRank);
    return move("broadcast", {tensor, tensor}, 1, 1, [=, this](const Unit &unit) -> Operation {
      return [=, this](const void *from, void *to, void *stream) {
        return as<Rooted>(library().broadcast)(from, to, unit.count, unit.dtype, root, handle(), stream);
      };
    });
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor &output, at::Tensor &input,
                                                 const c10d::AllgatherOptions &) override {
    return move("all_gather", {input, output}, 1, getSize(), [this](const Unit &unit) -> Operation {
      return [=, this](const void *from, void *to, void *stream) {
        return as<AllGather>(library().all_gather)(from, to, unit.count, unit.dtype, handle(), stream);
      };
    });
  }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor> &tensors, int peer, int) override {
    return move("send", {tensors.at(0), {}}, 1, 0, [=, this](const Unit &unit) -> Operation {
      return [=, this](const void *from, void *, void *stream) {
        return as<Send>(library().send)(from, unit.count, unit.dtype, peer, handle(), stream);
      };
    });
  }

  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor> &tensors, int peer, int) override {
    return move("recv", {{}, tensors.at(0)}, 0, 1, [=, this](const Unit &unit) -> Operation {
      return [=, this](const void *, void *to, void *stream) {
        return as<Receive>(library().recv)(to, unit.count, unit.dtype, peer, handle(), stream);
      };
    });
  }

  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>> &outputs, std::vector<at::Tensor> &inputs,
                                        const c10d::GatherOptions &options) override {
    const at::Tensor &input = inputs.at(0);
    const int root = static_cast<int>(options.rootRank);
    Splits from(getSize()), to(getSize());
    from[root] = input.nbytes();
    if (getRank() != root)
      return exchange("gather", {input, {}}, from, to);
    const at::Tensor stacked = at::empty_like(at::stack(outputs.at(0)));
    std::fill(to.begin(), to.end(), input.nbytes());
    return exchange("gather", {input, stacked}, from, to, [stacked, outputs = outputs.at(0)] {
      for (size_t i = 0; i < outputs.size(); ++i)
        outputs[i].copy_(stacked[static_cast<int64_t>(i)]);
    });
  }

  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor> &outputs, std::vector<std::vector<at::Tensor>> &inputs,
                                         const c10d::ScatterOptions &options) override {
    const at::Tensor &output = outputs.at(0);
    const int root = static_cast<int>(options.rootRank);
    Splits from(getSize()), to(getSize());
    to[root] = output.nbytes();
    if (getRank() != root)
      return exchange("scatter", {{}, output}, from, to);
    std::fill(from.begin(), from.end(), output.nbytes());
    return exchange("scatter", {at::stack(inputs.at(0)), output}, from, to);
  }

  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor &output, at::Tensor &input, std::vector<int64_t> &to,
                                               std::vector<int64_t> &from, const c10d::AllToAllOptions &) override {
    const auto in_bytes = [](const std::vector<int64_t> &rows, const at::Tensor &tensor) {
      const size_t row = tensor.size(0) == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(tensor.size(0));
      Splits bytes;
      for (const int64_t count : rows)
        bytes.push_back(static_cast<size_t>(count) * row);
      return bytes;
    };
    return exchange("all_to_all", {input, output}, in_bytes(from, input), in_bytes(to, output));
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions &) override {
    std::vector<at::Tensor> tensors{at::zeros({1}, at::kFloat)};
    return allreduce(tensors, {});
  }

private:
  // Bytes for, or from, each rank.
  using Splits = std::vector<size_t>;

  struct Reduction {
    const void *from;
    void *to;
    size_t count;
    int dtype, op;
    void *stream;
  };

  // How a tensor that is only moved is counted.
  struct Unit {
    size_t count;
    int dtype;
  };

  const vt_collective_library &library() const { return communicator->library; }
  void *handle() const { return communicator->handle(); }

  // `parts` is how many outputs there are in the input.
  c10::intrusive_ptr<c10d::Work> reduce(const char *name, const Tensors &tensors, size_t parts,
                                        const c10d::ReduceOp &reduce_op,
                                        std::function<int(const Reduction &)> function) {
    const at::ScalarType dtype = tensors.to.scalar_type();
    const bool is_word = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kInt;
    TORCH_CHECK(!staged || is_word, library().name, " reduces float32, bfloat16, float16 and int32, not ", dtype);
    TORCH_CHECK(dtype != at::kBool, library().name, " reduces no bool; convert to int32");
    int op = op_number(reduce_op);
    const bool divides = op == AVERAGE && library().has_average == 0;
    TORCH_CHECK(!divides || at::isFloatingType(dtype), "the average of ", dtype, " is not a whole number");
    op = divides ? SUM : op;
    const size_t count = tensors.to.numel();
    const Operation operation = [=](const void *from, void *to, void *stream) {
      return function({from, to, count, dtype_number(dtype), op, stream});
    };
    const size_t piece = tensors.to.nbytes();
    auto finish = run(name, tensors, {Splits(parts, piece), {piece}, false}, operation);
    return c10::make_intrusive<LibraryWork>([finish, divides, to = tensors.to, size = getSize()] {
      finish();
      if (divides)
        to.div_(size);
    });
  }

  // Data that stays what it is. Libraries that count in words get as many as hold each segment.
  template <typename Make>
  c10::intrusive_ptr<c10d::Work> move(const char *name, const Tensors &tensors, size_t from_segments,
                                      size_t to_segments, Make &&make) {
    const at::Tensor &segment = from_segments == 1 ? tensors.from : tensors.to;
    const size_t piece = segment.nbytes();
    const Staged::Shape shape{Splits(from_segments, piece), Splits(to_segments, piece), true};
    auto finish = run(name, tensors, shape, make(unit_of(piece, segment)));
    return c10::make_intrusive<LibraryWork>(std::move(finish));
  }

  // `bytes` of a tensor: words of a library that counts in them, else its own elements.
  Unit unit_of(size_t bytes, const at::Tensor &tensor) const {
    return staged ? Unit{(bytes + 3) / 4, dtype_number(at::kInt)}
                  : Unit{bytes / tensor.element_size(), dtype_number(tensor.scalar_type())};
  }

  // Sends each rank its part of one tensor, and takes a part of another from each. A rank's part for itself is copied.
  c10::intrusive_ptr<c10d::Work> exchange(const char *name, const Tensors &tensors, const Splits &from,
                                          const Splits &to, std::function<void()> then = nullptr) {
    const Staged::Shape shape{from, to, staged != nullptr};
    const auto start_of = [shape](const Splits &parts, int rank) {
      size_t start = 0;
      for (int i = 0; i < rank; ++i)
        start += shape.pitch(parts[i]);
      return start;
    };
    const Operation operation = [=, this](const void *input, void *output, void *stream) {
      int result = as<Plain>(library().group_start)();
      // one after the other in an order in which all ranks meet
      for (int step = 1; step < getSize() && result == 0; ++step) {
        const int next = (getRank() + step) % getSize(), previous = (getRank() + getSize() - step) % getSize();
        if (from[next] != 0) {
          const Unit unit = unit_of(from[next], tensors.from);
          const char *part = static_cast<const char *>(input) + start_of(from, next);
          result = as<Send>(library().send)(part, unit.count, unit.dtype, next, handle(), stream);
        }
        if (to[previous] != 0 && result == 0) {
          const Unit unit = unit_of(to[previous], tensors.to);
          char *part = static_cast<char *>(output) + start_of(to, previous);
          result = as<Receive>(library().recv)(part, unit.count, unit.dtype, previous, handle(), stream);
        }
      }
      const int ended = as<Plain>(library().group_end)();
      return result != 0 ? result : ended;
    };
    auto finish = run(name, tensors, shape, operation);
    const int rank = getRank();
    return c10::make_intrusive<LibraryWork>([=] {
      const at::NoGradGuard no_grad;
      finish();
      if (from[rank] != 0)
        own_part(tensors.to, to, rank).copy_(own_part(tensors.from, from, rank));
      if (then)
        then();
    });
  }

  static at::Tensor own_part(const at::Tensor &tensor, const Splits &parts, int rank) {
    size_t start = 0;
    for (int i = 0; i < rank; ++i)
      start += parts[i];
    const size_t unit = tensor.element_size();
    return tensor.view(-1).narrow(0, static_cast<int64_t>(start / unit), static_cast<int64_t>(parts[rank] / unit));
  }

  // Returns what waits for it.
  std::function<void()> run(const char *name, const Tensors &tensors, const Staged::Shape &shape,
                            const Operation &operation) {
    const at::NoGradGuard no_grad;
    handle(); // is there
    if (direct)
      return direct->run(name, tensors, operation);
    staged->run(name, tensors, shape, operation);
    return [] {};
  }

  std::shared_ptr<Communicator> communicator;
  std::unique_ptr<Direct> direct;
  std::unique_ptr<Staged> staged;
};

} // namespace

vt_error *vt_collective_id(const vt_collective_library *library, uint8_t *id) {
  return voltaic::guard([&] {
    Id made{};
    const int result = as<GetId>(library->get_unique_id)(&made);
    TORCH_CHECK(result == 0, library->name, ": ", as<ErrorText>(library->error_text)(result));
    std::memcpy(id, made.bytes, sizeof made.bytes);
  });
}

vt_error *vt_collective_join(const vt_collective_library *library, const uint8_t *id, int32_t rank, int32_t size,
                             int32_t device_type, int32_t device_index, int64_t timeout_ms, vt_group **group) {
  return voltaic::guard([&] {
    const c10::Device device(static_cast<c10::DeviceType>(device_type),
                             static_cast<c10::DeviceIndex>(device_type == VT_CPU ? -1 : device_index));
    const c10::OptionalDeviceGuard guard(device);
    Id given{};
    std::memcpy(given.bytes, id, sizeof given.bytes);
    void *comm = nullptr;
    const int result = as<InitRank>(library->init_rank)(&comm, size, given, rank);
    TORCH_CHECK(result == 0, library->name, ": ", as<ErrorText>(library->error_text)(result));
    auto communicator = std::make_shared<Communicator>(*library, comm, device, milliseconds(timeout_ms));
    *group = new vt_group{c10::make_intrusive<LibraryBackend>(std::move(communicator), rank, size)};
  });
}
