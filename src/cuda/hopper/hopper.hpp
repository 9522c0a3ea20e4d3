/// Hopper kernels of the expert products: TMA, mbarrier rings and wgmma, for sm_90a, bf16 and f16.
///
/// One function a stage, with the meaning of the stage's public header. Each enqueues on the stream given,
/// allocates nothing, synchronises nothing, and is bitwise reproducible. `refusal` says in words why a
/// call is not for these kernels, or returns null; calling a stage with arguments that it refuses is an
/// error (kUnsupported). Bias gradients (d_b_up, d_b_down) are not computed here: they are column sums
/// that the caller launches beside these.
///
/// What is asked for: device of compute capability 9.0; bf16 or f16 throughout (weight gradients also
/// f32); n and d multiples of 8; base addresses and row strides multiples of 16 bytes; weights that are
/// contiguous along their last axis (w_up along d, w_down along n).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/support.hpp"
#include "moestro/config.hpp"
#include "moestro/context.hpp"
#include "moestro/down.hpp"
#include "moestro/status.hpp"
#include "moestro/up.hpp"

namespace moestro::cuda::hopper {

/// Why no kernel of this folder can serve `config` on the device, or null. Addresses and strides of the
/// actual tensors are looked at only by the overloads below.
const char* refusal(const LayerConfig& config, int device_index);

const char* refusal(const UpForwardArgs& args, int device_index);
const char* refusal(const UpBackwardArgs& args, int device_index);
const char* refusal(const UpWeightBackwardArgs& args, int device_index);
const char* refusal(const DownForwardArgs& args, int device_index);
const char* refusal(const DownBackwardArgs& args, int device_index);
const char* refusal(const DownWeightBackwardArgs& args, int device_index);

/// ctx.device_index names the device. Every stage takes a tile counter (support.hpp); without one
/// (workspace_bytes less than kCounterBytes) tiles go to multiprocessors in a fixed pattern, which gives the
/// same bits, slower.
Status up_forward(const UpForwardArgs& args, const Context& ctx, cudaStream_t stream);
Status up_backward(const UpBackwardArgs& args, const Context& ctx, cudaStream_t stream);
Status up_weight_backward(const UpWeightBackwardArgs& args, const Context& ctx, cudaStream_t stream);
Status down_forward(const DownForwardArgs& args, const Context& ctx, cudaStream_t stream);
Status down_backward(const DownBackwardArgs& args, const Context& ctx, cudaStream_t stream);
Status down_weight_backward(const DownWeightBackwardArgs& args, const Context& ctx, cudaStream_t stream);

/// The counter, and the sums of rows of large experts that are cut into parts (at most 120 tiles of f32, 24
/// MB); with less workspace nothing is cut, and skewed routing takes longer.
std::size_t weight_backward_workspace_bytes(std::int64_t num_slots, std::int64_t routed,
                                            std::int64_t gathered);

/// The counter, and partial sums of dS: [S, ceil(n / 128)] f32, with b_down a column more.
std::size_t down_backward_workspace_bytes(std::int64_t num_slots, std::int64_t d_ff, bool has_b_down);

}  // namespace moestro::cuda::hopper
