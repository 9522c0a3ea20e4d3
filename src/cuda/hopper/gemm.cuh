/// One kernel for all expert products: schedule x loaders x main loop x epilogue.
///
///   warpgroup 0     producer: fills a ring of stages with a 128 x 64 tile of operand A (copied row by row
///                   through the index, or by TMA) and a kN x 64 tile of operand B (TMA)
///   warpgroups 1, 2 consumers: wgmma over the ring, then the epilogue. Cooperative: 64 rows each of one
///                   tile. Ping-pong: a whole tile each, one multiplies while the other stores.
///   warpgroup 3     where the epilogue has a type Finisher: the consumers leave a tile in shared memory and
///                   multiply the next, and the finisher does the rest (activation_backward.cuh)
///
/// The grid is one block a multiprocessor. Each starts with tile blockIdx.x of the schedule and draws the
/// next from a counter in memory, so that the tiles in flight are neighbours and share their operands in L2:
/// with a fixed stride blocks drift apart by whole tiles. The producer draws and passes the numbers on in
/// shared memory. A kernel is a type with the members
///   Element, kN, kStages, kPingPong, Schedule, LoadA, LoadB, Epilogue, kProducerRegisters,
///   kConsumerRegisters, kFinisherRegisters where there is a finisher, and
///   kWorkInTickets: does the producer pass on what a tile is, or do all warps look it up?
#pragma once

#include "cuda/hopper/load.cuh"
#include "cuda/hopper/parameters.hpp"
#include "cuda/hopper/ring.cuh"
#include "cuda/hopper/schedule.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace moestro::cuda::hopper {

constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;

template <class Kernel>
constexpr bool kHasFinisher = requires {
  typename Kernel::Epilogue::Finisher;
};
template <class Kernel>
constexpr int kThreadsOf = kThreads + (kHasFinisher<Kernel> ? kWarpgroup : 0);

// Named barriers: 0 is __syncthreads, 1 and 2 belong to one consumer warpgroup (sync_warpgroup).
constexpr int kBarrierOfTurn = 3;  ///< 3, 4: ping-pong, whose turn it is to multiply

template <class Kernel>
using TicketsOf = Tickets<std::conditional_t<Kernel::kWorkInTickets, Work, NoWork>>;

template <class Kernel>
struct SharedLayout {
  static constexpr int kStageBytes = kTileABytes + Kernel::kN * kLineBytes;
  static constexpr int kStaging = Kernel::kStages * kStageBytes;  ///< 1024-byte aligned, as stages are
  static constexpr int kBarriers = kStaging + 2 * Kernel::Epilogue::kStagingBytes;
  static constexpr int kTickets = kBarriers + (2 * Kernel::kStages + 2 * Kernel::Epilogue::kNumBarriers) * 8;
  static constexpr int kBytes = kTickets + TicketsOf<Kernel>::kBytes;
  static_assert(kTickets % 16 == 0);
  static_assert(kBytes <= 232448, "more shared memory than a block can have");

  static __device__ std::uint32_t full(std::uint32_t base, int stage) { return base + kBarriers + 8 * stage; }
  static __device__ std::uint32_t empty(std::uint32_t base, int stage) {
    return base + kBarriers + 8 * (Kernel::kStages + stage);
  }
  static __device__ std::uint32_t epilogue_barriers(std::uint32_t base, int consumer) {
    return base + kBarriers + 8 * (2 * Kernel::kStages + consumer * Kernel::Epilogue::kNumBarriers);
  }
};

template <class Kernel>
__device__ __forceinline__ void produce(const Parameters& p, std::uint32_t base) {
  using Layout = SharedLayout<Kernel>;
  using LoadA = typename Kernel::LoadA;
  using LoadB = typename Kernel::LoadB;
  if (threadIdx.x >= LoadA::kThreads) return;

  const typename Kernel::Schedule schedule(p);
  const int stride = static_cast<int>(gridDim.x);
  const bool draws = threadIdx.x == 0;
  LoadA load_a(p);
  TicketsOf<Kernel> tickets{base + Layout::kTickets};
  RingPosition<Kernel::kStages> ring;
  int w = static_cast<int>(blockIdx.x);
  int drawn = 0;  // number of the next tile, less stride
  const auto draw = [&] {
    if (draws && p.next_tile != nullptr) drawn = atomicAdd(p.next_tile, 1);
  };
  const auto publish = [&] {
    if (draws) publish_tile(tickets, schedule, stride + (p.next_tile != nullptr ? drawn : w));
  };
  if constexpr (Kernel::kPingPong) draw();
  if (w >= schedule.count()) return;
  Work work = schedule.at(w);
  [[maybe_unused]] Lockstep lockstep(p, true, schedule.count());
  while (w < schedule.count()) {
    if constexpr (!LoadA::kGathers) lockstep.begin_tile();
    // In ping-pong a consumer asks for the tile after the next.
    if constexpr (Kernel::kPingPong && LoadA::kGathers) publish();
    const int k_tiles = schedule.k_tiles(work);
    // Numbers are drawn late: neighbours share operands only where they run at the same time. But the answer
    // takes its time, and so does looking up what tile that is. A thread that does not gather has time for it
    // while the ring is full.
    const int draw_at = max(k_tiles - 3, 0);
    const int publish_at = Kernel::kPingPong ? 0 : max(k_tiles - 2, 0);
    load_a.begin(work);
    for (int k = 0; k < k_tiles; ++k, ring.next()) {
      const std::uint32_t tile_a = base + ring.stage * Layout::kStageBytes;
      const std::uint32_t full = Layout::full(base, ring.stage);
      barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
      // Where all four warps gather, they take turns with the copy engine.
      if (threadIdx.x == (LoadA::kGathers ? ring.stage % 4 * 32 : 0)) {
        barrier_expect_bytes(full, LoadB::kBytes + (LoadA::kGathers ? 0 : kTileABytes));
        LoadB::issue(p, work, k, tile_a + kTileABytes, full);
      }
      load_a.issue(work, k, tile_a, full);
      if constexpr (LoadA::kGathers) arrive_after_copies(full);
      // In ping-pong what is published was drawn in the tile before.
      if (!Kernel::kPingPong && k == draw_at) draw();
      if (!LoadA::kGathers && k == publish_at) publish();
      if (Kernel::kPingPong && k == draw_at) draw();
    }
    if constexpr (!Kernel::kPingPong && LoadA::kGathers) publish();
    w = take_tile<(LoadA::kThreads >= 32)>(tickets, schedule, schedule.count(), &work);
  }
}

/// This warp has left the stage.
template <class Kernel>
__device__ __forceinline__ void release(std::uint32_t base, int stage) {
  if (threadIdx.x % 32 == 0) barrier_arrive(SharedLayout<Kernel>::empty(base, stage));
}

/// Multiplies one tile: kBlocks x 64 rows starting at 64-row block `block`. `columns`: how many the matrix
/// still has; of a tile of 192 those beyond them are left out.
template <class Kernel, int kBlocks, int kMaxBlocks>
__device__ __forceinline__ void multiply(std::uint32_t base, int k_tiles, int block, int columns,
                                         RingPosition<Kernel::kStages>& ring,
                                         float (&acc)[kMaxBlocks][Kernel::kN / 2]) {
  using Layout = SharedLayout<Kernel>;
  constexpr Major kMajorA = Kernel::LoadA::kMajor;
  constexpr Major kMajorB = Kernel::LoadB::kMajor;
  constexpr std::uint64_t kStepBlock = kSlabBytes >> 4;  // of A: the next 64 rows, in either layout

  const auto step = [&]<int kN>(std::uint64_t a, std::uint64_t b, int kk, int accumulate) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const std::uint64_t at = a + i * kStepBlock + kk * kDescriptorStepK16<kMajorA>;
      const std::uint64_t bt = b + kk * kDescriptorStepK16<kMajorB>;
      if constexpr (kHasFinisher<Kernel> && Kernel::kN == 256) {
        // Threads of four warpgroups start with 128 registers, for which ptxas refuses 128 accumulators in
        // one instruction. The other 128 columns are 16 KB further in either layout.
        wgmma<typename Kernel::Element, 128, kMajorA, kMajorB>(accumulators_of<128>(acc[i]), at, bt,
                                                               accumulate);
        wgmma<typename Kernel::Element, 128, kMajorA, kMajorB>(accumulators_of<128>(acc[i], 128), at,
                                                               bt + (2 * kSlabBytes >> 4), accumulate);
      } else {
        wgmma<typename Kernel::Element, kN, kMajorA, kMajorB>(accumulators_of<kN>(acc[i]), at, bt,
                                                              accumulate);
      }
    }
  };
  int accumulate = 0;
  int previous = -1;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
  const auto loop = [&]<int kN>() {
    for (int k = 0; k < k_tiles; ++k, ring.next()) {
      const std::uint32_t tile_a = base + ring.stage * Layout::kStageBytes;
      barrier_wait(Layout::full(base, ring.stage), ring.parity);
      const std::uint64_t a = matrix_descriptor<kMajorA>(tile_a) + block * kStepBlock;
      const std::uint64_t b = matrix_descriptor<kMajorB>(tile_a + kTileABytes);
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        step.template operator()<kN>(a, b, kk, accumulate);
        accumulate = 1;
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (previous >= 0) release<Kernel>(base, previous);
      previous = ring.stage;
    }
  };
  with_columns<Kernel::kN>(columns, loop);
  if constexpr (Kernel::kPingPong) {
    named_arrive(kBarrierOfTurn + 1 - static_cast<int>(threadIdx.x / kWarpgroup - 1), 2 * kWarpgroup);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
  if (previous >= 0) release<Kernel>(base, previous);
}

template <class Kernel>
__device__ __forceinline__ void consume(const Parameters& p, std::uint32_t base, int consumer) {
  using Layout = SharedLayout<Kernel>;
  constexpr int kMaxBlocks = Kernel::kPingPong ? 2 : 1;
  const typename Kernel::Schedule schedule(p);
  typename Kernel::Epilogue epilogue(p, base + Layout::kStaging + consumer * Kernel::Epilogue::kStagingBytes,
                                     Layout::epilogue_barriers(base, consumer));
  RingPosition<Kernel::kStages> ring;
  float acc[kMaxBlocks][Kernel::kN / 2];

  TicketsOf<Kernel> tickets{base + Layout::kTickets};
  int w = static_cast<int>(blockIdx.x);
  if (w >= schedule.count()) return;
  Work work = schedule.at(w);
  if constexpr (Kernel::kPingPong) {
    if (consumer == 1) {
      named_arrive(kBarrierOfTurn, 2 * kWarpgroup);  // the first turn is consumer 0's
      w = take_tile<true>(tickets, schedule, schedule.count(), &work);
      ring.skip(p.k_tiles);
      if (w >= schedule.count()) return;
    }
  }
  Work next;
  /// This warpgroup's next tile; in ping-pong the one between is the other's.
  const auto look_ahead = [&] {
    if constexpr (Kernel::kPingPong) {
      w = tickets.template take<true>();
      if (w >= schedule.count()) return;
    }
    w = take_tile<true>(tickets, schedule, schedule.count(), &next);
  };
  for (; w < schedule.count(); work = next) {
    const int k_tiles = schedule.k_tiles(work);
    epilogue.prefetch(work);
    if constexpr (Kernel::kPingPong) {
      named_sync(kBarrierOfTurn + consumer, 2 * kWarpgroup);
      if (work.rows > 64) {
        multiply<Kernel, 2>(base, k_tiles, 0, p.cols - work.n * Kernel::kN, ring, acc);
        look_ahead();
        epilogue.store(acc[0], work, 0);
        epilogue.store(acc[1], work, 1);
      } else {
        multiply<Kernel, 1>(base, k_tiles, 0, p.cols - work.n * Kernel::kN, ring, acc);
        look_ahead();
        epilogue.store(acc[0], work, 0);
      }
      ring.skip(k_tiles);  // the other consumer's tile
    } else if (work.rows > 64 * consumer) {
      multiply<Kernel, 1>(base, k_tiles, consumer, Kernel::kN, ring, acc);
      look_ahead();
      epilogue.store(acc[0], work, consumer);
    } else {  // no rows in this half of the tile
      for (int k = 0; k < k_tiles; ++k, ring.next()) {
        barrier_wait(Layout::full(base, ring.stage), ring.parity);
        release<Kernel>(base, ring.stage);
      }
      look_ahead();
    }
  }
  epilogue.finish();
}

/// The fourth warpgroup, where the epilogue leaves work to it.
template <class Kernel>
__device__ __forceinline__ void finish(const Parameters& p, std::uint32_t base) {
  using Layout = SharedLayout<Kernel>;
  const typename Kernel::Schedule schedule(p);
  using Finisher = typename Kernel::Epilogue::Finisher;
  Finisher finisher(p, base + Layout::kStaging, Layout::epilogue_barriers(base, 0));
  TicketsOf<Kernel> tickets{base + Layout::kTickets};
  int w = static_cast<int>(blockIdx.x);
  if constexpr (requires(const Work& tile) { finisher.begin(tile); }) {  // it looks a tile ahead
    if (w >= schedule.count()) return;
    Work work = schedule.at(w);
    finisher.begin(work);
    for (Work next = work; w < schedule.count(); work = next) {
      w = tickets.template take<true>();  // published when this tile is loaded
      next = schedule.at(min(w, schedule.count() - 1));
      if (w >= schedule.count()) next.rows = 0;
      finisher.run(work, next);
    }
  } else {
    for (; w < schedule.count(); w = tickets.template take<true>()) finisher.run(schedule.at(w));
    if (threadIdx.x % kWarpgroup == 0) tma_wait_read<0>();  // its last stores still read shared memory
  }
}

template <class Kernel>
__global__ void __launch_bounds__(kThreadsOf<Kernel>, 1)
    expert_gemm_kernel(const __grid_constant__ Parameters p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Layout = SharedLayout<Kernel>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const std::uint32_t base = shared_address(shared);
  const int warpgroup = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x / kWarpgroup), 0);

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Kernel::kStages; ++stage) {
      barrier_init(Layout::full(base, stage), 1 + (Kernel::LoadA::kGathers ? kWarpgroup : 0));
      barrier_init(Layout::empty(base, stage), (Kernel::kPingPong ? 1 : 2) * kWarpgroup / 32);
    }
    for (int i = 0; i < 2 * Kernel::Epilogue::kNumBarriers; ++i) {
      barrier_init(Layout::epilogue_barriers(base, 0) + 8 * i, kHasFinisher<Kernel> ? kWarpgroup / 32 : 1);
    }
    TicketsOf<Kernel>{base + Layout::kTickets}.init(
        (kThreadsOf<Kernel> - kWarpgroup + max(Kernel::LoadA::kThreads, 32)) / 32);
    barrier_init_fence();
    prefetch_map(p.b);
    if constexpr (!Kernel::LoadA::kGathers) prefetch_map(p.a);
  }
  __syncthreads();

  if (warpgroup == 0) {
    give_registers<Kernel::kProducerRegisters>();
    // This kernel ends after the one before, as the one to come takes for granted. A warp waits that has
    // nothing else to do.
    if constexpr (Kernel::LoadA::kThreads < 32) {
      if (p.beside_previous && threadIdx.x / 32 == 1) wait_for_kernel_before();
    }
    produce<Kernel>(p, base);
  } else if (kHasFinisher<Kernel> && warpgroup == 3) {
    if constexpr (kHasFinisher<Kernel>) {
      take_registers<Kernel::kFinisherRegisters>();
      finish<Kernel>(p, base);
    }
  } else {
    take_registers<Kernel::kConsumerRegisters>();
    consume<Kernel>(p, base, warpgroup - 1);
  }
#endif
}

}  // namespace moestro::cuda::hopper
