// Attention, written in Rust, in the place of libtorch's for the CPU.
#include "kernels/kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <c10/core/GradMode.h>

namespace voltaic {
namespace {

vt_rows rows_of(const Tensor &tensor) {
  return {const_cast<void *>(tensor.const_data_ptr()), {tensor.stride(0), tensor.stride(1), tensor.stride(2)}};
}

bool is_rows(const Tensor &tensor, const Tensor &query) {
  return is_plain(tensor) && tensor.dim() == 4 && tensor.scalar_type() == query.scalar_type() &&
         tensor.stride(3) == 1 && tensor.size(0) == query.size(0) && tensor.size(1) == query.size(1) &&
         tensor.size(3) == query.size(3);
}

bool takes_attention(const Tensor &query, const Tensor &key, const Tensor &value, double dropout,
                     const std::optional<Tensor> &mask) {
  return query.dim() == 4 && has_rust_dtype(query) && is_rows(query, query) && is_rows(key, query) &&
         is_rows(value, query) && key.size(2) == value.size(2) && dropout == 0 &&
         !(mask.has_value() && mask->defined());
}

vt_attention describe(const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &out,
                      const Tensor &log_sum_exp, bool is_causal, std::optional<double> scale) {
  vt_attention attention{};
  attention.dtype = dtype_of(query);
  attention.is_causal = is_causal;
  attention.scale = scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3))));
  attention.batches = query.size(0);
  attention.heads = query.size(1);
  attention.queries = query.size(2);
  attention.keys = key.size(2);
  attention.dim = query.size(3);
  attention.query = rows_of(query);
  attention.key = rows_of(key);
  attention.value = rows_of(value);
  attention.out = rows_of(out);
  attention.log_sum_exp = rows_of(log_sum_exp);
  return attention;
}

// libtorch's layout of gradients: [batch, row, head, dim], seen as [batch, head, row, dim].
Tensor new_rows(const Tensor &like) {
  return new_empty(like, {like.size(0), like.size(2), like.size(1), like.size(3)}).transpose(1, 2);
}

// The gradient of `like`, which is result `number`: where a replay wants it, or in new memory.
Tensor new_grad(uint32_t number, const Tensor &like) {
  if (wanted_results != nullptr)
    for (const auto &[index, wanted] : *wanted_results)
      if (index == number && wanted.defined() && are_alike(wanted, like) && is_rows(wanted, like))
        return wanted;
  return new_rows(like);
}

// libtorch divides by the number of heads.
bool has_no_heads(const Tensor &query) { return query.dim() == 4 && query.size(1) == 0; }

Tensor new_log_sum_exp(const Tensor &query) {
  return at::empty({query.size(0), query.size(2), query.size(1)}, query.options().dtype(at::kFloat)).transpose(1, 2);
}

std::tuple<Tensor, Tensor> attention(const Tensor &query, const Tensor &key, const Tensor &value, double dropout,
                                     bool is_causal, const std::optional<Tensor> &mask, std::optional<double> scale) {
  const auto by_libtorch = [&] {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, mask, scale);
  };
  if (has_no_heads(query))
    return {at::empty_like(query), new_log_sum_exp(query)};
  if (!takes_attention(query, key, value, dropout, mask))
    return by_libtorch();
  Tensor out = at::empty_like(query); // libtorch's layout
  if (out.stride(3) != 1)
    return by_libtorch();
  Tensor log_sum_exp = new_log_sum_exp(query);
  const vt_attention call = describe(query, key, value, out, log_sum_exp, is_causal, scale);
  if (!is_done(rust.attention(&call)))
    return by_libtorch();
  return {std::move(out), std::move(log_sum_exp)};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor &grad, const Tensor &query, const Tensor &key,
                                                      const Tensor &value, const Tensor &out,
                                                      const Tensor &log_sum_exp, double dropout, bool is_causal,
                                                      const std::optional<Tensor> &mask, std::optional<double> scale) {
  const auto by_libtorch = [&] {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, log_sum_exp,
                                                                         dropout, is_causal, mask, scale);
  };
  if (has_no_heads(query))
    return {new_rows(query), new_rows(key), new_rows(value)};
  if (!takes_attention(query, key, value, dropout, mask) || !is_rows(grad, query) || !is_rows(out, query) ||
      !are_alike(grad, query) || !are_alike(out, query) || log_sum_exp.scalar_type() != at::kFloat ||
      log_sum_exp.sizes() != query.sizes().slice(0, 3))
    return by_libtorch();
  Tensor grad_query = new_grad(0, query), grad_key = new_grad(1, key), grad_value = new_grad(2, value);
  vt_attention call = describe(query, key, value, out, log_sum_exp, is_causal, scale);
  call.grad_out = rows_of(grad);
  call.grad_query = rows_of(grad_query);
  call.grad_key = rows_of(grad_key);
  call.grad_value = rows_of(grad_value);
  if (!is_done(rust.attention_backward(&call)))
    return by_libtorch();
  return {std::move(grad_query), std::move(grad_key), std::move(grad_value)};
}

bool is_float8(const Tensor &tensor) {
  return tensor.scalar_type() == at::kFloat8_e4m3fn || tensor.scalar_type() == at::kFloat8_e5m2;
}

// The newest keys or values of queries, and the cache that they go to.
vt_cached_rows cached_rows(const Tensor &query, const Tensor &rows, const Tensor &cache, const OptionalTensor &scale_inv) {
  const auto fits = [&](const Tensor &tensor) {
    return tensor.dim() == 4 && tensor.size(0) == query.size(0) && tensor.size(1) == query.size(1);
  };
  TORCH_CHECK(fits(rows) && fits(cache) && rows.size(2) == 1 && rows.size(3) == cache.size(3) && rows.stride(3) == 1 &&
                  is_dense(cache, at::MemoryFormat::Contiguous) && rows.scalar_type() == cache.scalar_type() &&
                  (has_rust_dtype(cache) || is_float8(cache)),
              "rows ", rows.sizes(), " and a cache ", cache.sizes(), " of ", cache.scalar_type(), " for queries ", query.sizes());
  TORCH_CHECK(!scale_inv.has_value() || (scale_inv->numel() == 1 && scale_inv->scalar_type() == at::kFloat), "one scale is needed");
  vt_cached_rows all{};
  all.rows = const_cast<void *>(rows.const_data_ptr());
  all.strides[0] = rows.stride(0);
  all.strides[1] = rows.stride(1);
  all.cache = cache.mutable_data_ptr();
  all.bytes = static_cast<int32_t>(cache.element_size());
  all.format = cache.scalar_type() == at::kFloat8_e5m2 ? VT_E5M2 : VT_E4M3;
  all.dim = cache.size(3);
  all.scale = scale_inv.has_value() ? *scale_inv->const_data_ptr<float>() : 1;
  return all;
}

Tensor attend_cached(const Tensor &query, const Tensor &key, const Tensor &value, const Tensor &keys, const Tensor &values,
                     const Tensor &slot, const Tensor &positions, const OptionalTensor &key_scale_inv,
                     const OptionalTensor &value_scale_inv) {
  TORCH_CHECK(query.dim() == 4 && query.size(2) == 1 && query.stride(3) == 1 && is_plain(query) && has_rust_dtype(query) &&
                  keys.dim() == 4 && values.dim() == 4 && query.size(3) == keys.size(3) && keys.size(2) == values.size(2),
              "queries ", query.sizes(), ", keys ", keys.sizes(), " and values ", values.sizes());
  TORCH_CHECK(slot.numel() == 1 && positions.numel() == query.size(0) && positions.is_contiguous() &&
                  slot.scalar_type() == at::kLong && positions.scalar_type() == at::kLong,
              "a slot and a position for each sequence are needed");
  Tensor out = at::empty({query.size(0), query.size(1), 1, values.size(3)}, query.options());
  vt_cached_attention call{};
  call.dtype = dtype_of(query);
  call.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(query.size(3))));
  call.batches = query.size(0);
  call.heads = query.size(1);
  call.capacity = keys.size(2);
  call.slot = *slot.const_data_ptr<int64_t>();
  call.positions = positions.const_data_ptr<int64_t>();
  call.query = const_cast<void *>(query.const_data_ptr());
  call.strides[0] = query.stride(0);
  call.strides[1] = query.stride(1);
  call.out = out.mutable_data_ptr();
  call.keys = cached_rows(query, key, keys, key_scale_inv);
  call.values = cached_rows(query, value, values, value_scale_inv);
  is_done(rust.attend_cached(&call));
  return out;
}

void define_attend_cached() {
  static auto *library = new torch::Library(torch::Library::FRAGMENT, "voltaic", std::nullopt, __FILE__, __LINE__);
  library->def("attend_cached(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slot, Tensor positions, "
               "Tensor? key_scale_inv, Tensor? value_scale_inv) -> Tensor");
  static auto *kernels = new torch::Library(torch::Library::IMPL, "voltaic", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernels->impl("attend_cached", &attend_cached);
}

} // namespace

void install_attention(torch::Library &library) {
  if (rust.attend_cached != nullptr)
    define_attend_cached();
  if (rust.attention == nullptr)
    return;
  library.impl("_scaled_dot_product_flash_attention_for_cpu", &attention);
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &attention_backward);
}

} // namespace voltaic

using namespace voltaic;

vt_error *vt_attend_cached(const vt_cached_tensors *tensors, vt_tensor *out) {
  return voltaic::guard([&] {
    const c10::NoGradGuard no_grad;
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("voltaic::attend_cached", "").typed<decltype(attend_cached)>();
    const auto optional = [](vt_tensor tensor) { return tensor == nullptr ? std::nullopt : OptionalTensor(*tensor); };
    *out = new Tensor(op.call(*tensors->query, *tensors->key, *tensors->value, *tensors->keys, *tensors->values, *tensors->slot,
                              *tensors->positions, optional(tensors->key_scale_inv), optional(tensors->value_scale_inv)));
  });
}
