// Stores and process groups of c10d.
#include "ranks/c10d.h"
#include "error.h"
#include "ranks/abi.h"
#include "ranks/sealed.h"
#include "hpu/alias.h"

#include <ATen/ScalarOps.h>
#include <ATen/record_function.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <optional>

struct vt_store {
  c10::intrusive_ptr<c10d::Store> store;
};

// The tensors live as long as the operation, whatever becomes of the caller's.
struct vt_work {
  c10::intrusive_ptr<c10d::Work> work;
  std::vector<at::Tensor> tensors;
  bool is_over = false; // waited for: a send or receive must not be waited for twice
};

namespace {

using std::chrono::milliseconds;

// The tensor as the back end takes it: an emulated HPU's memory is host memory. Gloo divides averages, and copies parts,
// in place by operators, which a tensor without a version counter refuses.
at::Tensor reachable(const at::Tensor &tensor) {
  if (tensor.device().type() == c10::DeviceType::HPU && voltaic::hpu::backend.is_active)
    return voltaic::hpu::plain_on_cpu(tensor);
  return tensor.detach();
}

c10d::ReduceOp reduce_op(int32_t op) {
  switch (op) {
  case VT_REDUCE_SUM:
    return c10d::ReduceOp::SUM;
  case VT_REDUCE_AVG:
    return c10d::ReduceOp::AVG;
  case VT_REDUCE_MIN:
    return c10d::ReduceOp::MIN;
  case VT_REDUCE_MAX:
    return c10d::ReduceOp::MAX;
  case VT_REDUCE_PRODUCT:
    return c10d::ReduceOp::PRODUCT;
  default:
    TORCH_CHECK(false, "no reduction has the number ", op);
  }
}

// While this exists, operations of Gloo are not recorded by libtorch's profiler: Gloo's threads take over the profiler of
// the thread that calls, and one that ends after the profiler has stopped would write to an event that is freed by then.
class Unrecorded {
public:
  explicit Unrecorded(const c10d::Backend &backend) {
    if (backend.getBackendName() == c10d::GLOO_BACKEND_NAME)
      guard_.emplace();
  }

private:
  std::optional<at::DisableRecordFunctionGuard> guard_;
};

// Starts an operation on tensors that the work keeps alive.
template <typename Start>
vt_error *start(const vt_group &group, vt_work **work, std::initializer_list<vt_tensor> tensors, Start &&body) {
  return voltaic::guard([&] {
    auto owner = std::make_unique<vt_work>();
    std::vector<at::Tensor> arguments;
    for (vt_tensor tensor : tensors) {
      owner->tensors.push_back(*tensor);
      arguments.push_back(reachable(*tensor));
    }
    {
      const Unrecorded unrecorded(*group.backend);
      owner->work = body(arguments);
    }
    for (at::Tensor &argument : arguments)
      owner->tensors.push_back(std::move(argument));
    *work = owner.release();
  });
}

// Sum over the ranks, forward and backward.
struct AllReduceSum : torch::autograd::Function<AllReduceSum> {
  static at::Tensor forward(torch::autograd::AutogradContext *context, const at::Tensor &input,
                            const c10::intrusive_ptr<c10d::Backend> &backend) {
    context->saved_data["backend"] =
        c10::IValue::make_capsule(c10::static_intrusive_pointer_cast<torch::CustomClassHolder>(backend));
    return sum(input, *backend);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext *context,
                                                 torch::autograd::variable_list grads) {
    auto backend = c10::static_intrusive_pointer_cast<c10d::Backend>(context->saved_data["backend"].toCapsule());
    return {sum(grads[0], *backend), at::Tensor()};
  }

  static at::Tensor sum(const at::Tensor &input, c10d::Backend &backend) {
    const at::NoGradGuard no_grad;
    at::Tensor output = input.clone(at::MemoryFormat::Contiguous);
    std::vector<at::Tensor> arguments{reachable(output)};
    const Unrecorded unrecorded(backend);
    backend.allreduce(arguments)->wait();
    return output;
  }
};

} // namespace

// ---- stores ---------------------------------------------------------------------------------------------------

vt_error *vt_store_tcp(const char *host, uint16_t port, int32_t is_server, int32_t listener, int64_t timeout_ms,
                       vt_store **store, uint16_t *actual_port) {
  return voltaic::guard([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = is_server != 0;
    options.waitWorkers = false;
    if (options.isServer && listener >= 0)
      options.masterListenFd = listener;
    options.timeout = milliseconds(timeout_ms);
    auto made = c10::make_intrusive<c10d::TCPStore>(host, options);
    *actual_port = made->getPort();
    *store = new vt_store{std::move(made)};
  });
}

vt_error *vt_store_sealed(const vt_store *store, const uint8_t *secret, vt_seal seal, vt_store **sealed) {
  return voltaic::guard(
      [&] { *sealed = new vt_store{c10::make_intrusive<voltaic::SealedStore>(store->store, secret, seal)}; });
}

vt_error *vt_store_with_prefix(const vt_store *store, const char *prefix, vt_store **prefixed) {
  return voltaic::guard(
      [&] { *prefixed = new vt_store{c10::make_intrusive<c10d::PrefixStore>(prefix, store->store)}; });
}

vt_error *vt_store_set(const vt_store *store, const char *key, const uint8_t *value, size_t len) {
  return voltaic::guard([&] { store->store->set(key, std::vector<uint8_t>(value, value + len)); });
}

vt_error *vt_store_get(const vt_store *store, const char *key, int64_t timeout_ms,
                       void (*take)(void *data, const uint8_t *value, size_t len), void *data) {
  return voltaic::guard([&] {
    store->store->wait({key}, milliseconds(timeout_ms));
    const std::vector<uint8_t> value = store->store->get(key);
    take(data, value.data(), value.size());
  });
}

vt_error *vt_store_add(const vt_store *store, const char *key, int64_t amount, int64_t *sum) {
  return voltaic::guard([&] { *sum = store->store->add(key, amount); });
}

vt_error *vt_store_has(const vt_store *store, const char *key, int32_t *has) {
  return voltaic::guard([&] { *has = store->store->check({key}) ? 1 : 0; });
}

void vt_store_free(vt_store *store) { delete store; }

// ---- groups ---------------------------------------------------------------------------------------------------

vt_error *vt_group_gloo(const vt_store *store, int32_t rank, int32_t size, int64_t timeout_ms, const char *interface,
                        const char *address, vt_group **group) {
  return voltaic::guard([&] {
    using c10d::ProcessGroupGloo;
    auto options = ProcessGroupGloo::Options::create(milliseconds(timeout_ms));
    options->devices.push_back(interface != nullptr ? ProcessGroupGloo::createDeviceForInterface(interface)
                                                    : ProcessGroupGloo::createDeviceForHostname(address));
    options->threads = 2;
    *group = new vt_group{c10::make_intrusive<ProcessGroupGloo>(store->store, rank, size, options)};
  });
}

void vt_group_free(vt_group *group) { delete group; }

vt_error *vt_group_set_timeout(const vt_group *group, int64_t timeout_ms) {
  return voltaic::guard([&] { group->backend->setTimeout(milliseconds(timeout_ms)); });
}

vt_error *vt_group_all_reduce(const vt_group *group, vt_tensor tensor, int32_t op, vt_work **work) {
  return start(*group, work, {tensor}, [&](std::vector<at::Tensor> &tensors) {
    c10d::AllreduceOptions options;
    options.reduceOp = reduce_op(op);
    return group->backend->allreduce(tensors, options);
  });
}

vt_error *vt_group_broadcast(const vt_group *group, vt_tensor tensor, int32_t root, vt_work **work) {
  return start(*group, work, {tensor}, [&](std::vector<at::Tensor> &tensors) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return group->backend->broadcast(tensors, options);
  });
}

vt_error *vt_group_all_gather(const vt_group *group, vt_tensor input, vt_tensor output, vt_work **work) {
  return start(*group, work, {input, output}, [&](std::vector<at::Tensor> &tensors) {
    return group->backend->_allgather_base(tensors[1], tensors[0]);
  });
}

vt_error *vt_group_reduce_scatter(const vt_group *group, vt_tensor input, vt_tensor output, int32_t op,
                                  vt_work **work) {
  return start(*group, work, {input, output}, [&](std::vector<at::Tensor> &tensors) {
    c10d::ReduceScatterOptions options;
    options.reduceOp = reduce_op(op);
    return group->backend->_reduce_scatter_base(tensors[1], tensors[0], options);
  });
}

vt_error *vt_group_send(const vt_group *group, vt_tensor tensor, int32_t peer, vt_work **work) {
  return start(*group, work, {tensor},
               [&](std::vector<at::Tensor> &tensors) { return group->backend->send(tensors, peer, 0); });
}

vt_error *vt_group_recv(const vt_group *group, vt_tensor tensor, int32_t peer, vt_work **work) {
  return start(*group, work, {tensor},
               [&](std::vector<at::Tensor> &tensors) { return group->backend->recv(tensors, peer, 0); });
}

vt_error *vt_group_reduce(const vt_group *group, vt_tensor tensor, int32_t root, int32_t op, vt_work **work) {
  return start(*group, work, {tensor}, [&](std::vector<at::Tensor> &tensors) {
    c10d::ReduceOptions options;
    options.rootRank = root;
    options.reduceOp = reduce_op(op);
    return group->backend->reduce(tensors, options);
  });
}

vt_error *vt_group_gather(const vt_group *group, vt_tensor input, vt_tensor output, int32_t root, vt_work **work) {
  return start(*group, work, {input, output}, [&](std::vector<at::Tensor> &tensors) {
    c10d::GatherOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> inputs{tensors[0]};
    std::vector<std::vector<at::Tensor>> outputs;
    if (group->backend->getRank() == root)
      outputs.push_back(tensors[1].unbind(0));
    return group->backend->gather(outputs, inputs, options);
  });
}

vt_error *vt_group_scatter(const vt_group *group, vt_tensor input, vt_tensor output, int32_t root, vt_work **work) {
  return start(*group, work, {input, output}, [&](std::vector<at::Tensor> &tensors) {
    c10d::ScatterOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> outputs{tensors[1]};
    std::vector<std::vector<at::Tensor>> inputs;
    if (group->backend->getRank() == root)
      inputs.push_back(tensors[0].unbind(0));
    return group->backend->scatter(outputs, inputs, options);
  });
}

vt_error *vt_group_all_to_all(const vt_group *group, vt_tensor input, const int64_t *input_splits, vt_tensor output,
                              const int64_t *output_splits, vt_work **work) {
  return start(*group, work, {input, output}, [&](std::vector<at::Tensor> &tensors) {
    const auto size = static_cast<size_t>(group->backend->getSize());
    std::vector<int64_t> from(input_splits, input_splits + size), to(output_splits, output_splits + size);
    return group->backend->alltoall_base(tensors[1], tensors[0], to, from);
  });
}

vt_error *vt_group_barrier(const vt_group *group, vt_work **work) {
  return start(*group, work, {}, [&](std::vector<at::Tensor> &) { return group->backend->barrier(); });
}

vt_error *vt_group_all_reduce_sum_function(const vt_group *group, vt_tensor input, vt_tensor *output) {
  return voltaic::guard([&] { *output = new at::Tensor(AllReduceSum::apply(*input, group->backend)); });
}

vt_error *vt_work_wait(vt_work *work) {
  return voltaic::guard([&] {
    work->is_over = true;
    TORCH_CHECK(work->work->wait(), "the operation was aborted");
  });
}

void vt_work_free(vt_work *work) {
  // the back end may be writing to the tensors still
  if (!work->is_over)
    vt_error_free(vt_work_wait(work));
  delete work;
}

// ---- gradients in buckets -------------------------------------------------------------------------------------

vt_error *vt_bucket_fill(const vt_tensor *params, const vt_tensor *views, size_t len, double scale) {
  return voltaic::guard([&] {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < len; ++i) {
      const at::Tensor &grad = params[i]->grad();
      if (!grad.defined()) {
        views[i]->zero_();
        continue;
      }
      TORCH_CHECK(grad.layout() == c10::kStrided, "a sparse gradient cannot be averaged over ranks");
      if (scale != 1.0)
        at::mul_out(*views[i], grad, at::native::wrapped_scalar_tensor(scale));
      else if (!grad.is_alias_of(*views[i]))
        views[i]->copy_(grad);
    }
  });
}

vt_error *vt_bucket_adopt(const vt_tensor *params, const vt_tensor *views, size_t len) {
  return voltaic::guard([&] {
    for (size_t i = 0; i < len; ++i)
      params[i]->mutable_grad() = *views[i];
  });
}

vt_error *vt_reaches_leaves(vt_tensor root, const vt_tensor *leaves, size_t len, uint8_t *reached) {
  return voltaic::guard([&] {
    std::unordered_map<const torch::autograd::Node *, size_t> accumulators;
    for (size_t i = 0; i < len; ++i) {
      reached[i] = 0;
      if (auto node = torch::autograd::impl::try_get_grad_accumulator(*leaves[i]))
        accumulators.emplace(node.get(), i);
    }
    std::unordered_set<const torch::autograd::Node *> seen;
    std::vector<const torch::autograd::Node *> pending{root->grad_fn().get()};
    while (!pending.empty()) {
      const torch::autograd::Node *node = pending.back();
      pending.pop_back();
      if (node == nullptr || !seen.insert(node).second)
        continue;
      if (const auto found = accumulators.find(node); found != accumulators.end())
        reached[found->second] = 1;
      for (const torch::autograd::Edge &edge : node->next_edges())
        pending.push_back(edge.function.get());
    }
  });
}
