#include "hpu/abi.h"
#include "hpu/alias.h"

#include <c10/core/InferenceMode.h>

#include <array>
#include <cstring>

namespace voltaic::hpu {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::StorageImpl;
using c10::TensorImpl;

// Names protected members, which pointers to members may reach.
struct Members : TensorImpl {
  using TensorImpl::device_opt_;
  using TensorImpl::key_set_;
};
DispatchKeySet &key_set_of(TensorImpl *tensor) { return tensor->*(&Members::key_set_); }

// The keys of a plain tensor outside inference mode.
DispatchKeySet plain_keys(DispatchKey key) {
  const c10::BackendComponent component = DispatchKeySet(key).highestBackendKey();
  return DispatchKeySet(key) | c10::getAutocastRelatedKeySetFromBackend(component) |
         c10::getAutogradRelatedKeySetFromBackend(component);
}
const DispatchKeySet &plain_cpu_keys() {
  static const DispatchKeySet keys = plain_keys(DispatchKey::CPU);
  return keys;
}
const DispatchKeySet &plain_hpu_keys() {
  static const DispatchKeySet keys = plain_keys(DispatchKey::HPU);
  return keys;
}

c10::Device hpu_device(int index) {
  return c10::Device(c10::DeviceType::HPU, static_cast<c10::DeviceIndex>(index));
}

c10::intrusive_ptr<StorageImpl> make_cpu_storage(void *data, size_t bytes) {
  return c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes,
                                          c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)), cpu_allocator(),
                                          /*resizable=*/true);
}

void drop_reference(void *twin) {
  c10::intrusive_ptr<StorageImpl>::reclaim(static_cast<StorageImpl *>(twin)).reset();
}

// The twin of a block: a CPU storage over it that does not own it, made at its first use and kept in the block's
// header until the block goes back to the system.
StorageImpl *twin_of(vt_block_header *header, void *data, size_t bytes) {
  auto *twin = static_cast<StorageImpl *>(__atomic_load_n(&header->twin, __ATOMIC_ACQUIRE));
  if (C10_UNLIKELY(twin == nullptr)) {
    void *expected = nullptr;
    twin = make_cpu_storage(data, bytes).release();
    if (!__atomic_compare_exchange_n(&header->twin, &expected, static_cast<void *>(twin), false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
      drop_reference(twin);
      twin = static_cast<StorageImpl *>(expected);
    }
  }
  if (twin->nbytes() != bytes)
    twin->set_nbytes(bytes);
  return twin;
}

// A CPU storage over the bytes of `storage`, kept with its block; null if it has none of ours.
StorageImpl *kept_twin(StorageImpl *storage) {
  const c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
  vt_block_header *header = header_of(data);
  return C10_LIKELY(header != nullptr) ? twin_of(header, data.get(), storage->nbytes()) : nullptr;
}

// A storage that a CPU kernel made becomes one of the device. Its memory already is, unless the kernel had it from
// elsewhere.
void move_storage(StorageImpl *storage, int device) {
  c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
  if (data.device().type() == c10::DeviceType::HPU)
    return;
  const vt_block_header *header = header_of(data);
  if (C10_UNLIKELY(data.get() != nullptr && (header == nullptr || header->pool != pool_of(device)))) {
    c10::DataPtr copy = allocate_block(pool_of(device), storage->nbytes(), hpu_device(device));
    std::memcpy(copy.get(), data.get(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(copy));
    backend.copied_outputs.fetch_add(1, std::memory_order_relaxed);
  } else {
    data.unsafe_set_device(hpu_device(device));
  }
  storage->set_allocator(allocator());
}

} // namespace

void set_device(TensorImpl *tensor, c10::Device device) { tensor->*(&Members::device_opt_) = device; }

namespace {

// Aliases of calls that are over, to be filled again: making and freeing one costs about as much as a small kernel.
class Spares {
public:
  TensorImplPtr take() { return count_ > 0 ? std::move(aliases_[--count_]) : TensorImplPtr(); }
  // Only a plain one that nobody else holds.
  void put(TensorImplPtr alias) {
    const bool is_plain = !alias->is_conj() && !alias->is_neg() && !alias->is_wrapped_number();
    if (count_ < aliases_.size() && is_plain && alias.use_count() == 1 && alias.weak_use_count() == 1)
      aliases_[count_++] = std::move(alias);
  }

private:
  std::array<TensorImplPtr, 16> aliases_;
  size_t count_ = 0;
};
thread_local Spares spares;

} // namespace

TensorImplPtr alias_on_cpu(const TensorImpl *tensor) {
  StorageImpl *storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  StorageImpl *twin = kept_twin(storage);
  TensorImplPtr alias = spares.take();
  // a spare often has the storage and the shape already, from the step before
  const bool is_over_it = alias.get() != nullptr && twin != nullptr &&
                          alias->unsafe_storage().unsafeGetStorageImpl() == twin && alias->dtype() == tensor->dtype();
  if (!is_over_it) {
    c10::Storage over(twin != nullptr ? c10::intrusive_ptr<StorageImpl>::reclaim_copy(twin)
                                      : make_cpu_storage(storage->_mutable_data_ptr_no_checks().get(), storage->nbytes()));
    if (alias.get() != nullptr)
      alias->set_storage_and_dtype(std::move(over), tensor->dtype());
    else
      alias = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, std::move(over), cpu_only, tensor->dtype());
  }
  TensorImpl *raw = alias.get();
  if (raw->sizes() != tensor->sizes() || raw->strides() != tensor->strides() ||
      raw->storage_offset() != tensor->storage_offset())
    raw->set_sizes_and_strides(tensor->sizes(), tensor->strides(), tensor->storage_offset());
  if (C10_UNLIKELY(tensor->is_conj()))
    raw->_set_conj(true);
  if (C10_UNLIKELY(tensor->is_neg()))
    raw->_set_neg(true);
  if (tensor->is_wrapped_number())
    raw->set_wrapped_number(true);
  return alias;
}

Tensor look_alike_on_cpu(const Tensor &tensor) {
  TensorImplPtr alias = alias_on_cpu(tensor.unsafeGetTensorImpl());
  if (tensor.requires_grad()) {
    key_set_of(alias.get()) = plain_cpu_keys();
    alias->set_requires_grad(true);
  }
  return Tensor(std::move(alias));
}

Tensor plain_on_cpu(const Tensor &tensor) {
  const TensorImplPtr alias = alias_on_cpu(tensor.unsafeGetTensorImpl());
  auto plain = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, c10::Storage(alias->storage()), plain_cpu_keys(),
                                               alias->dtype());
  plain->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
  if (alias->is_conj())
    plain->_set_conj(true);
  if (alias->is_neg())
    plain->_set_neg(true);
  return Tensor(std::move(plain));
}

Tensor tensor_on_hpu(const TensorImpl *like, c10::Storage storage) {
  const DispatchKeySet keys = c10::InferenceMode::is_enabled()
                                  ? hpu_only | DispatchKeySet(DispatchKey::AutocastHPU)
                                  : plain_hpu_keys();
  auto tensor = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, std::move(storage), keys, like->dtype());
  tensor->set_sizes_and_strides(like->sizes(), like->strides(), like->storage_offset());
  if (like->is_conj())
    tensor->_set_conj(true);
  if (like->is_neg())
    tensor->_set_neg(true);
  return Tensor(std::move(tensor));
}

Tensor view_of(const Tensor &self, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t storage_offset) {
  const TensorImpl *impl = self.unsafeGetTensorImpl();
  auto view = c10::make_intrusive<TensorImpl>(TensorImpl::VIEW, c10::Storage(impl->storage()), impl->key_set(),
                                              impl->dtype());
  view->set_sizes_and_strides(sizes, strides, storage_offset);
  return Tensor(std::move(view));
}

namespace {

// If the kernel gave the alias other memory, that memory now belongs to the tensor.
void carry_over_storage(TensorImpl *tensor, TensorImpl *alias) {
  StorageImpl *ours = tensor->unsafe_storage().unsafeGetStorageImpl();
  StorageImpl *theirs = alias->unsafe_storage().unsafeGetStorageImpl();
  if (C10_LIKELY(ours->data() == theirs->data() && ours->nbytes() == theirs->nbytes()))
    return;
  // the block that the tensor gives up must not keep a twin that points elsewhere
  if (vt_block_header *header = header_of(ours->_mutable_data_ptr_no_checks());
      header != nullptr && header->twin == theirs) {
    header->twin = nullptr;
    drop_reference(theirs); // the alias still holds it
  }
  c10::DataPtr data = std::move(theirs->_mutable_data_ptr_no_checks());
  data.unsafe_set_device(tensor->device());
  ours->set_data_ptr_noswap(std::move(data));
  ours->set_nbytes(theirs->nbytes());
}

} // namespace

void carry_over(TensorImpl *tensor, TensorImpl *alias) {
  carry_over_storage(tensor, alias);
  if (C10_UNLIKELY(tensor->storage_offset() != alias->storage_offset() || tensor->sizes() != alias->sizes() ||
                   tensor->strides() != alias->strides()))
    tensor->set_sizes_and_strides(alias->sizes(), alias->strides(), alias->storage_offset());
}

OpCall::~OpCall() {
  // backwards, so that the next call finds the spares in the order of its arguments
  while (!arguments_.empty()) {
    Argument argument = arguments_.pop_back_val();
    if (!argument.is_written)
      spares.put(argument.alias.unsafeReleaseIntrusivePtr());
    else if (!is_carried_over_) // the kernel threw; memory that it gave to an alias before must still find its owner
      carry_over_storage(argument.tensor, argument.alias.unsafeGetTensorImpl());
  }
}

void OpCall::refuse_mixed(c10::Device a, c10::Device b) const {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", a, " and ", b,
              "! (when running ", name_, ")");
}

void OpCall::enter_cpu(const TensorImpl *tensor, Use use) {
  cpu_arguments_.push_back(tensor);
  if (use == Use::index || (use == Use::read && tensor->dim() == 0))
    return;
  if (device_ >= 0)
    refuse_mixed(hpu_device(device_), tensor->device());
  strictly_cpu_ = tensor;
}

void OpCall::enter_device(c10::Device device) {
  const int index = device.has_index() ? device.index() : current_device;
  check_device_index(index);
  if (device_ < 0)
    device_ = index;
}

c10::MaybeOwned<Tensor> OpCall::enter_borrowed(const Tensor &tensor, Use use) {
  if (C10_UNLIKELY(!tensor.defined()))
    return c10::MaybeOwned<Tensor>::owned(std::in_place);
  TensorImpl *impl = tensor.unsafeGetTensorImpl();
  if (C10_UNLIKELY(!is_hpu(impl))) {
    enter_cpu(impl, use);
    return c10::MaybeOwned<Tensor>::borrowed(tensor);
  }
  const int device = impl->device().index();
  if (device_ < 0)
    device_ = device;
  else if (C10_UNLIKELY(device_ != device))
    refuse_mixed(hpu_device(device_), impl->device());
  if (C10_UNLIKELY(strictly_cpu_ != nullptr))
    refuse_mixed(impl->device(), strictly_cpu_->device());
  check_dtype(impl->dtype().toScalarType());
  arguments_.push_back({impl, Tensor(alias_on_cpu(impl)), use == Use::write});
  return c10::MaybeOwned<Tensor>::borrowed(arguments_.back().alias);
}

void OpCall::carry_over_writes() {
  is_carried_over_ = true;
  for (Argument &argument : arguments_)
    if (argument.is_written)
      carry_over(argument.tensor, argument.alias.unsafeGetTensorImpl());
}

bool OpCall::is_cpu_argument(const TensorImpl *tensor) const {
  for (const TensorImpl *argument : cpu_arguments_)
    if (argument == tensor)
      return true;
  return false;
}

void OpCall::move_to_hpu(Tensor &result) {
  TensorImpl *impl = result.unsafeGetTensorImpl();
  TORCH_CHECK(impl->has_storage() && impl->layout() == c10::Layout::Strided, name_,
              " gives a tensor of layout ", impl->layout(),
              ", which an HPU has not; move the tensor to the CPU first");
  check_dtype(impl->dtype().toScalarType());
  const c10::Device device = hpu_device(this->device());
  move_storage(impl->unsafe_storage().unsafeGetStorageImpl(), device.index());
  if (C10_LIKELY(key_set_of(impl) == plain_cpu_keys())) {
    key_set_of(impl) = plain_hpu_keys();
    set_device(impl, device);
  } else if (impl->is_inference() && !c10::InferenceMode::is_enabled()) {
    result = tensor_on_hpu(impl, impl->storage());
  } else {
    impl->_change_backend_component_keys(device);
    set_device(impl, device);
  }
}

void OpCall::leave(Tensor &result) {
  if (C10_UNLIKELY(!result.defined()))
    return;
  TensorImpl *impl = result.unsafeGetTensorImpl();
  if (is_hpu(impl) || is_cpu_argument(impl))
    return;
  for (const Argument &argument : arguments_)
    if (argument.alias.unsafeGetTensorImpl() == impl) {
      result = Tensor(TensorImplPtr::reclaim_copy(argument.tensor));
      return;
    }
  if (impl->has_storage()) {
    const StorageImpl *storage = impl->unsafe_storage().unsafeGetStorageImpl();
    for (const Argument &argument : arguments_)
      if (argument.alias.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == storage) {
        result = tensor_on_hpu(impl, argument.tensor->storage());
        return;
      }
    for (const TensorImpl *argument : cpu_arguments_)
      if (argument->has_storage() && argument->unsafe_storage().unsafeGetStorageImpl() == storage) {
        result = result.clone(); // the caller's CPU tensor must stay one
        break;
      }
  }
  move_to_hpu(result);
}

} // namespace voltaic::hpu

void vt_hpu_drop_twin(void *twin) { voltaic::hpu::drop_reference(twin); }
