#include "graph/card.h"

#include "graph/abi.h"
#include "graph/replay.h"
#include "hpu/alias.h"

#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>

namespace voltaic::graph {

using at::Tensor;

namespace {

// A view without autograd. Memory of the host takes part, too: numbers that became tensors.
Tensor over(const c10::Storage &storage, const Geometry &geometry) {
  return view_over(storage, geometry, storage.device().is_hpu() ? hpu::hpu_only : hpu::cpu_only);
}

// All of the memory, as a row of numbers.
Tensor whole(const c10::Storage &storage, Geometry geometry) {
  geometry.offset = 0;
  geometry.sizes = {static_cast<int64_t>(storage.nbytes() / c10::elementSize(geometry.dtype))};
  geometry.strides = {1};
  geometry.is_conj = geometry.is_neg = geometry.is_wrapped_number = false;
  return over(storage, geometry);
}

} // namespace

CardGraph::CardGraph(const vt_recording &recording, const vt_graph_plan &plan) {
  for (const Value &value : recording.values)
    values_.push_back({value.buffer, value.geometry, {}});
  for (const Buffer &buffer : recording.buffers)
    memory_.push_back({buffer.held, buffer.node, false, {}, {buffer.values.begin(), buffer.values.end()}});
  for (size_t i = 0; i < plan.num_inputs; ++i)
    inputs_.emplace_back(*plan.inputs[i], buffer_of(recording, *plan.inputs[i]));
  for (size_t i = 0; i < plan.num_outputs; ++i) {
    const int32_t buffer = buffer_of(recording, *plan.outputs[i]);
    TORCH_CHECK(buffer >= 0 && memory_[buffer].node >= 0, "output ", i, " is not made by the recording");
    memory_[buffer].is_output = true;
    memory_[buffer].held = c10::Storage();
    outputs_.emplace_back(Geometry(*plan.outputs[i]->unsafeGetTensorImpl()), buffer);
  }
  for (size_t i = 0; i < recording.nodes.size(); ++i)
    if (const Node &node = recording.nodes[i]; plan.runs[i] != 0)
      calls_.push_back({node.op, node.arguments, node.operands, node.results, {}, static_cast<int32_t>(i)});
  std::vector<bool> is_used(memory_.size());
  for (auto call = calls_.rbegin(); call != calls_.rend(); ++call)
    for (const std::vector<Operand> *list : {&call->operands, &call->results})
      for (const Operand &operand : *list)
        for (const int32_t value : operand.values) {
          const int32_t buffer = value < 0 ? -1 : values_[value].buffer;
          if (buffer < 0 || is_used[buffer])
            continue;
          is_used[buffer] = true;
          if (const Memory &memory = memory_[buffer]; memory.node >= 0 && !memory.held && !memory.is_output)
            call->over.push_back(buffer);
        }
}

// Has values over an input's memory read what is given, where it is unless it is laid out otherwise.
void CardGraph::bind(const Tensor &given, size_t index) {
  const auto &[recorded, buffer] = inputs_[index];
  check_input(index, given, recorded);
  if (buffer < 0)
    return;
  Tensor alike = given;
  if (!is_alike(given, recorded)) {
    alike = at::empty_strided(recorded.sizes(), recorded.strides(), recorded.options());
    at::_ops::copy_::call(alike, given, false);
  }
  for (const int32_t value : memory_[buffer].values) {
    Geometry geometry = values_[value].geometry;
    geometry.offset += alike.storage_offset() - recorded.storage_offset();
    values_[value].now = over(alike.storage(), geometry);
  }
}

Tensor CardGraph::tensor(int32_t value) {
  if (value < 0)
    return {};
  Known &known = values_[value];
  if (!known.now.defined()) {
    const Memory &memory = memory_[known.buffer];
    const c10::Storage &storage = memory.node < 0 ? memory.held : memory.now;
    TORCH_INTERNAL_ASSERT(storage, "a replay reads memory that nothing has made");
    known.now = over(storage, known.geometry);
  }
  return known.now;
}

void CardGraph::note(int32_t node, int32_t value, const Tensor &result, int32_t &misfit) {
  if (value < 0)
    return;
  Known &known = values_[value];
  check_shape(node, result, known.geometry.sizes, misfit);
  known.now = result;
  if (Memory &memory = memory_[known.buffer]; memory.node == node)
    memory.now = result.storage();
}

void CardGraph::run(const Call &call, int32_t &misfit) {
  stack_.clear();
  for (size_t i = 0; i < call.operands.size(); ++i)
    stack_.push_back(argument_of(call.operands[i], [this](int32_t value) { return tensor(value); }).value_or(call.constants[i]));
  call.op.callBoxed(&stack_);
  for (size_t i = 0; i < call.results.size(); ++i) {
    const Operand &result = call.results[i];
    if (result.kind == Operand::Kind::tensor) {
      note(call.node, result.values[0], stack_[i].toTensor(), misfit);
    } else if (result.kind == Operand::Kind::tensor_list) {
      const std::vector<Tensor> list = stack_[i].toTensorVector();
      for (size_t j = 0; j < list.size() && j < result.values.size(); ++j)
        note(call.node, result.values[j], list[j], misfit);
    }
  }
  for (const int32_t buffer : call.over)
    forget(memory_[buffer]);
}

// Puts what outlived the recording where those look who hold it.
void CardGraph::keep(Memory &memory) {
  const Geometry &geometry = values_[memory.values.front()].geometry;
  Tensor target = whole(memory.held, geometry);
  const Tensor source = whole(memory.now, geometry);
  TORCH_CHECK(source.sizes() == target.sizes(), "a result takes ", memory.now.nbytes(), " bytes in place of ",
              memory.held.nbytes());
  at::_ops::copy_::call(target, source, false);
}

void CardGraph::forget(Memory &memory) {
  memory.now = c10::Storage();
  for (const int32_t value : memory.values)
    values_[value].now.reset();
}

void CardGraph::replay(const Tensor *const *inputs, size_t num_inputs, vt_tensor *outputs, int32_t &misfit) {
  struct Forget {
    CardGraph &graph;
    ~Forget() {
      std::for_each(graph.memory_.begin(), graph.memory_.end(), [this](Memory &memory) { graph.forget(memory); });
      graph.stack_.clear();
    }
  } forget_all{*this};
  if (inputs != nullptr) {
    TORCH_CHECK(num_inputs == inputs_.size(), num_inputs, " inputs are given to a graph of ", inputs_.size());
    for (size_t i = 0; i < num_inputs; ++i)
      bind(*inputs[i], i);
  }
  for (const Call &call : calls_)
    run(call, misfit);
  for (Memory &memory : memory_)
    if (memory.node >= 0 && memory.held && memory.now && !memory.values.empty())
      keep(memory);
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const auto &[geometry, buffer] = outputs_[i];
    outputs[i] = new Tensor(output_over(memory_[buffer].now, geometry));
  }
}

} // namespace voltaic::graph
