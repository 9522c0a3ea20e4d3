/// One kernel for all expert products: schedule x loaders x main loop x epilogue.
///
///   warpgroup 0     producer: fills a ring of stages with a 128 x 64 tile of operand A (copied row by row
///                   through the index, or by TMA) and a kN x 64 tile of operand B (TMA)
///   warpgroups 1, 2 consumers: wgmma over the ring, then the epilogue. Cooperative: 64 rows each of one
///                   tile. Ping-pong: a whole tile each, one multiplies while the other stores.
///
/// The grid is one block a multiprocessor; each walks the tiles blockIdx.x, + gridDim.x, … of the schedule.
/// A kernel is a type with the members
///   Element, kN, kStages, kPingPong, Schedule, LoadA, LoadB, Epilogue, kProducerRegisters, kConsumerRegisters.
#pragma once

#include "cuda/hopper/load.cuh"
#include "cuda/hopper/parameters.hpp"
#include "cuda/hopper/schedule.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace moestro::cuda::hopper {

constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;

// Named barriers (0 is __syncthreads).
constexpr int kBarrierOfConsumer = 1;  ///< 1, 2: one consumer warpgroup on its own
constexpr int kBarrierOfTurn = 3;      ///< 3, 4: ping-pong, whose turn it is to multiply

template <class Kernel>
struct SharedLayout {
  static constexpr int kStageBytes = kTileABytes + Kernel::kN * kLineBytes;
  static constexpr int kStaging = Kernel::kStages * kStageBytes;  ///< 1024-byte aligned, as stages are
  static constexpr int kBarriers = kStaging + 2 * Kernel::Epilogue::kStagingBytes;
  static constexpr int kBytes = kBarriers + (2 * Kernel::kStages + 2 * Kernel::Epilogue::kNumBarriers) * 8;
  static_assert(kBytes <= 232448, "more shared memory than a block can have");

  static __device__ std::uint32_t full(std::uint32_t base, int stage) { return base + kBarriers + 8 * stage; }
  static __device__ std::uint32_t empty(std::uint32_t base, int stage) {
    return base + kBarriers + 8 * (Kernel::kStages + stage);
  }
  static __device__ std::uint32_t epilogue_barriers(std::uint32_t base, int consumer) {
    return base + kBarriers + 8 * (2 * Kernel::kStages + consumer * Kernel::Epilogue::kNumBarriers);
  }
};

/// A place in the ring: stage, and the parity of the phase in which its barrier completes next.
template <int kStages>
struct RingPosition {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void next() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void skip(int count) {
    const int sum = stage + count;
    stage = sum % kStages;
    parity ^= static_cast<std::uint32_t>(sum / kStages) & 1;
  }
};

template <class Kernel>
__device__ __forceinline__ void produce(const Parameters& p, std::uint32_t base) {
  using Layout = SharedLayout<Kernel>;
  using LoadA = typename Kernel::LoadA;
  using LoadB = typename Kernel::LoadB;
  const bool leader = threadIdx.x == 0;
  if (!LoadA::kGathers && !leader) return;

  const typename Kernel::Schedule schedule(p);
  LoadA load_a(p);
  RingPosition<Kernel::kStages> ring;
  for (int w = blockIdx.x; w < schedule.count; w += gridDim.x) {
    const Work work = schedule.at(w);
    const int k_tiles = schedule.k_tiles(work);
    load_a.begin(work);
    for (int k = 0; k < k_tiles; ++k, ring.next()) {
      const std::uint32_t tile_a = base + ring.stage * Layout::kStageBytes;
      const std::uint32_t full = Layout::full(base, ring.stage);
      barrier_wait(Layout::empty(base, ring.stage), ring.parity ^ 1);
      if (leader) {
        barrier_expect_bytes(full, LoadB::kBytes + (LoadA::kGathers ? 0 : kTileABytes));
        LoadB::issue(p, work, k, tile_a + kTileABytes, full);
      }
      load_a.issue(work, k, tile_a, full);
      if constexpr (LoadA::kGathers) arrive_after_copies(full);
    }
  }
}

/// Zeroes the lines from `first` on of an MN-major B tile: rows of the next expert, or of nobody.
template <int kN>
__device__ __forceinline__ void zero_lines(std::uint32_t tile_b, int first) {
  const int bytes = (kLinesOfSlab - first) * kLineBytes;
  for (int slab = 0; slab < kN / 64; ++slab) {
    const std::uint32_t start = tile_b + slab * kSlabBytes + first * kLineBytes;
    for (int i = (threadIdx.x % kWarpgroup) * 16; i < bytes; i += kWarpgroup * 16) zero_shared_16_bytes(start + i);
  }
}

/// Multiplies one tile: kBlocks x 64 rows starting at 64-row block `block`.
template <class Kernel, int kBlocks, int kMaxBlocks>
__device__ __forceinline__ void multiply(const Parameters& p, std::uint32_t base, const Work& work, int k_tiles, int block,
                         RingPosition<Kernel::kStages>& ring, float (&acc)[kMaxBlocks][Kernel::kN / 2]) {
  using Layout = SharedLayout<Kernel>;
  constexpr Major kMajorA = Kernel::LoadA::kMajor;
  constexpr Major kMajorB = Kernel::LoadB::kMajor;
  constexpr bool kVaryingK = Kernel::Schedule::kVaryingK;
  constexpr std::uint64_t kStepBlock = kSlabBytes >> 4;  // of A: the next 64 rows, in either layout
  const bool signals = threadIdx.x % 32 == 0;

  const auto step = [&](std::uint64_t a, std::uint64_t b, int kk, int accumulate) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      wgmma<typename Kernel::Element, Kernel::kN, kMajorA, kMajorB>(
          acc[i], a + i * kStepBlock + kk * kDescriptorStepK16<kMajorA>, b + kk * kDescriptorStepK16<kMajorB>,
          accumulate);
    }
  };
  const auto release = [&](int stage) {
    if (signals) barrier_arrive(Layout::empty(base, stage));
  };

  const int whole = kVaryingK ? work.rows / 64 : k_tiles;
  int accumulate = 0;
  int previous = -1;
  if (kVaryingK && whole == 0) {  // an expert of less than 64 rows, or none
    accumulate = 1;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (float& value : acc[i]) value = 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
  for (int k = 0; k < whole; ++k, ring.next()) {
    const std::uint32_t tile_a = base + ring.stage * Layout::kStageBytes;
    barrier_wait(Layout::full(base, ring.stage), ring.parity);
    const std::uint64_t a = matrix_descriptor<kMajorA>(tile_a) + block * kStepBlock;
    const std::uint64_t b = matrix_descriptor<kMajorB>(tile_a + kTileABytes);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      step(a, b, kk, accumulate);
      accumulate = 1;
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0) release(previous);
    previous = ring.stage;
  }
  if constexpr (Kernel::kPingPong) {
    named_arrive(kBarrierOfTurn + 1 - static_cast<int>(threadIdx.x / kWarpgroup - 1), 2 * kWarpgroup);
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
  if (previous >= 0) release(previous);

  if constexpr (kVaryingK) {
    const int rest = work.rows % 64;
    if (rest != 0) {
      const std::uint32_t tile_a = base + ring.stage * Layout::kStageBytes;
      barrier_wait(Layout::full(base, ring.stage), ring.parity);
      zero_lines<Kernel::kN>(tile_a + kTileABytes, rest);
      fence_async_proxy();
      named_sync(kBarrierOfConsumer + threadIdx.x / kWarpgroup - 1, kWarpgroup);
      std::uint64_t a = matrix_descriptor<kMajorA>(tile_a) + block * kStepBlock;
      std::uint64_t b = matrix_descriptor<kMajorB>(tile_a + kTileABytes);
      for (int kk = 0; kk < rest; kk += 16) {  // k16 steps without rows are left out
        wgmma_fence();
        step(a, b, 0, 1);
        wgmma_commit();
        wgmma_wait<0>();
        a += kDescriptorStepK16<kMajorA>;
        b += kDescriptorStepK16<kMajorB>;
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
      release(ring.stage);
      ring.next();
    }
  }
}

template <class Kernel>
__device__ __forceinline__ void consume(const Parameters& p, std::uint32_t base, int consumer) {
  using Layout = SharedLayout<Kernel>;
  constexpr int kMaxBlocks = Kernel::kPingPong ? 2 : 1;
  const typename Kernel::Schedule schedule(p);
  typename Kernel::Epilogue epilogue(p, base + Layout::kStaging + consumer * Kernel::Epilogue::kStagingBytes,
                                     Layout::epilogue_barriers(base, consumer),
                                     kBarrierOfConsumer + consumer);
  RingPosition<Kernel::kStages> ring;
  float acc[kMaxBlocks][Kernel::kN / 2];

  int w = blockIdx.x;
  if constexpr (Kernel::kPingPong) {
    if (consumer == 1) {
      named_arrive(kBarrierOfTurn, 2 * kWarpgroup);  // the first turn is consumer 0's
      w += gridDim.x;
      ring.skip(p.k_tiles);
    }
  }
  const int stride = Kernel::kPingPong ? 2 * gridDim.x : gridDim.x;
  if (w >= schedule.count) return;
  Work next = schedule.at(w);
  for (; w < schedule.count; w += stride) {
    const Work work = next;
    next = schedule.at(min(w + stride, schedule.count - 1));
    const int k_tiles = schedule.k_tiles(work);
    epilogue.prefetch(work);
    if constexpr (Kernel::kPingPong) {
      named_sync(kBarrierOfTurn + consumer, 2 * kWarpgroup);
      if (work.rows > 64) {
        multiply<Kernel, 2>(p, base, work, k_tiles, 0, ring, acc);
        epilogue.store(acc[0], work, 0);
        epilogue.store(acc[1], work, 1);
      } else {
        multiply<Kernel, 1>(p, base, work, k_tiles, 0, ring, acc);
        epilogue.store(acc[0], work, 0);
      }
      ring.skip(k_tiles);  // the other consumer's tile
    } else if (Kernel::Schedule::kVaryingK || work.rows > 64 * consumer) {
      multiply<Kernel, 1>(p, base, work, k_tiles, consumer, ring, acc);
      epilogue.store(acc[0], work, consumer);
    } else {  // no rows in this half of the tile
      for (int k = 0; k < k_tiles; ++k, ring.next()) {
        barrier_wait(Layout::full(base, ring.stage), ring.parity);
        if (threadIdx.x % 32 == 0) barrier_arrive(Layout::empty(base, ring.stage));
      }
    }
  }
  epilogue.finish();
}

template <class Kernel>
__global__ void __launch_bounds__(kThreads, 1) expert_gemm_kernel(const __grid_constant__ Parameters p) {
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
    for (int i = 0; i < 2 * Kernel::Epilogue::kNumBarriers; ++i) barrier_init(Layout::epilogue_barriers(base, 0) + 8 * i, 1);
    barrier_init_fence();
  }
  __syncthreads();

  if (warpgroup == 0) {
    give_registers<Kernel::kProducerRegisters>();
    produce<Kernel>(p, base);
  } else {
    take_registers<Kernel::kConsumerRegisters>();
    consume<Kernel>(p, base, warpgroup - 1);
  }
#endif
}

}  // namespace moestro::cuda::hopper
