#include "autograd/operators.h"
#include "error.h"
#include "graph/abi.h"
#include "graph/graph.h"
#include "hpu/hpu.h"
#include "profiler/events.h"
#include "tensor/autocast.h"

#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

namespace voltaic::graph {

Geometry::Geometry(const TensorImpl &tensor)
    : dtype(tensor.dtype().toScalarType()), offset(tensor.storage_offset()), sizes(tensor.sizes()),
      strides(tensor.strides()), is_conj(tensor.is_conj()), is_neg(tensor.is_neg()),
      is_wrapped_number(tensor.is_wrapped_number()) {}

namespace {

using at::Tensor;
using torch::jit::Stack;

constexpr c10::DispatchKey key = autograd::below_key;

class Recorder final : public BlockWatch {
public:
  Recorder() : recording_(new vt_recording) {}

  void run(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack);
  std::unique_ptr<vt_recording> finish();
  void refuse(std::string reason) { refuse(std::move(reason), static_cast<int32_t>(recording_->nodes.size()) - 1); }
  void set_scope(const char *scope) { scope_ = scope; }

  void *supply(size_t) override { return nullptr; }
  void taken(void *block, size_t bytes) override { blocks_.push_back({block, bytes}); }
  void given_back(void *block) override {
    for (auto taken = blocks_.rbegin(); taken != blocks_.rend(); ++taken)
      if (taken->address == block && !taken->is_given_back) {
        taken->is_given_back = true;
        return;
      }
  }

private:
  void refuse(std::string reason, int32_t node) {
    if (recording_->refusal.empty()) {
      recording_->refusal = std::move(reason);
      recording_->refused_node = node;
    }
  }
  Operand operand(const IValue &value, int32_t made_by);
  int32_t value_of(const Tensor &tensor, int32_t made_by);
  int32_t buffer_of(const Tensor &tensor, int32_t made_by);
  void check_memory(const Node &node);
  void note_device(c10::Device device);

  std::unique_ptr<vt_recording> recording_;
  std::unordered_map<const StorageImpl *, int32_t> buffers_;
  std::vector<Block> blocks_; // of the node that runs
  std::string scope_;
};

thread_local std::unique_ptr<Recorder> recorder;

void Recorder::note_device(c10::Device device) {
  c10::Device &known = recording_->device;
  if (device.is_cpu() || device == known)
    return;
  if (!known.is_cpu())
    refuse("works on " + device.str() + ", and operators before it on " + known.str());
  else if (!device.is_hpu())
    refuse("works on " + device.str() + "; only operators on cpu and on emulated HPUs are recorded, use " +
           (device.is_cuda() ? "HpuGraph::on the device" : "no graph"));
  else
    recording_->is_on_card = !hpu::backend.is_active;
  known = device;
}

int32_t Recorder::buffer_of(const Tensor &tensor, int32_t made_by) {
  StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
  const auto [found, is_new] = buffers_.try_emplace(storage, static_cast<int32_t>(recording_->buffers.size()));
  if (!is_new)
    return found->second;
  void *address = storage->_mutable_data_ptr_no_checks().get();
  Buffer buffer{tensor.storage().getWeakStorageImpl(), {}, address, storage->nbytes(), tensor.device(), made_by, false, {}};
  note_device(buffer.device);
  if (made_by < 0)
    buffer.held = tensor.storage();
  for (Block &block : blocks_)
    if (made_by >= 0 && block.address == buffer.address && !block.is_given_back)
      block.buffer = found->second;
  recording_->buffers.push_back(std::move(buffer));
  return found->second;
}

// `made_by` is the node whose result the tensor is; -1 for an argument.
int32_t Recorder::value_of(const Tensor &tensor, int32_t made_by) {
  if (!tensor.defined())
    return -1;
  if (!tensor.has_storage() || tensor.layout() != c10::Layout::Strided) {
    refuse("works on a tensor of layout " + std::string(c10::str(tensor.layout())));
    return -1;
  }
  const int32_t index = buffer_of(tensor, made_by);
  Buffer &buffer = recording_->buffers[index];
  const Geometry geometry(*tensor.unsafeGetTensorImpl());
  for (const int32_t value : buffer.values)
    if (recording_->values[value].geometry == geometry)
      return value;
  const auto value = static_cast<int32_t>(recording_->values.size());
  buffer.values.push_back(value);
  std::optional<WeakTensor> first;
  if (buffer.node < 0)
    first.emplace(tensor.getIntrusivePtr());
  recording_->values.push_back({index, geometry, std::move(first)});
  return value;
}

Operand Recorder::operand(const IValue &value, int32_t made_by) {
  Operand operand;
  if (value.isTensor()) {
    operand.kind = Operand::Kind::tensor;
    operand.values.push_back(value_of(value.toTensor(), made_by));
  } else if (value.isTensorList()) {
    operand.kind = Operand::Kind::tensor_list;
    for (const Tensor &tensor : value.toTensorVector())
      operand.values.push_back(value_of(tensor, made_by));
  } else if (value.isList()) {
    const c10::TypePtr element = value.toList().elementType();
    const auto optional = element->cast<c10::OptionalType>();
    if (optional && optional->getElementType()->kind() == c10::TypeKind::TensorType) {
      operand.kind = Operand::Kind::optional_tensor_list;
      for (const IValue &entry : value.toListRef())
        operand.values.push_back(entry.isTensor() ? value_of(entry.toTensor(), made_by) : -1);
    }
  } else if (value.isStorage() || value.isStream() || value.isCustomClass() || value.isObject()) {
    refuse("takes a " + value.tagKind() + ", which a graph cannot hold");
  }
  return operand;
}

// An operator that gives a tensor other memory cannot be replayed over memory that never moves.
void Recorder::check_memory(const Node &node) {
  for (const Operand &operand : node.operands)
    for (const int32_t value : operand.values) {
      if (value < 0)
        continue;
      const Buffer &buffer = recording_->buffers[recording_->values[value].buffer];
      // the caller still holds the argument, so that its storage lives
      const StorageImpl *storage = buffer.identity._unsafe_get_target();
      if (buffer.identity.use_count() != 0 && (storage->data() != buffer.address || storage->nbytes() != buffer.bytes))
        refuse("gives a tensor other memory");
    }
}

void Recorder::run(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
  const size_t num_arguments = op.schema().arguments().size(), num_results = op.schema().returns().size();
  const auto index = static_cast<int32_t>(recording_->nodes.size());
  recording_->nodes.push_back({op, {}, {}, {}, {}, scope_, {}});
  {
    Node &node = recording_->nodes[index];
    if (const auto current = torch::autograd::get_current_node())
      node.backward_node = current->name();
    for (const IValue &value : c10::ArrayRef<IValue>(stack->data() + stack->size() - num_arguments, num_arguments)) {
      node.operands.push_back(operand(value, -1));
      node.arguments.push_back(node.operands.back().kind == Operand::Kind::constant ? value : IValue());
    }
  }
  blocks_.clear();
  {
    const BlockWatchScope watch(this);
    autograd::run_below(op, keys, stack);
  }
  Node &node = recording_->nodes[index];
  for (const IValue &value : c10::ArrayRef<IValue>(stack->data() + stack->size() - num_results, num_results))
    node.results.push_back(operand(value, index));
  check_memory(node);
  node.blocks = std::move(blocks_);
  blocks_.clear();
}

std::unique_ptr<vt_recording> Recorder::finish() {
  for (Buffer &buffer : recording_->buffers) {
    if (buffer.node < 0)
      continue;
    if (auto storage = buffer.identity.lock(); storage.get() != nullptr) {
      buffer.is_kept = true;
      buffer.held = c10::Storage(std::move(storage));
    }
  }
  return std::move(recording_);
}

// Whether an operator draws random numbers through others, such as randn_like: a replay has no generator to give it, and it
// would draw from the CPU's, whatever the device.
bool draws_through_others(const c10::OperatorHandle &op) {
  if (!op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::CPU))
    return false;
  const auto &tags = op.getTags();
  if (std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) == tags.end())
    return false;
  const auto &arguments = op.schema().arguments();
  return std::none_of(arguments.begin(), arguments.end(), [](const c10::Argument &argument) {
    return argument.type()->str().find("Generator") != std::string::npos;
  });
}

void record(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
  if (recorder != nullptr && draws_through_others(op)) { // those are recorded
    autograd::run_below(op, keys, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard below(key);
  if (recorder != nullptr)
    recorder->run(op, keys, stack);
  else // autograd carried the key to another thread
    autograd::run_below(op, keys, stack);
}

// Composite operators that read a tensor's data on the host, with no operator for it that could be recorded: the sizes
// that they call others with are those of this call.
std::unique_ptr<at::ObserverContext> refuse_readers(const at::RecordFunction &function) {
  static const std::set<std::string> readers = {
      "aten::ctc_loss.Tensor", "aten::_pad_packed_sequence",
      "aten::lstm.data",       "aten::gru.data",
      "aten::rnn_tanh.data",   "aten::rnn_relu.data",
      "aten::tensor_split.tensor_indices_or_sections"};
  const auto name = function.operator_name();
  if (recorder == nullptr || !name.has_value() || c10::impl::tls_is_dispatch_key_excluded(key))
    return nullptr;
  const std::string full = name->overload_name.empty() ? name->name : name->name + "." + name->overload_name;
  if (readers.count(full) != 0)
    recorder->refuse(full + " reads lengths from a tensor on the host, where a replay reads nothing");
  return nullptr;
}

thread_local at::CallbackHandle watch_of_readers = at::INVALID_CALLBACK_HANDLE;
constinit thread_local uint64_t began = 0; // ticks of the profiler

void register_recorder() {
  autograd::register_below();
  autograd::set_recorder(&record);
}

} // namespace

bool is_recording() { return recorder != nullptr; }

Pause::Pause() : was_excluded_(c10::impl::tls_is_dispatch_key_excluded(key)) {
  c10::impl::tls_set_dispatch_key_excluded(key, true);
}
Pause::~Pause() { c10::impl::tls_set_dispatch_key_excluded(key, was_excluded_); }

bool is_held_outside(const Buffer &buffer, c10::ArrayRef<const vt_recording *> peers) {
  if (buffer.node < 0 || !buffer.held)
    return false;
  size_t holders = 0;
  for (const vt_recording *peer : peers)
    for (const Buffer &other : peer->buffers)
      holders += other.held && other.held.is_alias_of(buffer.held) ? 1 : 0;
  return buffer.held.use_count() > holders;
}

bool is_constant(const vt_recording &recording, const Buffer &buffer, c10::ArrayRef<const vt_recording *> peers) {
  if (buffer.node >= 0)
    return false;
  if (buffer.held.use_count() > 1) {
    size_t holders = 0;
    for (const vt_recording *peer : peers)
      for (const Buffer &other : peer->buffers)
        holders += other.held && other.held.is_alias_of(buffer.held) ? 1 : 0;
    if (buffer.held.use_count() > holders)
      return false;
  }
  for (const int32_t value : buffer.values)
    if (const auto &tensor = recording.values[value].tensor; tensor.has_value() && tensor->use_count() != 0)
      return false;
  return true;
}

int32_t buffer_of(const vt_recording &recording, const Tensor &tensor) {
  if (!tensor.defined() || !tensor.has_storage())
    return -1;
  const StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
  for (size_t i = 0; i < recording.buffers.size(); ++i)
    if (recording.buffers[i].identity._unsafe_get_target() == storage)
      return static_cast<int32_t>(i);
  return -1;
}

} // namespace voltaic::graph

using namespace voltaic::graph;

vt_error *vt_recording_begin(void) {
  return voltaic::guard([&] {
    TORCH_CHECK(recorder == nullptr, "operators of this thread are being recorded already");
    register_recorder();
    voltaic::clear_autocast_cache(); // weights that were cast before would be constants of the graph
    recorder = std::make_unique<Recorder>();
    began = voltaic::profiler::records_devices() ? voltaic::profiler::ticks() : 0;
    watch_of_readers = at::addThreadLocalCallback(
        at::RecordFunctionCallback(refuse_readers).scopes({at::RecordScope::FUNCTION}));
    c10::impl::tls_set_dispatch_key_included(key, true);
  });
}

vt_error *vt_recording_end(vt_recording **recording) {
  return voltaic::guard([&] {
    TORCH_CHECK(recorder != nullptr, "nothing is being recorded on this thread");
    c10::impl::tls_set_dispatch_key_included(key, false);
    at::removeCallback(std::exchange(watch_of_readers, at::INVALID_CALLBACK_HANDLE));
    voltaic::clear_autocast_cache(); // its tensors are values of the graph
    auto done = std::move(recorder);
    *recording = done->finish().release();
    const c10::Device device = (*recording)->device;
    voltaic::profiler::add_since(std::exchange(began, 0), VT_ROW_GRAPHS, device.is_hpu() ? device.index() : -1,
                                 "graph capture");
  });
}

int32_t vt_recording_is_on(void) { return is_recording() ? 1 : 0; }

int32_t vt_recording_pause(int32_t pauses) {
  const bool was_paused = c10::impl::tls_is_dispatch_key_excluded(key);
  c10::impl::tls_set_dispatch_key_excluded(key, pauses != 0);
  return was_paused ? 1 : 0;
}

void vt_recording_refuse(const char *reason) {
  if (recorder != nullptr)
    recorder->refuse(reason);
}

void vt_recording_set_scope(const char *scope) {
  if (recorder != nullptr)
    recorder->set_scope(scope);
}

vt_error *vt_recording_buffer_of(const vt_recording *recording, vt_tensor tensor, int32_t *buffer) {
  return voltaic::guard([&] { *buffer = buffer_of(*recording, *tensor); });
}

void vt_recording_forget_results(vt_recording *recording) {
  for (Buffer &buffer : recording->buffers)
    if (buffer.node >= 0)
      buffer.held = c10::Storage();
}

void vt_recording_free(vt_recording *recording) { delete recording; }

// Two functions of torch-sys move data without an operator. These are linked in their place (see voltaic-build).
extern "C" {
vt_tensor __real_at_tensor_of_data(void *data, int64_t *sizes, size_t num_dims, size_t element_bytes, int dtype);
void __real_at_copy_data(vt_tensor tensor, void *data, size_t numel, size_t element_bytes);

vt_tensor __wrap_at_tensor_of_data(void *data, int64_t *sizes, size_t num_dims, size_t element_bytes, int dtype) {
  const Pause pause; // recorded as zeros it would stay zeros: it is a constant
  return __real_at_tensor_of_data(data, sizes, num_dims, element_bytes, dtype);
}

void __wrap_at_copy_data(vt_tensor tensor, void *data, size_t numel, size_t element_bytes) {
  vt_recording_refuse("a tensor's data were read back to the host");
  __real_at_copy_data(tensor, data, numel, element_bytes);
}
}
