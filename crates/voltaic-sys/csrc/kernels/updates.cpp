// Steps of optimizers, written in Rust: in the place of libtorch's for the CPU, and with gradients and weights of 16 bits beside.
#include "kernels/kernels.h"
#include "tensor/lists.h"

#include <ATen/ops/_fused_adam_cpu_dispatch.h>
#include <ATen/ops/_fused_adamw_cpu_dispatch.h>
#include <ATen/ops/_fused_sgd_cpu_dispatch.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <initializer_list>

namespace voltaic {
namespace {

using at::TensorList;

// What a step works on: an entry for each parameter in all lists but those that are empty.
struct Lists {
  TensorList weights, grads;
  std::array<TensorList, 3> states{};
  TensorList rounded{}; // undefined where nothing is rounded
};

// Collects what Rust is called with, and whether it may be.
class Updates {
public:
  explicit Updates(const Lists &lists) : lists_(lists) {
    if (rust.update == nullptr)
      return;
    const size_t len = lists.weights.size();
    const auto fits = [&](TensorList list) { return list.empty() || list.size() == len; };
    fit_ = lists.grads.size() == len && fits(lists.rounded) && std::all_of(lists.states.begin(), lists.states.end(), fits);
    updates_.reserve(len);
    for (size_t i = 0; fit_ && i < len; ++i)
      fit_ = add(i);
    fit_ = fit_ && !overlap();
  }

  // Whether all is dense memory of the CPU, of which what is written is nothing else.
  bool fit() const { return fit_; }

  // Does the step; the counts are of each parameter, or null.
  bool run(const vt_update_rule &rule, const double *steps) {
    for (size_t i = 0; steps != nullptr && i < updates_.size(); ++i)
      updates_[i].step = steps[i];
    return is_done(rust.update(&rule, updates_.data(), updates_.size()));
  }

private:
  struct Span {
    uintptr_t begin, end;
    bool is_written;
  };

  bool add(size_t i) {
    const Tensor &weights = lists_.weights[i];
    vt_update update{};
    update.len = weights.numel();
    if (!take(weights, weights, true, update.weights) || !take(lists_.grads[i], weights, false, update.grad))
      return false;
    for (size_t state = 0; state < lists_.states.size(); ++state)
      if (!lists_.states[state].empty() && !take(lists_.states[state][i], weights, true, update.states[state]))
        return false;
    if (!lists_.rounded.empty() && lists_.rounded[i].defined() && !take(lists_.rounded[i], weights, true, update.rounded))
      return false;
    updates_.push_back(update);
    return true;
  }

  bool take(const Tensor &tensor, const Tensor &like, bool is_written, vt_numbers &numbers) {
    if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided || tensor.is_neg() ||
        !tensor.is_non_overlapping_and_dense() || !same_layout(tensor, like))
      return false;
    switch (tensor.scalar_type()) {
    case at::kFloat:
      numbers.dtype = VT_FLOAT32;
      break;
    case at::kBFloat16:
      numbers.dtype = VT_BFLOAT16;
      break;
    case at::kHalf:
      numbers.dtype = VT_FLOAT16;
      break;
    default:
      return false;
    }
    numbers.data = is_written ? tensor.mutable_data_ptr() : const_cast<void *>(tensor.const_data_ptr());
    const auto begin = reinterpret_cast<uintptr_t>(numbers.data);
    if (tensor.nbytes() > 0)
      spans_.push_back({begin, begin + tensor.nbytes(), is_written});
    return true;
  }

  // Whether something that is written is also something else.
  bool overlap() {
    std::sort(spans_.begin(), spans_.end(), [](const Span &a, const Span &b) { return a.begin < b.begin; });
    uintptr_t end = 0, written_end = 0;
    for (const Span &span : spans_) {
      if (span.begin < written_end || (span.is_written && span.begin < end))
        return true;
      end = std::max(end, span.end);
      if (span.is_written)
        written_end = std::max(written_end, span.end);
    }
    return false;
  }

  Lists lists_;
  std::vector<vt_update> updates_;
  std::vector<Span> spans_;
  bool fit_ = false;
};

// Whether all have one dtype, that of weights for which there is a loop with libtorch's bits.
bool are_alike(TensorList weights, std::initializer_list<TensorList> others) {
  if (weights.empty())
    return false;
  const auto dtype = weights[0].scalar_type();
  const auto is_alike = [&](const Tensor &tensor) { return tensor.scalar_type() == dtype; };
  const auto are = [&](TensorList list) { return std::all_of(list.begin(), list.end(), is_alike); };
  return (dtype == at::kFloat || dtype == at::kBFloat16) && are(weights) && std::all_of(others.begin(), others.end(), are);
}

using Lr = const Tensor &;

double number(double lr) { return lr; }
double number(Lr lr) { return lr.item<double>(); }

template <bool is_decoupled, typename L>
void adam(TensorList self, TensorList grads, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
          TensorList state_steps, L lr, double beta1, double beta2, double weight_decay, double eps, bool amsgrad,
          bool maximize, const OptionalTensor &grad_scale, const OptionalTensor &found_inf) {
  const auto is_count = [](const Tensor &step) {
    return step.is_cpu() && step.numel() == 1 && step.scalar_type() == at::kFloat;
  };
  const bool has_all = exp_avgs.size() == self.size() && exp_avg_sqs.size() == self.size() &&
                       (max_exp_avg_sqs.size() == self.size()) == amsgrad && state_steps.size() == self.size() &&
                       std::all_of(state_steps.begin(), state_steps.end(), is_count);
  if (!grad_scale.has_value() && !found_inf.has_value() && has_all &&
      are_alike(self, {grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs})) {
    Updates updates({self, grads, {exp_avgs, exp_avg_sqs, max_exp_avg_sqs}});
    if (updates.fit()) {
      vt_update_rule rule{};
      rule.kind = VT_ADAM;
      rule.lr = number(lr);
      rule.weight_decay = weight_decay;
      rule.beta1 = beta1;
      rule.beta2 = beta2;
      rule.eps = eps;
      rule.decoupled = is_decoupled;
      rule.amsgrad = amsgrad;
      rule.maximize = maximize;
      std::vector<double> steps;
      for (const Tensor &step : state_steps)
        steps.push_back(*step.const_data_ptr<float>());
      if (updates.run(rule, steps.data()))
        return;
    }
  }
  if constexpr (is_decoupled)
    at::cpu::_fused_adamw_(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2,
                           weight_decay, eps, amsgrad, maximize, grad_scale, found_inf);
  else
    at::cpu::_fused_adam_(self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2,
                          weight_decay, eps, amsgrad, maximize, grad_scale, found_inf);
}

template <typename L>
void sgd(TensorList self, TensorList grads, TensorList buffers, double weight_decay, double momentum, L lr,
         double dampening, bool nesterov, bool maximize, bool is_first_step, const OptionalTensor &grad_scale,
         const OptionalTensor &found_inf) {
  const bool has_all = buffers.size() == (momentum == 0 ? 0 : self.size());
  if (!grad_scale.has_value() && !found_inf.has_value() && has_all && are_alike(self, {grads, buffers})) {
    Updates updates({self, grads, {buffers}});
    if (updates.fit()) {
      vt_update_rule rule{};
      rule.kind = VT_SGD;
      rule.lr = number(lr);
      rule.weight_decay = weight_decay;
      rule.momentum = momentum;
      rule.dampening = dampening;
      rule.nesterov = nesterov;
      rule.maximize = maximize;
      rule.is_first_step = is_first_step;
      if (updates.run(rule, nullptr))
        return;
    }
  }
  at::cpu::_fused_sgd_(self, grads, buffers, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step,
                       grad_scale, found_inf);
}

TensorList or_none(const vt_list *list) { return list == nullptr ? TensorList() : TensorList(list->tensors); }

} // namespace

void install_updates(torch::Library &library) {
  if (rust.update == nullptr)
    return;
  library.impl("_fused_adam_", TORCH_FN((adam<false, double>)));
  library.impl("_fused_adam_.tensor_lr", TORCH_FN((adam<false, Lr>)));
  library.impl("_fused_adamw_", TORCH_FN((adam<true, double>)));
  library.impl("_fused_adamw_.tensor_lr", TORCH_FN((adam<true, Lr>)));
  library.impl("_fused_sgd_", TORCH_FN(sgd<double>));
  library.impl("_fused_sgd_.tensor_lr", TORCH_FN(sgd<Lr>));
}

} // namespace voltaic

vt_error *vt_update_lists(const vt_list *params, vt_list *grads, const vt_list *const *states, size_t num_states,
                          const vt_list *rounded, const double *steps, const vt_update_rule *rule, int32_t *is_done) {
  return voltaic::guard([&] {
    voltaic::Lists lists{params->tensors, grads->tensors};
    TORCH_CHECK(num_states <= lists.states.size(), "a step has at most ", lists.states.size(), " states, not ", num_states);
    for (size_t i = 0; i < num_states; ++i)
      lists.states[i] = states[i]->tensors;
    lists.rounded = voltaic::or_none(rounded);
    RECORD_FUNCTION("voltaic::update", std::vector<c10::IValue>{}); // as an operator in profiles
    voltaic::Updates updates(lists);
    *is_done = updates.fit() && updates.run(*rule, steps);
    if (*is_done == 0)
      return;
    voltaic::note_written(params->tensors);
    if (rounded != nullptr)
      voltaic::note_written(rounded->tensors);
    grads->tensors.clear();
  });
}
