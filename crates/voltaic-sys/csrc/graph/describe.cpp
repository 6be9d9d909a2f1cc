#include "error.h"
#include "graph/abi.h"
#include "graph/graph.h"
#include "hpu/hpu.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <sstream>

namespace voltaic::graph {
namespace {

// JSON, written piece by piece.
class Writer {
public:
  template <class T> Writer &operator<<(const T &part) {
    out_ << part;
    return *this;
  }
  void text(const std::string &text) {
    out_ << '"';
    for (const char c : text) {
      if (c == '"' || c == '\\')
        out_ << '\\' << c;
      else if (static_cast<unsigned char>(c) < 0x20)
        out_ << ' ';
      else
        out_ << c;
    }
    out_ << '"';
  }
  template <class List, class Item> void list(const List &entries, Item &&item) {
    out_ << '[';
    bool is_first = true;
    for (const auto &entry : entries) {
      if (!is_first)
        out_ << ',';
      is_first = false;
      item(entry);
    }
    out_ << ']';
  }
  std::string take() { return out_.str(); }

private:
  std::ostringstream out_;
};

std::string number_text(double number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.17g", number);
  return text;
}

// The same text for the same constant only.
std::string constant_text(const IValue &value) {
  if (value.isNone())
    return "None";
  if (value.isDouble())
    return number_text(value.toDouble());
  if (value.isDoubleList()) {
    std::string text = "[";
    for (const double number : value.toDoubleVector())
      text += (text.size() > 1 ? ", " : "") + number_text(number);
    return text + "]";
  }
  if (value.isGenerator())
    return "Generator";
  std::ostringstream text;
  text << value;
  return text.str();
}

std::string full_name(const c10::OperatorName &name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// Of all of it, by words: constants may be large. What lies on a card is not read.
uint64_t hash_of(const Buffer &buffer) {
  if (buffer.device.is_hpu() && !hpu::backend.is_active)
    return 0;
  uint64_t hash = 1469598103934665603u;
  const auto *bytes = static_cast<const unsigned char *>(buffer.address);
  for (size_t at = 0; bytes != nullptr && at < buffer.bytes; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof(word), buffer.bytes - at));
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  }
  return hash;
}

// Positions of the arguments that an operator writes to.
std::vector<size_t> written(const c10::FunctionSchema &schema) {
  std::vector<size_t> positions;
  for (size_t i = 0; i < schema.arguments().size(); ++i)
    if (const auto *alias = schema.arguments()[i].alias_info(); alias != nullptr && alias->isWrite())
      positions.push_back(i);
  return positions;
}

bool is_random(const c10::FunctionSchema &schema) {
  for (const c10::Argument &argument : schema.arguments())
    if (argument.type()->str().find("Generator") != std::string::npos)
      return true;
  return false;
}

void write_operand(Writer &out, const Operand &operand, const IValue *constant) {
  switch (operand.kind) {
  case Operand::Kind::constant:
    out << "{\"constant\":";
    out.text(constant != nullptr ? constant_text(*constant) : "");
    out << '}';
    break;
  case Operand::Kind::tensor:
    out << "{\"tensor\":" << operand.values[0] << '}';
    break;
  case Operand::Kind::tensor_list:
  case Operand::Kind::optional_tensor_list:
    out << "{\"tensors\":";
    out.list(operand.values, [&](int32_t value) { out << value; });
    out << '}';
    break;
  }
}

void write_node(Writer &out, const Node &node) {
  out << "{\"op\":";
  out.text(full_name(node.op.operator_name()));
  out << ",\"arguments\":[";
  for (size_t i = 0; i < node.operands.size(); ++i) {
    if (i != 0)
      out << ',';
    write_operand(out, node.operands[i], &node.arguments[i]);
  }
  out << "],\"results\":";
  out.list(node.results, [&](const Operand &result) { write_operand(out, result, nullptr); });
  out << ",\"blocks\":";
  out.list(node.blocks, [&](const Block &block) {
    out << "{\"bytes\":" << block.bytes << ",\"buffer\":" << block.buffer << ",\"is_given_back\":"
        << (block.is_given_back ? "true" : "false") << '}';
  });
  const auto flag = [&](const char *name, bool value) {
    if (value)
      out << ",\"" << name << "\":true";
  };
  if (const std::vector<size_t> positions = written(node.op.schema()); !positions.empty()) {
    out << ",\"writes\":true,\"written\":";
    out.list(positions, [&](size_t position) { out << position; });
  }
  flag("is_random", is_random(node.op.schema()) || node.op.hasTag(at::Tag::nondeterministic_seeded));
  flag("reads_data", node.op.hasTag(at::Tag::data_dependent_output));
  flag("has_dynamic_shape", node.op.hasTag(at::Tag::dynamic_output_shape));
  flag("changes_view", node.op.hasTag(at::Tag::inplace_view));
  out << ",\"scope\":";
  out.text(node.scope);
  out << ",\"backward_node\":";
  out.text(node.backward_node);
  out << '}';
}

} // namespace
} // namespace voltaic::graph

uint64_t vt_recording_hash(const vt_recording *recording, size_t buffer) {
  return voltaic::graph::hash_of(recording->buffers[buffer]);
}

vt_error *vt_recording_describe(const vt_recording *recording, const vt_recording *const *peers, size_t num_peers,
                                void (*take)(void *data, const char *text), void *data) {
  return voltaic::guard([&] {
    using namespace voltaic::graph;
    Writer out;
    out << "{\"nodes\":";
    out.list(recording->nodes, [&](const Node &node) { write_node(out, node); });
    out << ",\"values\":";
    out.list(recording->values, [&](const Value &value) {
      const Geometry &geometry = value.geometry;
      out << "{\"buffer\":" << value.buffer << ",\"dtype\":\"" << c10::toString(geometry.dtype)
          << "\",\"offset\":" << geometry.offset << ",\"size\":";
      out.list(geometry.sizes, [&](int64_t size) { out << size; });
      out << ",\"stride\":";
      out.list(geometry.strides, [&](int64_t stride) { out << stride; });
      out << '}';
    });
    out << ",\"buffers\":";
    out.list(recording->buffers, [&](const Buffer &buffer) {
      out << "{\"bytes\":" << buffer.bytes << ",\"node\":" << buffer.node
          << ",\"is_kept\":" << (buffer.is_kept ? "true" : "false")
          << ",\"is_on_cpu\":" << (buffer.device.is_cpu() ? "true" : "false");
      if (buffer.node < 0 || buffer.is_kept)
        out << ",\"address\":" << reinterpret_cast<size_t>(buffer.address);
      if (is_held_outside(buffer, {peers, num_peers}))
        out << ",\"is_held\":true";
      if (is_constant(*recording, buffer, {peers, num_peers}))
        out << ",\"is_constant\":true";
      out << '}';
    });
    out << ",\"refusal\":";
    out.text(recording->refusal);
    out << ",\"refused_node\":" << recording->refused_node
        << ",\"is_on_card\":" << (recording->is_on_card ? "true" : "false") << '}';
    const std::string text = out.take();
    take(data, text.c_str());
  });
}
