#include "cpu/isa.hpp"

#include <cstdlib>
#include <cstring>

namespace moestro::cpu {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("x86-64-v4")) {
    return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
  if (__builtin_cpu_supports("x86-64-v3")) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

}  // namespace

Isa isa() {
  static const Isa chosen = [] {
    const Isa best = best_isa();
    const char* limit = std::getenv("MOESTRO_CPU_ISA");
    for (int i = 0; limit != nullptr && i < static_cast<int>(best); ++i) {
      if (std::strcmp(limit, kNames[i]) == 0) return static_cast<Isa>(i);
    }
    return best;
  }();
  return chosen;
}

const char* isa_name(Isa level) {
  return kNames[static_cast<int>(level)];
}

}  // namespace moestro::cpu
