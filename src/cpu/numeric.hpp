/// Storage types, the types they are computed in, and rows converted between the two.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/float16.hpp"
#include "cpu/isa.hpp"
#include "moestro/tensor.hpp"

namespace moestro::cpu {

template <class T>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<double> {
  using Type = double;
};
template <class T>
using Acc = typename AccumulatorOf<T>::Type;

/// Calls function.template operator()<T>() with the storage type of `dtype`.
template <class Function>
decltype(auto) with_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kF64: return function.template operator()<double>();
    case DType::kBF16: return function.template operator()<BFloat16>();
    case DType::kF16: return function.template operator()<Float16>();
    default: return function.template operator()<float>();
  }
}

template <class T>
T* data_of(const TensorView& view) {
  return view.present() ? static_cast<T*>(view.data) : nullptr;
}

template <class To, class From>
To converted(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(static_cast<Acc<From>>(value));
  }
}

/// to[i] = from[i]; the two do not overlap.
template <class To, class From>
void convert_row(std::int64_t count, const From* __restrict from, To* __restrict to) {
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(To));
  } else {
    vectorized([=] {
#pragma GCC ivdep
      for (std::int64_t i = 0; i < count; ++i) to[i] = converted<To>(from[i]);
    });
  }
}

}  // namespace moestro::cpu
