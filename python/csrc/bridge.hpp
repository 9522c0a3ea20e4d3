/// From torch's tensors to moestro's views, from the current device and stream to a Context, and from a
/// Status to an exception. Generic over the device: the same code compiles against any torch build.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>

#include "moestro/config.hpp"
#include "moestro/context.hpp"
#include "moestro/status.hpp"
#include "moestro/tensor.hpp"

namespace moestro::bridge {

/// ValueError, NotImplementedError or RuntimeError in Python.
inline void check(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk: return;
    case StatusCode::kInvalidArgument: TORCH_CHECK_VALUE(false, status.message());
    case StatusCode::kUnsupported: TORCH_CHECK_NOT_IMPLEMENTED(false, status.message());
    case StatusCode::kDeviceError: break;
  }
  TORCH_CHECK(false, status.message());
}

/// Backward of a backward operator: first-order gradients come out, going back through them does not.
[[noreturn]] inline void no_second_derivative(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "moestro.", op,
                              " has no second derivative: its gradients cannot be differentiated again "
                              "(create_graph=True)");
}

inline std::optional<DType> dtype_from(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kF32;
    case at::kDouble: return DType::kF64;
    case at::kBFloat16: return DType::kBF16;
    case at::kHalf: return DType::kF16;
    case at::kInt: return DType::kI32;
    case at::kLong: return DType::kI64;
    default: return std::nullopt;
  }
}

inline at::ScalarType scalar_type_from(DType type) {
  switch (type) {
    case DType::kF32: return at::kFloat;
    case DType::kF64: return at::kDouble;
    case DType::kBF16: return at::kBFloat16;
    case DType::kF16: return at::kHalf;
    case DType::kI32: return at::kInt;
    case DType::kI64: break;
  }
  return at::kLong;
}

/// The tensor's memory as a view. An axis of one element takes unit stride: torch leaves it arbitrary.
inline TensorView view(const at::Tensor& tensor, const char* op, const char* name) {
  const std::optional<DType> dtype = dtype_from(tensor.scalar_type());
  TORCH_CHECK_VALUE(dtype, op, ": ", name, " is ", tensor.scalar_type(),
                    ", expected float32, float64, bfloat16, float16, int32 or int64");
  TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.dim() <= kMaxRank, op, ": ", name, " has ", tensor.dim(),
                    " axes, expected 1 to ", kMaxRank);
  TensorView result;
  result.data = tensor.data_ptr();
  result.dtype = *dtype;
  result.rank = static_cast<int>(tensor.dim());
  for (int i = 0; i < result.rank; ++i) {
    result.extent[i] = tensor.size(i);
    result.stride[i] = tensor.size(i) == 1 ? 1 : tensor.stride(i);
  }
  return result;
}

inline TensorView view(const std::optional<at::Tensor>& tensor, const char* op, const char* name) {
  return tensor && tensor->defined() ? view(*tensor, op, name) : TensorView{};
}

inline void check_device(const at::Tensor& tensor, const at::Tensor& x, const char* op, const char* name,
                         const char* x_name = "x") {
  TORCH_CHECK_VALUE(tensor.device() == x.device(), op, ": ", name, " is on ", tensor.device(), ", expected ",
                    x.device(), " (the device of ", x_name, ")");
}

inline void check_rank(const at::Tensor& tensor, std::int64_t rank, const char* op, const char* name,
                       const char* shape) {
  TORCH_CHECK_VALUE(tensor.dim() == rank, op, ": ", name, " has shape ", tensor.sizes(), ", expected ",
                    shape);
}

/// i32 and i64 as they are, other integers as i32; contiguous.
inline at::Tensor integer_tensor(const at::Tensor& tensor, const char* op, const char* name) {
  const at::ScalarType type = tensor.scalar_type();
  TORCH_CHECK_VALUE(at::isIntegralType(type, /*includeBool=*/false), op, ": ", name, " is ", type,
                    ", expected an integer type");
  const at::Tensor converted = type == at::kInt || type == at::kLong ? tensor : tensor.to(at::kInt);
  return converted.contiguous();
}

inline bool has_unit_inner_stride(const at::Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1;
}

/// The tensor itself, or a copy where neighbours of the last axis are not neighbours in memory (a
/// gradient that was expanded from a scalar, say). Rows may have any stride.
inline at::Tensor with_unit_inner_stride(const at::Tensor& tensor) {
  return has_unit_inner_stride(tensor) ? tensor : tensor.contiguous();
}

template <typename Enum>
Enum parse(std::string_view text, const char* op, const char* argument) {
  char name[32] = {};
  Enum value{};
  const bool fits = text.size() < sizeof name;
  if (fits) std::memcpy(name, text.data(), text.size());
  TORCH_CHECK_VALUE(fits && parse_name(name, &value), op, ": ", argument, " is '", text,
                    "', which is none of the names that moestro knows");
  return value;
}

/// CPU tensors run on the CPU backend, or on the f64 reference where MOESTRO_BACKEND=reference asks.
inline BackendId host_backend() {
  static const BackendId id = [] {
    const char* name = std::getenv("MOESTRO_BACKEND");
    return name != nullptr && std::strcmp(name, "reference") == 0 ? BackendId::kReference : BackendId::kCPU;
  }();
  return id;
}

/// The current CUDA stream of a device, as the runtime's handle. Asked through torch's C interface, which
/// is the same from release to release and is there only where torch's CUDA library is loaded: so this
/// file compiles and loads without CUDA.
inline void* current_cuda_stream(at::Device device) {
  using Function = std::int32_t (*)(std::int32_t device_index, void** stream);
  static const auto function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<Function>(symbol);
  }();
  void* stream = nullptr;
  TORCH_CHECK(function != nullptr && function(device.index(), &stream) == 0,
              "moestro cannot learn the current CUDA stream of ", device, " from this torch");
  return stream;
}

inline Context context_for(at::Device device) {
  Context context;
  if (device.is_cpu()) {
    context.backend = host_backend();
    context.num_threads = at::get_num_threads();
  } else {
    context.backend = BackendId::kCUDA;
    context.device_index = device.index();
    context.stream = current_cuda_stream(device);
  }
  return context;
}

constexpr std::size_t kAlignment = 256;

inline bool is_aligned(const at::Tensor& bytes) {
  return reinterpret_cast<std::uintptr_t>(bytes.data_ptr()) % kAlignment == 0;
}

/// Asks for huge pages under a large tensor of host memory that is about to be written. torch gives such
/// memory back to the system when it is freed, so each call would otherwise fault in every 4 KB of it
/// again: a fifth of a layer's time at 250 MB. The contents, and memory around it, are not touched.
inline void prefer_huge_pages(const at::Tensor& tensor) {
#ifdef MADV_HUGEPAGE
  constexpr std::uintptr_t kHugePage = 2U << 20;
  if (!tensor.is_cpu() || tensor.nbytes() < 2 * kHugePage) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = (begin + tensor.nbytes()) / kHugePage * kHugePage;
  // A kernel without huge pages refuses, and nothing is lost.
  if (first < last) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)tensor;
#endif
}

/// A byte tensor of torch's caching allocator, on the current stream, aligned as the core asks.
inline at::Tensor allocate_bytes(std::size_t bytes, at::Device device) {
  const auto size = static_cast<std::int64_t>(bytes);
  const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).device(device);
  if (!device.is_cpu()) return at::empty({size}, options);
  // torch's CPU allocator aligns to 64 bytes only.
  const at::Tensor storage = at::empty({size + static_cast<std::int64_t>(kAlignment)}, options);
  prefer_huge_pages(storage);
  const auto address = reinterpret_cast<std::uintptr_t>(storage.data_ptr());
  void* aligned = reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
  return at::from_blob(
      aligned, {size}, [storage](void*) {}, options);
}

/// Scratch for one call. Its memory may be reused as soon as this goes out of scope: what is enqueued
/// later on the same stream runs later.
class Workspace {
 public:
  Workspace(std::size_t bytes, at::Device device, Context* context) {
    if (bytes == 0) return;
    storage_ = allocate_bytes(bytes, device);
    context->workspace = storage_.data_ptr();
    context->workspace_bytes = bytes;
  }

 private:
  at::Tensor storage_;
};

}  // namespace moestro::bridge
