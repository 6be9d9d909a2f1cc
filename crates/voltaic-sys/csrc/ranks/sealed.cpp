#include "ranks/sealed.h"

#include <algorithm>

namespace voltaic {

SealedStore::SealedStore(c10::intrusive_ptr<c10d::Store> store, const uint8_t *secret, vt_seal seal)
    : store_(std::move(store)), seal_(seal) {
  std::copy_n(secret, secret_.size(), secret_.begin());
}

SealedStore::Seal SealedStore::seal_of(const std::string &key, const uint8_t *value, size_t len) const {
  Seal seal;
  seal_(secret_.data(), reinterpret_cast<const uint8_t *>(key.data()), key.size(), value, len, seal.data());
  return seal;
}

c10::intrusive_ptr<c10d::Store> SealedStore::clone() {
  return c10::make_intrusive<SealedStore>(store_->clone(), secret_.data(), seal_);
}

void SealedStore::set(const std::string &key, const std::vector<uint8_t> &value) {
  const Seal seal = seal_of(key, value.data(), value.size());
  std::vector<uint8_t> sealed(VT_SEAL_BYTES + value.size());
  std::copy(value.begin(), value.end(), std::copy(seal.begin(), seal.end(), sealed.begin()));
  store_->set(key, sealed);
}

std::vector<uint8_t> SealedStore::get(const std::string &key) {
  const std::vector<uint8_t> sealed = store_->get(key);
  uint8_t difference = sealed.size() < VT_SEAL_BYTES;
  if (difference == 0) {
    const Seal seal = seal_of(key, sealed.data() + VT_SEAL_BYTES, sealed.size() - VT_SEAL_BYTES);
    for (size_t i = 0; i < seal.size(); ++i) // takes the same time wherever they differ
      difference |= seal[i] ^ sealed[i];
  }
  TORCH_CHECK(difference == 0, "the value of ", key, " is not sealed with this job's secret");
  return {sealed.begin() + VT_SEAL_BYTES, sealed.end()};
}

int64_t SealedStore::add(const std::string &key, int64_t value) { return store_->add(key, value); }
bool SealedStore::deleteKey(const std::string &key) { return store_->deleteKey(key); }
bool SealedStore::check(const std::vector<std::string> &keys) { return store_->check(keys); }
int64_t SealedStore::getNumKeys() { return store_->getNumKeys(); }
void SealedStore::wait(const std::vector<std::string> &keys) { store_->wait(keys); }
void SealedStore::wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) {
  store_->wait(keys, timeout);
}
const std::chrono::milliseconds &SealedStore::getTimeout() const noexcept { return store_->getTimeout(); }
void SealedStore::setTimeout(const std::chrono::milliseconds &timeout) { store_->setTimeout(timeout); }

} // namespace voltaic
