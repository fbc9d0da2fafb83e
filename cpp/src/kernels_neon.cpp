// Every computation for NEON with products of bytes (dotprod, of ARMv8.2); what it is about the headers, see kernels_avx2.cpp.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "kernels.h"
#include "race.h"
#include "target.h"

HEADRACE_TARGET_BEGIN("arch=armv8.2-a+dotprod")
#define HEADRACE_ISA neon
#include "simd_neon.h"
#include "dot_portable.h"

#include "kernels.inl"
HEADRACE_TARGET_END

namespace headrace {
const Kernels* neon_kernels() {
  static const Kernels table = neon::make_kernels("neon");
  return &table;
}
}  // namespace headrace
#endif
