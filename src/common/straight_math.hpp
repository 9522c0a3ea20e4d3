/// exp and erf of a float without branches, table or call, so that a loop over them is vectorised; for the
/// host. Polynomials fitted for this file (weighted least squares towards the minimax error, coefficients
/// rounded to f32).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace moestro::straight_math {

/// Within 1 ulp; overflows to infinity, goes through subnormals to 0, keeps NaN.
inline float exponential(float x) {
  x = x < -104.0F ? -104.0F : x;
  x = x > 89.0F ? 89.0F : x;
  // x = n ln 2 + r. Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  const float shifted = x * 1.44269504F + 12582912.0F;
  const auto n = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(12582912.0F);
  const float rounded = shifted - 12582912.0F;
  const float r = (x - rounded * 0.693359375F) - rounded * -2.12194440e-4F;  // ln 2 in two parts
  float q = 0.0013813142F;
  q = q * r + 0.0083694188F;
  q = q * r + 0.041668456F;
  q = q * r + 0.16666515F;
  q = q * r + 0.49999994F;
  const float power = 1.0F + (r + r * r * q);
  // 2^n in two factors: 2^128 and 2^-150 have no float of their own.
  const std::int32_t half = n >> 1;
  return power * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((n - half + 127) << 23);
}

/// Within 1.4e-7 absolutely.
inline float error_function(float x) {
  const float a = x < 0.0F ? -x : x;
  const float s = a * a;
  float p = 7.8538571e-05F;
  p = p * s - 0.00080101925F;
  p = p * s + 0.0051883277F;
  p = p * s - 0.026853811F;
  p = p * s + 0.11283585F;
  p = p * s - 0.37612626F;
  p = p * s + 1.1283791F;
  // From 1 on: 1 - exp(-t u(t)); past 4 it is 1 in f32.
  const float t = a > 4.0F ? 4.0F : a;
  float u = 3.8507424e-06F;
  u = u * t - 3.2142125e-05F;
  u = u * t - 0.00011913453F;
  u = u * t + 0.0031255789F;
  u = u * t - 0.022996256F;
  u = u * t + 0.10557432F;
  u = u * t + 0.63546133F;
  u = u * t + 1.128588F;
  const float value = a < 1.0F ? a * p : 1.0F - exponential(-t * u);
  return x < 0.0F ? -value : value;
}

}  // namespace moestro::straight_math
