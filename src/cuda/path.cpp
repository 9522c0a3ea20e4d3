/// See path.hpp.
#include "cuda/path.hpp"

#include <cstdlib>
#include <cstring>

namespace moestro::cuda {

Status resolve_path(const Context& ctx, KernelPath* path) {
  *path = ctx.path;
  if (ctx.path != KernelPath::kAuto) return {};
  static const char* const value = std::getenv("MOESTRO_PATH");
  if (value == nullptr || *value == '\0' || std::strcmp(value, "auto") == 0) return {};
  if (std::strcmp(value, "portable") == 0) {
    *path = KernelPath::kPortable;
  } else if (std::strcmp(value, "hopper") == 0) {
    *path = KernelPath::kHopper;
  } else {
    return Status::error(StatusCode::kInvalidArgument,
                         "MOESTRO_PATH is \"%.60s\", expected auto, portable or hopper", value);
  }
  return {};
}

Status choose_path(const char* stage, const Context& ctx, const char* refusal, bool* use_hopper) {
  KernelPath path = KernelPath::kAuto;
  MOESTRO_RETURN_IF_ERROR(resolve_path(ctx, &path));
  if (path == KernelPath::kHopper && refusal != nullptr) {
    return Status::error(StatusCode::kUnsupported, "%s: the hopper path was asked for, but %s", stage,
                         refusal);
  }
  *use_hopper = path != KernelPath::kPortable && refusal == nullptr;
  return {};
}

}  // namespace moestro::cuda
