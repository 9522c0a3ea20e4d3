/// Rings in shared memory: the place in one, and the ring of tickets through which the producer hands out
/// tiles.
#pragma once

#include <type_traits>

#include "cuda/hopper/arch.cuh"
#include "cuda/hopper/parameters.hpp"

namespace moestro::cuda::hopper {

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

constexpr int kNumTickets = 4;

struct NoWork {};

/// Numbers of the tiles to come, from the producer's thread 0 to all warps that load or compute; and with
/// `Work`, 16 bytes, what those tiles are: to look it up takes memory's latency two or three times.
template <class Work = NoWork>
struct Tickets {
  static constexpr bool kWithWork = !std::is_empty_v<Work>;
  static_assert(!kWithWork || sizeof(Work) == 16);
  static constexpr int kWorks = kWithWork ? kNumTickets * 16 : 0;
  static constexpr int kBytes = kWorks + kNumTickets * (8 + 8 + 4);
  std::uint32_t base;  ///< 16-byte aligned: works, full barriers, empty barriers, numbers
  RingPosition<kNumTickets> ring;

  __device__ std::uint32_t work() const { return base + 16 * ring.stage; }
  __device__ std::uint32_t full(int i) const { return base + kWorks + 8 * i; }
  __device__ std::uint32_t empty(int i) const { return full(kNumTickets + i); }
  __device__ std::uint32_t number() const { return full(2 * kNumTickets) + 4 * ring.stage; }

  /// By one thread; `warps` warps take every ticket.
  __device__ void init(int warps) const {
    for (int i = 0; i < kNumTickets; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), warps);
    }
  }
  /// The ticket that this thread, too, takes next.
  __device__ void publish(int tile, const Work& what = {}) const {
    barrier_wait(empty(ring.stage), ring.parity ^ 1);
    store_shared(number(), tile);
    if constexpr (kWithWork) store_shared_16_bytes(work(), reinterpret_cast<const uint4&>(what));
    barrier_arrive(full(ring.stage));
  }
  /// The tile's number. What it is goes to `what`, unless that is null.
  template <bool kWholeWarp>
  __device__ int take(Work* what = nullptr) {
    barrier_wait(full(ring.stage), ring.parity);
    const int tile = load_shared(number());
    if constexpr (kWithWork) {
      if (what != nullptr) reinterpret_cast<uint4&>(*what) = load_shared_16_bytes(work());
    }
    if constexpr (kWholeWarp) __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(ring.stage));
    ring.next();
    return tile;
  }
};

/// Publishes a tile of `schedule`, or a number past its last.
template <class TicketWork, class Schedule>
__device__ __forceinline__ void publish_tile(const Tickets<TicketWork>& tickets, const Schedule& schedule,
                                             int number) {
  if constexpr (Tickets<TicketWork>::kWithWork) {
    tickets.publish(number, schedule.at(min(number, schedule.count() - 1)));
  } else {
    tickets.publish(number);
  }
}
/// A tile's number, and what it is: looked up here, among the `count` of `schedule`, where that is not in the
/// ticket.
template <bool kWholeWarp, class TicketWork, class Schedule, class Work>
__device__ __forceinline__ int take_tile(Tickets<TicketWork>& tickets, const Schedule& schedule, int count,
                                         Work* work) {
  if constexpr (Tickets<TicketWork>::kWithWork) {
    return tickets.template take<kWholeWarp>(work);
  } else {
    const int number = tickets.template take<kWholeWarp>();
    *work = schedule.at(min(number, count - 1));
    return number;
  }
}

/// Lets all blocks begin their i-th tiles at about the same time, so that what those share is in L2 when they
/// read it: all that are there, for another kernel may have some blocks' multiprocessors. Nothing depends on
/// it: a wait ends after a seventh of a tile's time, and a block that waited in vain four times in a row
/// waits no more. By the thread that draws tiles.
class Lockstep {
 public:
  /// Of the `count` tiles of a kernel, where its plan asks for it. `whole_sums`: no parts of sums are counted
  /// in the same place.
  __device__ Lockstep(const Parameters& p, bool whole_sums, int count)
      : begun_(p.lockstep && p.next_tile != nullptr && whole_sums ? p.next_tile + 1 : nullptr),
        count_(count),
        present_(static_cast<int>(gridDim.x)) {}

  __device__ __forceinline__ void begin_tile() {
    if (begun_ == nullptr) return;
    atomicAdd(begun_, 1);
    if (vain_waits_ == kMostVainWaits) return;
    expected_ = min(expected_ + present_, count_);
    const long long now = clock64();
    const long long limit = last_ == 0 ? kFirstLimit : (now - last_) / 7;
    ++vain_waits_;
    int begun = 0;
    do {
      begun = *const_cast<volatile int*>(begun_);
      if (begun >= expected_) {
        vain_waits_ = 0;
        break;
      }
      __nanosleep(100);
    } while (clock64() - now < limit);
    if (last_ == 0) expected_ = present_ = min(begun, expected_);
    last_ = clock64();
  }

 private:
  static constexpr int kMostVainWaits = 4;
  static constexpr long long kFirstLimit = 20000;  ///< cycles
  int* begun_;                                     ///< how many tiles have begun; null: nothing waits
  int count_;
  int present_;  ///< blocks that had begun when the first wait ended
  int expected_ = 0;
  int vain_waits_ = 0;  ///< in a row
  long long last_ = 0;  ///< when the tile before began
};

}  // namespace moestro::cuda::hopper
