// Operators on float8: casts with scales and largest magnitudes, new scales, products. They are operators of their own, so that
// recordings have them and emulated HPUs run them.
#include "kernels/kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>

#include <cmath>

namespace voltaic {
namespace {

vt_float8_kernels float8{};

using at::ScalarType;
using Pair = std::tuple<Tensor, Tensor>;

int32_t format_of(ScalarType dtype) {
  TORCH_CHECK(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, "float8_e4m3fn or float8_e5m2 is needed, not ",
              dtype);
  return dtype == ScalarType::Float8_e4m3fn ? VT_E4M3 : VT_E5M2;
}

// Dense float32 or bfloat16, which Rust casts from.
Tensor dense(const Tensor &input) {
  return (has_rust_dtype(input) ? input : input.to(at::kFloat)).contiguous();
}

Tensor empty_like_in(const Tensor &like, ScalarType dtype) { return at::empty(like.sizes(), like.options().dtype(dtype)); }

float number_at(const Tensor &numbers, int64_t slot) {
  TORCH_CHECK(numbers.scalar_type() == at::kFloat && numbers.is_contiguous() && slot >= 0 && slot < numbers.numel(),
              "scales are dense float32 with a place for each tensor");
  return numbers.const_data_ptr<float>()[slot];
}

Pair run_cast(const Tensor &given, const Tensor &scale, const Tensor &scale_inv, const Tensor &amax_history,
              const Tensor &amax_history_index, int64_t slot, bool measures, ScalarType dtype, const uint64_t *seed) {
  const Tensor input = dense(given);
  Tensor output = empty_like_in(input, dtype);
  float amax = 0;
  is_done(float8.cast(dtype_of(input), input.const_data_ptr(), input.numel(), format_of(dtype), number_at(scale, slot), seed,
                      output.mutable_data_ptr(), &amax));
  if (measures) {
    const int64_t row = amax_history_index.const_data_ptr<int32_t>()[0], slots = amax_history.size(1);
    TORCH_CHECK(amax_history.is_contiguous() && row >= 0 && row < amax_history.size(0) && slot < slots,
                "row ", row, " of an amax history of shape ", amax_history.sizes());
    amax_history.mutable_data_ptr<float>()[row * slots + slot] = amax;
  }
  Tensor inverse = at::empty({1}, scale.options());
  *inverse.mutable_data_ptr<float>() = number_at(scale_inv, slot);
  return {std::move(output), std::move(inverse)};
}

Pair cast(const Tensor &input, const Tensor &scale, const Tensor &scale_inv, const Tensor &amax_history,
          const Tensor &amax_history_index, int64_t slot, bool measures, ScalarType dtype) {
  return run_cast(input, scale, scale_inv, amax_history, amax_history_index, slot, measures, dtype, nullptr);
}

uint64_t seed_of(std::optional<at::Generator> given) {
  auto *generator = at::get_generator_or_default<at::CPUGeneratorImpl>(given, at::detail::getDefaultCPUGenerator());
  const std::scoped_lock lock(generator->mutex_);
  return generator->random64();
}

Pair cast_stochastic(const Tensor &input, const Tensor &scale, const Tensor &scale_inv, const Tensor &amax_history,
                     const Tensor &amax_history_index, int64_t slot, bool measures, ScalarType dtype,
                     std::optional<at::Generator> generator) {
  const uint64_t seed = seed_of(std::move(generator));
  return run_cast(input, scale, scale_inv, amax_history, amax_history_index, slot, measures, dtype, &seed);
}

// With a scale from the numbers themselves: of all, or of each row of a matrix.
Pair run_cast_current(const Tensor &given, bool by_row, ScalarType dtype, int64_t margin, const uint64_t *seed) {
  const Tensor input = dense(given);
  TORCH_CHECK(!by_row || input.dim() == 2, "rows of a matrix are needed, not of ", input.sizes());
  Tensor output = empty_like_in(input, dtype);
  const int64_t rows = by_row ? input.size(0) : 1, len = rows == 0 ? 0 : input.numel() / rows;
  Tensor inverse = at::empty({rows}, input.options().dtype(at::kFloat));
  const auto *from = static_cast<const char *>(input.const_data_ptr());
  auto *to = static_cast<char *>(output.mutable_data_ptr());
  const int32_t type = dtype_of(input), format = format_of(dtype);
  for (int64_t row = 0; row < rows; ++row) {
    const char *numbers = from + row * len * static_cast<int64_t>(input.element_size());
    float amax = 0;
    is_done(float8.largest(type, numbers, len, &amax));
    float scale = 1;
    is_done(float8.new_scale(amax, 1, format, static_cast<int32_t>(margin), &scale));
    const uint64_t own = seed == nullptr ? 0 : *seed + static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15ull;
    is_done(float8.cast(type, numbers, len, format, scale, seed == nullptr ? nullptr : &own, to + row * len, &amax));
    inverse.mutable_data_ptr<float>()[row] = 1 / scale;
  }
  return {std::move(output), std::move(inverse)};
}

Pair cast_current(const Tensor &input, bool by_row, ScalarType dtype, int64_t margin) {
  return run_cast_current(input, by_row, dtype, margin, nullptr);
}

Pair cast_current_stochastic(const Tensor &input, bool by_row, ScalarType dtype, int64_t margin,
                             std::optional<at::Generator> generator) {
  const uint64_t seed = seed_of(std::move(generator));
  return run_cast_current(input, by_row, dtype, margin, &seed);
}

// Scales from what was measured, then the next row of the history.
void update(const Tensor &scale, const Tensor &scale_inv, const Tensor &amax_history_index, const Tensor &amax_history,
            ScalarType dtype, int64_t margin, bool uses_max) {
  const int64_t rows = amax_history.size(0), slots = amax_history.size(1);
  TORCH_CHECK(scale.numel() == slots && scale_inv.numel() == slots && scale.is_contiguous() && scale_inv.is_contiguous() &&
                  amax_history.is_contiguous(),
              "a scale is needed for each of the ", slots, " tensors of the history");
  const float *history = amax_history.const_data_ptr<float>();
  int32_t &index = *amax_history_index.mutable_data_ptr<int32_t>();
  TORCH_CHECK(index >= 0 && index < rows, "row ", index, " of an amax history of ", rows);
  for (int64_t slot = 0; slot < slots; ++slot) {
    float amax = history[index * slots + slot];
    for (int64_t row = 0; uses_max && row < rows; ++row)
      if (const float own = history[row * slots + slot]; !(own <= amax))
        amax = own;
    float &known = scale.mutable_data_ptr<float>()[slot];
    is_done(float8.new_scale(amax, known, format_of(dtype), static_cast<int32_t>(margin), &known));
    scale_inv.mutable_data_ptr<float>()[slot] = 1 / known;
  }
  index = static_cast<int32_t>((index + 1) % rows);
}

// The numbers of a float8 tensor in another dtype, times a power of two: exactly.
Tensor scaled(const Tensor &codes, ScalarType dtype, float scale) {
  if (!codes.is_contiguous()) {
    const bool is_turned = codes.dim() >= 2 && codes.transpose(-1, -2).is_contiguous();
    return is_turned ? scaled(codes.transpose(-1, -2), dtype, scale).transpose(-1, -2) : scaled(codes.contiguous(), dtype, scale);
  }
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, "float8 is widened to float32 or bfloat16, not ", dtype);
  Tensor output = empty_like_in(codes, dtype);
  is_done(float8.widen(format_of(codes.scalar_type()), codes.const_data_ptr(), codes.numel(), scale, dtype_of(output),
                       output.mutable_data_ptr()));
  return output;
}

Tensor widened(const Tensor &codes, ScalarType dtype) { return scaled(codes, dtype, 1); }

bool are_powers_of_two(const Tensor &numbers) {
  const float *at = numbers.const_data_ptr<float>();
  int exponent = 0;
  return std::all_of(at, at + numbers.numel(), [&](float number) { return std::frexp(number, &exponent) == 0.5f; });
}

// (a b) of few rows and a matrix whose columns are dense, straight from its codes, times the scales, and the bias; none if it is not
// that.
OptionalTensor product_of_few_rows(const Tensor &a, const Tensor &b, const Tensor &a_scale_inv, const Tensor &b_scale_inv,
                                   const OptionalTensor &bias) {
  if (a.dim() != 2 || b.dim() != 2 || !b.t().is_contiguous() || a.numel() == 0 || b.numel() == 0 || a.size(1) != b.size(0))
    return std::nullopt;
  const int64_t rows = a.size(0), columns = b.size(1);
  int32_t is_known = 0;
  const auto multiply = [&](const float *input, float *output) {
    is_done(float8.rows(input, rows, b.const_data_ptr(), columns, b.size(0), format_of(b.scalar_type()), output, &is_known));
  };
  multiply(nullptr, nullptr);
  if (is_known == 0)
    return std::nullopt;
  const Tensor wide = widened(a, at::kFloat).contiguous();
  // one number, or one for each
  const auto dense_floats = [](const Tensor &numbers) { return numbers.to(at::kFloat).contiguous(); };
  const Tensor by_row = dense_floats(a_scale_inv), by_column = dense_floats(b_scale_inv);
  TORCH_CHECK((by_row.numel() == 1 || by_row.numel() == rows) && (by_column.numel() == 1 || by_column.numel() == columns),
              "a scale is needed for all rows and columns, or one for each");
  const Tensor row = bias.has_value() ? dense_floats(bias->expand({columns})) : Tensor();
  Tensor out = at::empty({rows, columns}, wide.options());
  auto *sums = out.mutable_data_ptr<float>();
  multiply(wide.const_data_ptr<float>(), sums);
  const auto *scales = by_column.const_data_ptr<float>(), *added = bias.has_value() ? row.const_data_ptr<float>() : nullptr;
  const bool has_one = by_column.numel() == 1;
  for (int64_t i = 0; i < rows; ++i, sums += columns) {
    const float scale = by_row.const_data_ptr<float>()[by_row.numel() == 1 ? 0 : i];
    if (has_one && added == nullptr) {
      const float of_all = *scales;
      for (int64_t j = 0; j < columns; ++j)
        sums[j] = sums[j] * scale * of_all;
      continue;
    }
    for (int64_t j = 0; j < columns; ++j)
      sums[j] = sums[j] * scale * scales[has_one ? 0 : j] + (added == nullptr ? 0 : added[j]);
  }
  return out;
}

// (a b) scale + row of float8 matrices, or without a row of batches of them, in the dtype of sums. Float8 times a power of two is exact
// in both dtypes, and so are its products in float32.
Tensor sums_of(const Tensor &a, const Tensor &b, float scale, const OptionalTensor &row, ScalarType dtype) {
  static const bool by_bf16 = is_done(float8.product(nullptr)); // faster than in float32
  const int64_t dim = a.dim();
  const bool fits = a.numel() > 0 && b.numel() > 0 && b.dim() == dim && a.size(-1) == b.size(-2) && (dim == 2 || a.size(0) == b.size(0));
  const bool is_own = by_bf16 && fits && dtype == at::kFloat;
  const ScalarType factors = is_own ? at::kBFloat16 : dtype;
  const Tensor wide_a = scaled(a, factors, scale), wide_b = widened(b, factors);
  if (!is_own && row.has_value())
    return at::addmm(*row, wide_a, wide_b);
  if (!is_own)
    return dim == 3 ? at::bmm(wide_a, wide_b) : at::mm(wide_a, wide_b);
  c10::SmallVector<int64_t, 3> sizes(a.sizes().begin(), a.sizes().end());
  sizes[dim - 1] = b.size(-1);
  Tensor out = at::empty(sizes, a.options().dtype(dtype));
  if (row.has_value())
    out.copy_(row->expand(sizes));
  const vt_product product = product_of(wide_a, wide_b, out, row.has_value());
  TORCH_CHECK(is_done(float8.product(&product)), "products of bfloat16 are not there");
  return out;
}

// Scales that factors are multiplied by before their product, with room for the numbers of float8.
bool fits_factors(float scale) { return scale >= 0x1p-60f && scale <= 0x1p60f; }

// (a b) times the scales, and the bias: rounded once if the scales are powers of two.
Tensor product(const Tensor &a, const Tensor &b, const Tensor &a_scale_inv, const Tensor &b_scale_inv,
               const OptionalTensor &bias, ScalarType out_dtype) {
  if (OptionalTensor out = product_of_few_rows(a, b, a_scale_inv, b_scale_inv, bias))
    return out->to(out_dtype);
  const bool is_exact = are_powers_of_two(a_scale_inv) && are_powers_of_two(b_scale_inv);
  const ScalarType dtype = is_exact && out_dtype == at::kBFloat16 ? at::kBFloat16 : at::kFloat;
  if (a_scale_inv.numel() == 1 && b_scale_inv.numel() == 1) {
    const float scale = number_at(a_scale_inv, 0) * number_at(b_scale_inv, 0);
    if (is_exact && fits_factors(scale)) {
      const OptionalTensor row = bias.has_value() ? OptionalTensor(bias->to(dtype)) : std::nullopt;
      return sums_of(a, b, scale, row, dtype).to(out_dtype);
    }
    Tensor out = sums_of(a, b, 1, std::nullopt, dtype).mul_(scale);
    if (bias.has_value())
      out.add_(*bias);
    return out.to(out_dtype);
  }
  Tensor out = sums_of(a, b, 1, std::nullopt, dtype);
  out.mul_(a_scale_inv.view({-1, 1})).mul_(b_scale_inv.view({1, -1}));
  if (bias.has_value())
    out.add_(*bias);
  return out.to(out_dtype);
}

// Defined once; the libraries live as long as the process.
void define() {
  static auto *library = new torch::Library(torch::Library::FRAGMENT, "voltaic", std::nullopt, __FILE__, __LINE__);
  library->def("fp8_cast(Tensor input, Tensor scale, Tensor scale_inv, Tensor(a!) amax_history, Tensor amax_history_index, int slot, "
               "bool measures, ScalarType dtype) -> (Tensor, Tensor)");
  library->def("fp8_cast_stochastic(Tensor input, Tensor scale, Tensor scale_inv, Tensor(a!) amax_history, Tensor "
               "amax_history_index, int slot, bool measures, ScalarType dtype, Generator? generator=None) -> (Tensor, Tensor)");
  library->def("fp8_cast_current(Tensor input, bool by_row, ScalarType dtype, int margin) -> (Tensor, Tensor)");
  library->def("fp8_cast_current_stochastic(Tensor input, bool by_row, ScalarType dtype, int margin, Generator? generator=None) -> "
               "(Tensor, Tensor)");
  library->def("fp8_update(Tensor(a!) scale, Tensor(b!) scale_inv, Tensor(c!) amax_history_index, Tensor amax_history, ScalarType "
               "dtype, int margin, bool uses_max) -> ()");
  library->def("fp8_from(Tensor codes, ScalarType dtype) -> Tensor");
  library->def("fp8_mm(Tensor a, Tensor b, Tensor a_scale_inv, Tensor b_scale_inv, Tensor? bias, ScalarType out_dtype) -> Tensor");
  static auto *kernels = new torch::Library(torch::Library::IMPL, "voltaic", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernels->impl("fp8_cast", &cast);
  kernels->impl("fp8_cast_stochastic", &cast_stochastic);
  kernels->impl("fp8_cast_current", &cast_current);
  kernels->impl("fp8_cast_current_stochastic", &cast_current_stochastic);
  kernels->impl("fp8_update", &update);
  kernels->impl("fp8_from", &widened);
  kernels->impl("fp8_mm", &product);
}

template <typename Function> auto operator_of(const char *name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Function>();
}

ScalarType dtype_numbered(int32_t number) { return static_cast<ScalarType>(number); }

const std::optional<at::Generator> default_generator;

void give(Pair pair, vt_tensor *first, vt_tensor *second) {
  *first = new Tensor(std::move(std::get<0>(pair)));
  *second = new Tensor(std::move(std::get<1>(pair)));
}

} // namespace
} // namespace voltaic

using namespace voltaic;

vt_error *vt_install_float8(const vt_float8_kernels *kernels) {
  return voltaic::guard([&] {
    float8 = *kernels;
    if (rust.failure == nullptr)
      rust.failure = kernels->failure;
    define();
  });
}

vt_error *vt_fp8_cast(vt_tensor input, const vt_fp8_meta *meta, int64_t slot, int32_t measures, int32_t dtype, int32_t is_stochastic,
                      vt_tensor *codes, vt_tensor *scale_inv) {
  return voltaic::guard([&] {
    const c10::NoGradGuard no_grad;
    if (is_stochastic != 0) {
      static const auto op = operator_of<decltype(cast_stochastic)>("voltaic::fp8_cast_stochastic");
      return give(op.call(*input, *meta->scale, *meta->scale_inv, *meta->amax_history, *meta->amax_history_index, slot, measures != 0,
                          dtype_numbered(dtype), default_generator),
                  codes, scale_inv);
    }
    static const auto op = operator_of<decltype(cast)>("voltaic::fp8_cast");
    give(op.call(*input, *meta->scale, *meta->scale_inv, *meta->amax_history, *meta->amax_history_index, slot, measures != 0,
                 dtype_numbered(dtype)),
         codes, scale_inv);
  });
}

vt_error *vt_fp8_cast_current(vt_tensor input, int32_t by_row, int32_t dtype, int64_t margin, int32_t is_stochastic, vt_tensor *codes,
                              vt_tensor *scale_inv) {
  return voltaic::guard([&] {
    const c10::NoGradGuard no_grad;
    if (is_stochastic != 0) {
      static const auto op = operator_of<decltype(cast_current_stochastic)>("voltaic::fp8_cast_current_stochastic");
      return give(op.call(*input, by_row != 0, dtype_numbered(dtype), margin, default_generator), codes, scale_inv);
    }
    static const auto op = operator_of<decltype(cast_current)>("voltaic::fp8_cast_current");
    give(op.call(*input, by_row != 0, dtype_numbered(dtype), margin), codes, scale_inv);
  });
}

vt_error *vt_fp8_update(const vt_fp8_meta *meta, int32_t dtype, int64_t margin, int32_t uses_max) {
  return voltaic::guard([&] {
    const c10::NoGradGuard no_grad;
    static const auto op = operator_of<decltype(update)>("voltaic::fp8_update");
    op.call(*meta->scale, *meta->scale_inv, *meta->amax_history_index, *meta->amax_history, dtype_numbered(dtype), margin, uses_max != 0);
  });
}

vt_error *vt_fp8_from(vt_tensor codes, int32_t dtype, vt_tensor *numbers) {
  return voltaic::guard([&] {
    const c10::NoGradGuard no_grad;
    static const auto op = operator_of<decltype(widened)>("voltaic::fp8_from");
    *numbers = new Tensor(op.call(*codes, dtype_numbered(dtype)));
  });
}

vt_error *vt_fp8_mm(vt_tensor a, vt_tensor b, vt_tensor a_scale_inv, vt_tensor b_scale_inv, vt_tensor bias, int32_t out_dtype,
                    vt_tensor *out) {
  return voltaic::guard([&] {
    const c10::NoGradGuard no_grad;
    static const auto op = operator_of<decltype(product)>("voltaic::fp8_mm");
    *out = new Tensor(op.call(*a, *b, *a_scale_inv, *b_scale_inv, to_optional(bias), dtype_numbered(out_dtype)));
  });
}
