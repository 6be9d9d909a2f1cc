// A back end of c10d over a library with NCCL's C interface: NCCL itself, or HCCL. The functions come from Rust, which
// has loaded the library.
//
// GPUs: operations run on a stream of their own beside the computation, with the tensors' memory. Gaudi: what libtorch
// takes for an address is a handle of Habana's plugin, so that data goes through memory of our own, by Synapse.
#include "ranks/library.h"
#include "error.h"
#include "ranks/c10d.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

using namespace voltaic::libraries;

namespace {

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

  void setTimeout(milliseconds timeout) override { communicator->timeout = timeout; }

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
