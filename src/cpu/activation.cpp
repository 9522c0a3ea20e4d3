/// Activation on the CPU: the formulas of common/activation_math.hpp over rows, vectorised.
#include "moestro/activation.hpp"

#include "common/activation_math.hpp"
#include "cpu/activation_rows.hpp"
#include "cpu/numeric.hpp"
#include "cpu/parallel.hpp"
#include "cpu/stages.hpp"

namespace moestro::cpu {
namespace {

constexpr std::int64_t kBlock = 512;  // columns converted to Real at a time: a few rows of L1
constexpr std::int64_t kGrain = 16;   // rows of a task

template <ActivationKind kKind, class Real>
void forward_row(std::int64_t count, const Real* __restrict gate, [[maybe_unused]] const Real* __restrict up,
                 Real limit, Real alpha, Real* __restrict a) {
  vectorized([=] {
#pragma GCC ivdep
    for (std::int64_t j = 0; j < count; ++j) {
      if constexpr (is_gated(kKind)) {
        a[j] = activation_math::gated<kKind>(gate[j], up[j], limit, alpha).value;
      } else {
        a[j] = activation_math::ungated<kKind>(gate[j]).value;
      }
    }
  });
}

template <ActivationKind kKind, class Real>
void backward_row(std::int64_t count, const Real* __restrict gate, [[maybe_unused]] const Real* __restrict up,
                  const Real* __restrict d_a, Real limit, Real alpha, Real* __restrict a,
                  Real* __restrict d_gate, [[maybe_unused]] Real* __restrict d_up) {
  vectorized([=] {
#pragma GCC ivdep
    for (std::int64_t j = 0; j < count; ++j) {
      if constexpr (is_gated(kKind)) {
        const auto f = activation_math::gated<kKind>(gate[j], up[j], limit, alpha);
        a[j] = f.value;
        d_gate[j] = d_a[j] * f.slope_gate;
        d_up[j] = d_a[j] * f.slope_up;
      } else {
        const auto f = activation_math::ungated<kKind>(gate[j]);
        a[j] = f.value;
        d_gate[j] = d_a[j] * f.slope;
      }
    }
  });
}

template <class T>
void forward(const ActivationForwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const ActivationRows<Real> rows = activation_rows<Real>(args.activation.kind);
  const std::int64_t width = args.a.extent[1];
  const bool gated = is_gated(args.activation.kind);
  parallel_ranges(num_workers(ctx), args.a.extent[0], kGrain,
                  [&](std::int64_t first, std::int64_t last, int) {
                    Real gate[kBlock], up[kBlock], a[kBlock];
                    for (std::int64_t r = first; r < last; ++r) {
                      const T* h = static_cast<const T*>(args.h.data) + r * args.h.stride[0];
                      T* out = static_cast<T*>(args.a.data) + r * args.a.stride[0];
                      for (std::int64_t j = 0; j < width; j += kBlock) {
                        const std::int64_t count = std::min(kBlock, width - j);
                        convert_row(count, h + j, gate);
                        if (gated) convert_row(count, h + width + j, up);
                        rows.forward(count, gate, up, args.activation.limit, args.activation.alpha, a);
                        convert_row(count, a, out + j);
                      }
                    }
                  });
}

template <class T>
void backward(const ActivationBackwardArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const ActivationRows<Real> rows = activation_rows<Real>(args.activation.kind);
  const std::int64_t width = args.d_a.extent[1];
  const bool gated = is_gated(args.activation.kind);
  parallel_ranges(num_workers(ctx), args.d_a.extent[0], kGrain,
                  [&](std::int64_t first, std::int64_t last, int) {
                    Real gate[kBlock], up[kBlock], d_a[kBlock], a[kBlock], d_gate[kBlock], d_up[kBlock];
                    for (std::int64_t r = first; r < last; ++r) {
                      const T* h = static_cast<const T*>(args.h.data) + r * args.h.stride[0];
                      const T* d_out = static_cast<const T*>(args.d_a.data) + r * args.d_a.stride[0];
                      T* d_h = static_cast<T*>(args.d_h.data) + r * args.d_h.stride[0];
                      for (std::int64_t j = 0; j < width; j += kBlock) {
                        const std::int64_t count = std::min(kBlock, width - j);
                        convert_row(count, h + j, gate);
                        if (gated) convert_row(count, h + width + j, up);
                        convert_row(count, d_out + j, d_a);
                        rows.backward(count, gate, up, d_a, args.activation.limit, args.activation.alpha, a,
                                      d_gate, d_up);
                        convert_row(count, d_gate, d_h + j);
                        if (gated) convert_row(count, d_up, d_h + width + j);
                      }
                    }
                  });
}

}  // namespace

template <class Real>
ActivationRows<Real> activation_rows(ActivationKind kind) {
  return with_activation_kind(kind, []<ActivationKind kKind>() -> ActivationRows<Real> {
    return {forward_row<kKind, Real>, backward_row<kKind, Real>};
  });
}
template ActivationRows<float> activation_rows(ActivationKind kind);
template ActivationRows<double> activation_rows(ActivationKind kind);

Status activation_forward(const ActivationForwardArgs& args, const Context& ctx) {
  with_dtype(args.h.dtype, [&]<class T>() { forward<T>(args, ctx); });
  return {};
}

Status activation_backward(const ActivationBackwardArgs& args, const Context& ctx) {
  with_dtype(args.h.dtype, [&]<class T>() { backward<T>(args, ctx); });
  return {};
}

}  // namespace moestro::cpu
