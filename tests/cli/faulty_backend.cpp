/// Stands in for src/core/backend.cpp: the CPU backend, with the fault that MOESTRO_FAULT names in combine.
#include <cmath>
#include <cstdlib>
#include <string>

#include "moestro/backend.hpp"

namespace moestro {

namespace reference {
const Backend* reference_backend();
}
namespace cpu {
const Backend* cpu_backend();
}

namespace {

Status faulty_combine(const CombineArgs& args, const Context& ctx) {
  static int calls = 0;
  const Status status = cpu::cpu_backend()->combine_forward(args, ctx);
  const std::string fault = std::getenv("MOESTRO_FAULT");
  float* y = static_cast<float*>(args.tokens.data);
  if (fault == "value") y[0] += 0.01F;
  if (fault == "nan") y[0] = std::nanf("");
  if (fault == "overrun") y[args.tokens.numel()] = 0;
  if (fault == "input") static_cast<float*>(args.weights.data)[0] = 0.5F;
  if (fault == "later" && ++calls == 2) y[0] *= 1.0F + 0x1p-23F;
  return status;
}

const Backend* faulty_backend() {
  static const Backend backend = [] {
    Backend copy = *cpu::cpu_backend();
    copy.combine_forward = faulty_combine;
    return copy;
  }();
  return &backend;
}

}  // namespace

const Backend* find_backend(BackendId id) {
  if (id == BackendId::kReference) return reference::reference_backend();
  return id == BackendId::kCPU ? faulty_backend() : nullptr;
}

Status require_backend(BackendId id, const Backend** backend) {
  *backend = find_backend(id);
  return *backend != nullptr ? Status() : Status::error(StatusCode::kUnsupported, "no such backend");
}

}  // namespace moestro
