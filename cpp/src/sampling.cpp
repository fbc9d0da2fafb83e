#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "half.h"
#include "race.h"

namespace headrace {

namespace {

// Tokens that arrive at a time: of as many the earliest is kept.
constexpr int64_t kHeat = 1024;

double sum_of(const float* x, int64_t n) {
  // Four sums, so that one addition need not wait for the other.
  double sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int64_t j = 0; j < 4; ++j) sums[j] += x[i + j];
  for (; i < n; ++i) sums[0] += x[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// A number that is the greater, the less x is; the same of equal ones. x is not NaN.
uint32_t descending(float x) {
  const uint32_t bits = float_to_bits(x + 0.0f);  // -0 is 0
  return bits >> 31 ? bits : ~bits & 0x7FFFFFFFu;
}

double exact_time(uint32_t number) { return -std::log1p(-(double(number) + 0.5) / 4294967296.0); }

}  // namespace

int32_t Sampler::sample(const float* logits, const int32_t* ids, int64_t n, const RowSampling& row, uint64_t position) {
  Candidate greatest;
  if (ids)
    greatest = {logits[0], ids[0]};
  else
    greatest = find_greatest(logits, n);
  if (!std::isfinite(greatest.value)) return -1;
  if (row.greedy) return greatest.id;

  bool numbered = ids || row.top_k;
  if (ids) {
    n = row.top_k;
    ids_.assign(ids, ids + n);
  } else if (row.top_k) {
    find_best(logits, n, row.top_k, best_);
    n = row.top_k;
    ids_.resize(n);
    values_.resize(n);
    for (int64_t i = 0; i < n; ++i) ids_[i] = best_[i].id, values_[i] = best_[i].value;
    logits = values_.data();
  }
  if (int64_t(weights_.size()) < n) weights_.resize(n), times_.resize(n);
  if (!numbered && row.top_p >= 1 && row.min_p == 0) return race_all(logits, n, greatest, row.scale, race_key(row.seed, position));
  kernels_.weigh(logits, greatest.value, row.scale, n, weights_.data());
  if (row.top_p < 1) {
    const double mass = sum_of(weights_.data(), n), wanted = row.top_p * mass;
    if (!numbered) n = keep_nucleus(logits, n, row.top_p), numbered = true;
    double sum = 0;
    for (int64_t i = 0; i < n; ++i)
      if ((sum += weights_[i]) >= wanted) n = i + 1;
  }
  if (row.min_p > 0) {
    ids_.resize(n);
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i)
      if (weights_[i] >= row.min_p) weights_[kept] = weights_[i], ids_[kept++] = numbered ? ids_[i] : int32_t(i);
    n = kept;
    numbered = true;
  }
  const int64_t winner = race(n, numbered, race_key(row.seed, position));
  return numbered ? ids_[winner] : int32_t(winner);
}

// The greatest of each heat, and of all.
Candidate Sampler::find_greatest(const float* logits, int64_t n) {
  Candidate greatest;
  maxima_.clear();
  for (int64_t i = 0; i < n; i += kHeat) {
    const int64_t index = i + kernels_.argmax(logits + i, std::min(kHeat, n - i));
    const Candidate best{logits[index], int32_t(index)};
    maxima_.push_back(best.value);
    if (before(best, greatest)) greatest = best;
  }
  return greatest;
}

// The first to arrive of all tokens, without the weights of most of them: a heat is passed over whose earliest number is too late for its
// greatest weight. See _first.
int32_t Sampler::race_all(const float* logits, int64_t n, const Candidate& greatest, float scale, uint64_t key) {
  const uint32_t first_key = uint32_t(key), second_key = uint32_t(key >> 32);
  const int64_t heats = int64_t(maxima_.size()), first = greatest.id / kHeat;
  kernels_.weigh(maxima_.data(), greatest.value, scale, heats, maxima_.data());
  int32_t winner = greatest.id;
  double time = exact_time(race_number(uint32_t(winner), first_key, second_key));  // its weight is 1
  const auto run = [&](int64_t heat) {
    const int64_t begin = heat * kHeat, count = std::min(kHeat, n - begin);
    kernels_.weigh(logits + begin, greatest.value, scale, count, weights_.data());
    if (kernels_.arrive(weights_.data(), nullptr, int32_t(begin), count, first_key, second_key, times_.data()) > 1.00001 * time) return;
    for (int64_t i = 0; i < count; ++i) {
      if (times_[i] > 1.00001 * time) continue;
      const int32_t id = int32_t(begin + i);
      const double at = exact_time(race_number(uint32_t(id), first_key, second_key)) / weights_[i];
      if (at < time || (at == time && id < winner)) time = at, winner = id;
    }
  };
  run(first);
  for (int64_t heat = 0; heat < heats; ++heat) {
    if (heat == first) continue;
    // No weight exceeds that of the greatest logit by more than rounding, for which there is the margin.
    const double latest = 1.00001 * time * maxima_[heat] * 4294967296.0;
    if (latest < 0.5) continue;
    const int64_t begin = heat * kHeat;
    if (kernels_.least_number(int32_t(begin), std::min(kHeat, n - begin), first_key, second_key) + 0.5 <= latest) run(heat);
  }
  return winner;
}

// Leaves the most likely tokens, in their order, with all of the nucleus among them; see _nucleus.
int64_t Sampler::keep_nucleus(const float* logits, int64_t n, double top_p) {
  const double mass = sum_of(weights_.data(), n), least = (1 - top_p) * mass / double(n);
  for (const double factor : {1024.0, 32.0, 1.0}) {
    order_.clear();
    double sum = 0;
    for (int64_t i = 0; i < n; ++i)
      if (weights_[i] >= float(factor * least)) order_.push_back(uint64_t(descending(logits[i])) << 32 | uint32_t(i)), sum += weights_[i];
    if (sum >= top_p * mass) break;
  }
  std::sort(order_.begin(), order_.end());
  n = int64_t(order_.size());
  ids_.resize(n);
  for (int64_t i = 0; i < n; ++i) ids_[i] = int32_t(uint32_t(order_[i])), times_[i] = weights_[ids_[i]];
  std::copy(times_.begin(), times_.begin() + n, weights_.begin());
  return n;
}

// Index of the first to arrive; see _first.
int64_t Sampler::race(int64_t n, bool numbered, uint64_t key) {
  const uint32_t first_key = uint32_t(key), second_key = uint32_t(key >> 32);
  const auto exact = [&](int64_t index) {
    return exact_time(race_number(uint32_t(numbered ? ids_[index] : int32_t(index)), first_key, second_key)) / weights_[index];
  };
  earliest_.clear();
  for (int64_t i = 0; i < n; i += kHeat)
    earliest_.push_back(kernels_.arrive(weights_.data() + i, numbered ? ids_.data() + i : nullptr, int32_t(i), std::min(kHeat, n - i), first_key,
                                        second_key, times_.data() + i));
  // Calls visit(index) for each that is no later than `bound`, ascending.
  const auto no_later = [&](double bound, auto&& visit) {
    for (int64_t heat = 0; heat < int64_t(earliest_.size()); ++heat) {
      if (earliest_[heat] > bound) continue;
      for (int64_t i = heat * kHeat; i < std::min((heat + 1) * kHeat, n); ++i)
        if (times_[i] <= bound) visit(i);
    }
  };
  double first = std::numeric_limits<double>::infinity();
  no_later(*std::min_element(earliest_.begin(), earliest_.end()), [&](int64_t index) { first = std::min(first, exact(index)); });
  int64_t winner = -1;
  double time = std::numeric_limits<double>::infinity();
  no_later(1.00001 * first, [&](int64_t index) {
    if (const double at = exact(index); winner < 0 || at < time) time = at, winner = index;
  });
  return winner;
}

}  // namespace headrace
