// Products with matrices in the layout of format.h.

namespace headrace::HEADRACE_ISA {

inline void fill_linear(Kernels&) {}

}  // namespace headrace::HEADRACE_ISA
