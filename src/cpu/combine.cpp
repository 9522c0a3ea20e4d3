/// Combine on the CPU: every token sums its own rows, so there is nothing to guard and one order of
/// summation.
#include "moestro/combine.hpp"

#include <algorithm>

#include "common/element_access.hpp"
#include "cpu/numeric.hpp"
#include "cpu/parallel.hpp"
#include "cpu/stages.hpp"

namespace moestro::cpu {
namespace {

constexpr std::int64_t kBlock = 1024;  // columns summed at a time: the sums stay in L1
constexpr std::int64_t kGrain = 32;    // tokens of a task

template <class T>
void combine(const CombineArgs& args, const Context& ctx) {
  using Real = Acc<T>;
  const std::int64_t width = args.tokens.extent[1];
  const bool ragged = args.token_offsets.present();
  const std::int64_t num_tokens = args.tokens.extent[0];
  const std::int64_t num_slots = args.rows.extent[0];
  const std::int64_t top_k = num_tokens == 0 ? 0 : num_slots / num_tokens;  // unless ragged
  const auto weight_of = [&](std::int64_t slot) -> Real {
    if (!args.weights.present()) return Real(1);
    const SlotPosition at = slot_position(args.weights, slot);
    return static_cast<Real>(load_real(args.weights, at.i, at.j));
  };

  parallel_ranges(num_workers(ctx), num_tokens, kGrain, [&](std::int64_t first, std::int64_t last, int) {
    Real sum[kBlock];
    for (std::int64_t token = first; token < last; ++token) {
      const std::int64_t begin =
          ragged ? std::max<std::int64_t>(load_integer(args.token_offsets, token), 0) : token * top_k;
      const std::int64_t end =
          ragged ? std::min(load_integer(args.token_offsets, token + 1), num_slots) : begin + top_k;
      T* out = static_cast<T*>(args.tokens.data) + token * args.tokens.stride[0];
      for (std::int64_t j = 0; j < width; j += kBlock) {
        const std::int64_t count = std::min(kBlock, width - j);
        std::fill_n(sum, count, Real(0));
        for (std::int64_t slot = begin; slot < end; ++slot) {
          const std::int64_t row = args.index.token_index_map[slot];
          if (row < 0) continue;
          const T* __restrict from = static_cast<const T*>(args.rows.data) + row * args.rows.stride[0] + j;
          const Real weight = weight_of(slot);
          Real* __restrict to = sum;
          vectorized([=] {
#pragma GCC ivdep
            for (std::int64_t i = 0; i < count; ++i) to[i] += weight * static_cast<Real>(from[i]);
          });
        }
        convert_row(count, sum, out + j);
      }
    }
  });
}

}  // namespace

Status combine_forward(const CombineArgs& args, const Context& ctx) {
  with_dtype(args.rows.dtype, [&]<class T>() { combine<T>(args, ctx); });
  return {};
}

Status combine_backward(const CombineArgs& args, const Context& ctx) {
  return cpu::combine_forward(args, ctx);
}

}  // namespace moestro::cpu
