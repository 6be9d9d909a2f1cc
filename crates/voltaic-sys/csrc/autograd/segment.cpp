// Segments of a forward pass whose saved tensors are dropped, and made again when backward asks for the first of them. There is one
// graph: gradients of a segment's weights come as those of any other operator.
#include "autograd/abi.h"
#include "autograd/backward_pass.h"
#include "autograd/saved_results.h"
#include "autograd/saved_tensors.h"
#include "error.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace voltaic::autograd {

namespace {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

// What a dropped tensor was like: the one that takes its place must be like it.
struct Meta {
  c10::ScalarType dtype;
  c10::Device device;
  std::vector<int64_t> sizes;

  explicit Meta(const at::Tensor &tensor)
      : dtype(tensor.scalar_type()), device(tensor.device()), sizes(tensor.sizes().vec()) {}
  bool fits(const at::Tensor &tensor) const {
    return dtype == tensor.scalar_type() && device == tensor.device() && tensor.sizes() == c10::IntArrayRef(sizes);
  }
};

// Ends a recomputation that has made all that is needed.
struct Complete final : std::exception {
  const char *what() const noexcept override { return "the recomputation has made all that backward needs"; }
};

class Recomputation;
constinit thread_local Recomputation *running = nullptr; // the innermost one of this thread

class Segment final : public std::enable_shared_from_this<Segment> {
public:
  Segment(vt_recompute_callbacks callbacks, bool inputs_on_host, const vt_save_policy *policy)
      : callbacks_(callbacks), inputs_on_host_(inputs_on_host) {
    if (policy != nullptr)
      results_.emplace(policy->operators);
  }
  ~Segment() { callbacks_.release(callbacks_.data); }
  Segment(const Segment &) = delete;
  Segment &operator=(const Segment &) = delete;

  void save(const at::Tensor &input) {
    Input &saved = inputs_.emplace_back();
    if (!input.defined())
      return;
    saved.is_trained = input.requires_grad();
    saved.device = input.device();
    if (inputs_on_host_ && !input.is_cpu())
      saved.on_host = input.detach().to(c10::Device(c10::kCPU));
    else // a frame around this one may drop it, too, and make it again
      saved.variable = SavedVariable(input, /*is_output=*/false);
    counts(input);
  }

  size_t drop(const at::Tensor &tensor) {
    metas_.emplace_back(tensor);
    const bool is_of_weight = tensor.is_view() && is_trained_leaf(tensor._base());
    if (!is_of_weight && counts(tensor))
      bytes_ += static_cast<int64_t>(tensor.storage().nbytes());
    return metas_.size() - 1;
  }

  at::Tensor take(size_t index);
  void forget_storages() {
    storages_.clear();
    known_.clear();
  }
  SavedResults *results() { return results_.has_value() ? &*results_ : nullptr; }
  void count_result(const at::Tensor &result) {
    if (counts(result))
      bytes_of_results_ += static_cast<int64_t>(result.storage().nbytes());
  }
  int64_t bytes() const { return bytes_; }
  int64_t bytes_of_results() const { return bytes_of_results_; }

private:
  friend class Recomputation;

  struct Input {
    SavedVariable variable;
    at::Tensor on_host;
    c10::Device device = c10::kCPU;
    bool is_trained = false;

    // With a history of its own: what hooks of the segment add to it stays out of the real one.
    at::Tensor unpack() const {
      at::Tensor input = on_host.defined() ? on_host.to(device) : variable.unpack();
      if (!input.defined())
        return input;
      input = input.detach();
      input.set_requires_grad(is_trained);
      return input;
    }
  };

  // Whether the memory is new in this pass.
  bool counts(const at::Tensor &tensor) {
    if (!tensor.has_storage() || !known_.insert(tensor.storage().unsafeGetStorageImpl()).second)
      return false;
    storages_.push_back(tensor.storage().getWeakStorageImpl()); // or another one might be made at this address
    return true;
  }

  void recompute();

  vt_recompute_callbacks callbacks_;
  bool inputs_on_host_;
  std::vector<Input> inputs_;
  std::vector<Meta> metas_;
  std::optional<SavedResults> results_; // of operators that a recomputation leaves out
  std::vector<Kept> made_;              // by the last recomputation, and not yet taken
  std::unordered_set<const c10::StorageImpl *> known_; // of the pass in progress
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  int64_t bytes_ = 0, bytes_of_results_ = 0;
  std::recursive_mutex mutex_; // backward may run on several threads
};

// The inputs of a pass are the same tensors each time, whether they are leaves or not.
struct Inputs {
  std::vector<const c10::TensorImpl *> impls;

  bool has(const at::Tensor &tensor) const {
    return std::find(impls.begin(), impls.end(), tensor.unsafeGetTensorImpl()) != impls.end();
  }
  // Weights are kept as they are, all else is dropped.
  bool drops(const at::Tensor &tensor) const { return has(tensor) || !is_trained_leaf(tensor); }
};

// The forward pass: counts what it drops.
class Forward final : public Frame {
public:
  Forward(std::shared_ptr<Segment> segment, Inputs inputs) : segment_(std::move(segment)), inputs_(std::move(inputs)) {
    scope_.emplace(*this);
    saving_.emplace(segment_->results(), [segment = segment_.get()](const at::Tensor &result) {
      segment->count_result(result);
    });
  }
  ~Forward() override { segment_->forget_storages(); }

  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Dropped>(segment_, inputs_); }
  const Segment &segment() const { return *segment_; }

private:
  struct Dropped final : SavedVariableHooks {
    Dropped(std::shared_ptr<Segment> segment, const Inputs &inputs) : segment_(std::move(segment)), inputs_(&inputs) {}

    void call_pack_hook(const at::Tensor &tensor) override {
      if (inputs_->drops(tensor))
        index_ = segment_->drop(tensor);
      else
        weight_ = Kept(tensor);
      inputs_ = nullptr; // which ends with the pass
    }
    at::Tensor call_unpack_hook() override {
      if (!weight_.tensor.defined())
        return segment_->take(index_);
      weight_.check();
      return weight_.tensor;
    }

    std::shared_ptr<Segment> segment_;
    const Inputs *inputs_;
    size_t index_ = 0;
    Kept weight_;
  };

  std::shared_ptr<Segment> segment_;
  Inputs inputs_;
  std::optional<FrameScope> scope_;
  std::optional<ResultsScope> saving_;
};

// The same code again: keeps what was dropped.
class Recomputation final : public Frame {
public:
  Recomputation(Segment &segment, Inputs inputs)
      : segment_(segment), inputs_(std::move(inputs)), needed_(segment.metas_.size()), outer_(running) {
    scope_.emplace(*this);
    giving_.emplace(segment_.results(), nullptr);
    running = this;
  }
  ~Recomputation() override { running = outer_; }

  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Made>(*this); }
  bool is_complete() const { return segment_.made_.size() == needed_; }
  // A code that reports errors as values is ended when all is made; other code runs on.
  bool may_end = false;

private:
  struct Made final : SavedVariableHooks {
    explicit Made(Recomputation &pass) : pass_(&pass) {}
    void call_pack_hook(const at::Tensor &tensor) override {
      Recomputation *pass = std::exchange(pass_, nullptr);
      if (!pass->is_complete()) {
        tensor_ = tensor.tensor_data();
        if (pass->inputs_.drops(tensor))
          pass->keep(tensor_);
      }
      if (pass->is_complete() && pass->may_end)
        throw Complete();
    }
    at::Tensor call_unpack_hook() override { // of a backward pass within the segment
      TORCH_CHECK(tensor_.defined(), "the recomputation is over");
      return tensor_;
    }

    Recomputation *pass_;
    at::Tensor tensor_;
  };

  void keep(const at::Tensor &tensor) {
    const size_t index = segment_.made_.size();
    const Meta &meta = segment_.metas_[index];
    TORCH_CHECK(meta.fits(tensor), "the recomputation of a checkpointed segment saves another tensor (number ", index,
                ") than its forward pass: ", tensor.sizes(), " of ", tensor.scalar_type(), " on ", tensor.device(),
                ", not ", c10::IntArrayRef(meta.sizes), " of ", meta.dtype, " on ", meta.device,
                ". The code of a segment must do the same each time: let it depend on its inputs alone");
    segment_.made_.emplace_back(tensor);
  }

  Segment &segment_;
  Inputs inputs_;
  size_t needed_;
  Recomputation *outer_;
  std::optional<FrameScope> scope_;
  std::optional<ResultsScope> giving_;
};

at::Tensor Segment::take(size_t index) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (index >= made_.size() || !made_[index].tensor.defined())
    recompute();
  const Kept made = std::exchange(made_[index], Kept());
  made.check();
  return made.tensor;
}

void Segment::recompute() {
  made_.clear();
  std::vector<at::Tensor> inputs;
  Inputs known;
  for (const Input &saved : inputs_) {
    at::Tensor input = saved.unpack();
    if (input.defined())
      known.impls.push_back(input.unsafeGetTensorImpl());
    inputs.push_back(std::move(input));
  }
  std::vector<vt_tensor> given;
  for (at::Tensor &input : inputs)
    given.push_back(&input);
  char text[4096] = "";
  PassScope scope;
  int32_t failed = 0;
  size_t made = 0;
  {
    Recomputation pass(*this, std::move(known));
    const c10::AutoGradMode with_grad(true);
    failed = callbacks_.recompute(callbacks_.data, given.data(), given.size(), text, sizeof text);
    made = made_.size();
  }
  if (made < metas_.size()) {
    made_.clear();
    TORCH_CHECK(failed == 0, text);
    TORCH_CHECK(false, "the recomputation of a checkpointed segment saves ", made, " tensors, and its forward pass ",
                metas_.size(), ". The code of a segment must do the same each time: let it depend on its inputs alone");
  }
  scope.finish();
  if (is_in_backward()) // what backward does not need is not for a later one
    at_backward_end([weak = weak_from_this()] {
      if (const auto segment = weak.lock()) {
        const std::lock_guard<std::recursive_mutex> lock(segment->mutex_);
        segment->made_.clear();
      }
    });
}

} // namespace

} // namespace voltaic::autograd

using namespace voltaic::autograd;

struct vt_segment {
  Forward forward;
};

vt_error *vt_segment_enter(const vt_tensor *inputs, size_t len, int32_t inputs_on_host, const vt_save_policy *policy,
                           vt_recompute_callbacks callbacks, vt_segment **segment) {
  auto made = std::make_shared<Segment>(callbacks, inputs_on_host != 0, policy);
  return voltaic::guard([&] {
    Inputs known;
    for (size_t i = 0; i < len; ++i) {
      made->save(*inputs[i]);
      if (inputs[i]->defined())
        known.impls.push_back(inputs[i]->unsafeGetTensorImpl());
    }
    *segment = new vt_segment{Forward(std::move(made), std::move(known))};
  });
}

int64_t vt_segment_bytes(const vt_segment *segment) { return segment->forward.segment().bytes(); }

int64_t vt_segment_saved_bytes(const vt_segment *segment) { return segment->forward.segment().bytes_of_results(); }

void vt_segment_leave(vt_segment *segment) { delete segment; }

int32_t vt_recompute_is_complete(void) { return running != nullptr && running->is_complete() ? 1 : 0; }

int32_t vt_recompute_may_end(int32_t may_end) {
  return running == nullptr ? 0 : std::exchange(running->may_end, may_end != 0) ? 1 : 0;
}
