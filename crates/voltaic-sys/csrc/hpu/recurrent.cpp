// Recurrent layers. libtorch has other algorithms for them on the CPU than elsewhere (mkldnn's LSTM, one product for
// all time steps), so they run as a whole on CPU tensors that stand for the HPU's, and record their backward there.
// Memory that the backward takes for a while is the host's.
#include "hpu/abi.h"
#include "hpu/alias.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <memory>

namespace voltaic::hpu {
namespace {

using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using torch::jit::Stack;

// A storage on `device` over the bytes of the tensor's, which it keeps alive. (Only those: the tensor itself would keep
// its autograd history.)
c10::Storage storage_over(const Tensor &tensor, c10::Device device, c10::Allocator *allocator) {
  const c10::Storage &owner = tensor.storage();
  c10::DataPtr data(owner.mutable_data(), new c10::Storage(owner),
                    [](void *kept) { delete static_cast<c10::Storage *>(kept); }, device);
  return c10::Storage(c10::Storage::use_byte_size_t(), owner.nbytes(), std::move(data), allocator,
                      /*resizable=*/false);
}

Tensor over_on_hpu(const Tensor &tensor, c10::Device device) {
  return tensor_on_hpu(tensor.unsafeGetTensorImpl(), storage_over(tensor, device, allocator()));
}

Tensor over_on_cpu(const Tensor &tensor) {
  const c10::Device cpu(c10::DeviceType::CPU);
  Tensor over = at::detail::make_tensor<c10::TensorImpl>(storage_over(tensor, cpu, cpu_allocator()), cpu_only,
                                                         tensor.dtype());
  over.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return over;
}

struct ToHpu;

// The same bytes as a CPU tensor; the gradient goes the other way.
struct ToCpu : torch::autograd::Function<ToCpu> {
  static Tensor forward(AutogradContext *context, const Tensor &tensor) {
    context->saved_data["device"] = tensor.device();
    return over_on_cpu(tensor);
  }
  static variable_list backward(AutogradContext *context, const variable_list &gradients);
};

// The same bytes as a tensor of an HPU.
struct ToHpu : torch::autograd::Function<ToHpu> {
  static Tensor forward(AutogradContext *, const Tensor &tensor, c10::Device device) {
    return over_on_hpu(tensor, device);
  }
  static variable_list backward(AutogradContext *, const variable_list &gradients) {
    const Tensor &gradient = gradients[0];
    return {gradient.defined() ? ToCpu::apply(gradient) : Tensor(), Tensor()};
  }
};

variable_list ToCpu::backward(AutogradContext *context, const variable_list &gradients) {
  const Tensor &gradient = gradients[0];
  // a copy: the gradient's memory is the host's, and it may outlive the backward
  return {gradient.defined() ? gradient.to(context->saved_data["device"].toDevice()) : Tensor()};
}

class CpuRun {
public:
  Tensor enter(const Tensor &tensor) {
    if (!tensor.defined() || !is_hpu(tensor.unsafeGetTensorImpl()))
      return tensor;
    if (!device_.has_value())
      device_ = tensor.device();
    TORCH_CHECK(*device_ == tensor.device(), "Expected all tensors to be on the same device, but found at least two "
                "devices, ", *device_, " and ", tensor.device(), "!");
    check_dtype(tensor.scalar_type());
    return ToCpu::apply(tensor);
  }

  void enter(IValue &value) {
    if (value.isTensor()) {
      value = IValue(enter(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<Tensor> entered;
      for (const Tensor &tensor : value.toTensorVector())
        entered.push_back(enter(tensor));
      value = IValue(std::move(entered));
    }
  }

  c10::Device device() const {
    return device_.value_or(c10::Device(c10::DeviceType::HPU, static_cast<c10::DeviceIndex>(current_device)));
  }

private:
  std::optional<c10::Device> device_;
};

void run_on_cpu(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
  const size_t num_arguments = op.schema().arguments().size();
  const size_t num_returns = op.schema().returns().size();
  CpuRun run;
  for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i)
    run.enter((*stack)[i]);
  {
    const PoolScope pool(pool_of(run.device().index()));
    op.callBoxed(stack);
  }
  for (size_t i = stack->size() - num_returns; i < stack->size(); ++i)
    if ((*stack)[i].isTensor())
      (*stack)[i] = IValue(ToHpu::apply((*stack)[i].toTensor(), run.device()));
}

} // namespace

void register_recurrent(torch::Library &library) {
  for (const char *layer : {"lstm", "gru", "rnn_tanh", "rnn_relu"})
    for (const char *overload : {"input", "data"})
      library.impl((std::string(layer) + "." + overload).c_str(),
                   torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

} // namespace voltaic::hpu
