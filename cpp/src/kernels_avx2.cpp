// Every computation for AVX2 with FMA and F16C.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels_common.h"

HEADRACE_TARGET_BEGIN("avx2,fma,f16c")
#define HEADRACE_ISA avx2
#include "simd_avx2.h"
#include "dot_avx2.h"

#include "kernels.inl"
HEADRACE_TARGET_END

namespace headrace {
const Kernels* avx2_kernels() {
  static const Kernels table = avx2::make_kernels("avx2");
  return &table;
}
}  // namespace headrace
#endif
