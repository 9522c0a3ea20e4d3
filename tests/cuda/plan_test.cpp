/// Plans of the matrix kernels: data that needs no GPU.
#include "cuda/plan.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "cuda/hopper/plan.hpp"

namespace moestro::cuda {
namespace {

const void* address(std::uintptr_t value) {
  return reinterpret_cast<const void*>(value);
}

/// Shared memory of an SM and of a block, in KiB.
Device device(std::size_t per_sm, std::size_t per_block) {
  Device result;
  result.smem_per_sm = per_sm * 1024;
  result.smem_per_block = per_block * 1024;
  return result;
}
const Device kHopper = device(228, 227);
const Device kA100 = device(164, 163);
const Device kAda = device(100, 99);

/// up_forward of T = 4096, d = 2048, n = 768, gated, weights [E, 2n, d].
RowsQuestion rows_question() {
  RowsQuestion question;
  question.dtype = DType::kBF16;
  question.a = address(0x1000);
  question.a_rows = 4096;
  question.a_stride = 2048;
  question.b = address(0x2000);
  question.b_stride_expert = 2 * 768 * 2048;
  question.b_stride_j = 2048;
  question.b_stride_k = 1;
  question.columns = 768;
  question.depth = 2048;
  question.gated = true;
  question.max_tiles = 300;
  return question;
}

TEST(CudaPlanTest, AlignedRowsTakeTheFastLoop) {
  const GemmPlan plan = plan_rows(rows_question(), kHopper);
  EXPECT_EQ(plan.loop, MainLoop::kFast);
  EXPECT_EQ(plan.obstacle, nullptr);
  EXPECT_TRUE(plan.b_along_k);
  EXPECT_EQ(plan.blocks, 300 * 12);  // 64 features a gated tile
}

TEST(CudaPlanTest, TwoBlocksFitWhereTheyCan) {
  for (const Device& each : {kHopper, kA100, kAda}) {
    const GemmPlan plan = plan_rows(rows_question(), each);
    EXPECT_GE(plan.stages, 3);
    EXPECT_LE(plan.stages, 6);
    EXPECT_LE(plan.smem_bytes, each.smem_per_block);
    EXPECT_GE(plan.smem_bytes, static_cast<std::size_t>(plan.stages * plan.step) * 512);
    EXPECT_GE(plan.smem_bytes, 128U * 136U * 4U);  // the staged sums
  }
  EXPECT_LE(2 * (plan_rows(rows_question(), kHopper).smem_bytes + 1024), kHopper.smem_per_sm);
  EXPECT_LE(2 * (plan_rows(rows_question(), kA100).smem_bytes + 1024), kA100.smem_per_sm);
}

TEST(CudaPlanTest, WhatDoesNotFitTheFastLoopIsNamed) {
  const struct {
    const char* word;  // of the obstacle
    void (*change)(RowsQuestion&);
  } cases[] = {
      {"left operand", [](RowsQuestion& q) { q.a = address(0x1002); }},
      {"left operand", [](RowsQuestion& q) { q.a_stride = 2049; }},
      {"summed", [](RowsQuestion& q) { q.depth = 2047; }},
      {"2^32", [](RowsQuestion& q) { q.a_rows = std::int64_t{1} << 31; }},
      {"weights", [](RowsQuestion& q) { q.b = address(0x2008); }},
      {"weights", [](RowsQuestion& q) { q.b_stride_expert += 4; }},
      {"weight rows", [](RowsQuestion& q) { q.b_stride_j = 2052; }},
      {"interleave", [](RowsQuestion& q) { q.interleaved_k = true; }},
      {"interleave", [](RowsQuestion& q) { q.b_stride_j = 1, q.b_stride_k = 1536, q.interleaved_j = true; }},
      {"multiple of 8", [](RowsQuestion& q) { q.b_stride_j = 1, q.b_stride_k = 1536, q.columns = 764; }},
      {"multiple of 64",
       [](RowsQuestion& q) {
         q.b_stride_j = 1, q.b_stride_k = 1536, q.gated = false, q.interleaved_k = true, q.depth = 2 * 40;
       }},
  };
  for (const auto& each : cases) {
    RowsQuestion question = rows_question();
    each.change(question);
    const GemmPlan plan = plan_rows(question, kHopper);
    EXPECT_EQ(plan.loop, MainLoop::kGeneral) << each.word;
    ASSERT_NE(plan.obstacle, nullptr) << each.word;
    EXPECT_NE(std::strstr(plan.obstacle, each.word), nullptr) << plan.obstacle << " lacks " << each.word;
    char text[160];
    describe_plan(plan, text, sizeof text);
    EXPECT_NE(std::strstr(text, plan.obstacle), nullptr) << text;
  }
}

TEST(CudaPlanTest, OuterProducts) {
  OuterQuestion question;
  question.p = address(0x1000);
  question.q = address(0x2000);
  question.p_rows = question.q_rows = 32768;
  question.p_stride = 1536;
  question.q_stride = 2048;
  question.m = 1536;
  question.n = 2048;
  question.num_experts = 64;
  EXPECT_EQ(plan_outer(question, kHopper).loop, MainLoop::kFast);
  EXPECT_EQ(plan_outer(question, kHopper).blocks, 64 * 12 * 16);
  question.n = 2047;
  EXPECT_EQ(plan_outer(question, kHopper).loop, MainLoop::kGeneral);
  question.dtype = DType::kF32;
  EXPECT_EQ(plan_outer(question, kHopper).loop, MainLoop::kF32);
  EXPECT_EQ(plan_outer(question, kHopper).obstacle, nullptr);
}

TEST(CudaPlanTest, WeightTilesOfHopper) {
  using hopper::WeightTile;
  const auto tile_of = [](std::int64_t experts, std::int64_t routed, std::int64_t gathered) {
    return hopper::plan_weight(hopper::Product::kUpWeight, 512 * experts, experts, routed, gathered, 132)
        .tile;
  };
  EXPECT_EQ(tile_of(128, 512, 1536), WeightTile::k256x192);   // 7B, n = 256: dW1
  EXPECT_EQ(tile_of(128, 256, 1536), WeightTile::k256x192);   // and dW2
  EXPECT_EQ(tile_of(256, 4096, 7168), WeightTile::k256x192);  // DeepSeek-V3
  EXPECT_EQ(tile_of(16, 8192, 1024), WeightTile::k192x256);   // a sixth of 256 x 192 would be empty
  EXPECT_EQ(tile_of(8, 4096, 1024), WeightTile::k128x256);    // large tiles end in a third of a wave
  EXPECT_EQ(tile_of(8, 2048, 512), WeightTile::k128x256);     // the large tile needs a second wave
  EXPECT_EQ(tile_of(256, 128, 2048), WeightTile::k128x256);   // half of it would be empty
}

}  // namespace
}  // namespace moestro::cuda
