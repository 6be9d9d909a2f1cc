#pragma once

#include <functional>
#include <vector>

namespace voltaic::autograd {

// The number of the backward pass that this thread runs, the innermost one.
inline constexpr int no_pass = -1;
int current_pass();
inline bool is_in_backward() { return current_pass() != no_pass; }

// libtorch calls code of ours within a backward pass, from construction to destruction. That code may run backward passes of its own
// (a checkpoint recomputes its segment), which are nested in the pass that called it.
class PassScope {
public:
  PassScope();
  ~PassScope();
  PassScope(const PassScope &) = delete;
  PassScope &operator=(const PassScope &) = delete;

  // To be called when the code has succeeded: hands what nested passes have left for the end to the pass that called it.
  void finish();

private:
  friend void at_backward_end(std::function<void()> callback);

  int pass_;
  std::vector<std::function<void()>> at_end_;
};

// Calls `callback` at the end of the backward pass of this thread; of nested ones, at the end of the outermost.
void at_backward_end(std::function<void()> callback);

} // namespace voltaic::autograd
