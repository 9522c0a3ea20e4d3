#include "support/plain_layer.hpp"

#include <type_traits>

#include "common/activation_math.hpp"
#include "common/element_access.hpp"

namespace moestro::test {
namespace {

/// Calls function(Real{}) with the type that sums are done in.
template <typename Function>
auto with_accumulator(DType dtype, Function function) {
  return dtype == DType::kF64 ? function(double{}) : function(float{});
}

template <typename Real>
std::vector<Real> as(const Array& array) {
  return {array.values.begin(), array.values.end()};
}

template <typename Real>
void multiply(Array* c, const Array& a, const Array& b, bool transpose_b, const Array& bias,
              const std::vector<RoutedRow>& rows, DType dtype) {
  const std::vector<Real> a_values = as<Real>(a);
  const std::vector<Real> b_values = as<Real>(b);
  const std::int64_t inner = a.columns();
  const std::int64_t columns = c->columns();
  std::vector<Real> sums(static_cast<std::size_t>(columns));
  for (std::int64_t r = 0; r < a.extent(0); ++r) {
    const std::int64_t e = rows[static_cast<std::size_t>(r)].expert;
    const Real* a_row = a_values.data() + r * inner;
    const Real* b_matrix = b_values.data() + e * inner * columns;
    std::fill(sums.begin(), sums.end(), Real(0));
    if (transpose_b) {
      for (std::int64_t k = 0; k < inner; ++k) {
        for (std::int64_t j = 0; j < columns; ++j) {
          sums[static_cast<std::size_t>(j)] += a_row[k] * b_matrix[k * columns + j];
        }
      }
    } else {
      for (std::int64_t j = 0; j < columns; ++j) {
        Real sum = 0;
        for (std::int64_t k = 0; k < inner; ++k) sum += a_row[k] * b_matrix[j * inner + k];
        sums[static_cast<std::size_t>(j)] = sum;
      }
    }
    for (std::int64_t j = 0; j < columns; ++j) {
      Real sum = sums[static_cast<std::size_t>(j)];
      if (bias.present()) sum += static_cast<Real>(bias.at(e, j));
      c->at(r, j) = rounded_to(dtype, static_cast<double>(sum));
    }
  }
}

template <typename Real>
Real activate(const Activation& activation, Real gate, Real up, Real* slope_gate, Real* slope_up) {
  return with_activation_kind(activation.kind, [&]<ActivationKind kKind>() -> Real {
    if constexpr (is_gated(kKind)) {
      const auto point = activation_math::gated<kKind, Real>(gate, up, static_cast<Real>(activation.limit),
                                                             static_cast<Real>(activation.alpha));
      *slope_gate = point.slope_gate;
      *slope_up = point.slope_up;
      return point.value;
    } else {
      const auto point = activation_math::ungated<kKind, Real>(gate);
      *slope_gate = point.slope;
      return point.value;
    }
  });
}

}  // namespace

Array plain_combine(const Array& array, const Array* weights, const std::vector<RoutedRow>& rows,
                    const std::vector<std::int64_t>& shape, std::int64_t num_slots, DType dtype) {
  Array tokens(shape);
  std::vector<std::int64_t> row_of(static_cast<std::size_t>(num_slots), -1);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    row_of[static_cast<std::size_t>(rows[r].slot)] = static_cast<std::int64_t>(r);
  }
  with_accumulator(dtype, [&](auto zero) {
    using Real = decltype(zero);
    std::vector<Real> sums(tokens.values.size(), Real(0));
    for (const std::int64_t r : row_of) {
      if (r < 0) continue;
      const RoutedRow& row = rows[static_cast<std::size_t>(r)];
      const Real weight = weights == nullptr
                              ? Real(1)
                              : static_cast<Real>(weights->values[static_cast<std::size_t>(row.slot)]);
      for (std::int64_t c = 0; c < tokens.columns(); ++c) {
        sums[static_cast<std::size_t>(row.token * tokens.columns() + c)] +=
            weight * static_cast<Real>(array.at(r, c));
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      tokens.values[i] = rounded_to(dtype, static_cast<double>(sums[i]));
    }
  });
  return tokens;
}

Array scaled(const Array& array, const Array& weights, const std::vector<RoutedRow>& rows, DType dtype) {
  Array result = array;
  for (std::int64_t r = 0; r < array.extent(0); ++r) {
    const double weight = weights.values[static_cast<std::size_t>(rows[static_cast<std::size_t>(r)].slot)];
    for (std::int64_t c = 0; c < array.columns(); ++c) {
      result.at(r, c) = rounded_to(dtype, weight * array.at(r, c));
    }
  }
  return result;
}

Array plain_row_products(const Array& a, const Array& b, const std::vector<RoutedRow>& rows,
                         const Array& slots, DType accumulator) {
  Array result(slots.shape);
  with_accumulator(accumulator, [&](auto zero) {
    using Real = decltype(zero);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto row = static_cast<std::int64_t>(r);
      Real sum = 0;
      for (std::int64_t c = 0; c < a.columns(); ++c) {
        sum += static_cast<Real>(a.at(row, c)) * static_cast<Real>(b.at(row, c));
      }
      result.values[static_cast<std::size_t>(rows[r].slot)] = static_cast<double>(sum);
    }
  });
  return result;
}

Array gathered(const Array& tokens, const std::vector<RoutedRow>& rows) {
  Array result({static_cast<std::int64_t>(rows.size()), tokens.columns()});
  for (std::int64_t r = 0; r < result.extent(0); ++r) {
    for (std::int64_t c = 0; c < result.columns(); ++c) {
      result.at(r, c) = tokens.at(rows[static_cast<std::size_t>(r)].token, c);
    }
  }
  return result;
}

namespace {

Array permuted_gates(const Array& array, const LayerConfig& config, bool to_concatenated) {
  if (!array.present()) return {};
  Array result = array;
  for (std::int64_t e = 0; e < array.extent(0); ++e) {
    for (std::int64_t j = 0; j < array.extent(1); ++j) {
      const std::int64_t w_row =
          w_up_row(j, config.d_ff, is_gated(config.activation.kind), config.gate_layout);
      const std::int64_t from = to_concatenated ? w_row : j;
      const std::int64_t to = to_concatenated ? j : w_row;
      if (array.shape.size() == 2) {
        result.at(e, to) = array.at(e, from);
      } else {
        for (std::int64_t k = 0; k < array.extent(2); ++k) result.at(e, to, k) = array.at(e, from, k);
      }
    }
  }
  return result;
}

}  // namespace

Array concatenated_gates(const Array& array, const LayerConfig& config) {
  return permuted_gates(array, config, true);
}
Array in_gate_layout(const Array& array, const LayerConfig& config) {
  return permuted_gates(array, config, false);
}

Array plain_grouped_product(const Array& a, const Array& b, bool transpose_b, const Array& bias,
                            const std::vector<RoutedRow>& rows, DType dtype) {
  Array c({a.extent(0), transpose_b ? b.extent(2) : b.extent(1)});
  with_accumulator(dtype,
                   [&](auto zero) { multiply<decltype(zero)>(&c, a, b, transpose_b, bias, rows, dtype); });
  return c;
}

Array plain_weight_gradient(const Array& a, const Array& b, const std::vector<RoutedRow>& rows,
                            std::int64_t num_experts, DType accumulator, DType dtype) {
  Array c({num_experts, a.columns(), b.columns()});
  with_accumulator(accumulator, [&](auto zero) {
    using Real = decltype(zero);
    const std::vector<Real> b_values = as<Real>(b);
    std::vector<Real> sums(c.values.size(), Real(0));
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const Real* b_row = b_values.data() + static_cast<std::int64_t>(r) * b.columns();
      for (std::int64_t i = 0; i < a.columns(); ++i) {
        Real* sum = sums.data() + (rows[r].expert * a.columns() + i) * b.columns();
        const auto factor = static_cast<Real>(a.at(static_cast<std::int64_t>(r), i));
        for (std::int64_t j = 0; j < b.columns(); ++j) sum[j] += factor * b_row[j];
      }
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      c.values[i] = rounded_to(dtype, static_cast<double>(sums[i]));
    }
  });
  return c;
}

Array plain_bias_gradient(const Array& a, const std::vector<RoutedRow>& rows, std::int64_t num_experts,
                          DType accumulator, DType dtype) {
  const Array ones({a.extent(0), 1}, 1.0);
  Array c = plain_weight_gradient(ones, a, rows, num_experts, accumulator, dtype);
  c.shape = {num_experts, a.columns()};
  return c;
}

Array plain_activation(const Array& h, const Activation& activation, DType dtype) {
  const bool gated = is_gated(activation.kind);
  const std::int64_t n = gated ? h.columns() / 2 : h.columns();
  Array a({h.extent(0), n});
  with_accumulator(dtype, [&](auto zero) {
    using Real = decltype(zero);
    Real unused = 0;
    for (std::int64_t r = 0; r < h.extent(0); ++r) {
      for (std::int64_t j = 0; j < n; ++j) {
        const Real up = gated ? static_cast<Real>(h.at(r, n + j)) : Real(0);
        a.at(r, j) = rounded_to(dtype, static_cast<double>(activate<Real>(
                                           activation, static_cast<Real>(h.at(r, j)), up, &unused, &unused)));
      }
    }
  });
  return a;
}

Array plain_activation_backward(const Array& h, const Array& d_a, const Activation& activation, DType dtype) {
  const bool gated = is_gated(activation.kind);
  const std::int64_t n = d_a.columns();
  Array d_h(h.shape);
  with_accumulator(dtype, [&](auto zero) {
    using Real = decltype(zero);
    for (std::int64_t r = 0; r < h.extent(0); ++r) {
      for (std::int64_t j = 0; j < n; ++j) {
        const Real up = gated ? static_cast<Real>(h.at(r, n + j)) : Real(0);
        Real slope_gate = 0;
        Real slope_up = 0;
        activate<Real>(activation, static_cast<Real>(h.at(r, j)), up, &slope_gate, &slope_up);
        const auto d = static_cast<Real>(d_a.at(r, j));
        d_h.at(r, j) = rounded_to(dtype, static_cast<double>(slope_gate * d));
        if (gated) d_h.at(r, n + j) = rounded_to(dtype, static_cast<double>(slope_up * d));
      }
    }
  });
  return d_h;
}

LayerResult plain_layer(const LayerProblem& problem, DType grad_dtype) {
  const LayerConfig& config = problem.config;
  const DType dtype = config.dtype;
  const DType real = accumulation_dtype(dtype);
  const bool before = config.weight_position == WeightPosition::kBefore;
  const std::vector<RoutedRow> rows = sorted_rows(problem.routing);
  const Array w_up = concatenated_gates(problem.w_up, config);
  const Array b_up = concatenated_gates(problem.b_up, config);

  Array x_rows = gathered(problem.x, rows);
  if (before) x_rows = scaled(x_rows, problem.weights, rows, dtype);
  const Array h = plain_grouped_product(x_rows, w_up, false, b_up, rows, dtype);
  const Array a = plain_activation(h, config.activation, dtype);
  const Array y_rows = plain_grouped_product(a, problem.w_down, false, problem.b_down, rows, dtype);
  LayerResult result;
  result.y = plain_combine(y_rows, before ? nullptr : &problem.weights, rows, problem.x.shape,
                           problem.routing.num_slots(), dtype);

  const Array d_y_gathered = gathered(problem.d_y, rows);
  const Array d_y_rows = before ? d_y_gathered : scaled(d_y_gathered, problem.weights, rows, dtype);
  const Array d_a = plain_grouped_product(d_y_rows, problem.w_down, true, {}, rows, dtype);
  const Array d_h = plain_activation_backward(h, d_a, config.activation, dtype);
  Array d_x_rows = plain_grouped_product(d_h, w_up, true, {}, rows, dtype);

  // The weight multiplies Y, or x: its gradient is the product of that with the gradient that arrives.
  result.d_weights = plain_row_products(before ? gathered(problem.x, rows) : y_rows,
                                        before ? d_x_rows : d_y_gathered, rows, problem.weights, real);
  if (before) d_x_rows = scaled(d_x_rows, problem.weights, rows, dtype);
  result.d_x = plain_combine(d_x_rows, nullptr, rows, problem.x.shape, problem.routing.num_slots(), dtype);
  const std::int64_t num_experts = config.num_experts;
  result.d_w_up =
      in_gate_layout(plain_weight_gradient(d_h, x_rows, rows, num_experts, real, grad_dtype), config);
  result.d_w_down = plain_weight_gradient(d_y_rows, a, rows, num_experts, real, grad_dtype);
  if (config.has_b_up) {
    result.d_b_up = in_gate_layout(plain_bias_gradient(d_h, rows, num_experts, real, grad_dtype), config);
  }
  if (config.has_b_down) {
    result.d_b_down = plain_bias_gradient(d_y_rows, rows, num_experts, real, grad_dtype);
  }
  return result;
}

}  // namespace moestro::test
