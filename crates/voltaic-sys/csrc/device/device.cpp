#include "device/abi.h"
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

// tch has no HPU. The linker flags of voltaic-build put these two functions in the place of torch-sys's own, so that
// tch's Cuda(VT_TCH_HPU + i) means hpu:i, in both directions.
extern "C" {

c10::Device __wrap__Z13device_of_inti(int number) {
  switch (number) {
  case -3:
    return c10::Device(c10::DeviceType::Vulkan);
  case -2:
    return c10::Device(c10::DeviceType::MPS);
  default:
    if (number < 0)
      return c10::Device(c10::DeviceType::CPU);
    if (number >= VT_TCH_HPU)
      return c10::Device(c10::DeviceType::HPU, static_cast<c10::DeviceIndex>(number - VT_TCH_HPU));
    return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(number));
  }
}

int __real_at_device(vt_tensor tensor);

int __wrap_at_device(vt_tensor tensor) {
  if (tensor->defined() && tensor->is_hpu())
    return VT_TCH_HPU + tensor->device().index();
  return __real_at_device(tensor);
}
}

// torch-sys's, or the one above.
at::Device device_of_int(int number);

int32_t vt_tch_names_hpu(void) { return device_of_int(VT_TCH_HPU).type() == c10::DeviceType::HPU ? 1 : 0; }

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
