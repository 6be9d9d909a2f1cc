// Any operator with a CPU kernel: its arguments are found by the operator's schema.
#include "hpu/abi.h"
#include "hpu/alias.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace voltaic::hpu {
namespace {

using c10::FunctionSchema;
using c10::IValue;
using c10::TypeKind;
using torch::jit::Stack;

enum class Kind : uint8_t { tensor, tensor_list, optional_tensor_list, generator, device };

// An argument that an HPU operator must translate.
struct Parameter {
  uint16_t position;
  Kind kind;
  Use use;
};

std::string full_name(const c10::OperatorName &name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

std::optional<Kind> kind_of(const c10::TypePtr &declared) {
  c10::TypePtr type = declared;
  if (const auto optional = type->cast<c10::OptionalType>())
    type = optional->getElementType();
  if (type->kind() == TypeKind::TensorType)
    return Kind::tensor;
  if (type->kind() == TypeKind::GeneratorType)
    return Kind::generator;
  if (type->kind() == TypeKind::DeviceObjType)
    return Kind::device;
  if (const auto list = type->cast<c10::ListType>()) {
    const c10::TypePtr element = list->getElementType();
    if (element->kind() == TypeKind::TensorType)
      return Kind::tensor_list;
    const auto optional = element->cast<c10::OptionalType>();
    if (optional && optional->getElementType()->kind() == TypeKind::TensorType)
      return Kind::optional_tensor_list;
  }
  return std::nullopt;
}

Use use_of(const c10::Argument &argument, Kind kind) {
  if (argument.alias_info() != nullptr && argument.alias_info()->isWrite())
    return Use::write;
  // what libtorch's other devices want on the CPU
  static const std::unordered_set<std::string> always_on_cpu{"scalars", "lengths", "input_lengths", "target_lengths"};
  if (kind == Kind::optional_tensor_list || always_on_cpu.count(argument.name()) != 0)
    return Use::index;
  return Use::read;
}

struct BoxedKernel final : c10::OperatorKernel {
  explicit BoxedKernel(const FunctionSchema &schema)
      : name_(full_name(schema.operator_name())), num_arguments_(schema.arguments().size()),
        num_returns_(schema.returns().size()) {
    for (size_t i = 0; i < num_arguments_; ++i) {
      const c10::Argument &argument = schema.arguments()[i];
      if (const std::optional<Kind> kind = kind_of(argument.type()))
        parameters_.push_back({static_cast<uint16_t>(i), *kind, use_of(argument, *kind)});
    }
    for (size_t i = 0; i < num_returns_; ++i) {
      const TypeKind kind = schema.returns()[i].type()->kind();
      if (kind == TypeKind::TensorType || kind == TypeKind::ListType)
        results_.push_back(static_cast<uint16_t>(i));
    }
  }

  void operator()(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    OpCall call(name_.c_str());
    IValue *arguments = stack->data() + stack->size() - num_arguments_;
    for (const Parameter &parameter : parameters_)
      enter(call, arguments[parameter.position], parameter);
    for (const Parameter &parameter : parameters_)
      if (parameter.kind == Kind::generator)
        enter_generator(call, arguments[parameter.position]);
    {
      const KernelScope scope(call);
      op.redispatchBoxed(cpu_only, stack);
    }
    call.carry_over_writes();
    IValue *results = stack->data() + stack->size() - num_returns_;
    for (const uint16_t position : results_)
      leave(call, results[position]);
  }

private:
  static void enter(OpCall &call, IValue &value, const Parameter &parameter) {
    switch (parameter.kind) {
    case Kind::tensor:
      if (value.isTensor())
        enter_tensor(call, value, parameter.use);
      break;
    case Kind::tensor_list:
      if (value.isTensorList()) {
        c10::List<Tensor> entered;
        for (Tensor &tensor : value.toTensorVector()) {
          entered.push_back(call.enter(tensor, parameter.use));
          call.keep(std::move(tensor));
        }
        value = IValue(std::move(entered));
      }
      break;
    case Kind::optional_tensor_list:
      if (value.isList()) {
        c10::List<std::optional<Tensor>> entered;
        for (const IValue &element : value.toListRef()) {
          if (!element.isTensor() || !element.toTensor().defined()) {
            entered.push_back(std::nullopt);
            continue;
          }
          entered.push_back(call.enter(element.toTensor(), parameter.use));
          call.keep(element.toTensor());
        }
        value = IValue(std::move(entered));
      }
      break;
    case Kind::device:
      if (value.isDevice() && value.toDevice().type() == c10::DeviceType::HPU) {
        call.enter_device(value.toDevice());
        value = IValue(c10::Device(c10::DeviceType::CPU));
      }
      break;
    case Kind::generator:
      break; // needs the device of the call, which the tensors tell
    }
  }

  // The stack gives its handle up for the alias; the call keeps it.
  static void enter_tensor(OpCall &call, IValue &value, Use use) {
    Tensor tensor = std::move(value).toTensor();
    value = IValue(call.enter(tensor, use));
    call.keep(std::move(tensor));
  }

  static void enter_generator(const OpCall &call, IValue &value) {
    const auto given = value.isNone() ? std::nullopt : std::optional<at::Generator>(value.toGenerator());
    value = IValue(cpu_generator(given, call.device()));
  }

  static void leave(OpCall &call, IValue &value) {
    if (value.isTensor()) {
      Tensor result = std::move(value).toTensor();
      call.leave(result);
      value = IValue(std::move(result));
    } else if (value.isTensorList()) {
      c10::List<Tensor> left;
      for (Tensor &result : value.toTensorVector()) {
        call.leave(result);
        left.push_back(result);
      }
      value = IValue(std::move(left));
    }
  }

  std::string name_;
  size_t num_arguments_, num_returns_;
  std::vector<Parameter> parameters_;
  std::vector<uint16_t> results_;
};

// Operators that libtorch composes of others by asking for the device: they must see a CPU, to choose as on the CPU.
const Names &composed_on_cpu() {
  static const Names names{"aten::convolution", "aten::convolution_backward", "aten::_convolution"};
  return names;
}

// Operators that must not run as on the CPU.
const Names &not_on_cpu() {
  static const Names names{"aten::_fused_sdp_choice"}; // has a stub of its own
  return names;
}

} // namespace

void register_boxed(torch::Library &library, const Names &done) {
  for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0)
      continue;
    const std::string full = full_name(name);
    if (done.count(full.substr(6)) != 0 || not_on_cpu().count(full) != 0)
      continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))
      continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || composed_on_cpu().count(full) != 0)
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel>(op->schema())));
  }
}

namespace {

void call_unknown(const c10::OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
  BoxedKernel(op.schema())(op, keys, stack);
}

} // namespace

// For operators registered later or in other namespaces.
torch::CppFunction boxed_fallback() { return torch::CppFunction::makeFromBoxedFunction<&call_unknown>(); }

} // namespace voltaic::hpu
