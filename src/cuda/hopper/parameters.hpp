/// What a launch of the expert kernel reads: maps of the tensors that TMA touches, the index, extents.
/// One struct for all kernels; a kernel reads the fields of its own schedule, loaders and epilogue.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "moestro/config.hpp"

namespace moestro::cuda::hopper {

constexpr int kTileM = 128;
constexpr int kLineBytes = 128;                   ///< 64 elements of 16 bits
constexpr int kTileABytes = kTileM * kLineBytes;  ///< 128 x 64
constexpr int kLinesOfSlab = 64;                  ///< a slab: 64 x 64 elements
constexpr int kSlabBytes = kLinesOfSlab * kLineBytes;

/// A tensor of routed rows.
struct Rows {
  void* data = nullptr;     ///< null: not asked for
  std::int64_t stride = 0;  ///< elements from row to row
  int cols = 0;             ///< columns of one plane (gate, or up)
};

/// One in which tiles are stored, cut off at the end of the expert's rows.
struct RowsOutput : Rows {
  CUtensorMap map;  ///< (cols, planes, rows), box 64 x 1 x 64
};

struct Parameters {
  CUtensorMap a;          ///< operand A, where it comes by TMA
  CUtensorMap b;          ///< operand B
  CUtensorMap h;          ///< down_backward: H, box 64 x 1 x 64
  Rows h_rows;            ///< the same without TMA
  RowsOutput rows_out;    ///< H, Y, dH or dX~
  RowsOutput rows_out_a;  ///< A, or A'
  Rows d_h_bias;          ///< down_backward, WeightPosition::kBefore: dP
  CUtensorMap weight_out;

  // Gather: rows of x or dY.
  const void* source;
  std::int64_t source_stride;  ///< elements
  int source_cols;
  const std::int32_t* row_token;

  // Schedule.
  const int4* tiles;
  const std::int32_t* num_tiles;
  const std::int32_t* offsets;
  const std::int32_t* expert_order;
  int num_experts;
  int m_tiles;  ///< weight gradients: tiles along M
  int n_tiles;
  int* next_tile;        ///< 0 at the start: tiles drawn; null: every gridDim.x-th tile is a block's
  int raster;            ///< tiles along M that are walked before the next along N
  bool by_expert;        ///< row tiles: no band crosses from one expert to the next
  bool beside_previous;  ///< the kernel before may still run
  bool lockstep;         ///< where tiles are drawn and no sum is cut
  int k_tiles;           ///< of every tile, except in weight gradients
  int k_tiles_of_plane;
  int slabs_of_plane;  ///< weight gradients: 64-column slabs in one plane of dH or A'
  bool joined_slabs;   ///< weight gradients: A's map has such slabs as its third axis
  int num_planes;      ///< 2 where the second weight's rows are gate and up

  // Weight gradients whose sums are cut into parts. What next_tile points to is 128 bytes of zeros at the
  // start; behind the counter itself they count the parts that have come, or in lockstep the tiles that have
  // begun.
  char* sums;         ///< [partial_slots][a tile of f32]
  int partial_slots;  ///< 0: no sum is cut
  int multiprocessors;

  // Epilogue.
  int cols;                  ///< n or d: columns of one plane of the output
  const void* bias;          ///< of up: [E, W]; of down: [E, d]; or null
  std::int64_t bias_stride;  ///< from expert to expert
  int bias_step;             ///< from column to column: 2 where gate and up interleave
  int bias_up;               ///< first element of up
  bool bias_after_scale;     ///< WeightPosition::kBefore: act(s h + b)
  const float* row_weights;  ///< s, or null
  Activation activation;
  float* partials;  ///< [S, partials_stride] of dS, a column a tile along N
  int partials_stride;
  bool accumulate;  ///< weight gradients are added to
};

}  // namespace moestro::cuda::hopper
