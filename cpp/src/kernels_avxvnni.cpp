// Products for AVX2 with VNNI, which client processors have without AVX-512; all other computations are those of AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernels_common.h"

HEADRACE_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#define HEADRACE_ISA avxvnni
#include "simd_avx2.h"
#include "dot_avxvnni.h"

#include "math.inl"

#include "linear.inl"

namespace headrace::avxvnni {
inline Kernels with_products(Kernels table) {
  table.name = "avxvnni";
  fill_linear(table);
  return table;
}
}  // namespace headrace::avxvnni
HEADRACE_TARGET_END

namespace headrace {
const Kernels* avx2_kernels();

const Kernels* avxvnni_kernels() {
  static const Kernels table = avxvnni::with_products(*avx2_kernels());
  return &table;
}
}  // namespace headrace
#endif
