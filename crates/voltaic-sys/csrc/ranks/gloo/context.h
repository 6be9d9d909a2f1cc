// What libtorch's ProcessGroupGloo.hpp names of gloo, whose headers the wheel lacks. Only declarations: the classes are
// inside libtorch_cpu.so, and this shim holds pointers to them, makes none and calls none. Their layout is of no account.
#pragma once

#include <chrono>

namespace gloo {

class Context {
public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {

class Device;

class UnboundBuffer {
public:
  virtual ~UnboundBuffer();
};

} // namespace transport
} // namespace gloo
