#include "autograd/abi.h"
#include "error.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <cmath>
#include <cstring>
#include <string>

namespace {

// What the operations of this thread have produced since the watch began.
struct Watch {
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
  std::string node;      // backward function in progress
  std::string found;     // first operation with NaN or infinity in its result, and none in its arguments
};

thread_local Watch watch;

struct Before final : at::ObserverContext {
  bool has_nan = false;
  bool has_inf = false;
};

void look(const at::Tensor &tensor, bool &has_nan, bool &has_inf) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0 || !tensor.has_storage())
    return;
  if (!tensor.is_floating_point() && !tensor.is_complex())
    return;
  const at::Tensor plain = tensor.detach();
  has_nan = has_nan || plain.isnan().any().item<bool>();
  has_inf = has_inf || (!plain.is_complex() && plain.isinf().any().item<bool>());
}

void look(const c10::IValue &value, bool &has_nan, bool &has_inf) {
  if (value.isTensor())
    look(value.toTensor(), has_nan, has_inf);
  else if (value.isTensorList())
    for (const at::Tensor &tensor : value.toTensorVector())
      look(tensor, has_nan, has_inf);
  else if (value.isDouble()) // masked_fill(-inf) is meant
    has_inf = has_inf || std::isinf(value.toDouble()), has_nan = has_nan || std::isnan(value.toDouble());
  else if (value.isScalar() && value.toScalar().isFloatingPoint())
    has_inf = has_inf || std::isinf(value.toScalar().toDouble());
}

template <class Values> void look_at_all(const Values &values, bool &has_nan, bool &has_inf) {
  const at::DisableRecordFunctionGuard no_watch;
  const at::AutoDispatchBelowAutograd no_graph;
  for (const c10::IValue &value : values)
    look(value, has_nan, has_inf);
}

// Their results are memory as it was found, or nothing new.
bool is_uninteresting(const char *name) {
  for (const char *part : {"empty", "resize", "set_", "detach", "view", "alias", "as_strided"})
    if (std::strstr(name, part) != nullptr)
      return true;
  return false;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction &function) {
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    watch.node = function.name();
    return nullptr;
  }
  if (!watch.found.empty() || is_uninteresting(function.name()))
    return nullptr;
  auto before = std::make_unique<Before>();
  look_at_all(function.inputs(), before->has_nan, before->has_inf);
  return before;
}

void on_end(const at::RecordFunction &function, at::ObserverContext *context) {
  if (function.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    watch.node.clear();
    return;
  }
  const auto *before = static_cast<const Before *>(context);
  if (before == nullptr || !watch.found.empty())
    return;
  bool has_nan = false, has_inf = false;
  look_at_all(function.outputs(), has_nan, has_inf);
  const bool makes_nan = has_nan && !before->has_nan;
  const bool makes_inf = has_inf && !before->has_inf && !before->has_nan;
  if (!makes_nan && !makes_inf)
    return;
  watch.found = std::string(function.name()) + (makes_nan ? " (NaN)" : " (infinity)");
  if (!watch.node.empty())
    watch.found += " in " + watch.node;
}

} // namespace

vt_error *vt_anomaly_watch(int32_t on) {
  return voltaic::guard([&] {
    if (watch.handle != at::INVALID_CALLBACK_HANDLE) {
      at::removeCallback(watch.handle);
      watch = Watch();
    }
    if (on == 0)
      return;
    watch.handle = at::addThreadLocalCallback(
        at::RecordFunctionCallback(on_start, on_end)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  });
}

vt_error *vt_anomaly_take(char *text, size_t capacity) {
  return voltaic::guard([&] {
    if (capacity == 0)
      return;
    std::strncpy(text, watch.found.c_str(), capacity - 1);
    text[capacity - 1] = '\0';
    watch.found.clear();
    watch.node.clear();
  });
}

vt_error *vt_inference_mode_enter(void **guard) {
  return voltaic::guard([&] { *guard = new c10::InferenceMode(true); });
}

void vt_inference_mode_leave(void *guard) { delete static_cast<c10::InferenceMode *>(guard); }

vt_error *vt_set_deterministic(int32_t mode) {
  return voltaic::guard([&] { at::globalContext().setDeterministicAlgorithms(mode != 0, mode == 2); });
}

vt_error *vt_deterministic(int32_t *mode) {
  return voltaic::guard([&] {
    const auto &context = at::globalContext();
    *mode = !context.deterministicAlgorithms() ? 0 : context.deterministicAlgorithmsWarnOnly() ? 2 : 1;
  });
}

vt_error *vt_set_cudnn_benchmark(int32_t on) {
  return voltaic::guard([&] { at::globalContext().setBenchmarkCuDNN(on != 0); });
}
