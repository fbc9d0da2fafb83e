// The greatest logits of a row, found in any order of its parts.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace headrace {

struct Candidate {
  // Behind all that there are: Python's NO_CANDIDATE.
  float value = -std::numeric_limits<float>::infinity();
  int32_t id = std::numeric_limits<int32_t>::max();
};

// One order of all candidates, so that the best of them do not depend on who found which: NaN, then the greater, then the lower id.
inline bool before(const Candidate& a, const Candidate& b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan != b_nan) return a_nan;
  if (!a_nan && a.value != b.value) return a.value > b.value;
  return a.id < b.id;
}

// Most that are kept in order one by one; more are sorted at one go.
constexpr int64_t kMostCandidates = 128;

// Offers n logits, of the tokens first_id, first_id + 1, ..., to the `count` best so far, which are in order: at first all `Candidate{}`.
void offer(const float* logits, int64_t n, int32_t first_id, Candidate* best, int64_t count);

// Offers what others have found.
void offer(const Candidate* found, int64_t n, Candidate* best, int64_t count);

// The `count` best of a whole row [n] in their order; at most n.
void find_best(const float* logits, int64_t n, int64_t count, std::vector<Candidate>& best);

}  // namespace headrace
