/// Which family of kernels a call takes.
///
/// Each stage with a matrix product asks hopper::refusal (hopper/hopper.hpp): null means that Hopper's
/// kernels take the call, else it is the reason why not, in a few words. kAuto then takes Hopper's kernels or
/// the portable ones; a forced path that does not fit is an error. The environment variable MOESTRO_PATH,
/// read once, replaces kAuto.
#pragma once

#include "cuda/device.hpp"

namespace moestro::cuda {

/// kAuto replaced by MOESTRO_PATH where that is set; kInvalidArgument for a value that it cannot have.
Status resolve_path(const Context& ctx, KernelPath* path);

/// *use_hopper says whether the call goes to Hopper's kernels.
Status choose_path(const char* stage, const Context& ctx, const char* refusal, bool* use_hopper);

}  // namespace moestro::cuda
