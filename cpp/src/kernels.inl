// The table of one instruction set: included behind its vectors, in a file that is compiled for it.
#include "math.inl"

#include "elementwise.inl"
#include "attention.inl"
#include "linear.inl"
#include "sampling.inl"
#include "weights.inl"

namespace headrace::HEADRACE_ISA {

// Not constexpr: a table is made from functions of its own file.
inline Kernels make_kernels(const char* name) {
  Kernels table{};
  table.name = name;
  fill_elementwise(table);
  fill_attention(table);
  fill_linear(table);
  fill_sampling(table);
  fill_weights(table);
  return table;
}

}  // namespace headrace::HEADRACE_ISA
