// Operators that need no kernel of the CPU: they make tensors, views or copies.
#include "hpu/abi.h"
#include "hpu/alias.h"

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/ops/_to_copy_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/resize_ops.h>

namespace voltaic::hpu {
namespace {

using c10::IntArrayRef;
using c10::ScalarType;
using std::optional;

// Set while a tensor of the device is converted to a dtype that the device does not compute with: such a tensor may
// only be read back.
constinit thread_local bool converts_for_reading = false;

int index_of(optional<c10::Device> device) {
  const int index = device.has_value() && device->has_index() ? device->index() : current_device;
  check_device_index(index);
  return index;
}

ScalarType dtype_of(optional<ScalarType> dtype) {
  const ScalarType chosen = c10::dtype_or_default(dtype);
  if (!converts_for_reading)
    check_dtype(chosen);
  return chosen;
}

Tensor empty(IntArrayRef size, optional<ScalarType> dtype, optional<c10::Layout>, optional<c10::Device> device,
             optional<bool>, optional<c10::MemoryFormat> format) {
  const PoolScope pool(pool_of(index_of(device)));
  return at::detail::empty_generic(size, allocator(), hpu_only, dtype_of(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<ScalarType> dtype, optional<c10::Layout>,
                     optional<c10::Device> device, optional<bool>) {
  const PoolScope pool(pool_of(index_of(device)));
  return at::detail::empty_strided_generic(size, stride, allocator(), hpu_only, dtype_of(dtype));
}

Tensor to_copy(const Tensor &self, optional<ScalarType> dtype, optional<c10::Layout> layout,
               optional<c10::Device> device, optional<bool> pinned, bool non_blocking,
               optional<c10::MemoryFormat> format) {
  struct Scope {
    explicit Scope(bool converts) : before(std::exchange(converts_for_reading, converts)) {}
    ~Scope() { converts_for_reading = before; }
    bool before;
  } scope(is_hpu(self.unsafeGetTensorImpl())); // else it is a copy from the host
  return at::_ops::_to_copy::redispatch(cpu_only, self, dtype, layout, device, pinned, non_blocking, format);
}

// ---- views ----

Tensor as_strided(const Tensor &self, IntArrayRef size, IntArrayRef stride, optional<int64_t> storage_offset) {
  return view_of(self, size, stride, storage_offset.value_or(self.storage_offset()));
}

Tensor view(const Tensor &self, IntArrayRef size) {
  const at::DimVector sizes = at::infer_size_dv(size, self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one dimension spans across "
              "two contiguous subspaces). Use .reshape(...) instead.");
  return view_of(self, sizes, *strides, self.storage_offset());
}

Tensor reshape_alias(const Tensor &self, IntArrayRef size, IntArrayRef stride) {
  return view_of(self, size, stride, self.storage_offset());
}

Tensor alias(const Tensor &self) { return view_of(self, self.sizes(), self.strides(), self.storage_offset()); }

std::vector<Tensor> split_with_sizes(const Tensor &self, IntArrayRef split_sizes, int64_t dim) {
  TORCH_CHECK(self.dim() != 0, "split expects at least a 1-dimensional tensor");
  dim = at::maybe_wrap_dim(dim, self.dim());
  at::DimVector sizes(self.sizes().begin(), self.sizes().end());
  std::vector<Tensor> parts;
  parts.reserve(split_sizes.size());
  int64_t start = 0;
  for (const int64_t size : split_sizes) {
    TORCH_CHECK(size >= 0, "split_with_sizes expects split_sizes have only non-negative entries, but got split_sizes=",
                split_sizes);
    sizes[dim] = size;
    parts.push_back(view_of(self, sizes, self.strides(), self.storage_offset() + start * self.stride(dim)));
    start += size;
  }
  TORCH_CHECK(start == self.size(dim), "split_with_sizes expects split_sizes to sum exactly to ", self.size(dim),
              " (input tensor's size at dimension ", dim, "), but got split_sizes=", split_sizes);
  return parts;
}

// ---- copies, between any two devices ----

Tensor on_host(const Tensor &tensor) { return is_hpu(tensor.unsafeGetTensorImpl()) ? alias_on_cpu(tensor) : tensor; }

Tensor &copy_(Tensor &self, const Tensor &source, bool non_blocking) {
  const Tensor &owner = is_hpu(self.unsafeGetTensorImpl()) ? self : source;
  const char *name = !is_hpu(self.unsafeGetTensorImpl())     ? "Memcpy DtoH"
                     : !is_hpu(source.unsafeGetTensorImpl()) ? "Memcpy HtoD"
                                                             : "Memcpy DtoD";
  const KernelScope scope(owner.device().index(), name, source.nbytes());
  Tensor target = on_host(self);
  at::_ops::copy_::redispatch(cpu_only, target, on_host(source), non_blocking);
  return self;
}

Tensor copy_from(const Tensor &self, const Tensor &target, bool non_blocking) {
  Tensor result = target;
  copy_(result, self, non_blocking);
  return result;
}

// ---- changes of a tensor's storage ----

const Tensor &resize_(const Tensor &self, c10::SymIntArrayRef size, optional<c10::MemoryFormat> format) {
  const KernelScope scope(self.device().index());
  const Tensor on_cpu = alias_on_cpu(self);
  at::_ops::resize_::redispatch(cpu_only, on_cpu, size, format);
  carry_over(self.unsafeGetTensorImpl(), on_cpu.unsafeGetTensorImpl());
  return self;
}

Tensor &set_strided(Tensor &self, c10::Storage source, int64_t storage_offset, IntArrayRef size, IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(),
              "\". This is no longer allowed; the devices must match.");
  c10::TensorImpl *impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, storage_offset);
  return self;
}

Tensor &set_storage(Tensor &self, c10::Storage source) {
  const int64_t len = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_strided(self, std::move(source), 0, {len}, {1});
}

Tensor &set_empty(Tensor &self) {
  const PoolScope pool(pool_of(self.device().index()));
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, allocator(), /*resizable=*/true);
  return set_strided(self, std::move(none), 0, {0}, {1});
}

} // namespace

void register_direct(torch::Library &library, Names &done) {
  const auto add = [&](const char *name, auto *kernel) {
    library.impl(name, torch::CppFunction::makeFromUnboxedFunction(kernel));
    done.insert(name);
  };
  add("empty.memory_format", &empty);
  add("empty_strided", &empty_strided);
  add("_to_copy", &to_copy);
  add("as_strided", &as_strided);
  add("view", &view);
  add("_reshape_alias", &reshape_alias);
  add("alias", &alias);
  add("split_with_sizes", &split_with_sizes);
  add("copy_", &copy_);
  add("_copy_from", &copy_from);
  add("resize_", &resize_);
  add("set_.source_Storage_storage_offset", &set_strided);
  add("set_.source_Storage", &set_storage);
  add("set_", &set_empty);
}

} // namespace voltaic::hpu
