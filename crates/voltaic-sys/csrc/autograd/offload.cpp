// Tensors that autograd saves in device memory go to the host, and come back ahead of their use in the backward pass.
#include "autograd/abi.h"
#include "autograd/backward_pass.h"
#include "autograd/saved_tensors.h"
#include "error.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace voltaic::autograd {

namespace {

using c10::impl::VirtualGuardImpl;

// Copies from and to a device, on a stream of their own where the device has several, so that kernels run beside them.
class Copies {
public:
  explicit Copies(c10::Device device) : impl_(device.type()), device_(device) {}

  at::Tensor to_host(const at::Tensor &tensor) const {
    if (!tensor.is_cuda())
      return tensor.detach().to(c10::Device(c10::kCPU));
    const c10::Stream stream = of_device();
    c10::Event computed(device_.type());
    computed.record(impl_.getStream(device_));
    const c10::StreamGuard on_it(stream);
    computed.block(stream);
    const auto pinned = tensor.options().device(c10::kCPU).pinned_memory(true);
    at::Tensor on_host = at::empty_like(tensor, pinned).copy_(tensor.detach(), /*non_blocking=*/true);
    impl_.recordDataPtrOnStream(tensor.storage().data_ptr(), stream); // its memory is not used again before
    return on_host;
  }

  // On the same stream as the copy to the host, and after it.
  at::Tensor to_device(const at::Tensor &on_host, c10::Event &arrived) const {
    const c10::Stream stream = of_device();
    const c10::StreamGuard on_it(stream);
    at::Tensor tensor = on_host.to(device_, /*non_blocking=*/true);
    arrived.record(stream);
    return tensor;
  }

  // Kernels from here on find the tensor there.
  void await(const at::Tensor &tensor, const c10::Event &arrived) const {
    const c10::Stream kernels = impl_.getStream(device_);
    arrived.block(kernels);
    impl_.recordDataPtrOnStream(tensor.storage().data_ptr(), kernels);
  }

private:
  c10::Stream of_device() const {
    thread_local std::unordered_map<c10::Device, c10::Stream> streams;
    return streams.try_emplace(device_, impl_.getStreamFromGlobalPool(device_, /*isHighPriority=*/false)).first->second;
  }

  VirtualGuardImpl impl_;
  c10::Device device_;
};

std::mutex moves; // backward may run on several threads

struct Moved;

// What one scope has moved, such as a block of a model.
struct Block {
  std::vector<std::weak_ptr<Moved>> moved;
  std::weak_ptr<Block> before; // the scope that began before this one: backward comes to it next
  size_t num_uses = 0;
  int pass = no_pass; // the backward pass of these counts
  size_t num_taken = 0, num_fetched = 0;

  void begin_pass(int now);
  // The last `count` come back, but for those that backward is done with.
  void fetch_last(size_t count);
};

// A tensor on the host, shared by all that have saved it.
struct Moved {
  at::Tensor on_host;
  c10::Device device;
  std::shared_ptr<Block> block;
  std::weak_ptr<Moved> before; // saved before this one: backward needs it next
  size_t num_uses = 0, num_left = 0;
  int done = no_pass; // the last backward pass that has taken it for all its uses
  at::Tensor back; // there once it has come ahead of its use
  std::optional<c10::Event> arrived;

  Moved(const at::Tensor &tensor, std::shared_ptr<Block> block)
      : on_host(Copies(tensor.device()).to_host(tensor)), device(tensor.device()), block(std::move(block)) {}

  void fetch() {
    if (back.defined())
      return;
    back = Copies(device).to_device(on_host, arrived.emplace(device.type()));
    num_left = num_uses;
  }

  at::Tensor take() {
    const std::lock_guard<std::mutex> lock(moves);
    fetch();
    const bool is_last = --num_left == 0;
    const at::Tensor tensor = is_last ? std::exchange(back, at::Tensor()) : back;
    Copies(device).await(tensor, *arrived);
    if (const int pass = current_pass(); pass != no_pass) {
      if (is_last)
        done = pass;
      fetch_ahead(pass);
    }
    return tensor;
  }

  // While backward works through this block, the one before comes bit by bit, so that about one block is on the device.
  void fetch_ahead(int pass) {
    block->begin_pass(pass);
    ++block->num_taken;
    if (const auto next = before.lock(); next && next->done != pass)
      next->fetch();
    if (const auto next = block->before.lock()) {
      next->begin_pass(pass);
      next->fetch_last((block->num_taken * next->moved.size() + block->num_uses - 1) / block->num_uses);
    }
  }
};

void Block::begin_pass(int now) {
  if (std::exchange(pass, now) == now)
    return;
  num_taken = num_fetched = 0;
  at_backward_end([moved = moved] { // what backward did not need after all
    const std::lock_guard<std::mutex> lock(moves);
    for (const auto &weak : moved)
      if (const auto each = weak.lock())
        each->back = at::Tensor();
  });
}

void Block::fetch_last(size_t count) {
  for (; num_fetched < count && num_fetched < moved.size(); ++num_fetched)
    if (const auto each = moved[moved.size() - 1 - num_fetched].lock(); each && each->done != pass)
      each->fetch();
}

thread_local std::weak_ptr<Block> newest; // of this thread

class Offload final : public Frame {
public:
  Offload() {
    block_->before = std::exchange(newest, block_);
    scope_.emplace(*this);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(*this); }
  int64_t bytes() const { return bytes_; }

private:
  struct Hooks final : torch::autograd::SavedVariableHooks {
    explicit Hooks(Offload &offload) : offload_(&offload) {}

    void call_pack_hook(const at::Tensor &tensor) override {
      Offload *offload = std::exchange(offload_, nullptr);
      const bool is_of_weight =
          is_trained_leaf(tensor) || (tensor.is_view() && is_trained_leaf(tensor._base()));
      if (tensor.is_cpu() || is_of_weight || tensor.layout() != c10::kStrided || !tensor.has_storage())
        kept_ = Kept(tensor);
      else
        moved_ = offload->move(tensor);
    }
    at::Tensor call_unpack_hook() override {
      if (moved_)
        return moved_->take();
      kept_.check();
      return kept_.tensor;
    }

    Offload *offload_;
    Kept kept_;
    std::shared_ptr<Moved> moved_;
  };

  // A tensor that was moved, as long as it lives.
  struct Known {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    int64_t version;
    std::shared_ptr<Moved> moved;
  };

  std::shared_ptr<Moved> move(const at::Tensor &tensor) {
    ++block_->num_uses;
    for (const Known &known : known_) // what several operators save is moved once
      if (known.tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl() && known.tensor.use_count() != 0 &&
          known.version == tensor._version()) {
        ++known.moved->num_uses;
        return known.moved;
      }
    auto moved = std::make_shared<Moved>(tensor, block_);
    moved->num_uses = 1;
    if (!known_.empty())
      moved->before = known_.back().moved;
    block_->moved.push_back(moved);
    known_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()),
                      tensor._version(), moved});
    bytes_ += static_cast<int64_t>(moved->on_host.nbytes());
    return moved;
  }

  std::shared_ptr<Block> block_ = std::make_shared<Block>();
  std::vector<Known> known_; // of this pass
  int64_t bytes_ = 0;
  std::optional<FrameScope> scope_;
};

} // namespace

} // namespace voltaic::autograd

using voltaic::autograd::Offload;

struct vt_offload {
  Offload offload;
};

vt_error *vt_offload_enter(vt_offload **offload) {
  return voltaic::guard([&] { *offload = new vt_offload(); });
}

int64_t vt_offload_bytes(const vt_offload *offload) { return offload->offload.bytes(); }

void vt_offload_leave(vt_offload *offload) { delete offload; }
