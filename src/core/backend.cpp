/// The backends of this build.
#include "moestro/backend.hpp"

namespace moestro {

namespace reference {
const Backend* reference_backend();
}
namespace cpu {
const Backend* cpu_backend();
}
#if MOESTRO_WITH_CUDA
namespace cuda {
const Backend* cuda_backend();
}
#endif

const Backend* find_backend(BackendId id) {
  switch (id) {
    case BackendId::kReference: return reference::reference_backend();
    case BackendId::kCPU: return cpu::cpu_backend();
    case BackendId::kCUDA:
#if MOESTRO_WITH_CUDA
      return cuda::cuda_backend();
#else
      return nullptr;
#endif
  }
  return nullptr;
}

Status require_backend(BackendId id, const Backend** backend) {
  *backend = find_backend(id);
  if (*backend != nullptr) return {};
  return Status::error(
      StatusCode::kUnsupported,
      "this build of moestro has no CUDA backend; build it with nvcc on PATH (-DMOESTRO_CUDA=ON)");
}

}  // namespace moestro
