// A recording of operators, and the graph that replays it.
//
//   record.cpp   a kernel under DispatchKey::Fake, below autograd, that notes each operator and runs it
//   describe.cpp a recording as text, for Rust, which decides what is replayed and where its memory lies
//   replay.cpp   the graph: prepared calls of CPU kernels over memory that never moves
//   card.cpp     the graph on a Gaudi card: its operators, one after the other
//
// A value is identified by storage and geometry, never by TensorImpl: autograd hands a saved tensor back as another one.
#pragma once

#include "device/memory.h"
#include "graph/abi.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include <string>
#include <vector>

namespace voltaic::graph {

using c10::IValue;
using c10::StorageImpl;
using c10::TensorImpl;

// How a tensor lies in its storage.
struct Geometry {
  c10::ScalarType dtype;
  int64_t offset; // in elements
  at::DimVector sizes, strides;
  bool is_conj, is_neg, is_wrapped_number;

  explicit Geometry(const TensorImpl &tensor);
  bool operator==(const Geometry &) const = default;
};

// Memory that operators read or write.
struct Buffer {
  c10::weak_intrusive_ptr<StorageImpl> identity; // its address is not used again while this is there
  c10::Storage held;                             // of a buffer that was there before, or outlives the recording
  void *address;
  size_t bytes;
  c10::Device device;
  int32_t node; // that made it; -1 if it was there
  bool is_kept;
  c10::SmallVector<int32_t, 2> values; // over it
};

using WeakTensor = c10::weak_intrusive_ptr<TensorImpl, c10::UndefinedTensorImpl>;

struct Value {
  int32_t buffer;
  Geometry geometry;
  std::optional<WeakTensor> tensor; // the first that was seen of it, if the buffer was there before
};

struct Operand {
  enum class Kind : uint8_t { constant, tensor, tensor_list, optional_tensor_list };
  Kind kind = Kind::constant;
  c10::SmallVector<int32_t, 1> values; // -1 for an undefined tensor
};

// An argument made of `tensor(value)`; none if it is a constant.
template <class Make> std::optional<IValue> argument_of(const Operand &operand, Make &&tensor) {
  switch (operand.kind) {
  case Operand::Kind::tensor:
    return IValue(tensor(operand.values[0]));
  case Operand::Kind::tensor_list: {
    c10::List<at::Tensor> list;
    for (const int32_t value : operand.values)
      list.push_back(tensor(value));
    return IValue(std::move(list));
  }
  case Operand::Kind::optional_tensor_list: {
    c10::List<std::optional<at::Tensor>> list;
    for (const int32_t value : operand.values)
      list.push_back(value < 0 ? std::nullopt : std::optional<at::Tensor>(tensor(value)));
    return IValue(std::move(list));
  }
  case Operand::Kind::constant:
    break;
  }
  return std::nullopt;
}

// Memory that a node's kernel took.
struct Block {
  void *address;
  size_t bytes;
  bool is_given_back = false;
  int32_t buffer = -1; // whose memory it is, if it was not given back
};

struct Node {
  c10::OperatorHandle op;
  std::vector<IValue> arguments; // tensors are blank
  std::vector<Operand> operands, results;
  std::vector<Block> blocks;
  std::string scope;         // where the caller said it was
  std::string backward_node; // of autograd, in a backward pass
};

} // namespace voltaic::graph

struct vt_recording {
  c10::Device device = c10::Device(c10::DeviceType::CPU); // an HPU if one takes part
  std::vector<voltaic::graph::Node> nodes;
  std::vector<voltaic::graph::Buffer> buffers;
  std::vector<voltaic::graph::Value> values;
  std::string refusal; // why the recording cannot be replayed; empty if it can
  int32_t refused_node = -1;
  bool is_on_card = false; // works on a Gaudi card, not on an emulated one
};

namespace voltaic::graph {

// Whether a tensor outside shares what the recording made.
bool is_held_outside(const Buffer &buffer, c10::ArrayRef<const vt_recording *> peers);
// Whether nobody but the recording and its peers hold what was there before: a constant, such as a number that became a
// tensor.
bool is_constant(const vt_recording &recording, const Buffer &buffer, c10::ArrayRef<const vt_recording *> peers);
// Index of the buffer of a tensor's storage; -1 if no operator touched it.
int32_t buffer_of(const vt_recording &recording, const at::Tensor &tensor);

// Whether operators on this thread are being recorded.
bool is_recording();
// Operators are not recorded while this lives.
class Pause {
public:
  Pause();
  ~Pause();
  Pause(const Pause &) = delete;
  Pause &operator=(const Pause &) = delete;

private:
  bool was_excluded_;
};

} // namespace voltaic::graph
