#include "error.h"
#include "hpu/abi.h"
#include "hpu/alias.h"

#include <ATen/Context.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <c10/core/Allocator.h>

namespace voltaic::hpu {
namespace {

using c10::DispatchKey;

// The libraries hold the registrations and live as long as the process.
torch::Library &new_library(const char *name_space, DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);
}

// Which kernel attention uses is decided on the tensors as the CPU would see them.
int64_t choose_attention(const Tensor &query, const Tensor &key, const Tensor &value,
                         const std::optional<Tensor> &mask, double dropout, bool is_causal,
                         std::optional<double> scale, bool enable_gqa) {
  const std::optional<Tensor> cpu_mask =
      mask.has_value() && mask->defined() ? std::optional(look_alike_on_cpu(*mask)) : std::nullopt;
  return at::native::_fused_sdp_choice_cpp(look_alike_on_cpu(query), look_alike_on_cpu(key), look_alike_on_cpu(value),
                                           cpu_mask, dropout, is_causal, scale, enable_gqa);
}

void refuse_sparse(const c10::OperatorHandle &op, c10::DispatchKeySet, torch::jit::Stack *) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": an HPU has no sparse tensors; use dense ones, or keep this part on the CPU");
}

void register_kernels() {
  torch::Library &library = new_library("aten", DispatchKey::HPU);
  Names done;
  register_direct(library, done);
  register_fast(library, done);
  register_boxed(library, done);
  register_recurrent(library);
  register_recurrent(new_library("aten", DispatchKey::AutogradHPU));
  new_library("_", DispatchKey::HPU).fallback(boxed_fallback());
  // libtorch has none for this key, so that each operator would need its own
  new_library("_", DispatchKey::AutocastHPU).fallback(torch::CppFunction::makeFallthrough());
  for (const DispatchKey key : {DispatchKey::SparseHPU, DispatchKey::SparseCsrHPU})
    new_library("_", key).fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>());
  at::native::_fused_sdp_choice_stub.set_hpu_dispatch_ptr(&choose_attention);
}

void check_that_nothing_is_there() {
  TORCH_CHECK(has_cpu_allocator(), "the memory pools are not installed");
  TORCH_CHECK(!c10::impl::hasDeviceGuardImpl(c10::DeviceType::HPU),
              "another HPU back end is loaded in this process, which can have only one");
  check_hooks();
}

} // namespace
} // namespace voltaic::hpu

vt_error *vt_hpu_emulator_init(const vt_hpu_options *options) {
  return voltaic::guard([&] {
    using namespace voltaic::hpu;
    TORCH_CHECK(!backend.is_active, "the HPU emulator is already set up");
    TORCH_CHECK(options->num_devices >= 1 && options->num_devices <= VT_HPU_MAX_DEVICES, options->num_devices,
                " HPUs asked for; 1 to ", VT_HPU_MAX_DEVICES, " can be emulated");
    check_that_nothing_is_there();
    backend.num_devices = options->num_devices;
    backend.dtypes = options->dtypes;
    backend.explain_dtype = options->explain_dtype;
    c10::SetAllocator(c10::DeviceType::HPU, allocator(), /*priority=*/1);
    register_guard();
    register_kernels();
    backend.is_active = true;
  });
}

vt_error *vt_hpu_adopt_plugin(void) {
  return voltaic::guard([] {
    TORCH_CHECK(c10::impl::hasDeviceGuardImpl(c10::DeviceType::HPU) && c10::GetAllocator(c10::DeviceType::HPU) != nullptr,
                "the plugin gave libtorch no back end for hpu; it is none of Habana's, or one for another libtorch");
    voltaic::hpu::check_hooks();
  });
}

uint64_t vt_hpu_copied_outputs(void) { return voltaic::hpu::backend.copied_outputs.load(std::memory_order_relaxed); }
