/// The activations on one row in f32 or f64, vectorised: what the epilogues of up and down call.
#pragma once

#include <cstdint>

#include "moestro/config.hpp"

namespace moestro::cpu {

template <class Real>
struct ActivationRows {
  /// a = act(gate, up); `up` is not read by ungated kinds.
  void (*forward)(std::int64_t count, const Real* gate, const Real* up, Real limit, Real alpha, Real* a);

  /// a = act(gate, up), d_gate = da * slope by gate, d_up = da * slope by up (not written by ungated kinds).
  void (*backward)(std::int64_t count, const Real* gate, const Real* up, const Real* d_a, Real limit,
                   Real alpha, Real* a, Real* d_gate, Real* d_up);
};

template <class Real>
ActivationRows<Real> activation_rows(ActivationKind kind);

}  // namespace moestro::cpu
