/// See plan.hpp.
#include "cuda/plan.hpp"

#include <algorithm>
#include <cstdio>

namespace moestro::cuda {
namespace {

// Shapes of gemm/tile.cuh, which states them for the device; plan_test and the launchers hold them equal.
constexpr std::int64_t kTile = 128;
constexpr std::size_t kStageBytesPerK = 512;
constexpr std::size_t kMaxStages = 6;
constexpr std::size_t kStagedSumsBytes = 128 * (128 + 8) * 4;
constexpr std::int64_t kMaxChunks = 0xffffffffLL;  // the fast loop counts a matrix's chunks in 32 bits
constexpr std::size_t kReservedPerBlock = 1024;    // of shared memory, by the runtime

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

bool aligned(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
}

/// Two blocks on an SM hide each other's epilogues: as deep a ring as lets two fit, else as one block can
/// have. Operands along k are read best in whole lines of 64 of k, where three such stages fit.
void plan_ring(const Device& device, bool along_k, GemmPlan* plan) {
  const std::size_t half = device.smem_per_sm / 2 - kReservedPerBlock;
  const std::size_t room = half >= kStagedSumsBytes ? half : device.smem_per_block;
  plan->step = along_k && room >= 3 * 64 * kStageBytesPerK ? 64 : 32;
  const std::size_t stage_bytes = static_cast<std::size_t>(plan->step) * kStageBytesPerK;
  plan->stages = static_cast<int>(std::min(room / stage_bytes, kMaxStages));
  plan->smem_bytes = std::max(static_cast<std::size_t>(plan->stages) * stage_bytes, kStagedSumsBytes);
}

GemmPlan finish(DType dtype, const char* obstacle, bool along_k, const Device& device, GemmPlan plan) {
  plan.obstacle = nullptr;
  if (dtype == DType::kF32) {
    plan.loop = MainLoop::kF32;
    plan.threads = 256;
    plan.smem_bytes = kStagedSumsBytes;
  } else if (obstacle != nullptr) {
    plan.loop = MainLoop::kGeneral;
    plan.obstacle = obstacle;
    plan.threads = 128;
    plan.smem_bytes = kStagedSumsBytes;
  } else {
    plan.loop = MainLoop::kFast;
    plan.threads = 128;
    plan_ring(device, along_k, &plan);
  }
  return plan;
}

}  // namespace

GemmPlan plan_rows(const RowsQuestion& question, const Device& device) {
  GemmPlan plan;
  plan.b_along_k = question.b_stride_k == 1;
  plan.blocks = question.max_tiles * ceil_div(question.columns, question.gated ? kTile / 2 : kTile);
  const char* obstacle = nullptr;
  if (!aligned(question.a) || question.a_stride % 8 != 0) {
    obstacle = "rows of the left operand are not 16-byte aligned";
  } else if (question.depth % 8 != 0) {
    obstacle = "the summed extent is not a multiple of 8";
  } else if (question.a_rows * (question.a_stride / 8) > kMaxChunks) {
    obstacle = "the left operand has more than 2^32 chunks of 16 bytes";
  } else if (!aligned(question.b) || question.b_stride_expert % 8 != 0) {
    obstacle = "weights are not 16-byte aligned";
  } else if (question.columns * (question.gated ? 2 : 1) * (question.b_stride_j / 8) > kMaxChunks) {
    obstacle = "an expert's weight has more than 2^32 chunks of 16 bytes";
  } else if (plan.b_along_k) {
    if (question.b_stride_j % 8 != 0) obstacle = "weight rows are not 16-byte aligned";
    if (question.interleaved_k) obstacle = "gate and up interleave along the weight's contiguous axis";
  } else {
    if (question.b_stride_j != 1 || question.b_stride_k % 8 != 0)
      obstacle = "weight rows are not 16-byte aligned";
    if (question.columns % 8 != 0) obstacle = "the output's extent is not a multiple of 8";
    if (question.interleaved_j) obstacle = "gate and up interleave along the weight's contiguous axis";
    if (question.interleaved_k && question.depth % 128 != 0) {
      obstacle = "gate and up interleave and n is not a multiple of 64";
    }
  }
  return finish(question.dtype, obstacle, /*along_k=*/true, device, plan);
}

GemmPlan plan_outer(const OuterQuestion& question, const Device& device) {
  GemmPlan plan;
  plan.b_along_k = false;
  plan.blocks = question.num_experts * ceil_div(question.m, kTile) * ceil_div(question.n, kTile);
  const char* obstacle = nullptr;
  if (!aligned(question.p) || !aligned(question.q) || question.p_stride % 8 != 0 ||
      question.q_stride % 8 != 0) {
    obstacle = "rows of an operand are not 16-byte aligned";
  } else if (question.m % 8 != 0 || question.n % 8 != 0) {
    obstacle = "an extent of the gradient is not a multiple of 8";
  } else if (question.p_rows * (question.p_stride / 8) > kMaxChunks ||
             question.q_rows * (question.q_stride / 8) > kMaxChunks) {
    obstacle = "an operand has more than 2^32 chunks of 16 bytes";
  }
  return finish(question.dtype, obstacle, /*along_k=*/false, device, plan);
}

void describe_plan(const GemmPlan& plan, char* text, std::size_t size) {
  const auto blocks = static_cast<long long>(plan.blocks);
  switch (plan.loop) {
    case MainLoop::kFast:
      std::snprintf(text, size, "fast 128x128x%d, %d stages, %zu B shared, %lld blocks", plan.step,
                    plan.stages, plan.smem_bytes, blocks);
      return;
    case MainLoop::kGeneral:
      std::snprintf(text, size, "general 128x128x32 (%s), %lld blocks", plan.obstacle, blocks);
      return;
    case MainLoop::kF32: std::snprintf(text, size, "f32 128x128x16, %lld blocks", blocks); return;
  }
}

}  // namespace moestro::cuda
