// Every computation in plain C++.
#include "kernels_common.h"

#define HEADRACE_ISA portable
#include "simd_portable.h"
#include "dot_portable.h"

#include "kernels.inl"

namespace headrace {
const Kernels* portable_kernels() {
  static const Kernels table = portable::make_kernels("portable");
  return &table;
}
}  // namespace headrace
