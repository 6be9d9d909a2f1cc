// What the back ends of c10d share.
#pragma once

#include "ranks/abi.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

struct vt_group {
  c10::intrusive_ptr<c10d::Backend> backend;
};
