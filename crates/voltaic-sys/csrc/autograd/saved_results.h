// Results of named operators that a checkpointed segment keeps: its recomputation takes them in place of computing them again.
// PyTorch's selective activation checkpointing (torch.utils.checkpoint.create_selective_checkpoint_contexts).
#pragma once

#include "autograd/abi.h"
#include "autograd/operators.h"
#include "autograd/saved_tensors.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

namespace voltaic::autograd {

class SavePolicy {
public:
  // Adds the operators of a name such as aten::mm, all overloads that compute new tensors; how many there are.
  size_t add(const std::string &name);
  // Whether the results of this call are kept. Those that draw random numbers are not, since a call that is left out draws none.
  bool saves(const c10::OperatorHandle &op, const torch::jit::Stack &stack) const;

private:
  std::unordered_set<c10::OperatorHandle> operators_;
};

// Those of one segment, in the order of its forward pass.
class SavedResults {
public:
  explicit SavedResults(std::shared_ptr<const SavePolicy> policy) : policy_(std::move(policy)) {}

  const SavePolicy &policy() const { return *policy_; }
  // Keeps the results on the stack; `visit` gets their tensors.
  void save(const c10::OperatorHandle &op, const torch::jit::Stack &stack,
            const std::function<void(const at::Tensor &)> &visit);
  // Puts the results of call `index` in place of the arguments on the stack; false if one of them was changed in place since.
  bool give(size_t index, const c10::OperatorHandle &op, torch::jit::Stack &stack) const;
  // Drops what was changed in place, which is to be computed again.
  void drop_changed();

private:
  struct Result {
    Kept tensor;
    c10::IValue other; // if it is no tensor
  };
  struct Call {
    c10::OperatorHandle op;
    std::vector<Result> results; // empty once one of them was changed in place
    bool is_unchanged() const;
  };

  std::shared_ptr<const SavePolicy> policy_;
  std::vector<Call> calls_;
};

// From construction to destruction operators of this thread are those of a pass of a segment. Without results, they run as usual, also
// within a segment that has some.
class ResultsScope {
public:
  // `visit`, in the forward pass, gets the tensors that are kept; without it this is a recomputation.
  ResultsScope(SavedResults *results, std::function<void(const at::Tensor &)> visit);
  ~ResultsScope();
  ResultsScope(const ResultsScope &) = delete;
  ResultsScope &operator=(const ResultsScope &) = delete;

  // The innermost one of this thread; null if there is none, or it has no results.
  static ResultsScope *current();
  // Whether the results are on the stack; otherwise the operator is to be run, and `ran` to be called.
  bool gives(const c10::OperatorHandle &op, torch::jit::Stack &stack);
  bool saves(const c10::OperatorHandle &op, const torch::jit::Stack &stack) const {
    return results_->policy().saves(op, stack);
  }
  void ran(const c10::OperatorHandle &op, const torch::jit::Stack &stack);

private:
  SavedResults *results_;
  std::function<void(const at::Tensor &)> visit_;
  size_t next_ = 0;
  ResultsScope *outer_;
  bool was_included_;
};

} // namespace voltaic::autograd

struct vt_save_policy {
  std::shared_ptr<voltaic::autograd::SavePolicy> operators = std::make_shared<voltaic::autograd::SavePolicy>();
};
