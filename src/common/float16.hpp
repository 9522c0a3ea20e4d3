/// bf16 and f16 as storage types: bits that convert to and from float with one rounding to nearest
/// even. Arithmetic happens in float. For the host; CUDA code uses the toolkit's own types on the same bits.
#pragma once

#include <bit>
#include <cstdint>

namespace moestro {

struct BFloat16 {
  std::uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const std::uint32_t word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7fffffffU) > 0x7f800000U) {
      bits = static_cast<std::uint16_t>((word >> 16) | 0x40U);  // NaN stays NaN
    } else {
      bits = static_cast<std::uint16_t>((word + 0x7fffU + ((word >> 16) & 1U)) >> 16);
    }
  }
  explicit BFloat16(double value) : BFloat16(static_cast<float>(value)) {}
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

struct Float16 {
  std::uint16_t bits;

  Float16() = default;
  explicit Float16(float value) {
    const std::uint32_t word = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = (word >> 16) & 0x8000U;
    const std::uint32_t magnitude = word & 0x7fffffffU;
    if (magnitude > 0x7f800000U) {
      bits = static_cast<std::uint16_t>(sign | 0x7e00U);
    } else if (magnitude >= 0x477ff000U) {  // rounds past 65504
      bits = static_cast<std::uint16_t>(sign | 0x7c00U);
    } else if (magnitude < 0x38800000U) {  // subnormal in f16: let float addition round at bit 2^-24
      const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
      bits = static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
    } else {
      const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
      bits = static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
    }
  }
  explicit Float16(double value) : Float16(static_cast<float>(value)) {}
  operator float() const {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t exponent = (bits >> 10) & 0x1fU;
    const std::uint32_t mantissa = bits & 0x3ffU;
    if (exponent == 0x1fU) return std::bit_cast<float>(sign | 0x7f800000U | (mantissa << 13));
    if (exponent == 0) {
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
      return sign != 0 ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  }
};

}  // namespace moestro
