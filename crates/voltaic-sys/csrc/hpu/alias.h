// CPU tensors over an HPU tensor's bytes, and results of CPU kernels as HPU tensors.
#pragma once

#include "hpu/hpu.h"
#include "profiler/events.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/MaybeOwned.h>
#include <c10/util/SmallVector.h>

namespace voltaic::hpu {

using TensorImplPtr = c10::intrusive_ptr<c10::TensorImpl>;

// A CPU tensor over the same memory. It has the dispatch key CPU only: no autograd, no version counter.
TensorImplPtr alias_on_cpu(const c10::TensorImpl *tensor);
inline Tensor alias_on_cpu(const Tensor &tensor) { return Tensor(alias_on_cpu(tensor.unsafeGetTensorImpl())); }

// The same for code that only looks at it, and at whether it requires grad.
Tensor look_alike_on_cpu(const Tensor &tensor);

// The same as a tensor like any other, for code that writes to it as a user does.
Tensor plain_on_cpu(const Tensor &tensor);

// An HPU tensor over `storage`, a storage of an HPU, with shape and dtype of `like`.
Tensor tensor_on_hpu(const c10::TensorImpl *like, c10::Storage storage);
// A view of an HPU tensor.
Tensor view_of(const Tensor &self, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t storage_offset);
void set_device(c10::TensorImpl *tensor, c10::Device device);
// Carries a change that a kernel made to the storage or the shape of `alias` over to the tensor it stands for.
void carry_over(c10::TensorImpl *tensor, c10::TensorImpl *alias);

// How an operator uses a tensor. A CPU tensor among HPU tensors is an error, except for scalars that are read, and for
// indices.
enum class Use : uint8_t { read, write, index };

// One call of an operator: its tensors go in as aliases, its results come out as HPU tensors of the same device.
class OpCall {
public:
  explicit OpCall(const char *name) : name_(name) {
    if (profiler::records_devices())
      launched_ = profiler::ticks();
  }
  ~OpCall();
  OpCall(const OpCall &) = delete;
  OpCall &operator=(const OpCall &) = delete;

  // What the kernel gets in place of `tensor`, which may be undefined and must live until the results have left.
  Tensor enter(const Tensor &tensor, Use use) { return *enter_borrowed(tensor, use); }
  // The same for the time of the call, without counting a reference.
  c10::MaybeOwned<Tensor> enter_borrowed(const Tensor &tensor, Use use);
  // Keeps a tensor alive until the call is over.
  void keep(Tensor tensor) { kept_.push_back(std::move(tensor)); }
  // Takes part in the choice of the device; for operators that are given a device.
  void enter_device(c10::Device device);
  // The device of the call; known once all arguments have entered.
  int device() const { return device_ >= 0 ? device_ : current_device; }
  const char *name() const { return name_; }
  // In ticks of the profiler; 0 if it records nothing.
  uint64_t launched() const { return launched_; }
  // To be called when the kernel is done, before the results leave.
  void carry_over_writes();
  // Turns a result of the kernel into what the caller gets.
  void leave(Tensor &result);

private:
  struct Argument {
    c10::TensorImpl *tensor;
    Tensor alias; // owning: the kernel may drop its own handle, and the address be used again for a result
    bool is_written;
  };
  [[noreturn]] void refuse_mixed(c10::Device a, c10::Device b) const;
  void enter_cpu(const c10::TensorImpl *tensor, Use use);
  bool is_cpu_argument(const c10::TensorImpl *tensor) const;
  void move_to_hpu(Tensor &result);

  const char *name_;
  uint64_t launched_ = 0;
  bool is_carried_over_ = false;
  int device_ = -1;
  c10::SmallVector<Argument, 8> arguments_;
  c10::SmallVector<Tensor, 4> kept_;
  c10::SmallVector<const c10::TensorImpl *, 2> cpu_arguments_;
  // a CPU tensor that no HPU tensor may meet
  const c10::TensorImpl *strictly_cpu_ = nullptr;
};

// Runs the CPU's kernel of an operator: memory from the device's pool, no autograd and no view tracking below.
class KernelScope {
public:
  explicit KernelScope(const OpCall &call)
      : pool_(pool_of(call.device())), profiled_(VT_ROW_OPERATORS, call.device(), call.name(), call.launched()) {}
  KernelScope(int device, const char *copy, size_t bytes)
      : pool_(pool_of(device)), profiled_(VT_ROW_COPIES, device, copy, 0, static_cast<int64_t>(bytes)) {}
  explicit KernelScope(int device) : pool_(pool_of(device)) {}

private:
  PoolScope pool_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  profiler::DeviceScope profiled_;
};

inline constexpr c10::DispatchKeySet cpu_only{c10::DispatchKey::CPU};
inline constexpr c10::DispatchKeySet hpu_only{c10::DispatchKey::HPU};

} // namespace voltaic::hpu
