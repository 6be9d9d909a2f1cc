// How C++ exceptions become vt_error values. No exception leaves the shim.
#pragma once

#include "voltaic.h"

#ifndef NDEBUG
#error "libtorch is built with NDEBUG, on which inline functions of its headers (at::RecordFunction, the dispatcher) depend"
#endif

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <string>

struct vt_error {
  int32_t kind;
  std::string message;
};

namespace voltaic {

// Runs `body`; null on success, else a vt_error the caller owns.
template <typename Body> vt_error *guard(Body &&body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::OutOfMemoryError &error) {
    return new vt_error{VT_ERROR_OUT_OF_MEMORY, error.what_without_backtrace()};
  } catch (const c10::IndexError &error) {
    return new vt_error{VT_ERROR_INDEX, error.what_without_backtrace()};
  } catch (const c10::NotImplementedError &error) {
    return new vt_error{VT_ERROR_NOT_IMPLEMENTED, error.what_without_backtrace()};
  } catch (const c10::Error &error) {
    return new vt_error{VT_ERROR_OTHER, error.what_without_backtrace()};
  } catch (const std::exception &error) {
    return new vt_error{VT_ERROR_OTHER, error.what()};
  } catch (...) {
    return new vt_error{VT_ERROR_OTHER, "a C++ exception that is not a std::exception"};
  }
}

// Borrowed tensors as the vector libtorch's list arguments want; null gives an empty list.
inline std::vector<at::Tensor> to_list(const vt_tensor *tensors, size_t len) {
  std::vector<at::Tensor> list;
  if (tensors != nullptr) {
    list.reserve(len);
    for (size_t i = 0; i < len; ++i)
      list.push_back(*tensors[i]);
  }
  return list;
}

inline std::optional<at::Tensor> to_optional(vt_tensor tensor) {
  return tensor == nullptr ? std::nullopt : std::optional<at::Tensor>(*tensor);
}

} // namespace voltaic
