// C functions of sampling.
#include <stdexcept>
#include <string>

#include "api.h"
#include "error.h"
#include "sampling.h"

namespace {

void check(const headrace::RowSampling& row, bool candidates, int64_t width) {
  if (row.greedy) return;
  if (row.top_k < 0 || row.top_k > width) throw std::invalid_argument("top_k is " + std::to_string(row.top_k) + " of " + std::to_string(width) + " logits");
  if (candidates && !row.top_k) throw std::invalid_argument("a row without top_k needs all of its logits");
  if (!(row.top_p >= 0 && row.top_p <= 1)) throw std::invalid_argument("top_p is " + std::to_string(row.top_p) + ", which is not within 0 and 1");
  if (!(row.min_p >= 0 && row.min_p <= 1)) throw std::invalid_argument("min_p is " + std::to_string(row.min_p) + ", which is not within 0 and 1");
  if (!(row.scale > 0)) throw std::invalid_argument("the scale of logits is " + std::to_string(row.scale) + ", which is not above 0");
}

}  // namespace

int32_t headrace_sample(const char* set, const float* logits, const int32_t* ids, int64_t rows, int64_t width, const headrace::RowSampling* samplings,
                        const uint64_t* positions, int32_t* tokens) {
  return headrace::guarded([&] {
    const headrace::Kernels* kernels = set ? headrace::find_kernels(set) : headrace::chosen_kernels();
    if (!kernels) throw std::invalid_argument("this machine does not have the instruction set that was asked for");
    if (rows < 0 || width < 1 || width >= INT32_MAX) throw std::invalid_argument(std::to_string(rows) + " rows of " + std::to_string(width) + " logits");
    for (int64_t i = 0; i < rows; ++i) check(samplings[i], ids, width);
    headrace::Sampler sampler(*kernels);
    for (int64_t i = 0; i < rows; ++i)
      tokens[i] = sampler.sample(logits + i * width, ids ? ids + i * width : nullptr, width, samplings[i], positions[i]);
    return 1;
  });
}
