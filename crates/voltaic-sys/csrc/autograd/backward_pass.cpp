#include "autograd/backward_pass.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace voltaic::autograd {

namespace {

// The scopes of this thread, the outermost first. libtorch runs a nested pass on the thread that starts it (up to its limit of
// recursion, 60), so that the first scope is of the outermost pass.
thread_local std::vector<PassScope *> scopes;

void queue(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

} // namespace

int current_pass() { return torch::autograd::get_current_graph_task_id(); }

PassScope::PassScope() : pass_(current_pass()) { scopes.push_back(this); }

PassScope::~PassScope() { scopes.pop_back(); }

void PassScope::finish() {
  for (auto &callback : std::exchange(at_end_, {}))
    queue(std::move(callback));
}

void at_backward_end(std::function<void()> callback) {
  TORCH_CHECK(is_in_backward(), "no backward pass is in progress");
  const bool is_nested = !scopes.empty() && scopes.front()->pass_ != current_pass();
  if (is_nested)
    scopes.front()->at_end_.push_back(std::move(callback));
  else
    queue(std::move(callback));
}

} // namespace voltaic::autograd
