/// Argument checks with one sentence for each failure: the function, the argument, what was expected,
/// what came.
#pragma once

#include <initializer_list>

#include "moestro/config.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro::core {

/// Which axes of a view must lie close together.
enum class Strides {
  kRows,    ///< unit stride along the last axis
  kMatrix,  ///< unit stride along one of the last two axes, the other at least as far apart
};

enum class Access { kRead, kWrite };

/// Checks one argument and makes its strides canonical: along an axis of one element (or none) the
/// stride says nothing, so it is set to what a contiguous tensor would have and backends need not care.
/// `meaning` explains the extents ("[E, 2n, d]").
Status check_tensor(const char* function, const char* name, TensorView* view, DType dtype,
                    std::initializer_list<std::int64_t> extents, const char* meaning, Strides strides,
                    Access access = Access::kRead);

/// As check_tensor for the gradient of a weight or bias, whose dtype is `dtype` or f32.
Status check_gradient(const char* function, const char* name, TensorView* view, DType dtype,
                      std::initializer_list<std::int64_t> extents, const char* meaning, Strides strides);

Status check_present(const char* function, const char* name, const TensorView& view);

bool is_floating(DType dtype);

/// Extents in range, dtype a floating one, slots and tokens countable in 32 bits, activation sound.
Status check_config(const char* function, const LayerConfig& config);
Status check_activation(const char* function, const Activation& activation);

}  // namespace moestro::core
