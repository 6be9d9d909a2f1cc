// Memory of tensors that comes and goes while the tensors stay.
#include "error.h"
#include "tensor/abi.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

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

vt_error *vt_storage_refill(vt_tensor tensor, vt_tensor values) {
  return voltaic::guard([&] {
    const at::AutoDispatchBelowADInplaceOrView guard; // no new version: what backward has saved is the same weight
    tensor->copy_(*values);
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
