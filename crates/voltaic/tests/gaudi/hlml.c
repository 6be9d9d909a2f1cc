// Stands in for Habana's libhlml.so in tests: STUB_CARDS cards (2 if it is not set) of Gaudi2.
// STUB_INIT is what hlml_init returns.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { uint64_t free, total, used; } memory_info;
typedef struct { uint32_t aip, memory; } utilization_rates;

static unsigned number(const char *name, unsigned otherwise) {
  const char *text = getenv(name);
  return text == NULL ? otherwise : (unsigned)atoi(text);
}

static unsigned index_of(void *device) { return (unsigned)(uintptr_t)device - 1; }

int hlml_init(void) { return (int)number("STUB_INIT", 0); }
int hlml_shutdown(void) { return 0; }

int hlml_device_get_count(uint32_t *count) {
  *count = number("STUB_CARDS", 2);
  return 0;
}

int hlml_device_get_handle_by_index(uint32_t index, void **device) {
  if (index >= number("STUB_CARDS", 2))
    return 2;
  *device = (void *)(uintptr_t)(index + 1);
  return 0;
}

int hlml_device_get_name(void *device, char *text, uint32_t length) {
  (void)device;
  snprintf(text, length, "HL-225");
  return 0;
}

int hlml_device_get_uuid(void *device, char *text, uint32_t length) {
  snprintf(text, length, "01P0-STUB-%u", index_of(device));
  return 0;
}

int hlml_device_get_module_id(void *device, uint32_t *module) {
  *module = index_of(device) + 4; // so that index and module differ
  return 0;
}

int hlml_device_get_memory_info(void *device, memory_info *memory) {
  memory->total = (uint64_t)96 << 30;
  memory->used = (uint64_t)(index_of(device) + 1) << 30;
  memory->free = memory->total - memory->used;
  return 0;
}

int hlml_device_get_utilization_rates(void *device, utilization_rates *rates) {
  rates->aip = 10 * (index_of(device) + 1);
  rates->memory = 1;
  return 0;
}

int hlml_device_get_temperature(void *device, uint32_t sensor, uint32_t *degrees) {
  *degrees = sensor == 0 ? 30 + index_of(device) : 99;
  return 0;
}

int hlml_device_get_power_usage(void *device, uint32_t *milliwatts) {
  *milliwatts = 98400 + index_of(device);
  return 0;
}

int hlml_get_driver_version(char *text, uint32_t length) {
  snprintf(text, length, "1.24.0-stub");
  return 0;
}
