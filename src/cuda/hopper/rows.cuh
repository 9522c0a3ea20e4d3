/// Products of contiguous routed rows with a weight, one output row each: down's forward (weight along k)
/// and up's backward (weight across k). They differ in how operand B lies in memory alone.
#pragma once

#include "cuda/hopper/epilogue.cuh"
#include "cuda/hopper/gemm.cuh"
#include "cuda/hopper/launch.hpp"
#include "cuda/hopper/plan.hpp"

namespace moestro::cuda::hopper {

template <int kN>
using LoadWeightAlongK = LoadWeightRows<kN, 1>;

template <class Element_, template <int> class LoadB_, RowsTile kTile>
struct RowsKernel {
  using Element = Element_;
  static constexpr bool kPingPong = kTile == RowsTile::kPingPong192;
  static constexpr bool kWorkInTickets = true;
  static constexpr int kN = kPingPong ? 192 : 256;
  static constexpr int kStages = 4;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  using Schedule = RowTiles;
  using LoadA = LoadRows;
  using LoadB = LoadB_<kN>;
  using Epilogue = StoreRows<Element, kN, kPingPong ? 4 : 2>;
};

/// Fills in what depends on the tile, and launches.
template <class Element, template <int> class LoadB, RowsTile kTile>
Status launch_rows_tile(const char* name, Parameters& p, const TensorView& weight, int planes,
                        GateLayout layout, std::int64_t num_slots, const Index& index, const Walk& walk,
                        const Context& ctx, cudaStream_t stream) {
  using Kernel = RowsKernel<Element, LoadB, kTile>;
  constexpr bool kAlongK = Kernel::LoadB::kMajor == Major::kK;
  MOESTRO_RETURN_IF_ERROR(
      make_weight_map(name, weight, planes, layout, 1, kAlongK ? Kernel::kN / 2 : 64, &p.b));
  set_row_tiles(index, ceil_div(p.cols, Kernel::kN), walk, &p);
  const std::int64_t count = max_tiles(num_slots, weight.extent[0]) * p.n_tiles;
  return launch(name, expert_gemm_kernel<Kernel>, SharedLayout<Kernel>::kBytes, p, count, ctx, stream);
}

template <class Element, template <int> class LoadB>
Status launch_rows(const char* name, Parameters& p, const TensorView& weight, int planes, GateLayout layout,
                   std::int64_t num_slots, const Index& index, const Plan<RowsTile>& plan, const Context& ctx,
                   cudaStream_t stream) {
  set_start(plan.start, ctx, &p);
  const auto run = [&]<RowsTile kTile>() {
    return launch_rows_tile<Element, LoadB, kTile>(name, p, weight, planes, layout, num_slots, index,
                                                   plan.walk, ctx, stream);
  };
  return plan.tile == RowsTile::kPingPong192 ? run.template operator()<RowsTile::kPingPong192>()
                                             : run.template operator()<RowsTile::kCooperative256>();
}

}  // namespace moestro::cuda::hopper
