// Where tensors go that autograd saves for the backward pass. libtorch asks its engine for the hooks of each; the engine here is
// libtorch's but for that.
#include "autograd/saved_tensors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace voltaic::autograd {

namespace {

constinit thread_local std::vector<Frame *> frames;

class Engine final : public torch::autograd::Engine {
public:
  static torch::autograd::Engine &get() {
    static Engine engine;
    return engine;
  }
  ~Engine() override { stop(); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return frames.empty() ? nullptr : frames.back()->hooks();
  }
};

// before any thread runs a backward pass, so that all passes have the same engine
const bool is_installed = [] {
  torch::autograd::set_default_engine_stub(&Engine::get);
  return true;
}();

uint32_t version_of(const at::Tensor &tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
}

} // namespace

FrameScope::FrameScope(Frame &frame) {
  TORCH_CHECK(is_installed, "the engine of autograd is not there");
  frames.push_back(&frame);
}

FrameScope::~FrameScope() { frames.pop_back(); }

Kept::Kept(at::Tensor saved) : tensor(std::move(saved)), version(version_of(tensor)) {}

bool Kept::is_unchanged() const { return version_of(tensor) == version; }

void Kept::check() const {
  TORCH_CHECK(is_unchanged(),
              "one of the variables needed for gradient computation has been modified by an inplace operation: [",
              tensor.toString(), " ", tensor.sizes(), "] is at version ", version_of(tensor), "; expected version ",
              version, " instead");
}

bool is_trained_leaf(const at::TensorBase &tensor) { return tensor.requires_grad() && tensor.is_leaf(); }

} // namespace voltaic::autograd
