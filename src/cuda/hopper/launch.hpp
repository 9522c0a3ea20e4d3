/// Host side shared by the stages: maps of tensors for the copy engine, checks, and the launch.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/hopper/hopper.hpp"
#include "cuda/hopper/parameters.hpp"
#include "cuda/hopper/plan.hpp"
#include "moestro/dispatch.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro::cuda::hopper {

/// Four axes, innermost first; strides in elements, of axes 1 to 3; the box that one TMA instruction moves.
struct MapShape {
  std::int64_t extent[4];
  std::int64_t stride[3];
  int box[4];
};

/// A map of `data` in the 128-byte swizzle; box[0] elements are 128 bytes.
Status make_map(const char* name, void* data, DType dtype, const MapShape& shape, CUtensorMap* map);

/// A [rows, planes * cols] tensor of routed rows, in boxes of 128 bytes of one plane x `box_rows` rows.
Status make_rows_map(const char* name, const TensorView& rows, int planes, int box_rows, CUtensorMap* map);
Status make_rows_output(const char* name, const TensorView& rows, int planes, RowsOutput* output);

/// A weight [E, planes * rows, cols] in boxes of box_planes x box_rows x 128 bytes.
Status make_weight_map(const char* name, const TensorView& weight, int planes, GateLayout layout,
                       int box_planes, int box_rows, CUtensorMap* map);

/// What every refusal asks first: the device, and the element type.
const char* refuse_device(int device_index);
const char* refuse_dtype(DType dtype);
/// Null when `view` (absent views pass) starts and steps by 16 bytes, and has unit stride along its last
/// axis.
const char* refuse_layout(const TensorView& view, const char* reason);

using KernelPointer = void (*)(Parameters);
/// `max_count` bounds the number of tiles, which only the device knows. Gives the kernel the tile counter
/// of the stage's place in the layer.
Status launch(const char* name, KernelPointer kernel, int shared_bytes, Parameters& parameters,
              std::int64_t max_count, const Context& ctx, cudaStream_t stream, int threads = 384);

/// up's bias, where it is there: the columns of both planes in either layout.
inline void set_up_bias(const TensorView& b_up, int planes, GateLayout layout, Parameters* p) {
  if (!b_up.present()) return;
  const bool interleaved = planes == 2 && layout == GateLayout::kInterleaved;
  p->bias = b_up.data;
  p->bias_stride = b_up.stride[0];
  p->bias_step = interleaved ? 2 : 1;
  p->bias_up = interleaved ? 1 : p->cols;
}

/// How the blocks of a kernel begin.
inline void set_start(Start start, const Context& ctx, Parameters* p) {
  p->beside_previous = ctx.beside_previous && start == Start::kOverlapping;
  p->lockstep = start == Start::kLockstep;
}

/// The tile table's part of the parameters; `n_tiles` tiles along N.
inline void set_row_tiles(const Index& index, std::int64_t n_tiles, const Walk& walk, Parameters* p) {
  p->tiles = reinterpret_cast<const int4*>(index.tiles);
  p->num_tiles = index.num_tiles;
  p->offsets = index.expert_token_offsets;
  p->n_tiles = static_cast<int>(n_tiles);
  p->raster = walk.raster;
  p->by_expert = walk.by_expert;
}

}  // namespace moestro::cuda::hopper
