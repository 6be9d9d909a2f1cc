// Autocast by lists of operators: a boxed kernel under the device's autocast key casts the arguments and calls the
// operator again below that key.
#include "tensor/autocast.h"

#include "error.h"
#include "tensor/abi.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

constexpr const char *aten = "aten::";

at::DeviceType type_of(int32_t number) { return static_cast<at::DeviceType>(number); }

bool is_float32(const Tensor &tensor, at::DeviceType type) {
  return tensor.defined() && at::autocast::is_eligible(tensor, type) && tensor.scalar_type() == at::kFloat;
}

std::atomic<vt_cast_report> observer{nullptr};

// Casts the arguments of one operator by its policy.
class CastingKernel final : public c10::OperatorKernel {
public:
  CastingKernel(at::DeviceType type, uint8_t policy) : type_(type), policy_(policy) {}

  void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    const c10::impl::ExcludeDispatchKeyGuard below(at::autocast::get_autocast_dispatch_key_from_device_type(type_));
    const size_t count = op.schema().arguments().size();
    IValue *arguments = stack->data() + stack->size() - count;
    const at::ScalarType to = target(arguments, count);
    for (size_t i = 0; i < count; ++i)
      if (cast(op, i, arguments[i], to) && policy_ == VT_AUTOCAST_LOWER_FIRST)
        break;
    op.callBoxed(stack);
  }

private:
  at::ScalarType target(const IValue *arguments, size_t count) const {
    if (policy_ == VT_AUTOCAST_FP32)
      return at::kFloat;
    if (policy_ == VT_AUTOCAST_PROMOTE)
      for (size_t i = 0; i < count; ++i)
        if (has_float32(arguments[i]))
          return at::kFloat;
    return at::autocast::get_autocast_dtype(type_);
  }

  bool has_float32(const IValue &value) const {
    if (value.isTensor())
      return is_float32(value.toTensor(), type_);
    if (value.isList())
      for (const IValue &element : value.toListRef())
        if (element.isTensor() && is_float32(element.toTensor(), type_))
          return true;
    return false;
  }

  // Whether the argument holds tensors.
  bool cast(const c10::OperatorHandle &op, size_t index, IValue &value, at::ScalarType to) const {
    if (value.isTensor()) {
      value = IValue(cast(op, index, value.toTensor(), to));
      return true;
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor &tensor : value.toTensorVector())
        list.push_back(cast(op, index, tensor, to));
      value = IValue(std::move(list));
      return true;
    }
    return false;
  }

  Tensor cast(const c10::OperatorHandle &op, size_t index, const Tensor &from, at::ScalarType to) const {
    Tensor result = at::autocast::cached_cast(to, from, type_);
    const vt_cast_report report = observer.load(std::memory_order_relaxed);
    if (report && result.defined() && result.scalar_type() != from.scalar_type())
      report(op.schema().name().c_str() + std::strlen(aten), index, static_cast<int32_t>(from.scalar_type()),
             static_cast<int32_t>(result.scalar_type()));
    return result;
  }

  at::DeviceType type_;
  uint8_t policy_;
};

std::string full_name(const c10::OperatorName &name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// What is registered now, by device type. Dropping a library gives the operators back the kernels they had before.
std::map<at::DeviceType, std::unique_ptr<torch::Library>> &libraries() {
  static auto *libraries = new std::map<at::DeviceType, std::unique_ptr<torch::Library>>;
  return *libraries;
}

// libtorch warns when its own kernel is replaced, which is what is wanted here.
struct Quiet final : c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

void register_lists(at::DeviceType type, const std::unordered_map<std::string, uint8_t> &policies, bool replaces_rest) {
  const c10::DispatchKey key = at::autocast::get_autocast_dispatch_key_from_device_type(type);
  libraries().erase(type);
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.rfind(aten, 0) != 0 || !op)
      continue;
    // an operator that writes to its arguments must get them, not copies of them
    const bool writes = std::any_of(op->schema().arguments().begin(), op->schema().arguments().end(),
                                    [](const c10::Argument &a) { return a.alias_info() && a.alias_info()->isWrite(); });
    const auto policy = policies.find(name.name.substr(std::string(aten).size()));
    const std::string full = full_name(name);
    if (policy != policies.end() && !writes)
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(
                                      std::make_unique<CastingKernel>(type, policy->second)));
    else if (replaces_rest && op->hasKernelForDispatchKey(key))
      library->impl(full.c_str(), torch::CppFunction::makeFallthrough());
  }
  libraries()[type] = std::move(library);
}

} // namespace

vt_error *vt_autocast_get(int32_t device_type, int32_t *enabled, int32_t *dtype) {
  return voltaic::guard([&] {
    *enabled = at::autocast::is_autocast_enabled(type_of(device_type)) ? 1 : 0;
    *dtype = static_cast<int32_t>(at::autocast::get_autocast_dtype(type_of(device_type)));
  });
}

vt_error *vt_autocast_set(int32_t device_type, int32_t enabled, int32_t dtype) {
  return voltaic::guard([&] {
    at::autocast::set_autocast_enabled(type_of(device_type), enabled != 0);
    at::autocast::set_autocast_dtype(type_of(device_type), static_cast<at::ScalarType>(dtype));
  });
}

void voltaic::clear_autocast_cache() { at::autocast::clear_cache(); }

vt_error *vt_autocast_enter(void) {
  return voltaic::guard([] { at::autocast::increment_nesting(); });
}

vt_error *vt_autocast_leave(void) {
  return voltaic::guard([] {
    if (at::autocast::decrement_nesting() == 0)
      voltaic::clear_autocast_cache();
  });
}

vt_error *vt_autocast_clear_cache(void) {
  return voltaic::guard([] { at::autocast::clear_cache(); });
}

vt_error *vt_autocast_set_lists(int32_t device_type, const char *const *names, const uint8_t *policies, size_t len,
                                int32_t replaces_rest) {
  return voltaic::guard([&] {
    std::unordered_map<std::string, uint8_t> by_name;
    for (size_t i = 0; i < len; ++i)
      by_name.emplace(names[i], policies[i]); // the first list that names an operator has it
    register_lists(type_of(device_type), by_name, replaces_rest != 0);
  });
}

vt_error *vt_autocast_reset_lists(int32_t device_type) {
  return voltaic::guard([&] { libraries().erase(type_of(device_type)); });
}

void vt_autocast_observe(vt_cast_report report) { observer.store(report, std::memory_order_relaxed); }

vt_error *vt_operator_names(void (*report)(void *data, const char *name), void *data) {
  return voltaic::guard([&] {
    for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames())
      if (name.name.rfind(aten, 0) == 0)
        report(data, name.name.c_str() + std::string(aten).size());
  });
}
