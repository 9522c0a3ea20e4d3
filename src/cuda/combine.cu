/// Combine on CUDA: see combine.hpp. Bound by memory; sums in the order of k. In both kernels neighbouring
/// threads of a block take a token's columns, and blocks come in the order of the tokens:
///   rows  the numbers of choices that layers have, aligned rows: a thread asks for its pieces of all rows,
///         or of half of twelve or sixteen, before it adds up the first
///   any   everything else: two pieces of four rows at a time
#include <cuda_runtime.h>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/device/numeric.cuh"
#include "cuda/support.hpp"

namespace moestro::cuda {
namespace {

struct CombineParams {
  const void* rows;
  std::int64_t row_bytes;  // from a row to the next
  const float* weights;    // null: 1
  std::int64_t weights_stride_token;
  std::int64_t weights_stride_choice;
  const std::int32_t* token_offsets;  // ragged only
  const std::int32_t* map;
  void* tokens;
  std::int64_t tokens_stride;
  std::int64_t num_tokens;
  std::int64_t num_slots;
  std::int64_t width;
  std::int32_t top_k;
};

/// kCount neighbouring elements of a row.
template <typename T, int kCount>
struct Piece {
  T value;
};
template <typename T>
struct Piece<T, 16 / sizeof(T)> {
  uint4 value;
};

/// The load is assembly, so that a thread's loads stay together in front of its sums. It passes through L1:
/// around it (L1::no_allocate) all takes 2 to 5 % longer.
__device__ __forceinline__ void load_piece(uint4& to, const void* from, std::int32_t row) {
  to = {};
  asm volatile("{.reg .pred p; setp.ge.s32 p, %5, 0; @p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "l"(from), "r"(row));
}
template <typename T>
__device__ __forceinline__ void load_piece(T& to, const void* from, std::int32_t row) {
  to = row >= 0 ? *static_cast<const T*>(from) : T{};
}
template <typename T, int kCount>
__device__ __forceinline__ void add(float (&sum)[kCount], const Piece<T, kCount>& piece, float weight) {
  const T* element = reinterpret_cast<const T*>(&piece.value);
#pragma unroll
  for (int j = 0; j < kCount; ++j) sum[j] = fmaf(weight, to_float(element[j]), sum[j]);
}
template <typename T, int kCount>
__device__ __forceinline__ void store_sum(T* to, const float (&sum)[kCount]) {
  Piece<T, kCount> result;
#pragma unroll
  for (int j = 0; j < kCount; ++j) reinterpret_cast<T*>(&result.value)[j] = from_float<T>(sum[j]);
  *reinterpret_cast<decltype(result.value)*>(to) = result.value;
}

/// Words of 4 bytes, by pairs where their number is even (`p` is aligned for that), or what `word` holds
/// where `there` is false; assembly as above.
template <int kWords>
__device__ __forceinline__ void load_words(std::int32_t (&word)[kWords], const void* p, bool there) {
  const auto* at = static_cast<const std::int32_t*>(p);
  if constexpr (kWords % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      asm volatile("{.reg .pred p; setp.ne.s32 p, %3, 0; @p ld.global.v2.u32 {%0, %1}, [%2];}"
                   : "+r"(word[i]), "+r"(word[i + 1])
                   : "l"(at + i), "r"(static_cast<int>(there)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.u32 %0, [%1];}"
                   : "+r"(word[i])
                   : "l"(at + i), "r"(static_cast<int>(there)));
    }
  }
}

/// Of the rows kernel with `kRows` rows at once, `kGroups` times: pieces of each row that a thread takes at
/// once; threads of a block, at most; and blocks that a multiprocessor has room for: as many as leave a
/// thread the registers for all its pieces.
template <int kRows>
constexpr int kPieces = kRows <= 4 ? 2 : 1;
template <int kRows>
constexpr int kThreads = kRows == 4 || kRows == 8 ? 256 : 128;
template <int kRows, int kGroups>
constexpr int kBlocks = kGroups > 1  ? 6 * 128 / kThreads<kRows>
                        : kRows <= 2 ? 12
                        : kRows <= 8 ? 4
                                     : 6;

template <typename T, int kRows, int kGroups>
__global__ void __launch_bounds__(kThreads<kRows>, (kBlocks<kRows, kGroups>))
    combine_rows_kernel(const __grid_constant__ CombineParams p) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  constexpr int kSteps = kPieces<kRows>;
  const std::uint32_t t = blockIdx.x * blockDim.y + threadIdx.y;
  if (t >= p.num_tokens) return;
  std::int32_t row[kGroups][kRows] = {};
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    load_words(row[g], p.map + t * static_cast<std::uint32_t>(kGroups * kRows) + g * kRows, true);
  }
  T* const out = static_cast<T*>(p.tokens) + t * p.tokens_stride;
  const auto row_bytes = static_cast<std::uint32_t>(p.row_bytes);
  const auto width = static_cast<std::uint32_t>(p.width);
  const std::uint32_t step = blockDim.x * kCount;
#pragma unroll 1
  for (std::uint32_t c = threadIdx.x * kCount; c < width; c += kSteps * step) {
    bool in_row[kSteps];
#pragma unroll
    for (int h = 0; h < kSteps; ++h) in_row[h] = h == 0 || c + h * step < width;
    const char* const rows = reinterpret_cast<const char*>(static_cast<const T*>(p.rows) + c);
    float sum[kSteps][kCount] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      Piece<T, kCount> piece[kSteps][kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) {
        const auto number = static_cast<std::uint32_t>(row[g][k]);
        const char* own = rows + static_cast<std::uint64_t>(number) * row_bytes;
#pragma unroll
        for (int h = 0; h < kSteps; ++h) {
          load_piece(piece[h][k].value, reinterpret_cast<const T*>(own) + h * step,
                     in_row[h] ? row[g][k] : -1);
        }
      }
      // Not read before the loop: a sentinel's 0 would be chosen there, and so all weights waited for before
      // any row is asked for.
      std::int32_t weight[kRows];
#pragma unroll
      for (int k = 0; k < kRows; ++k) weight[k] = __float_as_int(1.0F);
      load_words(weight, p.weights + t * p.weights_stride_token + g * kRows, p.weights != nullptr);
#pragma unroll
      for (int h = 0; h < kSteps; ++h) {
#pragma unroll
        for (int k = 0; k < kRows; ++k) {
          add(sum[h], piece[h][k], row[g][k] < 0 ? 0.0F : __int_as_float(weight[k]));
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kSteps; ++h) {
      if (in_row[h]) store_sum(out + (c + h * step), sum[h]);
    }
  }
}

constexpr int kAnyThreads = 256;

template <typename T, int kCount>
__global__ void __launch_bounds__(kAnyThreads) combine_any_kernel(const __grid_constant__ CombineParams p) {
  constexpr int kInFlight = 4;
  const std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (t >= p.num_tokens) return;
  std::int64_t first = t * p.top_k;
  std::int64_t end = first + p.top_k;
  if (p.token_offsets != nullptr) {
    first = max(p.token_offsets[t], 0);
    end = min(static_cast<std::int64_t>(p.token_offsets[t + 1]), p.num_slots);
  }
  const float* weights = p.weights == nullptr ? nullptr
                         : p.token_offsets == nullptr
                             ? p.weights + t * p.weights_stride_token - first * p.weights_stride_choice
                             : p.weights;
  T* const out = static_cast<T*>(p.tokens) + t * p.tokens_stride;
  const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * kCount;
#pragma unroll 1
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * kCount; c < p.width; c += 2 * step) {
    const bool two = c + step < p.width;
    const char* rows = reinterpret_cast<const char*>(static_cast<const T*>(p.rows) + c);
    float sum[2][kCount] = {};
#pragma unroll 1
    for (std::int64_t slot = first; slot < end; slot += kInFlight) {
      std::int32_t row[kInFlight];
      float weight[kInFlight];
      Piece<T, kCount> piece[kInFlight][2];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) row[i] = slot + i < end ? __ldg(p.map + slot + i) : -1;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        piece[i][0] = piece[i][1] = {};
        if (row[i] < 0) continue;
        const T* own = reinterpret_cast<const T*>(rows + row[i] * p.row_bytes);
        load_piece(piece[i][0].value, own, row[i]);
        load_piece(piece[i][1].value, own + step, two ? row[i] : -1);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        weight[i] =
            row[i] >= 0 && weights != nullptr ? __ldg(weights + (slot + i) * p.weights_stride_choice) : 1.0F;
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (row[i] < 0) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h) add(sum[h], piece[i][h], weight[i]);
      }
    }
    store_sum(out + c, sum[0]);
    if (two) store_sum(out + c + step, sum[1]);
  }
}

/// As many threads a token as its row has work for, `columns` each at once; as many tokens a block as fit.
LaunchShape shape_of(const CombineParams& params, int columns, int most_threads) {
  const std::int64_t needed = ceil_div(params.width, columns);
  const int threads = static_cast<int>(ceil_div(needed, ceil_div(needed, most_threads)));
  const int tokens = most_threads / threads;
  return {.blocks = ceil_div(params.num_tokens, tokens), .threads = threads, .threads_y = tokens};
}

template <typename T, int kRows, int kGroups = 1>
Status launch_rows(const CombineParams& params, const Context& ctx) {
  constexpr int kColumns = kPieces<kRows> * 16 / static_cast<int>(sizeof(T));
  return launch_kernel("combine_rows_kernel", combine_rows_kernel<T, kRows, kGroups>,
                       shape_of(params, kColumns, kThreads<kRows>), params, ctx);
}

template <typename T, int kCount>
Status launch_any(const CombineParams& params, const Context& ctx) {
  return launch_kernel("combine_any_kernel", combine_any_kernel<T, kCount>,
                       shape_of(params, 2 * kCount, kAnyThreads), params, ctx);
}

/// Can the rows kernel count a row's bytes in 32 bits and read row numbers and weights by pairs?
bool suits_rows(const CombineParams& params) {
  constexpr std::int64_t kMostBytes = 0x7fffffff;
  constexpr std::int64_t kMostColumns = kMostBytes / 4;
  const auto paired = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 8 == 0; };
  if (params.token_offsets != nullptr || params.row_bytes > kMostBytes || params.width > kMostColumns) {
    return false;
  }
  if (params.top_k == 1) return true;
  return paired(params.map) &&
         (params.weights == nullptr || (paired(params.weights) && params.weights_stride_choice == 1 &&
                                        params.weights_stride_token % 2 == 0));
}

template <typename T>
Status launch_aligned(const CombineParams& params, const Context& ctx) {
  if (suits_rows(params)) {
    switch (params.top_k) {
      case 1: return launch_rows<T, 1>(params, ctx);
      case 2: return launch_rows<T, 2>(params, ctx);
      case 4: return launch_rows<T, 4>(params, ctx);
      case 6: return launch_rows<T, 6>(params, ctx);
      case 8: return launch_rows<T, 8>(params, ctx);
      case 10: return launch_rows<T, 10>(params, ctx);
      case 12: return launch_rows<T, 6, 2>(params, ctx);
      case 16: return launch_rows<T, 8, 2>(params, ctx);
      default: break;
    }
  }
  return launch_any<T, 16 / static_cast<int>(sizeof(T))>(params, ctx);
}

}  // namespace

Status combine_forward(const CombineArgs& args, const Context& ctx) {
  MOESTRO_RETURN_IF_ERROR(check_supported("combine", args.rows.dtype));
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  CombineParams params{};
  params.num_tokens = args.tokens.extent[0];
  params.num_slots = args.rows.extent[0];
  params.width = args.rows.extent[1];
  if (params.num_tokens == 0 || params.width == 0) return {};
  const bool ragged = args.token_offsets.present();
  params.rows = args.rows.data;
  params.row_bytes = args.rows.stride[0] * dtype_bytes(args.rows.dtype);
  if (args.weights.present()) {
    params.weights = static_cast<const float*>(args.weights.data);
    params.weights_stride_token = args.weights.stride[0];
    params.weights_stride_choice = ragged ? args.weights.stride[0] : args.weights.stride[1];
  }
  params.token_offsets = ragged ? static_cast<const std::int32_t*>(args.token_offsets.data) : nullptr;
  params.map = args.index.token_index_map;
  params.tokens = args.tokens.data;
  params.tokens_stride = args.tokens.stride[0];
  params.top_k = ragged ? 0 : static_cast<std::int32_t>(params.num_slots / params.num_tokens);

  const DeviceGuard guard(device->ordinal);
  return with_element_type(args.rows.dtype, [&]<typename T>() {
    constexpr int kVector = 16 / static_cast<int>(sizeof(T));
    if (params.width % kVector != 0 || !rows_are_aligned(args.rows) || !rows_are_aligned(args.tokens)) {
      return launch_any<T, 1>(params, ctx);
    }
    return launch_aligned<T>(params, ctx);
  });
}

/// The same sum: dX~ comes with its weights inside, so backward's `weights` is absent.
Status combine_backward(const CombineArgs& args, const Context& ctx) {
  return cuda::combine_forward(args, ctx);
}

}  // namespace moestro::cuda
