// Calls each operator that has a CPU kernel with made-up arguments, on the CPU and on an HPU, and compares the bytes.
#include "error.h"
#include "hpu/abi.h"
#include "hpu/alias.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <cstring>

namespace voltaic::hpu {
namespace {

using c10::IValue;
using c10::ScalarType;
using c10::TypeKind;
using torch::jit::Stack;

// ---- arguments ----

struct Shape {
  ScalarType dtype;
  std::vector<int64_t> sizes;
};

constexpr ScalarType f32 = ScalarType::Float, i64 = ScalarType::Long, boolean = ScalarType::Bool;

// Shapes of the tensor arguments in order; the last one holds for all that follow.
const std::vector<std::vector<Shape>> &tensor_shapes() {
  static const std::vector<std::vector<Shape>> shapes{
      {{f32, {4, 4}}},
      {{f32, {2, 3, 8, 8}}},
      {{f32, {2, 4, 4}}},
      {{i64, {4, 4}}},
      {{boolean, {4, 4}}},
      {{f32, {4}}},
      {{f32, {}}},
      {{f32, {2, 3, 4, 8, 8}}},
      {{ScalarType::BFloat16, {4, 4}}},
      {{f32, {4, 4}}, {i64, {4, 4}}, {f32, {4, 4}}},
      {{f32, {4, 4}}, {i64, {4}}, {f32, {4, 4}}},
      {{f32, {4, 4}}, {f32, {4, 4}}, {i64, {4, 4}}},
      {{f32, {4, 4}}, {f32, {4, 4}}, {i64, {4}}, {f32, {}}},
      {{f32, {4, 4}}, {i64, {4}}, {f32, {4}}},
      {{boolean, {4, 4}}, {f32, {4, 4}}},
      {{f32, {4, 4}}, {boolean, {4, 4}}, {f32, {4, 4}}},
      {{f32, {2, 3, 8, 8}}, {f32, {3, 3, 2, 2}}, {f32, {3}}},
      {{f32, {2, 3, 8}}, {f32, {3, 3, 2}}, {f32, {3}}},
      {{f32, {2, 3, 8, 8}}, {f32, {3}}},
      {{f32, {4}}, {f32, {4, 4}}, {f32, {4}}},
      {{f32, {4, 4}}, {f32, {4}}, {f32, {4}}},
      {{f32, {4, 4}}, {f32, {2, 4, 4}}},
      {{f32, {2, 4, 2, 4}}},
      {{i64, {4}}, {f32, {4, 4}}},
      {{f32, {2, 3, 8, 8}}, {f32, {2, 8, 8, 2}}},
      {{i64, {4}}},
  };
  return shapes;
}

// Choices for everything that is not a tensor.
struct Choice {
  int64_t integer;
  bool boolean, optionals;
};
constexpr Choice choices[] = {{1, false, false}, {0, false, true}, {2, true, true}, {2, false, false}, {0, true, false}};

// Numbers that are in the domain of most functions; a matrix of them is not singular. Depends on `position` only.
Tensor make_tensor(const Shape &shape, size_t position) {
  Tensor tensor = at::empty(shape.sizes, at::TensorOptions(shape.dtype));
  const int64_t len = tensor.numel();
  for (int64_t i = 0; i < len; ++i) {
    const int64_t hash = (i * 7919 + static_cast<int64_t>(position) * 104729 + 12345) % 1009;
    switch (shape.dtype) {
    case f32:
      tensor.data_ptr<float>()[i] = 0.1f + 0.8f * static_cast<float>(hash) / 1009.0f;
      break;
    case ScalarType::BFloat16:
      tensor.data_ptr<at::BFloat16>()[i] = 0.1f + 0.8f * static_cast<float>(hash) / 1009.0f;
      break;
    case i64:
      tensor.data_ptr<int64_t>()[i] = hash % 4;
      break;
    default:
      tensor.data_ptr<bool>()[i] = hash % 2 == 0;
    }
  }
  return tensor;
}

class Arguments {
public:
  Arguments(const std::vector<Shape> &shapes, const Choice &choice, c10::Device device)
      : shapes_(shapes), choice_(choice), device_(device) {}

  // False if there is no value for an argument of this type.
  bool push_all(const c10::FunctionSchema &schema, Stack &stack) {
    for (const c10::Argument &argument : schema.arguments())
      if (!push(argument, stack))
        return false;
    return true;
  }

  // The tensors pushed, which the operator may have written to.
  const std::vector<Tensor> &tensors() const { return tensors_; }

private:
  Tensor next_tensor() {
    const Shape &shape = shapes_[std::min(tensors_.size(), shapes_.size() - 1)];
    tensors_.push_back(make_tensor(shape, tensors_.size()).to(device_));
    return tensors_.back();
  }

  std::vector<int64_t> integers(const c10::Argument &argument, const c10::ListType &) const {
    const int64_t value = argument.name() == "padding" ? 0
                          : argument.name() == "dilation" || argument.name() == "stride" ? 1
                                                                                          : choice_.integer;
    return std::vector<int64_t>(static_cast<size_t>(argument.N().value_or(2)), value);
  }

  bool push_list(const c10::Argument &argument, const c10::ListType &list, Stack &stack) {
    const c10::TypePtr element = list.getElementType();
    const auto optional = element->cast<c10::OptionalType>();
    if (element->kind() == TypeKind::TensorType) {
      stack.emplace_back(c10::List<Tensor>({next_tensor(), next_tensor()}));
    } else if (optional && optional->getElementType()->kind() == TypeKind::TensorType) {
      c10::List<std::optional<Tensor>> indices;
      indices.push_back(next_tensor());
      stack.emplace_back(std::move(indices));
    } else if (element->kind() == TypeKind::IntType || element->kind() == TypeKind::SymIntType) {
      stack.emplace_back(integers(argument, list));
    } else if (element->kind() == TypeKind::FloatType) {
      stack.emplace_back(std::vector<double>{0.5, 0.5});
    } else if (element->kind() == TypeKind::BoolType) {
      stack.emplace_back(c10::List<bool>({true, true, true}));
    } else if (element->kind() == TypeKind::NumberType) {
      stack.emplace_back(c10::List<at::Scalar>({at::Scalar(0.5), at::Scalar(0.5)}));
    } else {
      return false;
    }
    return true;
  }

  bool push(const c10::Argument &argument, Stack &stack) {
    c10::TypePtr type = argument.type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
      const bool is_device = type->kind() == TypeKind::DeviceObjType;
      if ((!choice_.optionals || type->kind() == TypeKind::GeneratorType || argument.default_value()) && !is_device) {
        stack.push_back(argument.default_value().value_or(IValue()));
        return true;
      }
    } else if (argument.default_value() && choice_.integer == 1) {
      stack.push_back(*argument.default_value());
      return true;
    }
    switch (type->kind()) {
    case TypeKind::TensorType:
      stack.emplace_back(next_tensor());
      return true;
    case TypeKind::ListType:
      return push_list(argument, *type->castRaw<c10::ListType>(), stack);
    case TypeKind::IntType:
    case TypeKind::SymIntType:
      stack.emplace_back(choice_.integer);
      return true;
    case TypeKind::FloatType:
      stack.emplace_back(0.5);
      return true;
    case TypeKind::BoolType:
      stack.emplace_back(choice_.boolean);
      return true;
    case TypeKind::NumberType:
      stack.emplace_back(at::Scalar(0.5));
      return true;
    case TypeKind::ScalarTypeType:
      stack.emplace_back(static_cast<int64_t>(f32));
      return true;
    case TypeKind::DeviceObjType:
      stack.emplace_back(device_);
      return true;
    case TypeKind::StringType:
      stack.emplace_back(std::string("none"));
      return true;
    default:
      return false;
    }
  }

  const std::vector<Shape> &shapes_;
  const Choice &choice_;
  c10::Device device_;
  std::vector<Tensor> tensors_;
};

// ---- comparing ----

void check_same(const Tensor &cpu, const Tensor &hpu) {
  TORCH_CHECK(cpu.defined() == hpu.defined(), "a result is undefined on one of them");
  if (!cpu.defined())
    return;
  TORCH_CHECK(hpu.device().type() == c10::DeviceType::HPU, "a result is on ", hpu.device());
  TORCH_CHECK(cpu.scalar_type() == hpu.scalar_type() && cpu.sizes() == hpu.sizes() && cpu.strides() == hpu.strides(),
              "a result is ", cpu.scalar_type(), cpu.sizes(), cpu.strides(), " on the cpu and ", hpu.scalar_type(),
              hpu.sizes(), hpu.strides(), " on the hpu");
  const Tensor a = cpu.contiguous(), b = hpu.cpu().contiguous();
  TORCH_CHECK(a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0,
              "the values differ: ", cpu, " on the cpu and ", hpu, " on the hpu");
}

void check_same(const IValue &cpu, const IValue &hpu) {
  if (cpu.isTensor()) {
    check_same(cpu.toTensor(), hpu.toTensor());
  } else if (cpu.isTensorList()) {
    const auto a = cpu.toTensorVector(), b = hpu.toTensorVector();
    TORCH_CHECK(a.size() == b.size(), "there are ", a.size(), " results on the cpu and ", b.size(), " on the hpu");
    for (size_t i = 0; i < a.size(); ++i)
      check_same(a[i], b[i]);
  } else {
    TORCH_CHECK(cpu == hpu, "the result is ", cpu, " on the cpu and ", hpu, " on the hpu");
  }
}

bool contains_any(const std::string &name, std::initializer_list<const char *> parts) {
  for (const char *part : parts)
    if (name.find(part) != std::string::npos)
      return true;
  return false;
}

// Operators for which made-up arguments test nothing: their results are not defined by their arguments, they are about
// other sorts of tensors, or they are internal ones that trust their arguments without a check.
bool is_left_out(const std::string &name) {
  if (contains_any(name, {"empty", "resize", "set_", "quantize", "mkldnn", "sparse", "nested", "jagged", "pinned",
                          "_backward", "native_", "segment_reduce", "ldl_solve", "rand", "view_as_complex", "seed"}))
    return true;
  const bool is_internal = name.rfind("aten::_", 0) == 0 && name.rfind("aten::__", 0) != 0;
  return is_internal && !contains_any(name, {"softmax", "_adaptive_avg", "_cdist_forward", "_unique", "_local_scalar",
                                             "logcumsumexp", "_prelu", "_upsample", "_index_put", "_fake_quantize"});
}

enum class Outcome { not_callable, same, refused };

struct Result {
  Outcome outcome;
  std::string text; // why it differs; empty if it does not
};

// libtorch's warnings about the made-up arguments tell nothing.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

Result compare(const c10::OperatorHandle &op, const std::vector<Shape> &shapes, const Choice &choice) {
  const c10::Device on_cpu(c10::DeviceType::CPU), on_hpu(c10::DeviceType::HPU, 0);
  Arguments cpu(shapes, choice, on_cpu), hpu(shapes, choice, on_hpu);
  Stack cpu_stack, hpu_stack;
  if (!cpu.push_all(op.schema(), cpu_stack) || cpu.tensors().empty())
    return {Outcome::not_callable, ""};
  try {
    at::manual_seed(3);
    op.callBoxed(cpu_stack);
  } catch (const std::exception &) {
    return {Outcome::not_callable, ""};
  }
  try {
    hpu.push_all(op.schema(), hpu_stack);
    at::manual_seed(3);
    op.callBoxed(hpu_stack);
    for (size_t i = 0; i < cpu_stack.size(); ++i)
      check_same(cpu_stack[i], hpu_stack[i]);
    for (size_t i = 0; i < cpu.tensors().size(); ++i)
      check_same(cpu.tensors()[i], hpu.tensors()[i]);
  } catch (const c10::TypeError &) {
    return {Outcome::refused, ""}; // a dtype that the device does not have
  } catch (const c10::Error &error) {
    return {Outcome::same, error.what_without_backtrace()};
  }
  return {Outcome::same, ""};
}

} // namespace
} // namespace voltaic::hpu

vt_error *vt_hpu_compare_operators(void (*report)(void *data, const char *op, const char *difference), void *data) {
  return voltaic::guard([&] {
    using namespace voltaic::hpu;
    const at::NoGradGuard no_grad;
    Silence silence;
    const c10::WarningUtils::WarningHandlerGuard silenced(&silence);
    for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (name.name.rfind("aten::", 0) != 0 || is_left_out(name.name) || !op ||
          !op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
        continue;
      const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      int num_compared = 0;
      for (const auto &shapes : tensor_shapes())
        for (const Choice &choice : choices) {
          if (num_compared >= 3)
            break;
          const Result result = compare(*op, shapes, choice);
          if (result.outcome != Outcome::same)
            continue;
          ++num_compared;
          report(data, full.c_str(), result.text.empty() ? nullptr : result.text.c_str());
        }
    }
  });
}
