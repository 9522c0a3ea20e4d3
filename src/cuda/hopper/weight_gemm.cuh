/// The kernel of the weights' gradients: of each expert the product gathered^T routed, or its transpose,
/// summed over the expert's rows. `routed` is a tensor of routed rows (dH or A'), which TMA reads; `gathered`
/// are the rows of x or dY that the index names. Either can be operand A.
///
///   warpgroup 0     producer: fills a ring of stages, each 32 rows of kM columns of operand A and of kN
///                   columns of operand B. Its four warps gather, and take turns with TMA
///   warpgroups 1, 2 consumers: wgmma over the ring, kBlocks x 64 rows of the tile each
///
/// A finished tile goes to memory through stages of the ring: behind the last k of a tile come kSlots stages
/// without a load, which the consumers fill with the result. So the stores run under the next tile, whose
/// first stages are loaded by then.
///
/// An expert that has more rows than its tiles can share out among the multiprocessors is cut into parts
/// where whole sums would end late. Their sums meet in memory; the last part to end adds them in their order.
///
/// A tile takes long, so multiprocessors fall idle at the end: the next kernel may fill them, and this one
/// those that are left by the one before. But the next may write where that one read, so it is let in when
/// that one has ended; and where the sums of parts are, so where there are any nothing overlaps.
#pragma once

#include "cuda/hopper/epilogue.cuh"
#include "cuda/hopper/gemm.cuh"

namespace moestro::cuda::hopper {

constexpr int kRowsOfStage = 32;
constexpr int kStageSlabBytes = kRowsOfStage * kLineBytes;  ///< 64 columns of an operand in a stage
constexpr int kMinPartRows = 1024;
constexpr int kMaxParts = 15;  ///< of an expert; what four bits count

struct WeightWork {
  int expert;
  int row0;      ///< first routed row of the sum
  int rows;      ///< in the sum: the expert's, or those of a part of them
  int routed;    ///< tile along the columns of dH or A'
  int gathered;  ///< tile along the columns of x or dY
  int parts;     ///< in which the expert's rows are summed; 1: the sum is whole
  int slot0;     ///< parts > 1: where the sum of part 0 of the tile goes; that of the next is `tiles` further
};

/// The tiles of all experts' gradients, the largest expert first. What is cut where depends on the experts'
/// rows alone, so the bits are the same in every run.
struct WeightTiles {
  const Parameters& p;
  int tiles;              ///< of an expert
  int part_rows = 0;      ///< at most so many rows are summed in one part
  int split_experts = 0;  ///< the first in the order
  int split_items = 0;    ///< their tiles x parts

  explicit __device__ WeightTiles(const Parameters& parameters)
      : p(parameters), tiles(parameters.m_tiles * parameters.n_tiles) {
    if (p.partial_slots == 0) return;
    const int all_rows = __ldg(p.offsets + p.num_experts);
    const int largest = rows_of(__ldg(p.expert_order));
    if (!whole_sums_end_late(all_rows, largest, p.num_experts, tiles, p.multiprocessors)) return;
    const float share = even_rows(all_rows, tiles, p.multiprocessors);
    part_rows = max(static_cast<int>(share * 0.5F), kMinPartRows);
    for (; split_experts < p.num_experts; ++split_experts) {
      const int rows = rows_of(__ldg(p.expert_order + split_experts));
      if (rows < 2 * kMinPartRows || static_cast<float>(rows) <= 0.6F * share) break;
      const int items = tiles * parts_of(rows);
      if (split_items + items > p.partial_slots) break;
      split_items += items;
    }
  }
  __device__ int count() const { return split_items + (p.num_experts - split_experts) * tiles; }
  __device__ bool has_parts() const { return split_items > 0; }
  __device__ int rows_of(int expert) const {
    return __ldg(p.offsets + expert + 1) - __ldg(p.offsets + expert);
  }
  /// Rows of each part but the last: whole stages.
  __device__ int length_of(int rows) const {
    const int parts = min((rows + part_rows - 1) / part_rows, kMaxParts);
    return ((rows + parts - 1) / parts + kRowsOfStage - 1) / kRowsOfStage * kRowsOfStage;
  }
  __device__ int parts_of(int rows) const {
    const int length = length_of(rows);
    return (rows + length - 1) / length;
  }

  __device__ WeightWork at(int i) const {
    WeightWork work;
    int tile;
    if (i < split_items) {
      int order = 0;
      int first = 0;
      int rows = rows_of(__ldg(p.expert_order));
      for (int items; first + (items = tiles * parts_of(rows)) <= i; first += items) {
        rows = rows_of(__ldg(p.expert_order + ++order));
      }
      const int part = (i - first) / tiles;
      const int begin = part * length_of(rows);
      tile = i - first - part * tiles;
      work.expert = __ldg(p.expert_order + order);
      work.row0 = __ldg(p.offsets + work.expert) + begin;
      work.rows = min(length_of(rows), rows - begin);
      work.parts = parts_of(rows);
      work.slot0 = first + tile;
    } else {
      const int order = (i - split_items) / tiles;
      tile = i - split_items - order * tiles;
      work.expert = __ldg(p.expert_order + split_experts + order);
      work.row0 = __ldg(p.offsets + work.expert);
      work.rows = __ldg(p.offsets + work.expert + 1) - work.row0;
      work.parts = 1;
      work.slot0 = 0;
    }
    raster_tile(tile, p.m_tiles, p.n_tiles, p.raster, &work.routed, &work.gathered);
    return work;
  }
};

__device__ __forceinline__ int stages_of(const WeightWork& work) {
  return (work.rows + kRowsOfStage - 1) / kRowsOfStage;
}
/// First row of stage k, counted from the first of the sum. Rows that do not fill the last stage stand at its
/// end; before them are rows that were counted already (or, of less than 32, another expert's), whose tokens
/// count as zeros.
__device__ __forceinline__ int first_row(const WeightWork& work, int k) {
  return min(k * kRowsOfStage, work.rows - kRowsOfStage);
}

template <class Kernel>
struct WeightLayout {
  static constexpr int kM = 2 * Kernel::kBlocks * 64;
  static constexpr int kN = Kernel::kN;
  static constexpr int kABytes = kM / 64 * kStageSlabBytes;
  static constexpr int kStageBytes = kABytes + kN / 64 * kStageSlabBytes;
  static constexpr int kRouted = Kernel::kGatheredM ? kN : kM;        ///< columns
  static constexpr int kGathered = Kernel::kGatheredM ? kM : kN;      ///< columns
  static constexpr int kRoutedAt = Kernel::kGatheredM ? kABytes : 0;  ///< in a stage
  static constexpr int kGatheredAt = kABytes - kRoutedAt;
  static constexpr int kChunksOfStage = kStageBytes / kChunkBytes;
  static constexpr int kUnit = kN / 64;                    ///< chunks of 64 rows of 16-bit results
  static constexpr int kChunks = Kernel::kBlocks * kUnit;  ///< of a consumer
  static constexpr int kSlots = (2 * kChunks + kChunksOfStage - 1) / kChunksOfStage;
  static constexpr int kStages = (232448 - 1024) / kStageBytes;
  static constexpr int kBarriers = kStages * kStageBytes;
  static constexpr int kTickets = kBarriers + 2 * kStages * 8;
  static constexpr int kArrived = kTickets + Tickets<>::kBytes;  ///< a number for each consumer
  static constexpr int kBytes = kArrived + 2 * 4;
  static constexpr int kSumBytes = kM * kN * 4;
  static_assert(kBytes <= 232448 && kSlots + 2 <= kStages);

  static __device__ std::uint32_t full(std::uint32_t base, int stage) { return base + kBarriers + 8 * stage; }
  static __device__ std::uint32_t empty(std::uint32_t base, int stage) {
    return base + kBarriers + 8 * (kStages + stage);
  }
};

/// Gathers 32 tokens a stage. Thread t copies chunk t % 8 of each slab of tokens t / 8 and t / 8 +
/// 16: eight threads read a 128-byte line. Each warp reads the indices of its own 8 tokens for four stages at
/// once and four stages ahead, across the ends of tiles.
template <class Kernel>
struct GatherTokens {
  using Element = typename Kernel::Element;
  static constexpr int kColumns = WeightLayout<Kernel>::kGathered;
  static constexpr int kSlabs = kColumns / 64;
  const Parameters& p;
  unsigned now = 0;    ///< lane l: token l % 8 of this warp's in stage l / 8 of the four
  unsigned ahead = 0;  ///< the same of the next four

  explicit __device__ GatherTokens(const Parameters& parameters) : p(parameters) {}

  __device__ __forceinline__ void read_ahead(const WeightWork& work, int k) {
    if (work.rows == 0) return;  // row0 may be past the end of the index
    const int lane = threadIdx.x % 32;
    const int line = threadIdx.x / 32 * 4 + lane % 4 + lane / 4 % 2 * 16;
    const int row = max(min(first_row(work, k + lane / 8) + line, work.rows - 1), 0);
    ahead = static_cast<unsigned>(__ldg(p.row_token + work.row0 + row));
  }
  __device__ __forceinline__ void issue(const WeightWork& work, int k, std::uint32_t target) const {
    const unsigned line = threadIdx.x / 8;
    const unsigned chunk = threadIdx.x % 8;
    const int col = work.gathered * kColumns + static_cast<int>(chunk) * 8;
    const unsigned stride = static_cast<unsigned>(p.source_stride) * sizeof(Element);
    const std::uint32_t slot = target + line * kLineBytes + ((chunk ^ (line % 8)) * 16);
    const char* source = reinterpret_cast<const char*>(static_cast<const Element*>(p.source) + col);
    const char* rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const unsigned token = __shfl_sync(0xffffffffU, now, k % 4 * 8 + i * 4 + threadIdx.x % 32 / 8);
      rows[i] = source + static_cast<std::uint64_t>(token) * stride;
    }
    if ((k + 1) * kRowsOfStage <= work.rows && (work.gathered + 1) * kColumns <= p.source_cols) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab)
          copy_16_bytes(slot + i * 16 * kLineBytes + slab * kStageSlabBytes, rows[i] + slab * 128);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool counts = first_row(work, k) + static_cast<int>(line) + i * 16 >= k * kRowsOfStage;
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          const bool inside = col + slab * 64 < p.source_cols;
          if (work.gathered * kColumns + slab * 64 >= p.source_cols) break;  // not stored
          copy_16_bytes_or_zero(slot + i * 16 * kLineBytes + slab * kStageSlabBytes,
                                inside ? static_cast<const void*>(rows[i] + slab * 128) : p.source,
                                counts && inside);
        }
      }
    }
  }
};

/// Where a 64 x 64 block of the result lies in the gradient: coordinates for TMA, contiguous axis first.
template <class Kernel>
struct WeightPlace {
  using Layout = WeightLayout<Kernel>;
  int routed;  ///< column of its plane
  int gathered;
  int plane;
  int expert;

  __device__ WeightPlace(const Parameters& p, const WeightWork& work, int block_m, int block_n) {
    const int block = Kernel::kGatheredM ? block_n : block_m;
    const Slab slab = slab_at(p, work.routed * (Layout::kRouted / 64) + block);
    routed = slab.col;
    gathered = work.gathered * Layout::kGathered + (Kernel::kGatheredM ? block_m : block_n) * 64;
    plane = slab.plane;
    expert = work.expert;
  }
  __device__ bool exists(const Parameters& p) const {
    return plane < p.num_planes && gathered < p.source_cols;
  }
  /// The box that begins m and n further on.
  template <class F>
  __device__ __forceinline__ void with_box(int further_m, int further_n, F&& f) const {
    const int r = routed + (Kernel::kGatheredM ? further_n : further_m);
    const int g = gathered + (Kernel::kGatheredM ? further_m : further_n);
    f(Kernel::kTransposed ? r : g, Kernel::kTransposed ? g : r, plane, expert);
  }
};

template <class Kernel>
__device__ __forceinline__ void produce_weight(const Parameters& p, std::uint32_t base) {
  using Layout = WeightLayout<Kernel>;
  constexpr int kSlabs = Layout::kRouted / 64;
  const WeightTiles schedule(p);
  const int count = schedule.count();
  const int stride = static_cast<int>(gridDim.x);
  const bool draws = threadIdx.x == 0;
  GatherTokens<Kernel> gather(p);
  Tickets<> tickets{base + Layout::kTickets};
  RingPosition<Layout::kStages> ring;
  int w = static_cast<int>(blockIdx.x);
  int drawn = 0;
  if (draws) drawn = p.next_tile != nullptr ? atomicAdd(p.next_tile, 1) : w;
  if (w >= count) return;
  if (p.beside_previous && schedule.has_parts()) wait_for_kernel_before();
  bool first_tile = true;
  WeightWork work = schedule.at(w);
  gather.read_ahead(work, 0);
  Lockstep lockstep(p, !schedule.has_parts(), count);
  while (w < count) {
    if (draws) {
      lockstep.begin_tile();
      const int next = stride + drawn;
      tickets.publish(next);
      drawn = p.next_tile != nullptr ? atomicAdd(p.next_tile, 1) : next;
    }
    WeightWork next;
    w = take_tile<true>(tickets, schedule, count, &next);
    const int stages = stages_of(work);
    if (stages == 0) gather.read_ahead(next, 0);
    for (int k = 0; k < stages; ++k, ring.next()) {
      const std::uint32_t stage = base + ring.stage * Layout::kStageBytes;
      const std::uint32_t full = Layout::full(base, ring.stage);
      if (k % 4 == 0) {
        gather.now = gather.ahead;
        if (k + 4 < stages) {
          gather.read_ahead(work, k + 4);
        } else {
          gather.read_ahead(next, 0);
        }
      }
      barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
      if (threadIdx.x == k % 4 * 32) {
        const std::uint32_t target = stage + Layout::kRoutedAt;
        barrier_expect_bytes(full, kSlabs * kStageSlabBytes);
        const int row = work.row0 + first_row(work, k);
        if (p.joined_slabs) {
          tma_load(target, p.a, full, 0, row, work.routed * kSlabs, 0);
        } else {
#pragma unroll 1
          for (int i = 0; i < kSlabs; ++i) {
            const Slab slab = slab_at(p, work.routed * kSlabs + i);
            tma_load(target + i * kStageSlabBytes, p.a, full, slab.col, slab.plane, row, 0);
          }
        }
      }
      gather.issue(work, k, stage + Layout::kGatheredAt);
      arrive_after_copies(full);
    }
    if (!p.accumulate || work.rows > 0) {  // the stages of the result
#pragma unroll 1
      for (int i = 0; i < Layout::kSlots; ++i, ring.next()) {
        const std::uint32_t full = Layout::full(base, ring.stage);
        barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
        if (threadIdx.x == 0) barrier_arrive(full);
        barrier_arrive(full);
      }
    }
    if (first_tile && !schedule.has_parts()) {
      if (p.beside_previous) wait_for_kernel_before();
      let_next_kernel_start();
    }
    first_tile = false;
    work = next;
  }
}

/// A consumer's result on its way to memory, in units of 64 rows x kN columns of 16 bits, or x kN / 2 of f32.
template <class Kernel>
struct WeightStore {
  using Element = typename Kernel::Element;
  using Layout = WeightLayout<Kernel>;
  static constexpr bool kWide = sizeof(typename Kernel::Output) == 4;
  static constexpr bool kContiguousM = Kernel::kTransposed != Kernel::kGatheredM;  ///< in the gradient
  const Parameters& p;
  std::uint32_t base;
  int consumer;
  int first = 0;         ///< stage of the first slot
  bool pending = false;  ///< the copy engine may still read the slots

  __device__ std::uint32_t chunk_address(int chunk) const {
    const int i = consumer * Layout::kChunks + chunk;
    const int slot = i / Layout::kChunksOfStage;
    int stage = first + slot;
    if (stage >= Layout::kStages) stage -= Layout::kStages;
    return base + stage * Layout::kStageBytes + (i - slot * Layout::kChunksOfStage) * kChunkBytes;
  }

  /// Takes the tile's slots: `ring` stands at the first, and is moved past the last.
  __device__ __forceinline__ void begin(const WeightWork& work, RingPosition<Layout::kStages>& ring) {
    finish();
    if (p.accumulate && work.rows == 0) return;
    first = ring.stage;
#pragma unroll 1
    for (int i = 0; i < Layout::kSlots; ++i, ring.next())
      barrier_wait(Layout::full(base, ring.stage), ring.parity);
  }
  __device__ __forceinline__ void release_slots() const {
    int stage = first;
#pragma unroll
    for (int i = 0; i < Layout::kSlots; ++i) {
      barrier_arrive(Layout::empty(base, stage));
      stage = stage + 1 == Layout::kStages ? 0 : stage + 1;
    }
  }
  /// After the last unit. The first warp holds on to the slots until `finish`.
  __device__ __forceinline__ void end() {
    pending = true;
    if (Lane::lane() == 0 && Lane::thread() != 0) release_slots();
  }
  /// Releases the slots of the tile before, whose stores have had time.
  __device__ __forceinline__ void finish() {
    if (!pending) return;
    pending = false;
    if (Lane::thread() == 0) {
      tma_wait_read<0>();
      release_slots();
    }
  }
  /// Instead of store and end: the tile is another block's to store.
  __device__ __forceinline__ void skip() const {
    if (Lane::lane() == 0) release_slots();
  }

  /// The result of 64-row block `block`.
  __device__ __forceinline__ void store(const float (&acc)[Kernel::kN / 2], const WeightWork& work,
                                        int block) {
#pragma unroll
    for (int part = 0; part < (kWide ? 2 : 1); ++part) {
      const int unit = block * (kWide ? 2 : 1) + part;
      if (unit >= Kernel::kBlocks) {  // where an earlier unit was
        if (Lane::thread() == 0) tma_wait_read<Kernel::kBlocks - 1>();
        sync_warpgroup();
      }
      const int chunk0 = unit % Kernel::kBlocks * Layout::kUnit;
#pragma unroll
      for (int i = 0; i < Layout::kUnit; ++i) {
        const std::uint32_t chunk = chunk_address(chunk0 + i);
        if constexpr (kWide) {  // columns 32 part .. 32 part + 31 of the 64, in two parts of 32 x 32
          int row = Lane::row();
          int col = Lane::col();
          asm volatile("" : "+r"(row), "+r"(col));  // addresses are cheaper to compute again than to keep
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float* a = &acc[i * 32 + part * 16 + j * 4 + h * 2];
              const int r = row + 8 * h;
              const int c = j * 8 + col;
              const std::uint32_t half = chunk + r / 32 * (kChunkBytes / 2);
              if constexpr (kContiguousM) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const int line = c + e;
                  store_shared(half + line * kLineBytes + (((r % 32 / 4) ^ (line % 8)) * 16) + r % 4 * 4,
                               a[e]);
                }
              } else {
                store_shared(half + r % 32 * kLineBytes + (((c / 4) ^ (r % 8)) * 16) + c % 4 * 4, a[0], a[1]);
              }
            }
          }
        } else {
#pragma unroll
          for (int j = 0; j < 8; j += 2) {
            const float* a = &acc[i * 32 + j * 4];
            const std::uint32_t r0 = pack<Element>(a[0], a[1]);
            const std::uint32_t r1 = pack<Element>(a[2], a[3]);
            const std::uint32_t r2 = pack<Element>(a[4], a[5]);
            const std::uint32_t r3 = pack<Element>(a[6], a[7]);
            if constexpr (kContiguousM) {
              store_matrices_transposed(Lane::matrices_transposed(chunk, j), r0, r1, r2, r3);
            } else {
              store_matrices(Lane::matrices(chunk, j), r0, r1, r2, r3);
            }
          }
        }
      }
      fence_async_proxy();
      sync_warpgroup();
      if (Lane::thread() == 0) {
#pragma unroll 1
        for (int i = 0; i < Layout::kUnit; ++i) {
          const WeightPlace<Kernel> place(p, work, consumer * Kernel::kBlocks + block, i);
          if (!place.exists(p)) break;
          const std::uint32_t source = chunk_address(chunk0 + i);
          if constexpr (kWide) {
            place.with_box(0, part * 32, [&](auto... c) { to_memory(source, c...); });
            place.with_box(32, part * 32, [&](auto... c) { to_memory(source + kChunkBytes / 2, c...); });
          } else {
            place.with_box(0, 0, [&](auto... c) { to_memory(source, c...); });
          }
        }
        tma_commit();
      }
    }
  }
  __device__ __forceinline__ void to_memory(std::uint32_t source, int c0, int c1, int plane,
                                            int expert) const {
    if (p.accumulate) {
      tma_add(p.weight_out, source, c0, c1, plane, expert);
    } else {
      tma_store(p.weight_out, source, c0, c1, plane, expert);
    }
  }

  /// Puts this part's sum into its slot, beside those of the tile's other parts. True for the last to come,
  /// which then has the sum of all in `acc`.
  __device__ __forceinline__ bool join(float (&acc)[Kernel::kBlocks][Kernel::kN / 2], const WeightWork& work,
                                       int slot, int tiles) const {
    constexpr int kQuads = Kernel::kN / 8;
    constexpr int kQuadBytes = kWarpgroup * 16;
    char* const mine = p.sums + consumer * (Layout::kSumBytes / 2) + Lane::thread() * 16;
    char* sum = mine + static_cast<std::int64_t>(slot) * Layout::kSumBytes;
    asm volatile("" : "+l"(sum));
#pragma unroll
    for (int block = 0; block < Kernel::kBlocks; ++block) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const float* a = &acc[block][quad * 4];
        store_global_16_bytes(sum + (block * kQuads + quad) * kQuadBytes, a[0], a[1], a[2], a[3]);
      }
    }
    __threadfence();
    sync_warpgroup();
    const std::uint32_t arrived = base + Layout::kArrived + 4 * consumer;
    if (Lane::thread() == 0) {  // four bits a tile and consumer, behind the tile counter
      const int place = 2 * work.slot0 + consumer;
      const int before = atomicAdd(p.next_tile + 1 + place / 8, 1 << (place % 8 * 4));
      store_shared(arrived, before >> (place % 8 * 4) & 15);
    }
    sync_warpgroup();
    if (load_shared(arrived) != work.parts - 1) return false;
    __threadfence();
#pragma unroll
    for (int block = 0; block < Kernel::kBlocks; ++block) {
#pragma unroll
      for (float& value : acc[block]) value = 0;
    }
    sum = mine + static_cast<std::int64_t>(work.slot0) * Layout::kSumBytes;
#pragma unroll 1
    for (int part = 0; part < work.parts; ++part) {
      asm volatile("" : "+l"(sum));
#pragma unroll
      for (int block = 0; block < Kernel::kBlocks; ++block) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          const float4 v = load_global_16_bytes(sum + (block * kQuads + quad) * kQuadBytes);
          float* a = &acc[block][quad * 4];
          a[0] += v.x;
          a[1] += v.y;
          a[2] += v.z;
          a[3] += v.w;
        }
      }
      sum += static_cast<std::int64_t>(tiles) * Layout::kSumBytes;
    }
    return true;
  }
};

template <class Kernel>
__device__ __forceinline__ void consume_weight(const Parameters& p, std::uint32_t base, int consumer) {
  using Layout = WeightLayout<Kernel>;
  constexpr int kBlocks = Kernel::kBlocks;
  constexpr std::uint64_t kStepBlock = kStageSlabBytes >> 4;
  constexpr std::uint64_t kStepK = kDescriptorStepK16<Major::kMN>;
  const WeightTiles schedule(p);
  const int count = schedule.count();
  Tickets<> tickets{base + Layout::kTickets};
  RingPosition<Layout::kStages> ring;
  WeightStore<Kernel> result{p, base, consumer};
  float acc[kBlocks][Kernel::kN / 2];
  int w = static_cast<int>(blockIdx.x);
  if (w >= count) return;
  WeightWork work = schedule.at(w);
  const auto release = [&](int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(Layout::empty(base, stage));
  };
  while (w < count) {
    const int stages = stages_of(work);
    int accumulate = 0;
    int previous = -1;
    if (stages == 0) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (float& value : acc[i]) value = 0;
      }
    }
    if (stages > 0 && work.rows < kRowsOfStage) {  // begins with another expert's rows, which may be NaN
      barrier_wait(Layout::full(base, ring.stage), ring.parity);
      const std::uint32_t routed = base + ring.stage * Layout::kStageBytes + Layout::kRoutedAt;
      for (int slab = 0; slab < Layout::kRouted / 64; ++slab) {
        for (int i = Lane::thread() * 16; i < (kRowsOfStage - work.rows) * kLineBytes; i += kWarpgroup * 16)
          store_shared_16_bytes(routed + slab * kStageSlabBytes + i, {});
      }
      fence_async_proxy();
      sync_warpgroup();
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
    const auto multiply = [&]<int kN>() {
      for (int k = 0; k < stages; ++k, ring.next()) {
        const std::uint32_t stage = base + ring.stage * Layout::kStageBytes;
        const std::uint64_t a =
            matrix_descriptor<Major::kMN, kRowsOfStage>(stage) + consumer * kBlocks * kStepBlock;
        const std::uint64_t b = matrix_descriptor<Major::kMN, kRowsOfStage>(stage + Layout::kABytes);
        barrier_wait(Layout::full(base, ring.stage), ring.parity);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < kRowsOfStage / 16; ++kk) {
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) {
            wgmma<typename Kernel::Element, kN, Major::kMN, Major::kMN>(
                accumulators_of<kN>(acc[i]), a + i * kStepBlock + kk * kStepK, b + kk * kStepK, accumulate);
          }
          accumulate = 1;
        }
        wgmma_commit();
        if (previous >= 0) {
          wgmma_wait<1>();
          release(previous);
        } else {
          result.finish();
        }
        previous = ring.stage;
      }
    };
    const int columns = Kernel::kGatheredM ? p.num_planes * p.slabs_of_plane * 64 - work.routed * Kernel::kN
                                           : p.source_cols - work.gathered * Kernel::kN;
    with_columns<Kernel::kN>(columns, multiply);
    result.begin(work, ring);
    const int slot = w;  // of a part's sum: its number
    WeightWork next;
    w = take_tile<true>(tickets, schedule, count, &next);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
    if (previous >= 0) release(previous);
    if (work.parts > 1 && !result.join(acc, work, slot, schedule.tiles)) {
      result.skip();
    } else if (!p.accumulate || work.rows > 0) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) result.store(acc[i], work, i);
      result.end();
    }
    work = next;
  }
  if (Lane::thread() == 0) tma_wait_read<0>();
}

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 1) weight_gemm_kernel(const __grid_constant__ Parameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Layout = WeightLayout<Kernel>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t base = shared_address(shared);
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x / kWarpgroup), 0);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Layout::kStages; ++stage) {
      barrier_init(Layout::full(base, stage), 1 + kWarpgroup);
      barrier_init(Layout::empty(base, stage), 2 * kWarpgroup / 32);
    }
    Tickets<>{base + Layout::kTickets}.init(kThreads / 32);
    barrier_init_fence();
    prefetch_map(p.a);
    prefetch_map(p.weight_out);
  }
  __syncthreads();

  if (warpgroup == 0) {
    give_registers<40>();
    produce_weight<Kernel>(p, base);
    if (p.beside_previous) wait_for_kernel_before();  // blocks without a tile too
  } else {
    take_registers<232>();
    consume_weight<Kernel>(p, base, warpgroup - 1);
  }
#endif
}

}  // namespace moestro::cuda::hopper
