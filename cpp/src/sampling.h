// From logits to tokens: headrace/engine/sampler.py says what is computed and why; the tokens are the same.
#pragma once

#include <cstdint>
#include <vector>

#include "candidates.h"
#include "kernels.h"

namespace headrace {

// How a row is sampled: RowSampling of sampler.py.
struct RowSampling {
  float scale = 1;
  float min_p = 0;    // 0: no filter
  double top_p = 1;   // 1: no filter
  uint64_t seed = 0;
  int32_t top_k = 0;  // 0: no filter
  int32_t greedy = 0;
};

class Sampler {
 public:
  explicit Sampler(const Kernels& kernels) : kernels_(kernels) {}

  // The token of a row of n logits at a position. ids: of the logits, which are the top_k greatest in their order; null: they are all, and
  // those of the tokens 0 to n - 1. -1: the greatest is not finite. Throws std::bad_alloc.
  int32_t sample(const float* logits, const int32_t* ids, int64_t n, const RowSampling& row, uint64_t position);

 private:
  Candidate find_greatest(const float* logits, int64_t n);
  int64_t keep_nucleus(const float* logits, int64_t n, double top_p);
  int64_t race(int64_t n, bool numbered, uint64_t key);
  int32_t race_all(const float* logits, int64_t n, const Candidate& greatest, float scale, uint64_t key);

  const Kernels& kernels_;
  std::vector<Candidate> best_;
  // Of those that the filters leave.
  std::vector<float> values_, weights_, times_, earliest_, maxima_;
  std::vector<int32_t> ids_;
  std::vector<uint64_t> order_;
};

}  // namespace headrace
