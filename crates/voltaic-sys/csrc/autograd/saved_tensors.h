#pragma once

#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace voltaic::autograd {

// What autograd saves on this thread goes to the frame that was entered last; without one, autograd keeps it itself.
class Frame {
public:
  virtual ~Frame() = default;
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

// From construction to destruction, on one thread.
class FrameScope {
public:
  explicit FrameScope(Frame &frame);
  ~FrameScope();
  FrameScope(const FrameScope &) = delete;
  FrameScope &operator=(const FrameScope &) = delete;
};

// A tensor that autograd saves as it is, with the number of its changes: one that has changed since is refused.
struct Kept {
  at::Tensor tensor;
  uint32_t version = 0;

  explicit Kept(at::Tensor saved);
  Kept() = default;
  bool is_unchanged() const;
  void check() const;
};

// Whether a saved tensor is a trained weight: it lives on anyway, and its memory may come and go.
bool is_trained_leaf(const at::TensorBase &tensor);

} // namespace voltaic::autograd
