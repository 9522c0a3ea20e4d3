/// The CUDA backend's table.
#include <algorithm>
#include <cstdio>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "cuda/hopper/hopper.hpp"
#include "cuda/path.hpp"

namespace moestro::cuda {
namespace {

std::size_t stage_workspace_bytes(const LayerConfig&, const Context&) {
  return kCounterBytes;
}

std::size_t gradient_workspace_bytes(const LayerConfig& config, const Context&) {
  const bool has_dots = config.has_b_down && config.weight_position == WeightPosition::kAfter;
  const std::int64_t num_slots = config.num_slots();
  return std::max({down_backward_workspace_bytes(num_slots, config.d_ff, has_dots),
                   hopper::down_backward_workspace_bytes(num_slots, config.d_ff, has_dots),
                   hopper::weight_backward_workspace_bytes(num_slots, config.h_width(), config.d_model),
                   hopper::weight_backward_workspace_bytes(num_slots, config.d_ff, config.d_model)});
}

const char* portable_loop(const LayerConfig& config) {
  if (config.dtype == DType::kF32) return "f32 fused multiply-adds, 128x128 tiles";
  if (config.d_model % 8 != 0) return "mma.sync, element-wise loads (d is not a multiple of 8)";
  if (config.d_ff % 8 != 0) return "mma.sync, element-wise loads (n is not a multiple of 8)";
  return "mma.sync, 16-byte loads, 128x128 tiles";
}

void describe_path(const LayerConfig& config, const Context& ctx, char* text, std::size_t size) {
  const Device* device = nullptr;
  Status status = find_device(ctx, &device);
  if (config.dtype == DType::kF64) {
    status = Status::error(StatusCode::kUnsupported, "f64 has no CUDA kernels");
  }
  if (!status.ok()) {
    std::snprintf(text, size, "none: %s", status.message());
    return;
  }
  KernelPath path = KernelPath::kAuto;
  status = resolve_path(ctx, &path);
  const char* refusal = hopper::refusal(config, device->ordinal);
  if (!status.ok()) {
    std::snprintf(text, size, "none: %s", status.message());
  } else if (path == KernelPath::kHopper && refusal != nullptr) {
    std::snprintf(text, size, "none: hopper was asked for, but %s", refusal);
  } else if (path != KernelPath::kPortable && refusal == nullptr) {
    std::snprintf(text, size, "hopper: wgmma and TMA, %s, sm_%d%d%s", dtype_name(config.dtype), device->major,
                  device->minor, path == KernelPath::kHopper ? " (asked for)" : "");
  } else {
    std::snprintf(text, size, "portable: %s, %s, sm_%d%d (%s)", portable_loop(config),
                  dtype_name(config.dtype), device->major, device->minor,
                  path == KernelPath::kPortable ? "asked for" : refusal);
  }
}

}  // namespace

const Backend* cuda_backend() {
  static constexpr Backend kBackend = {
      .name = "cuda",
      .router_forward = cuda::router_forward,
      .router_backward = cuda::router_backward,
      .round_tokens = cuda::round_tokens,
      .dispatch_forward = cuda::dispatch_forward,
      .dispatch_row_weights = cuda::dispatch_row_weights,
      .up_forward = cuda::up_forward,
      .up_backward = cuda::up_backward,
      .up_weight_backward = cuda::up_weight_backward,
      .activation_forward = cuda::activation_forward,
      .activation_backward = cuda::activation_backward,
      .down_forward = cuda::down_forward,
      .down_backward = cuda::down_backward,
      .down_weight_backward = cuda::down_weight_backward,
      .combine_forward = cuda::combine_forward,
      .combine_backward = cuda::combine_backward,
      .rounding_workspace_bytes = cuda::rounding_workspace_bytes,
      .dispatch_workspace_bytes = cuda::dispatch_workspace_bytes,
      .stage_workspace_bytes = stage_workspace_bytes,
      .gradient_workspace_bytes = gradient_workspace_bytes,
      .describe_path = describe_path,
  };
  return &kBackend;
}

}  // namespace moestro::cuda
