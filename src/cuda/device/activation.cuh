/// An expert's non-linearity on a piece of a row, its kind chosen at run time: one switch a piece.
#pragma once

#include "common/activation_math.hpp"
#include "cuda/device/numeric.cuh"

namespace moestro::cuda {

/// with_activation_kind (common/activation_math.hpp) for device code.
template <typename Function>
__device__ __forceinline__ void with_kind(ActivationKind kind, Function&& function) {
  switch (kind) {
    case ActivationKind::kSwiGLU: function.template operator()<ActivationKind::kSwiGLU>(); break;
    case ActivationKind::kGeGLU: function.template operator()<ActivationKind::kGeGLU>(); break;
    case ActivationKind::kGeGLUTanh: function.template operator()<ActivationKind::kGeGLUTanh>(); break;
    case ActivationKind::kReGLU: function.template operator()<ActivationKind::kReGLU>(); break;
    case ActivationKind::kSwiGLUClamp: function.template operator()<ActivationKind::kSwiGLUClamp>(); break;
    case ActivationKind::kSwiGLUOAI: function.template operator()<ActivationKind::kSwiGLUOAI>(); break;
    case ActivationKind::kReLU: function.template operator()<ActivationKind::kReLU>(); break;
    case ActivationKind::kReLU2: function.template operator()<ActivationKind::kReLU2>(); break;
    case ActivationKind::kGELU: function.template operator()<ActivationKind::kGELU>(); break;
    case ActivationKind::kSiLU: function.template operator()<ActivationKind::kSiLU>(); break;
  }
}

/// a = act(gate, up); an ungated kind reads only `gate`.
__device__ __forceinline__ void activate_piece(const Activation& activation, const float (&gate)[kPiece],
                                               const float (&up)[kPiece], float (&a)[kPiece]) {
  with_kind(activation.kind, [&]<ActivationKind kKind>() {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if constexpr (is_gated(kKind)) {
        a[i] = activation_math::gated<kKind>(gate[i], up[i], activation.limit, activation.alpha).value;
      } else {
        a[i] = activation_math::ungated<kKind>(gate[i]).value;
      }
    }
  });
}

/// a = act(gate, up), and gate and up are replaced by the slopes.
__device__ __forceinline__ void activation_slopes(const Activation& activation, float (&gate)[kPiece],
                                                  float (&up)[kPiece], float (&a)[kPiece]) {
  with_kind(activation.kind, [&]<ActivationKind kKind>() {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      if constexpr (is_gated(kKind)) {
        const auto point = activation_math::gated<kKind>(gate[i], up[i], activation.limit, activation.alpha);
        a[i] = point.value;
        gate[i] = point.slope_gate;
        up[i] = point.slope_up;
      } else {
        const auto point = activation_math::ungated<kKind>(gate[i]);
        a[i] = point.value;
        gate[i] = point.slope;
        up[i] = 0.0F;
      }
    }
  });
}

}  // namespace moestro::cuda
