// What devices, memory and kernels do while a profile is taken: what libtorch's profiler does not see.
#pragma once

#include "profiler/abi.h"

#include <c10/macros/Macros.h>
#include <c10/util/ApproximateClock.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace voltaic::profiler {

// Bits of vt_profile_records; 0 while nothing is recorded.
extern std::atomic<int32_t> recorded;

inline bool records(int32_t what) { return C10_UNLIKELY((recorded.load(std::memory_order_relaxed) & what) != 0); }
inline bool records_devices() { return records(VT_RECORD_DEVICES); }

// Forgets what was recorded, and records from now on.
void start(int32_t what);
// Records no longer, and tells the visitor of what was recorded, unless it is null. Gives how many records were too many.
uint64_t stop(const vt_profile_visitor *visitor);

inline uint64_t ticks() { return static_cast<uint64_t>(c10::getApproximateTime()); }

// Something that lasted from then until now; nothing if it began while nothing was recorded, at 0.
void add_since(uint64_t began, int32_t row, int device, const char *name);
// A range of this thread that lasted from then until now; nothing if it began at 0, or before the recording did.
void add_range(uint64_t began, const std::string &name);

// What a device, or the host as -1, does from here to the end of the scope, on a row of its own. Within another such scope of the thread it is
// part of that.
class DeviceScope {
public:
  DeviceScope() = default; // records nothing
  // `launched`: when the host began to ask for it, 0 if that took no time; `bytes` of a copy, else -1. The name must live as
  // long as the scope.
  DeviceScope(int32_t row, int device, const char *name, uint64_t launched = 0, int64_t bytes = -1) {
    if (records_devices())
      begin(row, device, name, launched, bytes);
  }
  ~DeviceScope() {
    if (C10_UNLIKELY(name_ != nullptr))
      end();
  }
  DeviceScope(const DeviceScope &) = delete;
  DeviceScope &operator=(const DeviceScope &) = delete;

private:
  void begin(int32_t row, int device, const char *name, uint64_t launched, int64_t bytes);
  void end();

  const char *name_ = nullptr;
  uint64_t launched_ = 0, began_ = 0;
  int64_t bytes_ = -1;
  int32_t row_ = 0, device_ = 0, outer_ = 0;
};

} // namespace voltaic::profiler
