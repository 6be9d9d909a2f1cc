// A graph that works on a Gaudi card: its operators run one after the other, as they did when they were recorded, and take their memory from
// the card's own allocator. No compiled recipe stands behind it. Tested with a stand-in for Habana's plugin, not yet run on a card.
#pragma once

#include "graph/graph.h"

#include <vector>

namespace voltaic::graph {

class CardGraph {
public:
  CardGraph(const vt_recording &recording, const vt_graph_plan &plan);

  // As replay(); `misfit` is set to the node whose result has another shape than in the recording.
  void replay(const at::Tensor *const *inputs, size_t num_inputs, vt_tensor *outputs, int32_t &misfit);

private:
  struct Call {
    c10::OperatorHandle op;
    std::vector<IValue> constants; // blank where tensors are
    std::vector<Operand> operands, results;
    std::vector<int32_t> over; // buffers that nothing uses after it
    int32_t node;
  };
  struct Memory {
    c10::Storage held;      // what was there before, or outlived the recording
    int32_t node;           // that makes it; -1 if it was there
    bool is_output = false; // each replay gives it away
    c10::Storage now;       // during a replay
    std::vector<int32_t> values;
  };
  struct Known {
    int32_t buffer;
    Geometry geometry;
    at::Tensor now; // during a replay
  };

  void bind(const at::Tensor &input, size_t index);
  at::Tensor tensor(int32_t value);
  void note(int32_t node, int32_t value, const at::Tensor &result, int32_t &misfit);
  void run(const Call &call, int32_t &misfit);
  void keep(Memory &memory);
  void forget(Memory &memory);

  std::vector<Call> calls_;
  std::vector<Memory> memory_;                         // by buffer
  std::vector<Known> values_;                          // by value
  std::vector<std::pair<at::Tensor, int32_t>> inputs_; // as recorded, and their buffers; -1 if no operator reads one
  std::vector<std::pair<Geometry, int32_t>> outputs_;  // and their buffers
  std::vector<IValue> stack_;
};

} // namespace voltaic::graph
