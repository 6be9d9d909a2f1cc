#include "profiler/events.h"
#include "error.h"

#include <ATen/record_function.h>

#include <mutex>
#include <optional>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace voltaic::profiler {

std::atomic<int32_t> recorded{0};

namespace {

struct Activity {
  std::string name, details;
  uint64_t launched, began, ended, thread;
  int64_t system_thread;
  int32_t row, device;
};

struct MemoryChange {
  uint64_t at, thread;
  int64_t system_thread;
  vt_memory_change change;
};

// What was recorded since the start.
struct Records {
  std::mutex mutex;
  std::vector<Activity> activities;
  std::vector<MemoryChange> memory;
  uint64_t left_out = 0;
  uint64_t since = 0; // ticks at the start
  std::optional<c10::ApproximateClockToUnixTimeConverter> clock;
};

// More than fits into a trace that anyone can open; the rest is counted only.
constexpr size_t max_records = 4'000'000;

Records &all_records() {
  static auto *all = new Records; // never destroyed: memory may be given back after it would be
  return *all;
}

int64_t system_thread() {
  static thread_local const int64_t thread = syscall(SYS_gettid);
  return thread;
}

// Row of the innermost open scope of this thread; -1 if there is none.
constinit thread_local int32_t open_row = -1;

void add(Activity activity) {
  Records &all = all_records();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.activities.size() >= max_records)
    ++all.left_out;
  else
    all.activities.push_back(std::move(activity));
}

} // namespace

void DeviceScope::begin(int32_t row, int device, const char *name, uint64_t launched, int64_t bytes) {
  name_ = name;
  row_ = row;
  device_ = device;
  launched_ = launched;
  bytes_ = bytes;
  outer_ = std::exchange(open_row, row);
  began_ = ticks();
}

void DeviceScope::end() {
  const uint64_t ended = ticks();
  open_row = outer_;
  // what a graph replays is on the row of operators
  if (outer_ == -1 || (outer_ == VT_ROW_GRAPHS && row_ == VT_ROW_OPERATORS))
    add({name_, bytes_ < 0 ? "" : "\"bytes\": " + std::to_string(bytes_), launched_, began_, ended, at::RecordFunction::currentThreadId(), system_thread(), row_, device_});
}

void add_since(uint64_t began, int32_t row, int device, const char *name) {
  if (began != 0 && records_devices())
    add({name, "", 0, began, ticks(), at::RecordFunction::currentThreadId(), system_thread(), row, device});
}

void add_range(uint64_t began, const std::string &name) {
  if (began == 0 || !records(VT_RECORD_RANGES))
    return;
  Activity range{name, "", 0, began, ticks(), at::RecordFunction::currentThreadId(), system_thread(), VT_ROW_RANGES, -1};
  Records &all = all_records();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (began < all.since)
    return;
  if (all.activities.size() >= max_records)
    ++all.left_out;
  else
    all.activities.push_back(std::move(range));
}

void start(int32_t what) {
  Records &all = all_records();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.activities.clear();
  all.memory.clear();
  all.left_out = 0;
  all.since = ticks();
  all.clock.emplace();
  recorded.store(what, std::memory_order_relaxed);
}

uint64_t stop(const vt_profile_visitor *visitor) {
  recorded.store(0, std::memory_order_relaxed);
  Records &all = all_records();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const std::vector<Activity> activities = std::exchange(all.activities, {});
  const std::vector<MemoryChange> memory = std::exchange(all.memory, {});
  if (visitor == nullptr || !all.clock.has_value())
    return all.left_out;
  const auto nanoseconds = all.clock->makeConverter();
  for (const Activity &done : activities) {
    const vt_activity told{done.name.c_str(),
                           done.details.c_str(),
                           done.launched == 0 ? 0 : nanoseconds(done.launched),
                           nanoseconds(done.began),
                           nanoseconds(done.ended),
                           done.row,
                           done.device,
                           done.thread,
                           done.system_thread};
    visitor->activity(visitor->data, &told);
  }
  for (const MemoryChange &change : memory) {
    vt_memory_change told = change.change;
    told.at = nanoseconds(change.at);
    told.thread = change.thread;
    told.system_thread = change.system_thread;
    visitor->memory(visitor->data, &told);
  }
  return all.left_out;
}

} // namespace voltaic::profiler

using namespace voltaic::profiler;

uint64_t vt_profile_ticks(void) { return ticks(); }

void vt_profile_add_activity(const vt_activity *activity) {
  if (!voltaic::profiler::records(VT_RECORD_DEVICES | VT_RECORD_KERNELS))
    return;
  add({activity->name, activity->details, static_cast<uint64_t>(activity->launched),
       static_cast<uint64_t>(activity->began), static_cast<uint64_t>(activity->ended),
       at::RecordFunction::currentThreadId(), system_thread(), activity->row, activity->device});
}

void vt_profile_add_memory(const vt_memory_change *change) {
  if (!voltaic::profiler::records(VT_RECORD_MEMORY))
    return;
  Records &all = all_records();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.memory.size() >= max_records)
    ++all.left_out;
  else
    all.memory.push_back({ticks(), at::RecordFunction::currentThreadId(), system_thread(), *change});
}
