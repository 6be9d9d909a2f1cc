// Kernels written in Rust in the place of libtorch's for the CPU. What they do not cover goes to libtorch's own, which
// also says what is wrong with a call.
#include "kernels/kernels.h"

namespace voltaic {

vt_kernels rust{};
thread_local const std::vector<std::pair<uint32_t, Tensor>> *wanted_results = nullptr;

void throw_failure() {
  char text[1024] = "";
  if (rust.failure(text, sizeof(text)) == VT_ERROR_OUT_OF_MEMORY)
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  TORCH_CHECK(false, text);
}

namespace {

// libtorch warns of each kernel that takes another's place, which is what is wanted here.
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning &) override {}
};

// Registrations for the rest of the process.
torch::Library &new_library() {
  return *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
}

} // namespace
} // namespace voltaic

vt_error *vt_install_convolution_grads() {
  return voltaic::guard([] {
    using namespace voltaic;
    NoWarnings silence;
    const c10::WarningUtils::WarningHandlerGuard guard(&silence);
    install_convolution_grads(new_library());
  });
}

vt_error *vt_install_kernels(const vt_kernels *kernels) {
  return voltaic::guard([&] {
    using namespace voltaic;
    TORCH_CHECK(kernels->failure != nullptr, "kernels come with a function that tells why one failed");
    rust = *kernels;
    NoWarnings silence;
    const c10::WarningUtils::WarningHandlerGuard guard(&silence);
    auto &library = new_library();
    install_products(library);
    install_attention(library);
    install_elementwise(library);
    install_convolutions(library);
    install_images(library);
    install_updates(library);
  });
}
