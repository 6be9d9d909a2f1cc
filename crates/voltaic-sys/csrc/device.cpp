#include "error.h"

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <torch/headeronly/version.h>

#include <cstring>

static_assert(VT_CPU == static_cast<int32_t>(c10::DeviceType::CPU));
static_assert(VT_CUDA == static_cast<int32_t>(c10::DeviceType::CUDA));
static_assert(VT_HPU == static_cast<int32_t>(c10::DeviceType::HPU));

vt_error *vt_tensor_device(vt_tensor tensor, int32_t *device_type, int32_t *device_index) {
  return voltaic::guard([&] {
    const c10::Device device = tensor->device();
    *device_type = static_cast<int32_t>(device.type());
    *device_index = device.has_index() ? device.index() : 0;
  });
}

const char *vt_libtorch_version(void) { return TORCH_VERSION; }

int32_t vt_dtype_number(const char *name) {
  struct Entry {
    const char *name;
    c10::ScalarType dtype;
  };
  static constexpr Entry table[] = {
      {"uint8", c10::ScalarType::Byte},          {"int8", c10::ScalarType::Char},
      {"int16", c10::ScalarType::Short},         {"int32", c10::ScalarType::Int},
      {"int64", c10::ScalarType::Long},          {"float16", c10::ScalarType::Half},
      {"float32", c10::ScalarType::Float},       {"float64", c10::ScalarType::Double},
      {"bool", c10::ScalarType::Bool},           {"bfloat16", c10::ScalarType::BFloat16},
      {"float8_e4m3fn", c10::ScalarType::Float8_e4m3fn}, {"float8_e5m2", c10::ScalarType::Float8_e5m2},
  };
  for (const Entry &entry : table)
    if (std::strcmp(entry.name, name) == 0)
      return static_cast<int32_t>(entry.dtype);
  return -1;
}
