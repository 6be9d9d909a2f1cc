#include "profiler/abi.h"
#include "error.h"
#include "profiler/events.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <atomic>
#include <cstdlib>
#include <set>
#include <sstream>
#include <string>

// Kineto's own, whose header does not come with libtorch: messages below this level are not written.
namespace libkineto {
class Logger {
public:
  static std::atomic_int severityLevel_;
};
} // namespace libkineto

namespace {

// Without CUDA devices Kineto writes an error about them to standard error. KINETO_LOG_LEVEL of the user's wins.
void quiet() {
  constexpr int none = 100;
  if (std::getenv("KINETO_LOG_LEVEL") == nullptr)
    libkineto::Logger::severityLevel_ = none;
}

using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;

ProfilerConfig config_of(const vt_profile_options &options) {
  // Not profile_all_threads: an operator that another thread is running when the profiler stops would end by writing to
  // an event that is freed by then.
  return ProfilerConfig(torch::profiler::impl::ProfilerState::KINETO, options.record_shapes != 0,
                        options.profile_memory != 0, /*with_stack=*/false, options.with_flops != 0,
                        /*with_modules=*/false);
}

std::set<ActivityType> activities_of(const vt_profile_options &options) {
  std::set<ActivityType> activities{ActivityType::CPU};
  if (options.with_cuda != 0)
    activities.insert(ActivityType::CUDA);
  return activities;
}

std::string text_of(c10::ArrayRef<std::vector<int64_t>> shapes) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < shapes.size(); ++i) {
    text << (i == 0 ? "[" : ", [");
    for (size_t k = 0; k < shapes[i].size(); ++k)
      text << (k == 0 ? "" : ", ") << shapes[i][k];
    text << ']';
  }
  text << ']';
  return text.str();
}

// A range, which libtorch records on the thread of the profiler, and we on other threads.
struct Range {
  at::RecordFunction record{at::RecordScope::USER_SCOPE};
  std::string name;
  uint64_t began = 0; // unless libtorch records it, or nothing is recorded
};

} // namespace

extern "C" {

vt_error *vt_profile_prepare(vt_profile_options options) {
  return voltaic::guard([&] {
    quiet();
    torch::autograd::profiler::prepareProfiler(config_of(options), activities_of(options));
    quiet(); // the first preparation has set it
  });
}

vt_error *vt_profile_start(vt_profile_options options) {
  return voltaic::guard([&] {
    std::unordered_set<at::RecordScope> scopes{at::RecordScope::USER_SCOPE};
    if (options.operators != 0)
      scopes.insert({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION});
    torch::autograd::profiler::enableProfiler(config_of(options), activities_of(options), scopes);
    voltaic::profiler::start(options.records);
  });
}

vt_error *vt_profile_stop(const char *path, const vt_profile_visitor *visitor, uint64_t *left_out) {
  return voltaic::guard([&] {
    *left_out = voltaic::profiler::stop(visitor);
    const auto result = torch::autograd::profiler::disableProfiler();
    if (path != nullptr)
      result->save(path);
    if (visitor == nullptr)
      return;
    for (const auto &event : result->events()) {
      const std::string name = event.name();
      const std::string shapes = event.hasShapes() ? text_of(event.shapes()) : std::string();
      const vt_profile_event told{name.c_str(),
                                  shapes.c_str(),
                                  static_cast<int64_t>(event.startNs()),
                                  static_cast<int64_t>(event.durationNs()),
                                  event.startThreadId(),
                                  static_cast<int64_t>(event.flops()),
                                  event.nBytes(),
                                  event.scope(),
                                  static_cast<int32_t>(event.deviceType()),
                                  event.deviceIndex(),
                                  event.isAsync(),
                                  event.deviceResourceId(),
                                  event.correlationId()};
      visitor->event(visitor->data, &told);
    }
  });
}

vt_error *vt_profile_range_begin(const char *name, void **range) {
  return voltaic::guard([&] {
    auto begun = std::make_unique<Range>();
    if (begun->record.isActive()) {
      begun->record.before(std::string(name));
    } else if (voltaic::profiler::records(VT_RECORD_RANGES)) {
      begun->name = name;
      begun->began = voltaic::profiler::ticks();
    }
    *range = begun.release();
  });
}

void vt_profile_range_end(void *range) {
  const std::unique_ptr<Range> ended(static_cast<Range *>(range));
  voltaic::profiler::add_range(ended->began, ended->name);
}

} // extern "C"
