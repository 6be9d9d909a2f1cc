#include "error.h"
#include "graph/abi.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

#include <cstddef>
#include <optional>
#include <utility>

namespace {

using MempoolId = std::pair<unsigned long long, unsigned long long>;
constexpr int capture_mode_global = 0; // cudaStreamCaptureModeGlobal

// The members of at::cuda::CUDAGraph, whose header needs CUDA's.
struct CudaGraphClass {
  void (*construct)(void *self, bool keep_graph);
  void (*destroy)(void *self);
  void (*capture_begin)(void *self, MempoolId pool, int mode);
  void (*capture_end)(void *self);
  void (*replay)(void *self);
};

template <typename Function> void find(void *library, const char *name, Function &function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  TORCH_CHECK(function != nullptr, "libtorch_cuda.so has no ", name, "; use the library of libtorch 2.11");
}

const CudaGraphClass &cuda_graph_class() {
  static const CudaGraphClass found = [] {
    void *library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    TORCH_CHECK(library != nullptr, "libtorch_cuda.so is not loaded; set up accelerator=cuda first");
    CudaGraphClass functions{};
    find(library, "_ZN2at4cuda9CUDAGraphC1Eb", functions.construct);
    find(library, "_ZN2at4cuda9CUDAGraphD1Ev", functions.destroy);
    find(library, "_ZN2at4cuda9CUDAGraph13capture_beginESt4pairIyyE21cudaStreamCaptureMode", functions.capture_begin);
    find(library, "_ZN2at4cuda9CUDAGraph11capture_endEv", functions.capture_end);
    find(library, "_ZN2at4cuda9CUDAGraph6replayEv", functions.replay);
    return functions;
  }();
  return found;
}

} // namespace

struct vt_cuda_graph {
  explicit vt_cuda_graph(c10::DeviceIndex index) : guard(c10::DeviceType::CUDA) {
    const c10::Device device(c10::DeviceType::CUDA, index);
    guard.synchronizeDevice(index); // the capture stream waits for nothing
    const c10::Stream stream = guard.getStreamFromGlobalPool(device); // the default stream cannot be captured
    members.construct(object, false);
    before = guard.exchangeStream(stream);
    try {
      members.capture_begin(object, MempoolId{0, 0}, capture_mode_global);
    } catch (...) {
      leave_stream();
      members.destroy(object);
      throw;
    }
  }
  ~vt_cuda_graph() {
    try {
      end();
    } catch (...) { // what was captured is dropped
    }
    members.destroy(object);
  }
  vt_cuda_graph(const vt_cuda_graph &) = delete;
  vt_cuda_graph &operator=(const vt_cuda_graph &) = delete;

  void end() {
    if (!before)
      return;
    try {
      members.capture_end(object); // on the stream where it began
    } catch (...) {
      leave_stream();
      throw;
    }
    leave_stream();
  }
  void replay() { members.replay(object); }

private:
  void leave_stream() {
    guard.exchangeStream(*before);
    before.reset();
  }

  const CudaGraphClass &members = cuda_graph_class();
  c10::impl::VirtualGuardImpl guard;
  std::optional<c10::Stream> before; // while it captures
  // Holds the object, which takes about 200 bytes in libtorch 2.11.
  alignas(std::max_align_t) unsigned char object[4096];
};

vt_error *vt_cuda_graph_begin(int32_t device_index, vt_cuda_graph **graph) {
  return voltaic::guard([&] { *graph = new vt_cuda_graph(static_cast<c10::DeviceIndex>(device_index)); });
}

vt_error *vt_cuda_graph_end(vt_cuda_graph *graph) {
  return voltaic::guard([&] { graph->end(); });
}

vt_error *vt_cuda_graph_replay(vt_cuda_graph *graph) {
  return voltaic::guard([&] { graph->replay(); });
}

void vt_cuda_graph_free(vt_cuda_graph *graph) { delete graph; }
