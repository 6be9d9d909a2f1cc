#include "autograd/saved_results.h"
#include "error.h"

#include <ATen/core/ivalue.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>

namespace voltaic::autograd {

namespace {

using torch::jit::Stack;

constinit thread_local ResultsScope *scope = nullptr;
std::atomic<OperatorKernel *> recorder_of_graphs{nullptr};

void seen(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
  ResultsScope *saving = ResultsScope::current();
  const bool saves = saving != nullptr && saving->saves(op, *stack);
  if (saves && saving->gives(op, *stack))
    return;
  if (OperatorKernel *recorder = recorder_of_graphs.load(std::memory_order_acquire); recorder != nullptr)
    recorder(op, keys, stack);
  else {
    const c10::impl::ExcludeDispatchKeyGuard below(below_key);
    run_below(op, keys, stack);
  }
  if (saves)
    saving->ran(op, *stack);
}

// Whether it makes tensors, one by one, in memory of their own.
bool computes(const c10::OperatorHandle &op) {
  const auto &schema = op.schema();
  const auto is_new = [](const c10::Argument &result) {
    return result.alias_info() == nullptr && !result.type()->isSubtypeOf(*c10::ListType::ofTensors());
  };
  // one that is made of others comes to the key as those
  return !schema.is_mutable() && std::all_of(schema.returns().begin(), schema.returns().end(), is_new) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

bool draws(const c10::OperatorHandle &op, const Stack &stack) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded))
    return false;
  const auto &arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i)
    if (const auto &value = stack[stack.size() - arguments.size() + i]; arguments[i].name() == "dropout_p")
      return !value.isDouble() || value.toDouble() != 0.0;
  return true;
}

} // namespace

void register_below() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto *library = new torch::Library(torch::Library::IMPL, "_", below_key, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&seen>());
  });
}

void set_recorder(OperatorKernel *recorder) { recorder_of_graphs.store(recorder, std::memory_order_release); }

void run_below(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, below_key), stack);
}

size_t SavePolicy::add(const std::string &name) {
  auto &dispatcher = c10::Dispatcher::singleton();
  size_t found = 0;
  for (const c10::OperatorName &known : dispatcher.getAllOpNames()) {
    if (known.name != name)
      continue;
    if (const auto op = dispatcher.findSchema(known); op.has_value() && computes(*op)) {
      operators_.insert(*op);
      ++found;
    }
  }
  return found;
}

bool SavePolicy::saves(const c10::OperatorHandle &op, const Stack &stack) const {
  return operators_.count(op) != 0 && !draws(op, stack);
}

bool SavedResults::Call::is_unchanged() const {
  return std::all_of(results.begin(), results.end(), [](const Result &result) {
    return !result.tensor.tensor.defined() || result.tensor.is_unchanged();
  });
}

void SavedResults::save(const c10::OperatorHandle &op, const Stack &stack,
                        const std::function<void(const at::Tensor &)> &visit) {
  Call &call = calls_.emplace_back(Call{op, {}});
  const size_t num_results = op.schema().returns().size();
  for (size_t i = stack.size() - num_results; i < stack.size(); ++i) {
    Result &result = call.results.emplace_back();
    if (stack[i].isTensor() && stack[i].toTensor().defined()) {
      visit(stack[i].toTensor());
      result.tensor = Kept(stack[i].toTensor().tensor_data()); // without the history that autograd is about to give it
    } else {
      result.other = stack[i];
    }
  }
}

bool SavedResults::give(size_t index, const c10::OperatorHandle &op, Stack &stack) const {
  TORCH_CHECK(index < calls_.size() && calls_[index].op == op, "the recomputation of a checkpointed segment calls ",
              op.schema().name(), " as number ", index, " of the operators whose results are kept, and its forward pass ",
              index < calls_.size() ? calls_[index].op.schema().name() : "fewer",
              ". The code of a segment must do the same each time: let it depend on its inputs alone");
  const Call &call = calls_[index];
  if (call.results.empty() || !call.is_unchanged())
    return false;
  torch::jit::drop(stack, op.schema().arguments().size());
  for (const Result &result : call.results) {
    if (result.tensor.tensor.defined())
      stack.emplace_back(result.tensor.tensor.tensor_data());
    else
      stack.push_back(result.other);
  }
  return true;
}

void SavedResults::drop_changed() {
  for (Call &call : calls_)
    if (!call.is_unchanged())
      call.results.clear();
}

ResultsScope::ResultsScope(SavedResults *results, std::function<void(const at::Tensor &)> visit)
    : results_(results), visit_(std::move(visit)), outer_(scope),
      was_included_(c10::impl::tls_is_dispatch_key_included(below_key)) {
  if (results_ != nullptr) {
    register_below();
    c10::impl::tls_set_dispatch_key_included(below_key, true);
  }
  scope = this;
}

ResultsScope::~ResultsScope() {
  scope = outer_;
  if (results_ != nullptr) {
    c10::impl::tls_set_dispatch_key_included(below_key, was_included_);
    if (visit_)
      results_->drop_changed();
  }
}

ResultsScope *ResultsScope::current() { return scope != nullptr && scope->results_ != nullptr ? scope : nullptr; }

bool ResultsScope::gives(const c10::OperatorHandle &op, Stack &stack) {
  return !visit_ && results_->give(next_++, op, stack);
}

void ResultsScope::ran(const c10::OperatorHandle &op, const Stack &stack) {
  if (visit_)
    results_->save(op, stack, visit_);
}

} // namespace voltaic::autograd

vt_save_policy *vt_save_policy_new(void) { return new vt_save_policy(); }

vt_error *vt_save_policy_add(vt_save_policy *policy, const char *name, size_t *found) {
  return voltaic::guard([&] { *found = policy->operators->add(name); });
}

void vt_save_policy_free(vt_save_policy *policy) { delete policy; }
