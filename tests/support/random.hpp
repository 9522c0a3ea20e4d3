/// Random numbers that are the same on every platform (std's distributions are not).
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>

#include "support/array.hpp"

namespace moestro::test {

/// splitmix64: any seed is a good seed.
class Rng {
 public:
  explicit Rng(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }
  /// In [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  /// In [low, high], both included.
  std::int64_t integer(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool chance(double probability) { return uniform() < probability; }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }
  template <typename List>
  auto pick(const List& list) {
    return std::begin(list)[integer(0, static_cast<std::int64_t>(std::size(list)) - 1)];
  }

 private:
  std::uint64_t state_;
};

inline Array normal_array(Rng& rng, std::vector<std::int64_t> shape, double scale = 1) {
  Array array(std::move(shape));
  for (double& value : array.values) value = scale * rng.normal();
  return array;
}

/// Multiples of `step` in [-steps, steps] * step: sums of their products stay exact in f32, so every
/// order of summation gives the same bits and a kink of an activation is on the same side for all.
inline Array grid_array(Rng& rng, std::vector<std::int64_t> shape, double step, std::int64_t steps) {
  Array array(std::move(shape));
  for (double& value : array.values) value = step * static_cast<double>(rng.integer(-steps, steps));
  return array;
}

}  // namespace moestro::test
