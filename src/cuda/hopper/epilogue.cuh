/// What happens to a tile's accumulators: rounding, bias, activation, its backward, and the stores.
///
/// An epilogue belongs to one consumer warpgroup. `prefetch` runs before the tile's main loop, `store`
/// after it for each block of 64 rows, `finish` at the end. Tiles go to memory in chunks of 64 x 64
/// elements through staging buffers of 8 KB: stmatrix, then a TMA store. A block that ends before its 64th
/// row is written by ordinary stores, since the rows after it belong to another expert.
#pragma once

#include "common/activation_math.hpp"
#include "cuda/hopper/schedule.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace moestro::cuda::hopper {

constexpr int kChunkBytes = kSlabBytes;

/// Which activations a kernel is compiled for: one of the most used alone (in up with the routing weight
/// after the expert, and kSwiGLU without bias), or all of the kind.
enum class ActivationFamily { kSwiGLU, kSwiGLUOAI, kGated, kSiLU, kUngated };

constexpr ActivationFamily family_of(ActivationKind kind) {
  switch (kind) {
    case ActivationKind::kSwiGLU: return ActivationFamily::kSwiGLU;
    case ActivationKind::kSwiGLUOAI: return ActivationFamily::kSwiGLUOAI;
    case ActivationKind::kSiLU: return ActivationFamily::kSiLU;
    default: return is_gated(kind) ? ActivationFamily::kGated : ActivationFamily::kUngated;
  }
}

/// Calls `function.template operator()<family>()`.
template <class Function>
decltype(auto) with_family(ActivationFamily family, Function&& function) {
  using enum ActivationFamily;
  switch (family) {
    case kSwiGLU: return function.template operator()<kSwiGLU>();
    case kSwiGLUOAI: return function.template operator()<kSwiGLUOAI>();
    case kGated: return function.template operator()<kGated>();
    case kSiLU: return function.template operator()<kSiLU>();
    case kUngated: break;
  }
  return function.template operator()<kUngated>();
}

template <ActivationFamily kFamily>
constexpr int kPlanesOf = kFamily == ActivationFamily::kSiLU || kFamily == ActivationFamily::kUngated ? 1 : 2;

template <ActivationFamily kFamily>
constexpr bool kAnyOfTheKind = kFamily == ActivationFamily::kGated || kFamily == ActivationFamily::kUngated;

/// Calls `function.template operator()<kind>()` for one of the family's kinds. The functions are unrolled
/// over many elements: a switch inside would give a branch an element, which also keeps one element's
/// latencies from hiding behind another's, and code that the instruction caches do not hold.
template <ActivationFamily kFamily, class Function>
__device__ __forceinline__ void with_kind(ActivationKind kind, Function&& function) {
  using enum ActivationKind;
  if constexpr (kFamily == ActivationFamily::kSwiGLU) {
    function.template operator()<kSwiGLU>();
  } else if constexpr (kFamily == ActivationFamily::kSwiGLUOAI) {
    function.template operator()<kSwiGLUOAI>();
  } else if constexpr (kFamily == ActivationFamily::kSiLU) {
    function.template operator()<kSiLU>();
  } else if constexpr (kFamily == ActivationFamily::kGated) {
    switch (kind) {
      case kGeGLU: function.template operator()<kGeGLU>(); break;
      case kGeGLUTanh: function.template operator()<kGeGLUTanh>(); break;
      case kReGLU: function.template operator()<kReGLU>(); break;
      case kSwiGLUClamp: function.template operator()<kSwiGLUClamp>(); break;
      case kSwiGLUOAI: function.template operator()<kSwiGLUOAI>(); break;
      default: function.template operator()<kSwiGLU>(); break;
    }
  } else {
    switch (kind) {
      case kReLU: function.template operator()<kReLU>(); break;
      case kReLU2: function.template operator()<kReLU2>(); break;
      case kGELU: function.template operator()<kGELU>(); break;
      default: function.template operator()<kSiLU>(); break;
    }
  }
}

/// A thread's place in its warpgroup and in the fragments of ldmatrix, stmatrix and wgmma. Functions, not
/// members: the numbers are cheaper to compute again than to keep in registers.
struct Lane {
  static __device__ int thread() { return threadIdx.x % 128; }
  static __device__ int lane() { return threadIdx.x % 32; }
  /// Row of the first accumulators of each four in a block; the others are 8 below.
  static __device__ int row() { return thread() / 32 * 16 + lane() / 4; }
  static __device__ int col() { return lane() % 4 * 2; }  ///< in each group of 8 columns

  /// Address of this lane's line for the two groups of 8 columns from `group` on of a 64 x 64 chunk:
  /// matrices (rows, group), (rows + 8, group), (rows, group + 1), (rows + 8, group + 1).
  static __device__ std::uint32_t matrices(std::uint32_t chunk, int group) {
    const int line = thread() / 32 * 16 + lane() % 16;
    return chunk + line * kLineBytes + (((group + lane() / 16) ^ (line % 8)) * 16);
  }
  /// The same matrices of a chunk that holds the transpose: its lines are the columns.
  static __device__ std::uint32_t matrices_transposed(std::uint32_t chunk, int group) {
    const int line = (group + lane() / 16) * 8 + lane() % 8;
    return chunk + line * kLineBytes + (((thread() / 32 * 2 + lane() / 8 % 2) ^ (line % 8)) * 16);
  }
};

/// Leaves the accumulators of 64 rows in chunks of 64 columns, rounded to Element.
template <class Element, int kAccumulators>
__device__ __forceinline__ void stage_tile(const float (&acc)[kAccumulators], std::uint32_t chunks) {
#pragma unroll
  for (int chunk = 0; chunk < kAccumulators / 32; ++chunk) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float* a = &acc[chunk * 32 + i * 4];
      store_matrices(Lane::matrices(chunks + chunk * kChunkBytes, i), pack<Element>(a[0], a[1]),
                     pack<Element>(a[2], a[3]), pack<Element>(a[4], a[5]), pack<Element>(a[6], a[7]));
    }
  }
}

/// Rows that the consumers leave to a finisher in shared memory, seen from either side. Each consumer's 64
/// have two mbarriers: they are there, they have been read.
struct StagedRows {
  static constexpr int kNumBarriers = 2;
  const Parameters& p;
  std::uint32_t chunks;      ///< a consumer's own; the finisher's: consumer 0's, those of consumer 1 follow
  std::uint32_t barriers;    ///< likewise
  std::uint32_t parity = 0;  ///< of the phase to come; the finisher's: bit i of consumer i

  __device__ StagedRows(const Parameters& parameters, std::uint32_t buffers, std::uint32_t buffer_barriers)
      : p(parameters), chunks(buffers), barriers(buffer_barriers) {}

  /// A consumer leaves its rows, rounded to Element; kForCopyEngine: it reads them too.
  template <class Element, bool kForCopyEngine, int kAccumulators>
  __device__ __forceinline__ void leave(const float (&acc)[kAccumulators]) {
    barrier_wait(barriers + 8, parity ^ 1);
    parity ^= 1;
    stage_tile<Element>(acc, chunks);
    if constexpr (kForCopyEngine) fence_async_proxy();
    __syncwarp();
    if (Lane::lane() == 0) barrier_arrive(barriers);
  }
  /// The finisher takes the rows of consumer `half`, and gives their place back.
  __device__ __forceinline__ void take(int half) {
    barrier_wait(barriers + half * 8 * kNumBarriers, parity >> half & 1);
    parity ^= 1U << half;
  }
  __device__ __forceinline__ void give_back(int half) const {
    __syncwarp();
    if (Lane::lane() == 0) barrier_arrive(barriers + half * 8 * kNumBarriers + 8);
  }
};

/// Copies the first `rows` lines of a chunk to a rows output, where `cols` of its columns exist.
__device__ __forceinline__ void copy_lines(const RowsOutput& out, std::uint32_t chunk, int thread, int rows,
                                           int row, int plane, int col) {
  const int c = thread % 8;
  if (col + c * 8 >= out.cols) return;
  for (int r = thread / 8; r < rows; r += 16) {
    std::uint16_t* target = static_cast<std::uint16_t*>(out.data) + (row + r) * out.stride +
                            static_cast<std::int64_t>(plane) * out.cols + col + c * 8;
    *reinterpret_cast<uint4*>(target) = load_shared_16_bytes(chunk + r * kLineBytes + ((c ^ (r % 8)) * 16));
  }
}

/// kBuffers staging buffers in turn. Between two publishes the next buffer is free: the store that last
/// read it was waited for before the barrier of the publish before.
template <int kBuffers>
struct Staging {
  static_assert(kBuffers >= 2);
  std::uint32_t base;
  int next = 0;

  __device__ std::uint32_t buffer() const { return base + next * kChunkBytes; }

  /// All threads have filled buffer(): `store` starts the copy engine on it.
  template <class Store>
  __device__ __forceinline__ void publish(Store&& store) {
    fence_async_proxy();
    if (Lane::thread() == 0) tma_wait_read<kBuffers - 2>();
    sync_warpgroup();
    if (Lane::thread() == 0) {
      store(buffer());
      tma_commit();
    }
    next = next + 1 == kBuffers ? 0 : next + 1;
  }

  /// Writes 64 x 64 elements, packed in pairs as wgmma leaves them: [group of 8 columns][row, row + 8].
  __device__ __forceinline__ void put(const std::uint32_t (&pairs)[8][2], const RowsOutput& out, int rows,
                                      int row, int plane, int col) {
    const std::uint32_t chunk = buffer();
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      store_matrices(Lane::matrices(chunk, i), pairs[i][0], pairs[i][1], pairs[i + 1][0], pairs[i + 1][1]);
    }
    publish([&](std::uint32_t source) {
      if (rows >= 64) tma_store(out.map, source, col, plane, row, 0);
    });
    if (rows < 64) copy_lines(out, chunk, Lane::thread(), rows, row, plane, col);
  }
};

/// Rows of the product as they are, with a bias where there is one: Y, dX~.
template <class Element_, int kN, int kBuffers>
struct StoreRows {
  using Element = Element_;
  static constexpr int kStagingBytes = kBuffers * kChunkBytes;
  static constexpr int kNumBarriers = 0;
  const Parameters& p;
  Staging<kBuffers> staging;

  __device__ StoreRows(const Parameters& parameters, std::uint32_t buffers, std::uint32_t)
      : p(parameters), staging{buffers} {}
  __device__ void prefetch(const Work&) {}

  __device__ __forceinline__ void store(float (&acc)[kN / 2], const Work& work, int block) {
    const int row = work.row0 + block * 64;
#pragma unroll
    for (int chunk = 0; chunk < kN / 64; ++chunk) {
      const int col = work.n * kN + chunk * 64;
      if (col >= p.cols) break;
      if (p.bias != nullptr) {
        const Element* bias = static_cast<const Element*>(p.bias) + work.expert * p.bias_stride;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (col + i * 8 >= p.cols) break;
#pragma unroll
          for (int j = 0; j < 4; ++j)
            acc[chunk * 32 + i * 4 + j] += float(bias[col + i * 8 + Lane::col() + j % 2]);
        }
      }
      std::uint32_t pairs[8][2];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* a = &acc[chunk * 32 + i * 4 + h * 2];
          pairs[i][h] = pack<Element>(a[0], a[1]);
        }
      }
      staging.put(pairs, p.rows_out, work.rows - block * 64, row, 0, col);
    }
  }
  __device__ void finish() {
    if (Lane::thread() == 0) tma_wait_read<0>();
  }
};

/// H and A of up's forward. Gated: the first half of the columns is gate, the second up.
template <class Element_, int kN, ActivationFamily kFamily, int kBuffers>
struct StoreActivated {
  using Element = Element_;
  static constexpr int kPlanes = kPlanesOf<kFamily>;
  static constexpr bool kPlain = kFamily == ActivationFamily::kSwiGLU;
  static constexpr int kCols = kN / kPlanes;            ///< of A in a tile
  static constexpr int kBiasBytes = kPlain ? 0 : 1024;  ///< kN elements; buffers stay 1024-byte aligned
  static constexpr int kStagingBytes = kBuffers * kChunkBytes + kBiasBytes;
  static constexpr int kNumBarriers = 0;
  static_assert(kPlain || kN == 2 * 128, "a thread fetches the biases of two columns");
  const Parameters& p;
  Staging<kBuffers> staging;
  std::uint16_t fetched[2];  ///< biases of two of the tile's columns: gate's come first

  __device__ StoreActivated(const Parameters& parameters, std::uint32_t buffers, std::uint32_t)
      : p(parameters), staging{buffers} {}

  /// Asks for this thread's part of the bias, which is there when the tile has been multiplied. Zero past the
  /// last column.
  __device__ __forceinline__ void prefetch(const Work& work) {
    if constexpr (!kPlain) {
      const int plane = Lane::thread() * 2 / kCols;
      const int col = work.n * kCols + Lane::thread() * 2 % kCols;
      fetched[0] = fetched[1] = 0;
      if (p.bias != nullptr && col < p.cols) {
        const std::uint16_t* pair = static_cast<const std::uint16_t*>(p.bias) + work.expert * p.bias_stride +
                                    plane * p.bias_up + col * p.bias_step;
        fetched[0] = pair[0];
        fetched[1] = pair[p.bias_step];
      }
    }
  }

  __device__ std::uint32_t biases() const { return staging.base + kBuffers * kChunkBytes; }
  __device__ __forceinline__ void share_bias() const {
    sync_warpgroup();  // the tile before has read its own
    std::uint32_t base = biases();
    asm volatile("" : "+r"(base));  // as in bias()
    store_shared(base + Lane::thread() * 4, fetched[0] | fetched[1] << 16);
    sync_warpgroup();
  }
  /// Of this thread's columns in a group of 8 of a chunk.
  __device__ __forceinline__ float2 bias(int plane, int chunk, int group) const {
    std::uint32_t base = biases() + Lane::lane() % 4 * 4;
    asm volatile("" : "+r"(base));  // computed here, not kept in a register from tile to tile
    const int col = plane * kCols + chunk * 64 + group * 8;
    return unpack<Element>(static_cast<std::uint32_t>(load_shared(base + col * 2)));
  }

  __device__ __forceinline__ void store(float (&acc)[kN / 2], const Work& work, int block) {
    const int row = work.row0 + block * 64;
    const int rows = work.rows - block * 64;
    const bool bias_after_scale = kAnyOfTheKind<kFamily> && p.bias_after_scale;
    const bool bias_before_h = !kPlain && p.bias != nullptr && !bias_after_scale;
    if (bias_before_h || bias_after_scale) share_bias();
#pragma unroll
    for (int chunk = 0; chunk < kCols / 64; ++chunk) {
      const int col = work.n * kCols + chunk * 64;
      if (col >= p.cols) break;
      const auto place = [&](int plane, int i) { return &acc[plane * (kN / 4) + chunk * 32 + i * 4]; };
      if (bias_before_h) {
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float2 b = bias(plane, chunk, i);
#pragma unroll
            for (int j = 0; j < 4; ++j) place(plane, i)[j] += j % 2 == 0 ? b.x : b.y;
          }
        }
      }
      std::uint32_t h[kPlanes][8][2];
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float* value = place(plane, i) + r * 2;
            h[plane][i][r] = pack<Element>(value[0], value[1]);
          }
        }
        if (p.rows_out.data != nullptr) staging.put(h[plane], p.rows_out, rows, row, plane, col);
      }
      if (p.rows_out_a.data == nullptr) continue;
      float scale[2] = {1, 1};
      if (bias_after_scale) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (Lane::row() + 8 * r < rows) scale[r] = __ldg(p.row_weights + row + Lane::row() + 8 * r);
        }
      }
      with_kind<kFamily>(p.activation.kind, [&]<ActivationKind kKind>() {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float z[kPlanes][4];  // from H as stored: backward recomputes A from the same numbers
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const float2 stored = unpack<Element>(h[plane][i][r]);
              z[plane][r * 2] = stored.x;
              z[plane][r * 2 + 1] = stored.y;
            }
          }
          if (bias_after_scale) {
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane) {
              const float2 b = bias(plane, chunk, i);
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                z[plane][j] = z[plane][j] * scale[j / 2] + (j % 2 == 0 ? b.x : b.y);
              }
            }
          }
          float a[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if constexpr (kPlanes == 2) {
              a[j] = activation_math::gated<kKind>(z[0][j], z[1][j], p.activation.limit, p.activation.alpha)
                         .value;
            } else {
              a[j] = activation_math::ungated<kKind>(z[0][j]).value;
            }
          }
#pragma unroll
          for (int r = 0; r < 2; ++r) h[0][i][r] = pack<Element>(a[r * 2], a[r * 2 + 1]);
        }
      });
      staging.put(h[0], p.rows_out_a, rows, row, 0, col);
    }
  }
  __device__ void finish() {
    if (Lane::thread() == 0) tma_wait_read<0>();
  }
};

/// down's backward: the accumulators are g = dY W2. H comes in by TMA while the tile is multiplied; dH takes
/// its place in shared memory, A' goes beside it, and the partial sums of dS = <g, A> to memory.
template <class Element_, int kN, ActivationFamily kFamily>
struct StoreActivationBackward {
  using Element = Element_;
  static constexpr int kPlanes = kPlanesOf<kFamily>;
  static constexpr int kSets = 2;
  static constexpr int kSetBytes = (kPlanes + 1) * kChunkBytes;  ///< H, then dH; A'
  static constexpr int kStagingBytes = kSets * kSetBytes;
  static constexpr int kNumBarriers = kSets;
  static constexpr int kChunks = kN / 64;
  static_assert(kChunks == kSets);
  const Parameters& p;
  std::uint32_t sets;
  std::uint32_t barriers;
  std::uint32_t parity = 0;  ///< bit i: of set i
  float scale[2][2];         ///< s of this thread's rows: [block][row, row + 8]

  __device__ StoreActivationBackward(const Parameters& parameters, std::uint32_t buffers,
                                     std::uint32_t set_barriers)
      : p(parameters), sets(buffers), barriers(set_barriers) {}

  /// H of chunk `chunk` of 64-row block `block`, into the chunk's set.
  __device__ __forceinline__ void load(const Work& work, int block, int chunk) const {
    const std::uint32_t loaded = barriers + chunk * 8;
    barrier_expect_bytes(loaded, kPlanes * kChunkBytes);
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane) {
      tma_load(sets + chunk * kSetBytes + plane * kChunkBytes, p.h, loaded, work.n * kN + chunk * 64, plane,
               work.row0 + block * 64, 0);
    }
  }

  /// In the midst of chunk `chunk` of block `block`: H of the second block, into the set of the chunk before.
  __device__ __forceinline__ void load_second_block(const Work& work, int block, int chunk) const {
    static_assert(kChunks == 2);
    const bool first = block == 0 && chunk == 1;   // block 0's chunk 0 is on its way out
    const bool second = block == 1 && chunk == 0;  // block 0's chunk 1 is
    if (!(first || second) || work.rows <= 64 || Lane::thread() != 0) return;
    tma_wait_read<0>();
    load(work, 1, first ? 0 : 1);
  }

  __device__ __forceinline__ void prefetch(const Work& work) {
    if (Lane::thread() == 0) {
      tma_wait_read<0>();
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) load(work, 0, chunk);
    }
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = block * 64 + Lane::row() + 8 * h;
        scale[block][h] = row < work.rows ? __ldg(p.row_weights + work.row0 + row) : 0.0F;
      }
    }
  }

  __device__ __forceinline__ void store(float (&acc)[kN / 2], const Work& work, int block) {
    const int row = work.row0 + block * 64;
    const int rows = work.rows - block * 64;
    float sum[2] = {};
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const std::uint32_t set = sets + chunk * kSetBytes;
      const std::uint32_t a_buffer = set + kPlanes * kChunkBytes;
      const int col = work.n * kN + chunk * 64;
      barrier_wait(barriers + chunk * 8, parity >> chunk & 1);
      parity ^= 1U << chunk;
      with_kind<kFamily>(p.activation.kind, [&]<ActivationKind kKind>() {
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          // By now the copy engine has read the set stored before this chunk: waiting costs nothing here.
          if (i == 4) load_second_block(work, block, chunk);
          std::uint32_t planes[kPlanes][4];
          std::uint32_t scaled[4];
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            load_matrices(planes[plane], Lane::matrices(set + plane * kChunkBytes, i));
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {  // j: group i + j / 2, row + 8 (j % 2)
            const int h = j % 2;
            const float s = scale[block][h];
            const float* g = &acc[chunk * 32 + (i + j / 2) * 4 + h * 2];
            float d[kPlanes][2];
            float a[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float z[kPlanes];
#pragma unroll
              for (int plane = 0; plane < kPlanes; ++plane) {
                const float2 pair = unpack<Element>(planes[plane][j]);
                z[plane] = e == 0 ? pair.x : pair.y;
              }
              if constexpr (kPlanes == 2) {
                const auto f =
                    activation_math::gated<kKind>(z[0], z[1], p.activation.limit, p.activation.alpha);
                a[e] = f.value;
                d[0][e] = f.slope_gate * (g[e] * s);
                d[1][e] = f.slope_up * (g[e] * s);
              } else {
                const auto f = activation_math::ungated<kKind>(z[0]);
                a[e] = f.value;
                d[0][e] = f.slope * (g[e] * s);
              }
              sum[h] += g[e] * a[e];
            }
            scaled[j] = pack<Element>(a[0] * s, a[1] * s);
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane)
              planes[plane][j] = pack<Element>(d[plane][0], d[plane][1]);
          }
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            store_matrices(Lane::matrices(set + plane * kChunkBytes, i), planes[plane][0], planes[plane][1],
                           planes[plane][2], planes[plane][3]);
          }
          store_matrices(Lane::matrices(a_buffer, i), scaled[0], scaled[1], scaled[2], scaled[3]);
        }
      });
      fence_async_proxy();
      sync_warpgroup();
      if (rows >= 64) {
        if (Lane::thread() == 0) {
          if (p.rows_out.data != nullptr) {
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane) {
              tma_store(p.rows_out.map, set + plane * kChunkBytes, col, plane, row, 0);
            }
          }
          if (p.rows_out_a.data != nullptr) tma_store(p.rows_out_a.map, a_buffer, col, 0, row, 0);
          tma_commit();
        }
      } else {
        if (p.rows_out.data != nullptr) {
          for (int plane = 0; plane < kPlanes; ++plane) {
            copy_lines(p.rows_out, set + plane * kChunkBytes, Lane::thread(), rows, row, plane, col);
          }
        }
        if (p.rows_out_a.data != nullptr)
          copy_lines(p.rows_out_a, a_buffer, Lane::thread(), rows, row, 0, col);
        fence_async_proxy();
        sync_warpgroup();  // before the set is loaded for the next tile
      }
    }
    if (p.partials != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h] += __shfl_xor_sync(0xffffffffU, sum[h], 1);
        sum[h] += __shfl_xor_sync(0xffffffffU, sum[h], 2);
        const int local = Lane::row() + 8 * h;
        if (Lane::lane() % 4 == 0 && local < rows) {
          p.partials[static_cast<std::int64_t>(row + local) * p.partials_stride + work.n] = sum[h];
        }
      }
    }
  }
  __device__ void finish() {
    if (Lane::thread() == 0) tma_wait_read<0>();
  }
};

}  // namespace moestro::cuda::hopper
