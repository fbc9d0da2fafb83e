// Every computation for NEON with products of bytes (dotprod, of ARMv8.2).
#if defined(__aarch64__)
#include <arm_neon.h>

#include "kernels_common.h"

HEADRACE_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#define HEADRACE_ISA neon
#include "simd_neon.h"
#include "dot_neon.h"

#include "kernels.inl"
HEADRACE_TARGET_END

namespace headrace {
const Kernels* neon_kernels() {
  static const Kernels table = neon::make_kernels("neon");
  return &table;
}
}  // namespace headrace
#endif
