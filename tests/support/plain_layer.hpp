/// The yardstick for rounding errors: the layer as it is usually written (rows copied out, matrix
/// product, bias, activation, matrix product, weighted sum; backward through the saved output of every
/// step), in naive loops that add in f32 (f64 for f64) and round each result to the storage type.
/// A backend may be at most twice as far from the truth as this is.
#pragma once

#include "moestro/activation.hpp"
#include "support/problem.hpp"

namespace moestro::test {

/// All outputs of a layer or of a part of it; rows are grouped by expert.
struct LayerResult {
  Array y, d_x, d_weights, d_w_up, d_w_down, d_b_up, d_b_down;
};

/// Gradients of weights and biases are rounded to `grad_dtype`.
LayerResult plain_layer(const LayerProblem& problem, DType grad_dtype);
inline LayerResult plain_layer(const LayerProblem& problem) {
  return plain_layer(problem, problem.config.dtype);
}

/// c[r, :] = a[r, :] * b[e(r)]^T (+ bias[e(r)]): the grouped product of the stages, rounded to dtype.
/// `b` is [E, columns of c, columns of a], or with `transpose_b` [E, columns of a, columns of c].
Array plain_grouped_product(const Array& a, const Array& b, bool transpose_b, const Array& bias,
                            const std::vector<RoutedRow>& rows, DType dtype);
/// c[e] = sum over rows r of e of a[r, :]^T b[r, :].
Array plain_weight_gradient(const Array& a, const Array& b, const std::vector<RoutedRow>& rows,
                            std::int64_t num_experts, DType accumulator, DType dtype);
Array plain_bias_gradient(const Array& a, const std::vector<RoutedRow>& rows, std::int64_t num_experts,
                          DType accumulator, DType dtype);
/// tokens[t] = sum over t's slots of weights[slot] (1 where null) * array[r], of shape `shape`.
Array plain_combine(const Array& array, const Array* weights, const std::vector<RoutedRow>& rows,
                    const std::vector<std::int64_t>& shape, std::int64_t num_slots, DType dtype);
/// Each row times its slot's weight, rounded.
Array scaled(const Array& array, const Array& weights, const std::vector<RoutedRow>& rows, DType dtype);
/// d[slot] = <a[r, :], b[r, :]>, 0 at sentinels; `slots` gives the shape.
Array plain_row_products(const Array& a, const Array& b, const std::vector<RoutedRow>& rows,
                         const Array& slots, DType accumulator);
/// Rows of `tokens` [T, d] that the routed rows read.
Array gathered(const Array& tokens, const std::vector<RoutedRow>& rows);
/// w_up, b_up or a gradient of them with its rows (axis 1) in the order [gate | up].
Array concatenated_gates(const Array& array, const LayerConfig& config);
/// The inverse.
Array in_gate_layout(const Array& array, const LayerConfig& config);

Array plain_activation(const Array& h, const Activation& activation, DType dtype);
Array plain_activation_backward(const Array& h, const Array& d_a, const Activation& activation, DType dtype);

}  // namespace moestro::test
