#include "core/check.hpp"

#include <cstdio>
#include <limits>

namespace moestro::core {
namespace {

constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();

struct Text {
  char chars[96];
};

Text list(const std::int64_t* values, int count) {
  Text text;
  int used = std::snprintf(text.chars, sizeof text.chars, "[");
  const auto room = [&] { return sizeof text.chars - static_cast<std::size_t>(used); };
  for (int i = 0; i < count; ++i) {
    used += std::snprintf(text.chars + used, room(), "%s%lld", i == 0 ? "" : ", ",
                          static_cast<long long>(values[i]));
  }
  std::snprintf(text.chars + used, room(), "]");
  return text;
}

void canonicalize(TensorView* view, Strides strides) {
  const int last = view->rank - 1;
  const bool is_matrix = strides == Strides::kMatrix && view->rank >= 2;
  if (is_matrix && view->stride[last] != 1 && view->stride[last - 1] != 1) {
    if (view->extent[last] <= 1) {
      view->stride[last] = 1;
    } else if (view->extent[last - 1] <= 1) {
      view->stride[last - 1] = 1;
    }
  }
  const bool is_transposed = is_matrix && view->stride[last] != 1;
  if (view->extent[last] <= 1 && !is_transposed) view->stride[last] = 1;
  if (is_transposed && view->extent[last] <= 1) view->stride[last] = view->extent[last - 1];
  for (int axis = last - 1; axis >= 0; --axis) {
    if (is_transposed && axis == last - 1) continue;
    const int outermost_inner = is_transposed ? last : axis + 1;  // the one whose steps are longest
    if (view->extent[axis] <= 1) {
      view->stride[axis] = view->extent[outermost_inner] * view->stride[outermost_inner];
    }
  }
}

Status check_strides(const char* function, const char* name, const TensorView& view, Strides strides,
                     Access access) {
  if (view.numel() == 0) return {};
  const int last = view.rank - 1;
  bool sound = true;
  if (strides == Strides::kRows) {
    sound = view.stride[last] == 1;
    for (int axis = last - 1; axis >= 0; --axis) {
      const std::int64_t floor = access == Access::kWrite ? view.extent[axis + 1] * view.stride[axis + 1] : 0;
      sound = sound && view.stride[axis] >= floor;
    }
  } else {
    const int unit = view.stride[last] == 1 ? last : last - 1;
    const int other = 2 * last - 1 - unit;
    sound = view.stride[unit] == 1 && view.stride[other] >= view.extent[unit] && view.stride[0] >= 0;
    if (view.rank == 3 && access == Access::kWrite) {
      sound = sound && view.stride[0] >= view.extent[other] * view.stride[other];
    }
  }
  if (sound) return {};
  return Status::error(StatusCode::kInvalidArgument, "%s: %s has strides %s, expected 1 along %s%s", function,
                       name, list(view.stride, view.rank).chars,
                       strides == Strides::kRows ? "its last axis" : "one of its last two axes",
                       access == Access::kWrite ? " and no overlap" : "");
}

}  // namespace

bool is_floating(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16 || dtype == DType::kF16;
}

Status check_present(const char* function, const char* name, const TensorView& view) {
  if (view.present()) return {};
  return Status::error(StatusCode::kInvalidArgument, "%s: %s is required, but it is absent", function, name);
}

Status check_tensor(const char* function, const char* name, TensorView* view, DType dtype,
                    std::initializer_list<std::int64_t> extents, const char* meaning, Strides strides,
                    Access access) {
  MOESTRO_RETURN_IF_ERROR(check_present(function, name, *view));
  bool matches = view->rank == static_cast<int>(extents.size()) && view->dtype == dtype;
  for (int axis = 0; matches && axis < view->rank; ++axis) {
    matches = view->extent[axis] == extents.begin()[axis];
  }
  if (!matches) {
    return Status::error(StatusCode::kInvalidArgument, "%s: %s is %s %s, expected %s %s (%s)", function, name,
                         list(view->extent, view->rank).chars, dtype_name(view->dtype),
                         list(extents.begin(), static_cast<int>(extents.size())).chars, dtype_name(dtype),
                         meaning);
  }
  if (view->data == nullptr && view->numel() != 0) {
    return Status::error(StatusCode::kInvalidArgument, "%s: %s has elements, but its data pointer is null",
                         function, name);
  }
  canonicalize(view, strides);
  return check_strides(function, name, *view, strides, access);
}

Status check_gradient(const char* function, const char* name, TensorView* view, DType dtype,
                      std::initializer_list<std::int64_t> extents, const char* meaning, Strides strides) {
  const DType expected = view->dtype == DType::kF32 && dtype != DType::kF64 ? DType::kF32 : dtype;
  return check_tensor(function, name, view, expected, extents, meaning, strides, Access::kWrite);
}

Status check_activation(const char* function, const Activation& activation) {
  const bool clamps =
      activation.kind == ActivationKind::kSwiGLUClamp || activation.kind == ActivationKind::kSwiGLUOAI;
  if (clamps && !(activation.limit > 0.0F)) {
    return Status::error(StatusCode::kInvalidArgument,
                         "%s: activation limit is %g, expected a number above 0", function,
                         static_cast<double>(activation.limit));
  }
  return {};
}

Status check_config(const char* function, const LayerConfig& config) {
  const struct {
    const char* name;
    std::int64_t value;
    std::int64_t minimum;
    std::int64_t maximum;
  } extents[] = {
      {"num_tokens", config.num_tokens, 0, kInt32Max - 1},
      {"d_model", config.d_model, 1, kInt32Max},
      {"d_ff", config.d_ff, 1, kInt32Max / 2},
      {"num_experts", config.num_experts, 1, kInt32Max - 1},
      {"top_k", config.top_k, 0, kInt32Max},
      {"ragged_slots", config.ragged_slots, 0, kInt32Max},
      {"number of routing slots (T*K)", config.num_slots(), 0, kInt32Max},
  };
  for (const auto& extent : extents) {
    if (extent.value < extent.minimum || extent.value > extent.maximum) {
      return Status::error(StatusCode::kInvalidArgument, "%s: %s is %lld, expected %lld to %lld", function,
                           extent.name, static_cast<long long>(extent.value),
                           static_cast<long long>(extent.minimum), static_cast<long long>(extent.maximum));
    }
  }
  if (!is_floating(config.dtype)) {
    return Status::error(StatusCode::kInvalidArgument, "%s: dtype is %s, expected f32, f64, bf16 or f16",
                         function, dtype_name(config.dtype));
  }
  return check_activation(function, config.activation);
}

}  // namespace moestro::core
