/// See launch.hpp.
#pragma once

#include "cuda/gemm/fast.cuh"
#include "cuda/gemm/general.cuh"
#include "cuda/gemm/launch.hpp"

namespace moestro::cuda::gemm {

static_assert(kStagedBytes >= 2 * kF32TileK * kF32Pitch * 4);

template <typename... Parameters>
Status launch(const char* name, void (*kernel)(Parameters...), const GemmPlan& plan, int ordinal,
              cudaStream_t stream, Parameters... parameters) {
  if (plan.blocks == 0) return {};
  if (plan.blocks > 0x7fffffffLL) {
    return Status::error(StatusCode::kUnsupported, "%s: %lld tiles are more than one launch can have", name,
                         static_cast<long long>(plan.blocks));
  }
  MOESTRO_RETURN_IF_ERROR(
      allow_shared_memory(reinterpret_cast<const void*>(kernel), plan.smem_bytes, ordinal));
  kernel<<<static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.threads), plan.smem_bytes,
           stream>>>(parameters...);
  return check_launch(name);
}

template <typename T, typename Epilogue>
Status launch_rows(const GemmPlan& plan, const RowsProblem& problem, const Epilogue& epilogue, int ordinal,
                   cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    return launch("f32_kernel", f32_kernel<RowsProblem, Epilogue>, plan, ordinal, stream, problem, epilogue);
  } else {
    if (plan.loop == MainLoop::kGeneral) {
      return launch("general_kernel", general_kernel<T, RowsProblem, Epilogue>, plan, ordinal, stream,
                    problem, epilogue);
    }
    const auto launch_fast = [&]<Major kMajorB, int kStep>() {
      return launch("rows_fast_kernel", rows_fast_kernel<T, kMajorB, kStep, Epilogue>, plan, ordinal, stream,
                    problem, epilogue, plan.stages);
    };
    if (plan.step == 64) {
      return plan.b_along_k ? launch_fast.template operator()<Major::kAlongK, 64>()
                            : launch_fast.template operator()<Major::kAlongMN, 64>();
    }
    return plan.b_along_k ? launch_fast.template operator()<Major::kAlongK, 32>()
                          : launch_fast.template operator()<Major::kAlongMN, 32>();
  }
}

template <typename T, typename Epilogue>
Status launch_outer(const GemmPlan& plan, const OuterProblem& problem, const Epilogue& epilogue, int ordinal,
                    cudaStream_t stream) {
  if constexpr (sizeof(T) == 4) {
    return launch("f32_kernel", f32_kernel<OuterProblem, Epilogue>, plan, ordinal, stream, problem, epilogue);
  } else {
    if (plan.loop == MainLoop::kGeneral) {
      return launch("general_kernel", general_kernel<T, OuterProblem, Epilogue>, plan, ordinal, stream,
                    problem, epilogue);
    }
    if (problem.gather_p) {
      return launch("outer_fast_kernel", outer_fast_kernel<T, true, Epilogue>, plan, ordinal, stream, problem,
                    epilogue, plan.stages);
    }
    return launch("outer_fast_kernel", outer_fast_kernel<T, false, Epilogue>, plan, ordinal, stream, problem,
                  epilogue, plan.stages);
  }
}

}  // namespace moestro::cuda::gemm
