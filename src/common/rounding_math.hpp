/// The target count of one expert, written once for the reference, the CPU and CUDA.
#pragma once

#include <cstdint>

#include "common/host_device.hpp"
#include "moestro/rounding.hpp"

namespace moestro::rounding_math {

/// `count` rounded to a multiple of `tile`, at most `available`. `draw` is read for kStochastic only; kScore
/// is decided by the caller, who asks for kUp and kDown.
MOESTRO_HOST_DEVICE std::int64_t rounded(std::int64_t count, std::int64_t tile, Rounding rounding,
                                         std::int64_t available, float draw) {
  const std::int64_t rest = count & (tile - 1);
  const std::int64_t down = count - rest;
  bool up = false;
  switch (rounding) {
    case Rounding::kUp: up = rest > 0; break;
    case Rounding::kNearest: up = 2 * rest >= tile; break;
    case Rounding::kStochastic: up = draw * static_cast<float>(tile) < static_cast<float>(rest); break;
    case Rounding::kDown:
    case Rounding::kScore: break;
  }
  return up && down + tile <= available ? down + tile : down;
}

/// A score's bits in the order of the scores; NaN is 0, below every other.
MOESTRO_HOST_DEVICE std::uint32_t ordered(float score) {
  if (score != score) return 0;
  score += 0.0F;  // -0 is 0
  union {
    float real;
    std::uint32_t bits;
  } both = {score};
  return (both.bits & 0x80000000U) != 0 ? ~both.bits : both.bits | 0x80000000U;
}
MOESTRO_HOST_DEVICE float from_ordered(std::uint32_t order) {
  union {
    std::uint32_t bits;
    float real;
  } both = {(order & 0x80000000U) != 0 ? order ^ 0x80000000U : ~order};
  return order == 0 ? 0.0F : both.real;
}

}  // namespace moestro::rounding_math
