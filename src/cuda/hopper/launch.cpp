#include "cuda/hopper/launch.hpp"

#include <algorithm>

#include "cuda/device.hpp"
#include "cuda/hopper/hopper.hpp"

namespace moestro::cuda::hopper {
namespace {

using EncodeFunction = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                    const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                    CUtensorMapFloatOOBfill);

/// From the driver that is loaded anyway, so that programs need not link libcuda.
EncodeFunction encode_function() {
  static const EncodeFunction function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    const bool ok = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<EncodeFunction>(entry) : nullptr;
  }();
  return function;
}

}  // namespace

Status make_map(const char* name, void* data, DType dtype, const MapShape& shape, CUtensorMap* map) {
  const EncodeFunction encode = encode_function();
  if (encode == nullptr) {
    return Status::error(StatusCode::kUnsupported, "%s: the driver has no cuTensorMapEncodeTiled", name);
  }
  const std::int64_t bytes = dtype_bytes(dtype);
  cuuint64_t extent[4];
  cuuint64_t stride[3];
  cuuint32_t box[4];
  const cuuint32_t step[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) {
    extent[i] = static_cast<cuuint64_t>(shape.extent[i]);
    box[i] = static_cast<cuuint32_t>(shape.box[i]);
    if (i > 0) stride[i - 1] = static_cast<cuuint64_t>(shape.stride[i - 1] * bytes);
  }
  const CUtensorMapDataType type = dtype == DType::kBF16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  const CUresult result = encode(map, type, 4, data, extent, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::error(StatusCode::kDeviceError,
                         "%s: cuTensorMapEncodeTiled returned %d for extents %lld %lld %lld %lld", name,
                         static_cast<int>(result), static_cast<long long>(shape.extent[0]),
                         static_cast<long long>(shape.extent[1]), static_cast<long long>(shape.extent[2]),
                         static_cast<long long>(shape.extent[3]));
  }
  return {};
}

Status make_rows_map(const char* name, const TensorView& rows, int planes, int box_rows, CUtensorMap* map) {
  const std::int64_t cols = rows.extent[1] / planes;
  // One row may have any stride.
  const std::int64_t stride = rows.extent[0] > 1 ? rows.stride[0] : rows.extent[1];
  const MapShape shape{{cols, planes, rows.extent[0], 1},
                       {cols, stride, stride * rows.extent[0]},
                       {static_cast<int>(128 / dtype_bytes(rows.dtype)), 1, box_rows, 1}};
  return make_map(name, rows.data, rows.dtype, shape, map);
}

Status make_rows_output(const char* name, const TensorView& rows, int planes, RowsOutput* output) {
  output->data = nullptr;
  if (!rows.present()) return {};
  output->data = rows.data;
  output->stride = rows.stride[0];
  output->cols = static_cast<int>(rows.extent[1] / planes);
  return make_rows_map(name, rows, planes, kLinesOfSlab, &output->map);
}

Status make_weight_map(const char* name, const TensorView& weight, int planes, GateLayout layout,
                       int box_planes, int box_rows, CUtensorMap* map) {
  const std::int64_t rows = weight.extent[1] / planes;
  const std::int64_t stride = weight.stride[1];
  const bool interleaved = planes == 2 && layout == GateLayout::kInterleaved;
  const MapShape shape{{weight.extent[2], rows, planes, weight.extent[0]},
                       {interleaved ? 2 * stride : stride, interleaved ? stride : rows * stride,
                        weight.extent[0] > 1 ? weight.stride[0] : weight.extent[1] * stride},
                       {static_cast<int>(128 / dtype_bytes(weight.dtype)), box_rows, box_planes, 1}};
  return make_map(name, weight.data, weight.dtype, shape, map);
}

const char* refuse_device(int device_index) {
  Context ctx;
  ctx.device_index = device_index;
  const Device* device = nullptr;
  if (!find_device(ctx, &device).ok()) return "no such CUDA device";
  return device->major == 9 && device->minor == 0 ? nullptr : "the device is not of compute capability 9.0";
}

const char* refuse_dtype(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 ? nullptr : "dtype is neither bf16 nor f16";
}

const char* refuse_layout(const TensorView& view, const char* reason) {
  if (!view.present()) return nullptr;
  const std::int64_t bytes = dtype_bytes(view.dtype);
  bool fits = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.stride[view.rank - 1] == 1;
  for (int i = 0; i + 1 < view.rank; ++i) {
    if (view.extent[i] > 1) fits = fits && view.stride[i] > 0 && view.stride[i] * bytes % 16 == 0;
  }
  return fits ? nullptr : reason;
}

Status launch(const char* name, KernelPointer kernel, int shared_bytes, Parameters& parameters,
              std::int64_t max_count, const Context& ctx, cudaStream_t, int threads) {
  const Device* device = nullptr;
  MOESTRO_RETURN_IF_ERROR(find_device(ctx, &device));
  const auto* function = reinterpret_cast<const void*>(kernel);
  const auto bytes = static_cast<std::size_t>(shared_bytes);
  MOESTRO_RETURN_IF_ERROR(allow_shared_memory(function, bytes, ctx.device_index));
  parameters.next_tile = nullptr;
  if (ctx.workspace_bytes >= kCounterBytes) {
    const int place = ctx.place_in_layer;
    parameters.next_tile =
        static_cast<int*>(ctx.workspace) + static_cast<std::size_t>(place) * kCounterLineBytes / sizeof(int);
    if (place == 0) {
      const cudaError_t error = cudaMemsetAsync(parameters.next_tile, 0, kCounterLineBytes, stream_of(ctx));
      if (error != cudaSuccess) {
        return Status::error(StatusCode::kDeviceError, "%s: %s", name, cudaGetErrorString(error));
      }
    }
  }
  void* arguments[] = {&parameters};
  const std::int64_t blocks = std::min<std::int64_t>(max_count, device->sm_count);
  LaunchShape shape{blocks, threads, bytes};
  shape.beside_previous = parameters.beside_previous;
  return launch_kernel(name, function, shape, arguments, ctx);
}

const char* refusal(const LayerConfig& config, int device_index) {
  if (const char* reason = refuse_device(device_index)) return reason;
  if (const char* reason = refuse_dtype(config.dtype)) return reason;
  if (config.d_model % 8 != 0) return "d is not a multiple of 8";
  if (config.d_ff % 8 != 0) return "n is not a multiple of 8";
  return nullptr;
}

}  // namespace moestro::cuda::hopper
