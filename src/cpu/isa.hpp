/// Instruction sets: one source, compiled for several x86-64 levels and chosen at run time.
#pragma once

#include <cstdint>

namespace moestro::cpu {

enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

/// The best level of this processor. MOESTRO_CPU_ISA=baseline|avx2|avx512|avx512_bf16 lowers it.
Isa isa();

const char* isa_name(Isa level);

#if defined(__x86_64__)
// flatten inlines the body and all it calls, so the loops in it are compiled for this function's target.
template <class Body>
[[gnu::target("arch=x86-64-v4"), gnu::flatten]] void run_avx512(Body&& body) {
  body();
}
template <class Body>
[[gnu::target("arch=x86-64-v3"), gnu::flatten]] void run_avx2(Body&& body) {
  body();
}
#endif

/// Runs body() compiled for the processor. The body must be a plain loop over arrays.
template <class Body>
void vectorized(Body&& body) {
#if defined(__x86_64__)
  const Isa level = isa();
  if (level >= Isa::kAvx512) return run_avx512(body);
  if (level == Isa::kAvx2) return run_avx2(body);
#endif
  body();
}

}  // namespace moestro::cpu
