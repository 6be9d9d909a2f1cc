// Stands in for Habana's plugin in tests: registers a back end for DeviceType::HPU by static initialisers, as the
// plugin does, with one device in host memory whose operators fall back to the CPU's kernels by copies.
// Prints "stub plugin: module=..., lazy=..." when its device is first used.
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device hpu(DeviceType::HPU, 0);

void announce() {
  static const bool once = [] {
    const auto text = [](const char *name) { return std::getenv(name) ? std::getenv(name) : "none"; };
    std::fprintf(stderr, "stub plugin: module=%s, lazy=%s\n", text("HLS_MODULE_ID"), text("PT_HPU_LAZY_MODE"));
    return true;
  }();
  (void)once;
}

struct StubAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    announce();
    void *data = bytes == 0 ? nullptr : std::malloc(bytes);
    return {data, data, &std::free, hpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void *to, const void *from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
StubAllocator stub_allocator;
REGISTER_ALLOCATOR(DeviceType::HPU, &stub_allocator);

struct StubGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::HPU; }
  Device exchangeDevice(Device) const override { return hpu; }
  Device getDevice() const override { return hpu; }
  void setDevice(Device device) const override {
    TORCH_CHECK(!device.has_index() || device.index() == 0, "active device: ", device.index(), " != 0");
  }
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, hpu); }
  Stream exchangeStream(Stream) const override { return getStream(hpu); }
  void synchronizeDevice(const DeviceIndex) const override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(HPU, StubGuard);

at::Tensor on_cpu(const at::Tensor &tensor) {
  if (tensor.is_cpu())
    return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           &stub_allocator, c10::DispatchKeySet(c10::DispatchKey::HPU),
                                           dtype.value_or(at::kFloat));
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &stub_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::HPU), dtype.value_or(at::kFloat), format);
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor &resize(const at::Tensor &self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const auto wanted = C10_AS_INTARRAYREF_SLOW(sizes);
  if (self.sizes() == wanted)
    return self;
  const size_t bytes = c10::multiply_integers(wanted) * self.itemsize();
  if (bytes > self.storage().nbytes()) {
    self.storage().set_data_ptr(stub_allocator.allocate(bytes));
    self.storage().set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(wanted);
  return self;
}

at::Scalar read(const at::Tensor &self) { return on_cpu(self).item(); }

at::Tensor as_strided(const at::Tensor &self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

TORCH_LIBRARY_IMPL(aten, HPU, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(read));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("resize_", TORCH_FN(resize));
}

void fall_back(const c10::OperatorHandle &op, torch::jit::Stack *stack) { at::native::cpu_fallback(op, stack); }
TORCH_LIBRARY_IMPL(_, AutocastHPU, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
// Some of those that the real one casts, as it does.
TORCH_LIBRARY_IMPL(aten, AutocastHPU, m) {
  KERNEL(DeviceType::HPU, addmm, lower_precision_fp)
  KERNEL(DeviceType::HPU, conv2d, lower_precision_fp)
  KERNEL(DeviceType::HPU, cross_entropy_loss, fp32)
  KERNEL(DeviceType::HPU, linear, lower_precision_fp)
  KERNEL(DeviceType::HPU, matmul, lower_precision_fp)
  KERNEL(DeviceType::HPU, mm, lower_precision_fp)
}
TORCH_LIBRARY_IMPL(_, HPU, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }

} // namespace
