#include "cpu/cpu.hpp"

#include <cstdio>

#include "cpu/gemm.hpp"
#include "cpu/isa.hpp"
#include "cpu/panels.hpp"
#include "cpu/stages.hpp"
#include "cpu/tiles.hpp"

namespace moestro::cpu {
namespace {

std::size_t stage_workspace_bytes(const LayerConfig& config, const Context& ctx) {
  return Workspace::bytes(config.num_slots(), config.num_experts, config.dtype, num_workers(ctx));
}

void describe_path(const LayerConfig& config, const Context& ctx, char* text, std::size_t size) {
  const int workers = num_workers(ctx);
  char kernels[96];
  if ((config.dtype == DType::kF32 && has_panels<float>()) ||
      (config.dtype == DType::kBF16 && has_panels<BFloat16>())) {
    std::snprintf(kernels, sizeof kernels, "%s kernels that gather, %s",
                  config.dtype == DType::kF32 ? "avx512" : "avx512_bf16", dtype_name(config.dtype));
  } else if (dtype_bytes(config.dtype) == 2) {
    std::snprintf(kernels, sizeof kernels, "%s widened to f32 tile by tile, OpenBLAS (%s)",
                  dtype_name(config.dtype),
                  config.dtype == DType::kBF16 ? "no avx512_bf16" : "no f16 kernels");
  } else {
    std::snprintf(kernels, sizeof kernels, "OpenBLAS, %s%s", dtype_name(config.dtype),
                  config.dtype == DType::kF32 ? " (no avx512)" : "");
  }
  std::snprintf(text, size, "cpu: %s, %d thread%s", kernels, workers, workers == 1 ? "" : "s");
}

}  // namespace

const Backend* cpu_backend() {
  static const Backend backend{
      .name = "cpu",
      .router_forward = router_forward,
      .router_backward = router_backward,
      .round_tokens = round_tokens,
      .dispatch_forward = dispatch_forward,
      .dispatch_row_weights = dispatch_row_weights,
      .up_forward = up_forward,
      .up_backward = up_backward,
      .up_weight_backward = up_weight_backward,
      .activation_forward = activation_forward,
      .activation_backward = activation_backward,
      .down_forward = down_forward,
      .down_backward = down_backward,
      .down_weight_backward = down_weight_backward,
      .combine_forward = combine_forward,
      .combine_backward = combine_backward,
      .rounding_workspace_bytes = rounding_workspace_bytes,
      .dispatch_workspace_bytes = dispatch_workspace_bytes,
      .stage_workspace_bytes = stage_workspace_bytes,
      .gradient_workspace_bytes = stage_workspace_bytes,
      .describe_path = describe_path,
  };
  return &backend;
}

void library_versions(char* text, std::size_t size) {
  std::snprintf(text, size, "%s, %s", gemm_library(), isa_name(isa()));
}

}  // namespace moestro::cpu
