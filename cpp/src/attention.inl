// Attention over the paged KV cache.

namespace headrace::HEADRACE_ISA {

inline void fill_attention(Kernels&) {}

}  // namespace headrace::HEADRACE_ISA
