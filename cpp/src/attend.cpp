// Attention of a step, dealt out to threads: some tokens of a sequence and a KV head, or, where these are fewer than would keep all threads
// busy, their segments.
#include <algorithm>

#include "decoder.h"

namespace headrace {

namespace {

// As many pieces for each thread are enough to deal out.
constexpr int64_t kEnough = 4;
// More tokens in a piece come with other pieces, and what their segments give would take much memory.
constexpr int64_t kFewTokens = 4;

}  // namespace

Attention Decoder::task_of(const Layer& layer, const Piece& piece) const {
  const int64_t dim = spec_.head_dim;
  const int64_t first = std::max<int64_t>(piece.kv_head * spec_.group - spec_.first_slot, 0);
  const int64_t last = std::min((piece.kv_head + 1) * spec_.group - spec_.first_slot, spec_.query_heads);
  Attention task;
  task.cache = &layer.cache;
  task.table = piece.table;
  task.kv_head = piece.kv_head;
  task.start = piece.start;
  task.tokens = piece.tokens;
  task.heads = last - first;
  task.queries = heads_ + piece.row * heads_width_ + first * dim;
  task.query_stride = heads_width_;
  task.out_stride = padded(spec_.query_heads * dim, kBlock);
  task.out = wide_.floats + piece.row * task.out_stride + first * dim;
  task.scale = layer.scale;
  task.softcap = layer.softcap;
  task.window = layer.window;
  return task;
}

void Decoder::deal_attention(const Layer& layer) {
  const int64_t count = int64_t(pieces_.size()), threads = pool_.threads();
  const bool few = threads > 1 && count < kEnough * threads;
  if (few && !segments_left_) segments_left_ = std::make_unique<std::atomic<int64_t>[]>(size_t(kEnough * threads));
  parts_.clear();
  int64_t floats = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Attention task = task_of(layer, pieces_[i]);
    const int64_t first = task.first_segment(), segments = task.last_segment() - first;
    if (!few || task.tokens > kFewTokens || segments == 1) {
      parts_.push_back({i, kAllSegments, 0});
      continue;
    }
    for (int64_t segment = first; segment < first + segments; ++segment) parts_.push_back({i, segment, floats});
    segments_left_[i].store(segments, std::memory_order_relaxed);
    floats += segments * kernels_.partial_floats(task);
  }
  if (int64_t(partials_.size()) < floats) partials_.resize(size_t(floats));
}

void Decoder::attend(const Layer& layer) {
  const int64_t width = spec_.query_heads * spec_.head_dim;
  const bool quants = layer.output.reads_quants();
  // Whether the heads of each piece are whole blocks, which it can quantise itself.
  const bool whole = spec_.head_dim % kBlock == 0;
  deal_attention(layer);
  pool_.run(int64_t(parts_.size()), [&](int64_t index, int64_t slot) {
    const Part& part = parts_[index];
    const Piece& piece = pieces_[part.piece];
    const Attention task = task_of(layer, piece);
    float* scratch = slots_ + slot * slot_floats_;
    if (part.segment == kAllSegments) {
      kernels_.attend(task, scratch);
    } else {
      float* partials = partials_.data() + part.partials;
      const int64_t place = (part.segment - task.first_segment()) * kernels_.partial_floats(task);
      kernels_.attend_segment(task, part.segment, partials + place, scratch);
      // Whoever is the last joins them: it sees what the others have written, for each has released it and the last acquires.
      if (segments_left_[part.piece].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      kernels_.join_segments(task, partials);
    }
    if (quants && whole)
      for (int64_t i = 0; i < piece.tokens; ++i) {
        const float* row = task.out + i * task.out_stride;
        const int64_t begin = row - (wide_.floats + (piece.row + i) * task.out_stride);
        quantize(wide_, width, piece.row + i, row, begin, begin + task.heads * spec_.head_dim);
      }
  });
  if (quants && !whole)
    pool_.run(tokens_, [&](int64_t row, int64_t) { quantize(wide_, width, row, wide_.floats + row * padded(width, kBlock), 0, width); });
}

}  // namespace headrace
