// The interface that c10d's GlooStore implements, as far as ProcessGroupGloo.hpp overrides it; see gloo/context.h.
#pragma once

#include <gloo/context.h>

#include <cstdint>
#include <string>
#include <vector>

#define GLOO_STORE_HAS_STORE_V2 1

namespace gloo::rendezvous {

class Store {
public:
  using Value = std::vector<char>;
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::seconds(30);

  virtual ~Store();
  virtual void set(const std::string &key, const Value &value) = 0;
  virtual Value get(const std::string &key) = 0;
  virtual void wait(const std::vector<std::string> &keys) = 0;
  virtual void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &) { wait(keys); }
  virtual bool has_v2_support() { return false; }
  virtual std::vector<Value> multi_get(const std::vector<std::string> &keys) = 0;
  virtual void multi_set(const std::vector<std::string> &keys, const std::vector<Value> &values) = 0;
  virtual void append(const std::string &key, const Value &value) = 0;
  virtual int64_t add(const std::string &key, int64_t value) = 0;
};

} // namespace gloo::rendezvous
