#include "graph/replay.h"

#include "error.h"
#include "graph/abi.h"
#include "hpu/alias.h"
#include "kernels/kernels.h"
#include "profiler/events.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy_ops.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

namespace voltaic::graph {
namespace {

// How many graphs hold a storage that was there before them: one that only graphs hold is gone for the user.
std::mutex holds_mutex;
std::unordered_map<const StorageImpl *, size_t> holds;

size_t num_holds(const StorageImpl &storage) {
  const std::lock_guard<std::mutex> lock(holds_mutex);
  const auto found = holds.find(&storage);
  return found == holds.end() ? 0 : found->second;
}

void note_hold(const c10::Storage &storage) {
  const std::lock_guard<std::mutex> lock(holds_mutex);
  ++holds[storage.unsafeGetStorageImpl()];
}

using at::Tensor;

// ---- variants of operators that write their results to given tensors ----

bool has_alias_write(const c10::Argument &argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Whether `out` takes the arguments of `op` and then one tensor for each of its results.
bool is_out_variant(const c10::FunctionSchema &op, const c10::FunctionSchema &out) {
  const auto &given = op.arguments();
  const auto &taken = out.arguments();
  if (taken.size() != given.size() + op.returns().size())
    return false;
  for (size_t i = 0; i < given.size(); ++i)
    if (given[i].name() != taken[i].name() || *given[i].type() != *taken[i].type())
      return false;
  for (size_t i = given.size(); i < taken.size(); ++i)
    if (!has_alias_write(taken[i]) || taken[i].type()->kind() != c10::TypeKind::TensorType)
      return false;
  return true;
}

std::optional<c10::OperatorHandle> find_out_variant(const c10::FunctionSchema &schema) {
  for (const c10::Argument &result : schema.returns())
    if (result.type()->kind() != c10::TypeKind::TensorType)
      return std::nullopt;
  for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name != schema.name())
      continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    // generated ones, and those composed of others, compute the result elsewhere and copy it
    if (op && is_out_variant(schema, op->schema()) && !op->hasTag(at::Tag::generated) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      return op;
  }
  return std::nullopt;
}

std::optional<c10::OperatorHandle> out_variant(const c10::OperatorHandle &op) {
  static thread_local std::map<std::string, std::optional<c10::OperatorHandle>> known;
  const c10::OperatorName &name = op.operator_name();
  const auto [found, is_new] = known.try_emplace(name.name + "." + name.overload_name);
  if (is_new)
    found->second = find_out_variant(op.schema());
  return found->second;
}

// ---- memory that each replay gives away ----

c10::DataPtr data_at(void *address) { return c10::DataPtr(address, c10::Device(c10::DeviceType::CPU)); }

void place_outputs(vt_graph &graph, GivenAway &given, void *address) {
  given.storage->set_data_ptr_noswap(data_at(address));
  for (const size_t block : given.blocks)
    graph.blocks[block].address = address;
}

void release_outputs(vt_graph &graph) {
  for (GivenAway &given : graph.given_away)
    place_outputs(graph, given, nullptr);
}

// New memory for the outputs, of the device.
std::vector<c10::Storage> bind_outputs(vt_graph &graph) {
  std::vector<c10::Storage> storages;
  storages.reserve(graph.given_away.size());
  c10::Allocator *allocator = graph.device.is_hpu() ? hpu::allocator() : c10::GetCPUAllocator();
  for (GivenAway &given : graph.given_away) {
    c10::DataPtr data = has_cpu_allocator() ? allocate_block(active_pool, given.bytes, graph.device)
                                            : allocator->allocate(given.bytes);
    place_outputs(graph, given, data.get());
    // a node that frees it as raw memory of its own leaves it alone
    if (vt_block_header *header = header_of(data); header != nullptr)
      header->magic = supplied_magic;
    storages.emplace_back(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), given.bytes, std::move(data),
                                                           allocator, /*resizable=*/true));
  }
  return storages;
}

void lay_out(TensorImpl &impl, const Geometry &geometry) {
  impl.set_sizes_and_strides(geometry.sizes, geometry.strides, geometry.offset);
  if (geometry.is_conj)
    impl._set_conj(true);
  if (geometry.is_neg)
    impl._set_neg(true);
}

} // namespace

Tensor output_over(c10::Storage storage, const Geometry &geometry) {
  const c10::DispatchKeySet keys = storage.device().is_hpu() ? hpu::hpu_only : hpu::cpu_only;
  auto impl = c10::make_intrusive<TensorImpl>(std::move(storage), keys, c10::scalarTypeToTypeMeta(geometry.dtype));
  lay_out(*impl, geometry);
  return Tensor(std::move(impl));
}

void check_input(size_t index, const Tensor &given, const Tensor &recorded) {
  TORCH_CHECK(given.scalar_type() == recorded.scalar_type() && given.device() == recorded.device() &&
                  given.sizes() == recorded.sizes(),
              "input ", index, " is ", given.toString(), given.sizes(), " on ", given.device(),
              ", but the graph was recorded with ", recorded.toString(), recorded.sizes(), " on ", recorded.device());
}

void check_shape(int32_t node, const Tensor &result, at::IntArrayRef sizes, int32_t &misfit) {
  if (result.sizes() != sizes)
    misfit = node;
  TORCH_CHECK(result.sizes() == sizes, "an operator gives a tensor of shape ", result.sizes(), " in place of ", sizes,
              "; its shape depends on data, which a graph cannot hold");
}

bool is_alike(const Tensor &tensor, const Tensor &recorded) {
  return tensor.sizes() == recorded.sizes() && tensor.strides() == recorded.strides() && !tensor.is_conj() &&
         !tensor.is_neg();
}

Tensor view_over(c10::Storage storage, const Geometry &geometry, c10::DispatchKeySet keys) {
  auto impl = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, std::move(storage), keys,
                                              c10::scalarTypeToTypeMeta(geometry.dtype));
  lay_out(*impl, geometry);
  if (geometry.is_wrapped_number)
    impl->set_wrapped_number(true);
  return Tensor(std::move(impl));
}

namespace {

// ---- building ----

class Builder {
public:
  Builder(vt_recording &recording, const vt_graph_plan &plan) : recording_(recording), plan_(plan) {}

  std::unique_ptr<vt_graph> build();

private:
  void move_values();
  void add_outputs();
  void watch(size_t index);
  void place_buffers();
  void build_on_card();
  void add_inputs();
  void add_node(int32_t index, size_t first_block);
  void add_chain(const vt_chain &chain);
  void repeat(const vt_repeated_call &repeated);
  IValue argument(const Operand &operand, const IValue &constant, const c10::Argument &declared);
  Tensor tensor(int32_t value);
  void *at(uint64_t offset) const { return static_cast<char *>(graph_->arena.get()) + offset; }
  bool keep(const Buffer &buffer);
  bool is_made_smaller(int32_t value) const;
  bool is_placed(int32_t buffer) const { return plan_.buffer_offsets[buffer] != VT_GRAPH_NOWHERE; }
  void add_results(const Node &node, Call &call);

  vt_recording &recording_;
  const vt_graph_plan &plan_;
  std::unique_ptr<vt_graph> graph_ = std::make_unique<vt_graph>();
  std::vector<c10::intrusive_ptr<StorageImpl>> storages_; // by buffer
  std::vector<bool> is_moved_;                            // by value
  std::vector<bool> is_supplied_;                         // by buffer: whether its node is given its memory
  std::vector<Tensor> tensors_;                           // by value; made when needed
  std::map<int32_t, size_t> given_away_;                  // by buffer
};

c10::DataPtr allocate_arena(c10::Device device, size_t bytes) {
  if (!has_cpu_allocator())
    return c10::GetCPUAllocator()->allocate(bytes);
  const int32_t pool = device.is_hpu() ? hpu::pool_of(device.index()) : VT_HOST_POOL;
  return allocate_block(pool, bytes, c10::Device(c10::DeviceType::CPU));
}

void Builder::move_values() {
  is_moved_.resize(recording_.values.size());
  for (size_t i = 0; i < plan_.num_moved; ++i) {
    const vt_moved_value &moved = plan_.moved[i];
    Value &value = recording_.values[moved.value];
    value.buffer = static_cast<int32_t>(moved.buffer);
    value.geometry.offset = moved.offset;
    value.geometry.strides.assign(moved.strides, moved.strides + value.geometry.sizes.size());
    is_moved_[moved.value] = true;
  }
}

void Builder::add_outputs() {
  for (size_t i = 0; i < plan_.num_outputs; ++i) {
    const Tensor &output = *plan_.outputs[i];
    const int32_t buffer = buffer_of(recording_, output);
    TORCH_CHECK(buffer >= 0 && recording_.buffers[buffer].node >= 0 && recording_.buffers[buffer].is_kept, "output ", i,
                " was not made by the graph");
    const auto [found, is_new] = given_away_.try_emplace(buffer, graph_->given_away.size());
    if (is_new)
      graph_->given_away.push_back({{}, recording_.buffers[buffer].bytes, buffer, {}});
    graph_->outputs.push_back({Geometry(*output.unsafeGetTensorImpl()), found->second});
  }
}

// Holds what outlived the recording, and tells whether its node may be given this memory at each replay. A node that asks
// for as many bytes once more than in the recording, as raw memory, is given it for that, and frees it: the number in the
// header keeps the block, whose storage does not look at it, from going back to its pool then. What has no header would be
// freed.
bool Builder::keep(const Buffer &buffer) {
  graph_->kept.push_back(buffer.held);
  vt_block_header *header = header_of(buffer.held.data_ptr());
  if (header != nullptr)
    header->magic = supplied_magic;
  return header != nullptr;
}

// Has a replay see whether what was there before still is.
void Builder::watch(size_t index) {
  const Buffer &buffer = recording_.buffers[index];
  std::optional<WeakTensor> tensor;
  for (const int32_t value : buffer.values)
    if (const auto &seen = recording_.values[value].tensor; seen.has_value() && seen->use_count() != 0 && !tensor)
      tensor = *seen;
  note_hold(buffer.held);
  graph_->watched.push_back({buffer.held, buffer.address, buffer.bytes, std::move(tensor), static_cast<int32_t>(index),
                             plan_.constants[index] != 0});
}

void Builder::place_buffers() {
  storages_.reserve(recording_.buffers.size());
  is_supplied_.resize(recording_.buffers.size());
  for (size_t i = 0; i < recording_.buffers.size(); ++i) {
    const Buffer &buffer = recording_.buffers[i];
    if (plan_.merged[i] != i) {
      storages_.push_back(storages_[plan_.merged[i]]);
      continue;
    }
    void *address = is_placed(i) ? at(plan_.buffer_offsets[i]) : buffer.address;
    storages_.push_back(c10::make_intrusive<StorageImpl>(
        StorageImpl::use_byte_size_t(), buffer.bytes, data_at(address),
        c10::GetCPUAllocator(), /*resizable=*/false));
    is_supplied_[i] = is_placed(i);
    if (buffer.node >= 0) {
      if (const auto given = given_away_.find(static_cast<int32_t>(i)); given != given_away_.end()) {
        graph_->given_away[given->second].storage = storages_.back();
        is_supplied_[i] = true;
      } else if (buffer.is_kept) {
        is_supplied_[i] = keep(buffer);
      }
      continue;
    }
    watch(i);
  }
  for (Buffer &buffer : recording_.buffers)
    buffer.held = c10::Storage(); // the graph has it now
}

void Builder::add_inputs() {
  for (size_t i = 0; i < plan_.num_inputs; ++i) {
    const Tensor &recorded = *plan_.inputs[i];
    const int32_t buffer = buffer_of(recording_, recorded);
    // one that no operator reads needs no memory
    auto storage = buffer < 0 ? c10::intrusive_ptr<StorageImpl>() : storages_[buffer];
    void *address = buffer < 0 ? nullptr : recording_.buffers[buffer].address;
    graph_->inputs.push_back({recorded, std::move(storage), address});
  }
}

Tensor Builder::tensor(int32_t value) {
  if (value < 0)
    return Tensor();
  Tensor &made = tensors_[value];
  if (made.defined())
    return made;
  const Value &known = recording_.values[value];
  made = view_over(c10::Storage(storages_[known.buffer]), known.geometry, hpu::cpu_only);
  return made;
}

IValue Builder::argument(const Operand &operand, const IValue &constant, const c10::Argument &declared) {
  if (auto made = argument_of(operand, [this](int32_t value) { return tensor(value); }))
    return std::move(*made);
  if (!recording_.device.is_hpu())
    return constant;
  if (constant.isDevice() && constant.toDevice().is_hpu())
    return IValue(c10::Device(c10::DeviceType::CPU));
  c10::TypePtr type = declared.type();
  if (const auto optional = type->cast<c10::OptionalType>())
    type = optional->getElementType();
  if (type->kind() == c10::TypeKind::GeneratorType) {
    const auto given = constant.isNone() ? std::nullopt : std::optional<at::Generator>(constant.toGenerator());
    return IValue(hpu::cpu_generator(given, recording_.device.index()));
  }
  return constant;
}

void Builder::add_results(const Node &node, Call &call) {
  for (uint32_t i = 0; i < node.results.size(); ++i) {
    const Operand &result = node.results[i];
    if (result.kind == Operand::Kind::tensor && result.values[0] >= 0) {
      call.is_moved = call.is_moved || is_moved_[result.values[0]];
      call.results.emplace_back(i, tensor(result.values[0]));
    } else if (result.kind == Operand::Kind::tensor_list) {
      std::vector<Tensor> list;
      for (const int32_t value : result.values)
        list.push_back(tensor(value));
      call.result_lists.emplace_back(i, std::move(list));
    }
  }
}

// Whether a node made its result larger at first. Its out variant would do so, too, and libtorch warns of that each time.
bool Builder::is_made_smaller(int32_t value) const {
  const Value &result = recording_.values[value];
  return !is_moved_[value] && result.geometry.sizes.empty() &&
         recording_.buffers[result.buffer].bytes > c10::elementSize(result.geometry.dtype);
}

void Builder::add_node(int32_t index, size_t first_block) {
  const Node &node = recording_.nodes[index];
  const auto &declared = node.op.schema().arguments();
  Call call{node.op, {}, node.results.size(), {}, {}, static_cast<uint32_t>(graph_->blocks.size()), 0, index};
  for (size_t i = 0; i < node.operands.size(); ++i)
    call.arguments.push_back(argument(node.operands[i], node.arguments[i], declared[i]));
  const bool makes_results = [&] {
    for (const Block &block : node.blocks)
      if (block.buffer >= 0)
        return true;
    return false;
  }();
  std::optional<c10::OperatorHandle> out;
  if (makes_results && plan_.uses_out_variants != 0)
    out = out_variant(node.op);
  for (const Operand &result : node.results)
    if (result.kind != Operand::Kind::tensor || result.values[0] < 0 || is_made_smaller(result.values[0]))
      out.reset();
  if (out) {
    call.op = *out;
    call.num_results = node.results.size();
    for (const Operand &result : node.results)
      call.arguments.push_back(IValue(tensor(result.values[0])));
  } else {
    add_results(node, call);
  }
  for (size_t i = 0; i < node.blocks.size(); ++i) {
    const Block &block = node.blocks[i];
    if (block.buffer >= 0) {
      if (out || !is_supplied_[block.buffer])
        continue;
      if (const auto given = given_away_.find(block.buffer); given != given_away_.end())
        graph_->given_away[given->second].blocks.push_back(graph_->blocks.size());
      graph_->blocks.push_back({storages_[block.buffer]->mutable_data(), block.bytes, is_placed(block.buffer)});
    } else if (const uint64_t offset = plan_.block_offsets[first_block + i]; offset != VT_GRAPH_NOWHERE) {
      graph_->blocks.push_back({at(offset), block.bytes, true});
    }
  }
  call.num_blocks = static_cast<uint32_t>(graph_->blocks.size()) - call.first_block;
  call.is_frozen = plan_.runs[index] == VT_GRAPH_FROZEN;
  graph_->calls.push_back(std::move(call));
}

void Builder::add_chain(const vt_chain &from) {
  Chain chain;
  chain.steps.assign(from.steps, from.steps + from.num_steps);
  chain.len = from.len;
  chain.row = from.row;
  for (size_t i = 0; i < from.num_inputs; ++i) {
    chain.inputs.push_back(tensor(static_cast<int32_t>(from.inputs[i])));
    const Tensor &input = chain.inputs.back();
    const bool is_copied = from.periods[i] == 1 || input.scalar_type() == at::kLong;
    chain.reads.push_back({nullptr, from.periods[i], is_copied ? VT_FLOAT32 : dtype_of(input), 0});
    chain.numbers.emplace_back(is_copied ? input.numel() : 0);
  }
  for (size_t i = 0; i < from.num_outputs; ++i) {
    chain.outputs.push_back(tensor(static_cast<int32_t>(from.outputs[i])));
    chain.writes.push_back({nullptr, from.output_periods[i], dtype_of(chain.outputs[i]), from.registers[i]});
  }
  const auto node = static_cast<int32_t>(from.node);
  Call call{recording_.nodes[node].op, {}, 0, {}, {}, static_cast<uint32_t>(graph_->blocks.size()), 0, node,
            static_cast<int32_t>(graph_->chains.size())};
  graph_->calls.push_back(std::move(call));
  graph_->chains.push_back(std::move(chain));
}

void Builder::repeat(const vt_repeated_call &repeated) {
  if (repeated.chain != nullptr)
    return add_chain(*repeated.chain);
  const auto of_node = [&](const Call &call) { return static_cast<size_t>(call.node) == repeated.node; };
  const auto found = std::find_if(graph_->calls.begin(), graph_->calls.end(), of_node);
  TORCH_CHECK(found != graph_->calls.end(), "operator ", repeated.node, " has not run before ", repeated.before);
  Call again = *found; // its results lie where they did
  graph_->calls.push_back(std::move(again));
}

void Builder::build_on_card() {
  for (size_t i = 0; i < recording_.buffers.size(); ++i)
    if (recording_.buffers[i].node < 0)
      watch(i);
  graph_->on_card = std::make_unique<CardGraph>(recording_, plan_);
  for (Buffer &buffer : recording_.buffers)
    buffer.held = c10::Storage(); // the graph has it now
}

std::unique_ptr<vt_graph> Builder::build() {
  TORCH_CHECK(recording_.refusal.empty(), recording_.refusal);
  TORCH_CHECK(plan_.num_chains == 0 || rust.chain != nullptr, "chains of operators need voltaic's kernels");
  graph_->device = recording_.device;
  if (recording_.is_on_card) {
    build_on_card();
    return std::move(graph_);
  }
  if (plan_.arena_bytes != 0)
    graph_->arena = allocate_arena(recording_.device, plan_.arena_bytes);
  move_values();
  add_outputs();
  place_buffers();
  tensors_.resize(recording_.values.size());
  add_inputs();
  size_t first_block = 0;
  const vt_chain *chain = plan_.chains, *const end = plan_.chains + plan_.num_chains;
  const vt_repeated_call *repeated = plan_.repeated, *const last = plan_.repeated + plan_.num_repeated;
  for (size_t i = 0; i < recording_.nodes.size(); ++i) {
    while (repeated != last && repeated->before == i)
      repeat(*repeated++);
    if (chain != end && chain->node == i)
      add_chain(*chain++);
    else if (plan_.runs[i] != 0)
      add_node(static_cast<int32_t>(i), first_block);
    first_block += recording_.nodes[i].blocks.size();
  }
  release_outputs(*graph_);
  return std::move(graph_);
}

// ---- replaying ----

// Gives each kernel the memory it had when it was recorded.
class Placement final : public BlockWatch {
public:
  explicit Placement(vt_graph &graph) : blocks_(graph.blocks.data()), pool_blocks_(graph.stats.pool_blocks) {}
  void enter(const Call &call) {
    next_ = blocks_ + call.first_block;
    end_ = next_ + call.num_blocks;
  }
  void *supply(size_t bytes) override {
    for (const PlacedBlock *block = next_; block != end_; ++block) {
      if (block->bytes != bytes)
        continue;
      next_ = block + 1;
      if (block->has_header) {
        auto *header = reinterpret_cast<vt_block_header *>(static_cast<char *>(block->address) - VT_BLOCK_HEADER_BYTES);
        *header = {nullptr, VT_HOST_POOL, supplied_magic};
      }
      return block->address;
    }
    return nullptr;
  }
  void taken(void *, size_t) override { ++pool_blocks_; }
  void given_back(void *) override {}

private:
  const PlacedBlock *blocks_, *next_ = nullptr, *end_ = nullptr;
  uint64_t &pool_blocks_;
};

// Puts a result where the rest of the graph expects it, which the kernel has usually done.
void settle(vt_graph &graph, int32_t node, const Tensor &result, const Tensor &place) {
  if (!place.defined() || C10_LIKELY(result.const_data_ptr() == place.const_data_ptr()))
    return;
  check_shape(node, result, place.sizes(), graph.misfit);
  ++graph.stats.moved_results;
  Tensor target = place;
  at::_ops::copy_::redispatch(hpu::cpu_only, target, result, false);
}

template <class T> void widen(const Tensor &tensor, std::vector<float> &numbers) {
  const T *data = static_cast<const T *>(tensor.const_data_ptr());
  for (size_t i = 0; i < numbers.size(); ++i)
    numbers[i] = static_cast<float>(data[i]);
}

void read_numbers(const Tensor &tensor, std::vector<float> &numbers) {
  switch (tensor.scalar_type()) {
  case at::kFloat:
    return widen<float>(tensor, numbers);
  case at::kDouble:
    return widen<double>(tensor, numbers);
  case at::kBFloat16:
    return widen<at::BFloat16>(tensor, numbers);
  case at::kLong:
    return widen<int64_t>(tensor, numbers);
  default:
    TORCH_CHECK(false, "a chain of operators has no number of ", tensor.toString());
  }
}

void run_chain(Chain &chain) {
  for (size_t i = 0; i < chain.inputs.size(); ++i) {
    if (!chain.numbers[i].empty()) {
      read_numbers(chain.inputs[i], chain.numbers[i]);
      chain.reads[i].data = chain.numbers[i].data();
    } else {
      chain.reads[i].data = const_cast<void *>(chain.inputs[i].const_data_ptr());
    }
  }
  for (size_t i = 0; i < chain.outputs.size(); ++i)
    chain.writes[i].data = chain.outputs[i].mutable_data_ptr();
  const vt_chain_call call{chain.steps.data(),  chain.steps.size(),  chain.reads.data(), chain.reads.size(),
                           chain.writes.data(), chain.writes.size(), chain.len, chain.row};
  is_done(rust.chain(&call));
}

// Tells the kernel of a call where its results are to lie.
struct Wanted {
  explicit Wanted(const Call &call) { wanted_results = call.is_moved ? &call.results : nullptr; }
  ~Wanted() { wanted_results = nullptr; }
};

void run(vt_graph &graph, bool computes_frozen) {
  Placement placement(graph);
  const BlockWatchScope watch(has_cpu_allocator() ? &placement : nullptr);
  std::vector<IValue> &stack = graph.stack;
  const int device = graph.device.is_hpu() ? graph.device.index() : -1;
  const profiler::DeviceScope replay(VT_ROW_GRAPHS, device, "graph replay");
  for (const Call &call : graph.calls) {
    if (call.is_frozen && !computes_frozen)
      continue;
    if (call.chain >= 0) {
      const profiler::DeviceScope profiled(VT_ROW_OPERATORS, device, "chain");
      run_chain(graph.chains[call.chain]);
      continue;
    }
    stack.assign(call.arguments.begin(), call.arguments.end());
    placement.enter(call);
    {
      const profiler::DeviceScope profiled(VT_ROW_OPERATORS, device, call.op.schema().name().c_str());
      const Wanted wanted(call);
      call.op.redispatchBoxed(hpu::cpu_only, &stack);
    }
    for (const auto &[index, place] : call.results)
      settle(graph, call.node, stack[index].toTensor(), place);
    for (const auto &[index, places] : call.result_lists) {
      const std::vector<Tensor> results = stack[index].toTensorVector();
      for (size_t i = 0; i < places.size(); ++i)
        settle(graph, call.node, results[i], places[i]);
    }
  }
  stack.clear();
}

} // namespace

void end_holds(const std::vector<Watched> &watched) {
  const std::lock_guard<std::mutex> lock(holds_mutex);
  for (const Watched &one : watched)
    if (const auto found = holds.find(one.held.unsafeGetStorageImpl()); found != holds.end() && --found->second == 0)
      holds.erase(found);
}

int32_t gone_buffer(const vt_graph &graph) {
  for (const Watched &watched : graph.watched) {
    if (watched.is_constant)
      continue;
    const StorageImpl *storage = watched.held.unsafeGetStorageImpl();
    bool is_gone = storage->data() != watched.address || storage->nbytes() != watched.bytes;
    if (!is_gone && watched.tensor.has_value()) {
      const TensorImpl *tensor = watched.tensor->_unsafe_get_target();
      is_gone = watched.tensor->use_count() == 0
                    ? watched.held.use_count() <= num_holds(*storage)
                    : tensor->unsafe_storage().unsafeGetStorageImpl() != storage;
    }
    if (is_gone)
      return watched.buffer;
  }
  return -1;
}

namespace {

void bind_inputs(vt_graph &graph, const Tensor *const *inputs, size_t num_inputs) {
  TORCH_CHECK(num_inputs == graph.inputs.size(), num_inputs, " inputs are given to a graph of ", graph.inputs.size());
  for (size_t i = 0; i < num_inputs; ++i) {
    Input &input = graph.inputs[i];
    const Tensor &given = *inputs[i];
    check_input(i, given, input.recorded);
    if (input.storage.get() == nullptr)
      continue;
    if (is_alike(given, input.recorded)) {
      const size_t before = input.recorded.storage_offset() * input.recorded.itemsize();
      input.storage->set_data_ptr_noswap(data_at(static_cast<char *>(const_cast<void *>(given.const_data_ptr())) - before));
    } else {
      Tensor target = input.recorded.detach();
      target.copy_(given);
    }
  }
}

void release_inputs(vt_graph &graph) {
  for (Input &input : graph.inputs)
    if (input.storage.get() != nullptr)
      input.storage->set_data_ptr_noswap(data_at(input.address));
}

} // namespace

void replay(vt_graph &graph, const Tensor *const *inputs, size_t num_inputs, vt_tensor *outputs, bool computes_frozen) {
  if (C10_UNLIKELY(is_recording()))
    vt_recording_refuse("a graph was replayed");
  const Pause pause;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  if (graph.on_card) {
    const profiler::DeviceScope profiled(VT_ROW_GRAPHS, graph.device.index(), "graph replay");
    graph.on_card->replay(inputs, num_inputs, outputs, graph.misfit);
    ++graph.stats.replays;
    return;
  }
  const bool binds = inputs != nullptr;
  if (binds)
    bind_inputs(graph, inputs, num_inputs);
  struct Release {
    vt_graph &graph;
    bool binds;
    ~Release() {
      if (binds)
        release_inputs(graph);
      release_outputs(graph);
    }
  } release{graph, binds};
  const PoolScope pool(graph.device.is_hpu() ? hpu::pool_of(graph.device.index()) : active_pool);
  const std::vector<c10::Storage> storages = bind_outputs(graph);
  run(graph, computes_frozen);
  ++graph.stats.replays;
  for (size_t i = 0; i < graph.outputs.size(); ++i)
    outputs[i] = new Tensor(output_over(storages[graph.outputs[i].given_away], graph.outputs[i].geometry));
}

} // namespace voltaic::graph

using namespace voltaic::graph;

vt_error *vt_graph_build(vt_recording *recording, const vt_graph_plan *plan, vt_graph **graph) {
  return voltaic::guard([&] {
    const Pause pause;
    *graph = Builder(*recording, *plan).build().release();
  });
}

vt_error *vt_graph_replay(vt_graph *graph, const vt_tensor *inputs, size_t num_inputs, vt_tensor *outputs,
                          int32_t computes_frozen) {
  return voltaic::guard([&] { replay(*graph, inputs, num_inputs, outputs, computes_frozen != 0); });
}

int32_t vt_graph_misfit(const vt_graph *graph) { return graph->misfit; }

int32_t vt_graph_gone_buffer(const vt_graph *graph) { return gone_buffer(*graph); }

void vt_graph_get_stats(const vt_graph *graph, vt_graph_stats *stats) { *stats = graph->stats; }

void vt_graph_free(vt_graph *graph) { delete graph; }
