/// wgmma: a warpgroup multiplies 64 x 16 by 16 x kN, both operands in shared memory, f32 accumulators.
///
/// Accumulator 4 i + 2 h + j of a thread is row 16 warp + lane / 4 + 8 h, column 8 i + 2 (lane % 4) + j.
#pragma once

#include <type_traits>

#include "cuda/hopper/arch.cuh"

namespace moestro::cuda::hopper {

/// How a tile of 16-bit elements lies in shared memory; both in the 128-byte swizzle that TMA writes: the
/// 16-byte chunk c of a 128-byte line r is at slot c ^ (r % 8).
enum class Major {
  kK,   ///< line r holds 64 elements along k of row (or column) r of the product
  kMN,  ///< slabs of 64 rows (or columns), each 64 lines of 128 bytes, one line a k
};

/// What wgmma wants to know of a tile: address, distance of 8-line groups, distance of slabs (kLines of k in
/// a slab), swizzle.
template <Major kMajor, int kLines = 64>
__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kGroupBytes = 1024;
  constexpr std::uint64_t kSlabBytes = kMajor == Major::kMN ? kLines * 128 : 16;
  constexpr std::uint64_t kSwizzle128 = 1;
  return kSwizzle128 << 62 | (kGroupBytes >> 4) << 32 | (kSlabBytes >> 4) << 16 | ((address & 0x3ffffU) >> 4);
}

/// Step of a descriptor from one k16 to the next, in its units of 16 bytes.
template <Major kMajor>
constexpr std::uint64_t kDescriptorStepK16 = (kMajor == Major::kK ? 32 : 2048) >> 4;

/// Before the first wgmma of a batch: registers and shared memory are as the code before left them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of the accumulators over this point.
template <int kCount>
__device__ __forceinline__ void pin(float (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// Operand lists: MOESTRO_REGISTERS_<count> names %0 … and MOESTRO_OPERANDS_<count> binds them.
#define MOESTRO_NAMES_0                                                                                     \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%" \
  "28,%29,%30,%31"
#define MOESTRO_NAMES_1                                                                                      \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
  "%58,%59,%60,%61,%62,%63"
#define MOESTRO_NAMES_2                                                                                      \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89," \
  "%90,%91,%92,%93,%94,%95"
#define MOESTRO_NAMES_3                                                                                    \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%" \
  "117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MOESTRO_BIND_8(d, i)                                                                  \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define MOESTRO_BIND_32(d, i) \
  MOESTRO_BIND_8(d, i), MOESTRO_BIND_8(d, i + 8), MOESTRO_BIND_8(d, i + 16), MOESTRO_BIND_8(d, i + 24)
#define MOESTRO_REGISTERS_32 MOESTRO_NAMES_0
#define MOESTRO_REGISTERS_64 MOESTRO_NAMES_0 "," MOESTRO_NAMES_1
#define MOESTRO_REGISTERS_96 MOESTRO_REGISTERS_64 "," MOESTRO_NAMES_2
#define MOESTRO_REGISTERS_128 MOESTRO_REGISTERS_96 "," MOESTRO_NAMES_3
#define MOESTRO_OPERANDS_32(d) MOESTRO_BIND_32(d, 0)
#define MOESTRO_OPERANDS_64(d) MOESTRO_BIND_32(d, 0), MOESTRO_BIND_32(d, 32)
#define MOESTRO_OPERANDS_96(d) MOESTRO_OPERANDS_64(d), MOESTRO_BIND_32(d, 64)
#define MOESTRO_OPERANDS_128(d) MOESTRO_OPERANDS_96(d), MOESTRO_BIND_32(d, 96)

// P0, P1, P2, P3, P4: the operands after the accumulators (two descriptors, accumulate?, two majors).
#define MOESTRO_WGMMA(N, TYPE, COUNT, P0, P1, P2, P3, P4)                                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P2                                            \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                   \
               " {" MOESTRO_REGISTERS_##COUNT "}, " P0 ", " P1 ", p, 1, 1, " P3 ", " P4 ";\n}\n" \
               : MOESTRO_OPERANDS_##COUNT(d)                                                     \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kMajorA == Major::kMN), "n"(kMajorB == Major::kMN))

/// d = a b, or d += a b where `accumulate` is not 0.
template <class Element, int kN, Major kMajorA, Major kMajorB>
__device__ __forceinline__ void wgmma(float (&d)[kN / 2], std::uint64_t a, std::uint64_t b, int accumulate) {
  static_assert(kN == 64 || kN == 128 || kN == 192 || kN == 256);
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    if constexpr (kN == 64) MOESTRO_WGMMA(64, "bf16", 32, "%32", "%33", "%34", "%35", "%36");
    if constexpr (kN == 128) MOESTRO_WGMMA(128, "bf16", 64, "%64", "%65", "%66", "%67", "%68");
    if constexpr (kN == 192) MOESTRO_WGMMA(192, "bf16", 96, "%96", "%97", "%98", "%99", "%100");
    if constexpr (kN == 256) MOESTRO_WGMMA(256, "bf16", 128, "%128", "%129", "%130", "%131", "%132");
  } else {
    if constexpr (kN == 64) MOESTRO_WGMMA(64, "f16", 32, "%32", "%33", "%34", "%35", "%36");
    if constexpr (kN == 128) MOESTRO_WGMMA(128, "f16", 64, "%64", "%65", "%66", "%67", "%68");
    if constexpr (kN == 192) MOESTRO_WGMMA(192, "f16", 96, "%96", "%97", "%98", "%99", "%100");
    if constexpr (kN == 256) MOESTRO_WGMMA(256, "f16", 128, "%128", "%129", "%130", "%131", "%132");
  }
}

#undef MOESTRO_WGMMA

/// f.operator()<N>() with N the columns of a tile of kN, where `columns` is how many the matrix still has: in
/// steps of 64, so that a tile at its edge takes less time. `d` of a narrower tile are the first of the
/// accumulators.
template <int kN, class F>
__device__ __forceinline__ void with_columns(int columns, F&& f) {
  if constexpr (kN == 192) {
    if (columns <= 128) {
      return columns <= 64 ? f.template operator()<64>() : f.template operator()<128>();
    }
  }
  f.template operator()<kN>();
}
/// The accumulators of kN columns, from column `first` on.
template <int kN, int kCount>
__device__ __forceinline__ float (&accumulators_of(float (&d)[kCount], int first = 0))[kN / 2] {
  return *reinterpret_cast<float(*)[kN / 2]>(&d[first / 2]);
}

#undef MOESTRO_OPERANDS_128
#undef MOESTRO_OPERANDS_96
#undef MOESTRO_OPERANDS_64
#undef MOESTRO_OPERANDS_32
#undef MOESTRO_REGISTERS_128
#undef MOESTRO_REGISTERS_96
#undef MOESTRO_REGISTERS_64
#undef MOESTRO_REGISTERS_32
#undef MOESTRO_BIND_32
#undef MOESTRO_BIND_8
#undef MOESTRO_NAMES_3
#undef MOESTRO_NAMES_2
#undef MOESTRO_NAMES_1
#undef MOESTRO_NAMES_0

}  // namespace moestro::cuda::hopper
