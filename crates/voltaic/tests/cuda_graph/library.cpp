// Stands in for libtorch_cuda.so: streams and at::cuda::CUDAGraph, as far as a capture needs them. Nothing is computed.

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <utility>

namespace {

constexpr c10::DeviceType cuda = c10::DeviceType::CUDA;
thread_local c10::StreamId current = 0;
int captures = 0, replays = 0, alive = 0;

c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(cuda, 0), id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return cuda; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(cuda, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(3); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current, next.id())); }
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

} // namespace

enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0 };

namespace at::cuda {

struct CUDAGraph {
  explicit CUDAGraph(bool keep_graph);
  ~CUDAGraph();
  void capture_begin(std::pair<unsigned long long, unsigned long long> pool, cudaStreamCaptureMode mode);
  void capture_end();
  void replay();

  c10::StreamId captured_on = 0;
  bool is_captured = false;
  char rest[200] = {};
};

CUDAGraph::CUDAGraph(bool keep_graph) {
  TORCH_CHECK(!keep_graph);
  ++alive;
}
CUDAGraph::~CUDAGraph() { --alive; }

void CUDAGraph::capture_begin(std::pair<unsigned long long, unsigned long long> pool, cudaStreamCaptureMode mode) {
  TORCH_CHECK(pool.first == 0 && pool.second == 0 && mode == cudaStreamCaptureModeGlobal);
  TORCH_CHECK(current != 0, "CUDA graphs must be captured on a non-default stream.");
  captured_on = current;
}

void CUDAGraph::capture_end() {
  TORCH_CHECK(current == captured_on, "Capture must end on the same stream it began on.");
  is_captured = true;
  ++captures;
}

void CUDAGraph::replay() {
  TORCH_CHECK(is_captured, "Called CUDAGraph::replay without a preceding successful capture.");
  ++replays;
}

} // namespace at::cuda

// captures, replays, graphs that are alive, the current stream
extern "C" void stand_in_counts(int counts[4]) {
  counts[0] = captures;
  counts[1] = replays;
  counts[2] = alive;
  counts[3] = static_cast<int>(current);
}
