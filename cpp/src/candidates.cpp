#include "candidates.h"

#include <algorithm>

namespace headrace {

namespace {

constexpr int64_t kStride = 16;

void insert(const Candidate& candidate, Candidate* best, int64_t count) {
  if (!before(candidate, best[count - 1])) return;
  int64_t place = count - 1;
  for (; place > 0 && before(candidate, best[place - 1]); --place) best[place] = best[place - 1];
  best[place] = candidate;
}

}  // namespace

void offer(const float* logits, int64_t n, int32_t first_id, Candidate* best, int64_t count) {
  // Few are as good as the last of the best: the others are passed over by the stride. What is equal to it counts, for its id may be lower,
  // and so does NaN.
  int64_t i = 0;
  for (; i + kStride <= n; i += kStride) {
    const float last = best[count - 1].value;
    int32_t some = 0;
    for (int64_t j = 0; j < kStride; ++j) some |= !(logits[i + j] < last);
    if (!some) continue;
    for (int64_t j = i; j < i + kStride; ++j) insert({logits[j], first_id + int32_t(j)}, best, count);
  }
  for (; i < n; ++i) insert({logits[i], first_id + int32_t(i)}, best, count);
}

void offer(const Candidate* found, int64_t n, Candidate* best, int64_t count) {
  for (int64_t i = 0; i < n; ++i) insert(found[i], best, count);
}

void find_best(const float* logits, int64_t n, int64_t count, std::vector<Candidate>& best) {
  if (count <= kMostCandidates) {
    best.assign(count, Candidate{});
    offer(logits, n, 0, best.data(), count);
    return;
  }
  best.resize(n);
  for (int64_t i = 0; i < n; ++i) best[i] = {logits[i], int32_t(i)};
  std::nth_element(best.begin(), best.begin() + (count - 1), best.end(), before);
  best.resize(count);
  std::sort(best.begin(), best.end(), before);
}

}  // namespace headrace
