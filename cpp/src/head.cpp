// The end of a decoder: from rows of the residual stream to logits, or to the greatest of them alone.
#include <algorithm>
#include <cstring>

#include "decoder.h"
#include "tiles.h"

namespace headrace {

void Decoder::head(const Plan& plan, float* logits, Candidate* best) {
  const int64_t rows = plan.num_samples, width = spec_.head.rows;
  // Samples ascend, so no row is overwritten before it is read.
  for (int64_t i = 0; i < rows; ++i)
    if (i != plan.samples[i]) std::memcpy(x_ + i * spec_.hidden, x_ + plan.samples[i] * spec_.hidden, size_t(spec_.hidden) * sizeof(float));
  normalise(x_, rows, spec_.final_norm, head_);
  if (plan.candidates) return choose(plan, logits, best);
  multiply(head_, narrow_, rows, logits, width, false);
  if (spec_.final_softcap != 0) pool_.run(rows, [&](int64_t row, int64_t) { kernels_.softcap(logits + row * width, spec_.final_softcap, width); });
}

// A task's part of the logits is looked through where it was made; only those of rows that want all of them go to memory.
void Decoder::choose(const Plan& plan, float* logits, Candidate* best) {
  const int64_t rows = plan.num_samples, most = *std::max_element(plan.candidates, plan.candidates + rows);
  // Of each row its place among those of its kind.
  places_.resize(rows);
  int64_t whole = 0, chosen = 0;
  for (int64_t row = 0; row < rows; ++row) places_[row] = plan.candidates[row] ? chosen++ : whole++;
  // The best that each thread has seen: in what order it sees them does not matter (candidates.h).
  found_.assign(pool_.threads() * chosen * most, Candidate{});
  const Rows x = rows_of(narrow_, spec_.hidden, rows);
  const Dealt dealt(rows, spec_.head.panels(), pool_.threads(), 1);
  pool_.run(dealt.count(), [&](int64_t index, int64_t slot) {
    const int64_t begin = dealt.first_panel(index), end = dealt.last_panel(index), stride = (end - begin) * kPanel;
    const int64_t first = begin * kPanel, count = std::min(end * kPanel, spec_.head.rows) - first;
    float* part = slots_ + slot * slot_floats_;
    kernels_.multiply(slice(spec_.head, begin, end), x.slice(dealt.first_row(index), dealt.last_row(index)), 0, end - begin, nullptr, part, stride, false);
    for (int64_t row = dealt.first_row(index); row < dealt.last_row(index); ++row, part += stride) {
      if (spec_.final_softcap != 0) kernels_.softcap(part, spec_.final_softcap, count);
      if (plan.candidates[row])
        offer(part, count, int32_t(spec_.first_token + first), &found_[(slot * chosen + places_[row]) * most], plan.candidates[row]);
      else
        std::memcpy(logits + places_[row] * spec_.head.rows + first, part, size_t(count) * sizeof(float));
    }
  });
  std::copy(found_.begin(), found_.begin() + chosen * most, best);
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t slot = 1; plan.candidates[row] && slot < pool_.threads(); ++slot)
      offer(&found_[(slot * chosen + places_[row]) * most], plan.candidates[row], best + places_[row] * most, plan.candidates[row]);
}

}  // namespace headrace
