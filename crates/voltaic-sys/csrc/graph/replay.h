// A graph that can be replayed.
#pragma once

#include "graph/card.h"
#include "graph/graph.h"

#include <memory>

namespace voltaic::graph {

// A kernel's call with all its arguments: tensors over memory that never moves.
struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> arguments;
  size_t num_results;
  // results that must lie at a place of the graph; others are dropped
  std::vector<std::pair<uint32_t, at::Tensor>> results;
  std::vector<std::pair<uint32_t, std::vector<at::Tensor>>> result_lists;
  uint32_t first_block, num_blocks;
  int32_t node; // of the recording
  int32_t chain = -1; // that runs in its place
  bool is_moved = false; // a result lies elsewhere than when it was recorded
  bool is_frozen = false; // it runs only when what is frozen is computed again
};

// Operators that run as one.
struct Chain {
  std::vector<vt_chain_step> steps;
  std::vector<at::Tensor> inputs, outputs;
  std::vector<vt_chain_tensor> reads, writes; // of them, with addresses during a replay
  std::vector<std::vector<float>> numbers;    // of inputs that have one, or an integer for each row
  int64_t len, row;
};

// Memory that a call's kernel is given.
struct PlacedBlock {
  void *address;
  size_t bytes;
  bool has_header; // there is room for a header before it
};

// What was there before the recording, and must still be there.
struct Watched {
  c10::Storage held;
  void *address;
  size_t bytes;
  std::optional<WeakTensor> tensor;
  int32_t buffer;
  bool is_constant;
};

// A tensor that is given again for each replay.
struct Input {
  at::Tensor recorded;                           // as it was given to the recording
  c10::intrusive_ptr<StorageImpl> storage;       // of the graph, over the memory of `recorded` or of what is given
  void *address;                                 // of that memory while nothing is given
};

// Memory that is taken for each replay, and is the caller's afterwards.
struct GivenAway {
  c10::intrusive_ptr<StorageImpl> storage; // of the graph, over no memory between replays
  size_t bytes;
  int32_t buffer;
  std::vector<size_t> blocks; // of the graph, which lie there
};

// A result over such memory.
struct Output {
  Geometry geometry;
  size_t given_away; // which
};

// A tensor over memory, and one that has no keys of autograd.
at::Tensor output_over(c10::Storage storage, const Geometry &geometry);
at::Tensor view_over(c10::Storage storage, const Geometry &geometry, c10::DispatchKeySet keys);

// Refuse an input of another kind than the recorded one, and a result of another shape, whose node `misfit` is then.
void check_input(size_t index, const at::Tensor &given, const at::Tensor &recorded);
void check_shape(int32_t node, const at::Tensor &result, at::IntArrayRef sizes, int32_t &misfit);
// Whether a tensor's memory can be read as that of the recorded one.
bool is_alike(const at::Tensor &tensor, const at::Tensor &recorded);

// What a graph held before it ends.
void end_holds(const std::vector<Watched> &watched);

} // namespace voltaic::graph

struct vt_graph {
  vt_graph() = default;
  ~vt_graph() { voltaic::graph::end_holds(watched); }
  vt_graph(const vt_graph &) = delete;
  vt_graph &operator=(const vt_graph &) = delete;

  c10::Device device = c10::Device(c10::DeviceType::CPU);
  std::vector<voltaic::graph::Call> calls;
  std::vector<voltaic::graph::Chain> chains;
  std::vector<voltaic::graph::PlacedBlock> blocks;
  std::vector<voltaic::graph::Watched> watched;
  std::vector<voltaic::graph::Input> inputs;
  std::vector<c10::Storage> kept; // what outlived the recording
  std::vector<voltaic::graph::GivenAway> given_away;
  std::vector<voltaic::graph::Output> outputs;
  c10::DataPtr arena;
  std::unique_ptr<voltaic::graph::CardGraph> on_card; // in place of all but `watched` and `stats`
  std::vector<c10::IValue> stack; // kept for its memory
  vt_graph_stats stats = {};
  int32_t misfit = -1; // node whose result had another shape than when it was recorded
};

namespace voltaic::graph {

// The first buffer of the recording that nobody holds any more, or that was given other memory; -1 if there is none.
int32_t gone_buffer(const vt_graph &graph);
// To be called if no buffer is gone. Without `inputs` what the recorded ones hold is taken. `outputs` has room for those
// of the graph.
void replay(vt_graph &graph, const at::Tensor *const *inputs, size_t num_inputs, vt_tensor *outputs, bool computes_frozen);

} // namespace voltaic::graph
