// Every computation for AVX-512 with VNNI.
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own headers make a register of any content by setting it to itself, and GCC 12 complains of that.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "kernels_common.h"

HEADRACE_TARGET_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#define HEADRACE_ISA avx512
#include "simd_avx512.h"
#include "dot_avx512.h"

#include "kernels.inl"
HEADRACE_TARGET_END

namespace headrace {
const Kernels* avx512_kernels() {
  static const Kernels table = avx512::make_kernels("avx512");
  return &table;
}
}  // namespace headrace
#endif
