// Memory of tensors that comes and goes while the tensors stay.
#include "error.h"
#include "tensor/abi.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include <memory>

namespace {

// libtorch can forbid to read a storage, but has no function that allows it again. An explicit instantiation may name a private
// member.
template <bool c10::StorageImpl::*flag> struct Reading {
  friend void allow_reading(c10::StorageImpl &storage) { storage.*flag = false; }
};
void allow_reading(c10::StorageImpl &storage);
template struct Reading<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

constexpr const char *AWAY =
    "the memory of this tensor is freed: it is a view of a weight, kept from before. Take weights from their parameter "
    "each time, or keep a copy";

} // namespace

vt_error *vt_storage_release(vt_tensor tensor, size_t *bytes) {
  return voltaic::guard([&] {
    const c10::Storage &storage = tensor->storage();
    *bytes = storage.nbytes();
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
    storage.set_nbytes(0);
    storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(AWAY);
  });
}

vt_error *vt_storage_restore(vt_tensor tensor, size_t bytes) {
  return voltaic::guard([&] {
    const c10::Storage &storage = tensor->storage();
    if (storage.nbytes() >= bytes)
      return;
    // whatever made the old memory, the device's allocator makes the new one
    const auto options = at::TensorOptions().dtype(at::kByte).device(tensor->device());
    const at::Tensor fresh = at::empty({static_cast<int64_t>(bytes)}, options);
    c10::StorageImpl *donor = fresh.storage().unsafeGetStorageImpl();
    c10::DataPtr memory = donor->set_data_ptr(c10::DataPtr(nullptr, storage.device()));
    donor->set_nbytes(0);
    allow_reading(*storage.unsafeGetStorageImpl());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  });
}

vt_error *vt_storage_lend(vt_tensor tensor, vt_tensor memory) {
  return voltaic::guard([&] {
    const c10::Storage &storage = tensor->storage();
    TORCH_CHECK(memory->device() == storage.device() && memory->is_contiguous(),
                "memory that is lent must be contiguous, and on the device of the tensor");
    auto held = std::make_unique<at::Tensor>(*memory);
    void *first = held->mutable_data_ptr();
    c10::DataPtr lent(first, held.release(), [](void *kept) { delete static_cast<at::Tensor *>(kept); }, storage.device());
    allow_reading(*storage.unsafeGetStorageImpl());
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(lent));
    storage.set_nbytes(memory->nbytes());
  });
}

vt_error *vt_storage_refill(vt_tensor tensor, vt_tensor values) {
  return voltaic::guard([&] {
    const at::AutoDispatchBelowADInplaceOrView guard; // no new version: what backward has saved is the same weight
    tensor->copy_(*values);
  });
}

vt_error *vt_empty_pinned(vt_tensor like, vt_tensor *pinned) {
  return voltaic::guard([&] {
    const auto options = at::TensorOptions().dtype(like->dtype()).device(at::kCPU).pinned_memory(true);
    *pinned = new at::Tensor(at::empty(like->sizes(), options));
  });
}

vt_error *vt_copy_async(vt_tensor to, vt_tensor from) {
  return voltaic::guard([&] {
    to->copy_(*from, /*non_blocking=*/true);
  });
}

vt_error *vt_storage_describe(vt_tensor tensor, size_t *id, size_t *bytes) {
  return voltaic::guard([&] {
    const c10::Storage &storage = tensor->storage();
    *id = reinterpret_cast<size_t>(storage.unsafeGetStorageImpl());
    *bytes = storage.nbytes();
  });
}

vt_error *vt_set_version(vt_tensor tensor, int64_t version) {
  return voltaic::guard([&] {
    c10::VariableVersion count = tensor->unsafeGetTensorImpl()->version_counter(); // the same one, not a copy
    count.set_version(version);
  });
}
