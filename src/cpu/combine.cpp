/// Combine on the CPU: every token sums its own rows, so there is nothing to guard and one order of summation.
#include "moestro/combine.hpp"

#include <algorithm>

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
  const auto* offsets = data_of<const std::int32_t>(args.token_offsets);
  const std::int64_t offset_stride = args.token_offsets.stride[0];
  const std::int64_t num_tokens = args.tokens.extent[0];
  // Slots a token: the weights say it, and without them the map's length does, through its one user that
  // knows K: rows has S of them.
  const std::int64_t top_k = ragged || num_tokens == 0 ? 0 : args.rows.extent[0] / num_tokens;
  const bool flat_weights = args.weights.rank == 1;

  const auto weight_at = [&](std::int64_t token, std::int64_t slot, std::int64_t first_slot) -> Real {
    if (!args.weights.present()) return Real(1);
    const std::int64_t at = flat_weights ? slot * args.weights.stride[0]
                                         : token * args.weights.stride[0] + (slot - first_slot) * args.weights.stride[1];
    return args.weights.dtype == DType::kF64
               ? static_cast<Real>(static_cast<const double*>(args.weights.data)[at])
               : static_cast<Real>(static_cast<const float*>(args.weights.data)[at]);
  };

  parallel_ranges(num_workers(ctx), num_tokens, kGrain, [&](std::int64_t first, std::int64_t last, int) {
    Real sum[kBlock];
    for (std::int64_t token = first; token < last; ++token) {
      const std::int64_t begin = ragged ? offsets[token * offset_stride] : token * top_k;
      const std::int64_t end = ragged ? offsets[(token + 1) * offset_stride] : begin + top_k;
      T* out = static_cast<T*>(args.tokens.data) + token * args.tokens.stride[0];
      for (std::int64_t j = 0; j < width; j += kBlock) {
        const std::int64_t count = std::min(kBlock, width - j);
        std::fill_n(sum, count, Real(0));
        for (std::int64_t slot = begin; slot < end; ++slot) {
          const std::int64_t row = args.index.token_index_map[slot];
          if (row < 0) continue;
          const T* __restrict from = static_cast<const T*>(args.rows.data) + row * args.rows.stride[0] + j;
          const Real weight = weight_at(token, slot, begin);
          Real* __restrict to = sum;
          vectorized([=] {
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

Status combine_backward(const CombineArgs& args, const Context& ctx) { return combine_forward(args, ctx); }

}  // namespace moestro::cpu
