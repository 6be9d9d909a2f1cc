// A store that only those can write to who know a secret.
#pragma once

#include "ranks/abi.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>

namespace voltaic {

// Puts a seal before each value, made of the secret, the key and the value, and refuses a value without it. Gloo's addresses
// go through it, too. Counters, and whether a key is there, are not sealed.
class SealedStore : public c10d::Store {
public:
  SealedStore(c10::intrusive_ptr<c10d::Store> store, const uint8_t *secret, vt_seal seal);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using Store::set;
  void set(const std::string &key, const std::vector<uint8_t> &value) override;
  std::vector<uint8_t> get(const std::string &key) override;
  int64_t add(const std::string &key, int64_t value) override;
  bool deleteKey(const std::string &key) override;
  bool check(const std::vector<std::string> &keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string> &keys) override;
  void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) override;
  const std::chrono::milliseconds &getTimeout() const noexcept override;
  void setTimeout(const std::chrono::milliseconds &timeout) override;
  // without append and multiSet, which would join or write values without seals
  bool hasExtendedApi() const override { return false; }

private:
  using Seal = std::array<uint8_t, VT_SEAL_BYTES>;
  Seal seal_of(const std::string &key, const uint8_t *value, size_t len) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::array<uint8_t, VT_SECRET_BYTES> secret_;
  vt_seal seal_;
};

} // namespace voltaic
