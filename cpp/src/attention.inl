// Attention over the paged KV cache.
//
// A query sees the positions [low, high) of its sequence. They are dealt in segments of kSegment by their absolute number, so that what is
// computed does not depend on where a chunk, a window or a block begins. In each segment:
//   score   acc = 0; for each number d of the head, ascending: acc = fma(query d, key d, acc); times the key's scale (int8); times `scale`;
//           capped
//   weight  e^(score - greatest of the segment)
//   sum     lane p % kLanes of positions p, ascending; lanes by halves
//   value   acc = 0; for each position, ascending: acc = fma(weight (times the value's scale, int8), value d, acc)
// What the segments give is joined in their order: with the greatest score so far, before and after,
//   value = fma(value, e^(before - after), acc * e^(segment's - after)), the sum alike, and at last value / sum.
// So scores take little room however long a sequence is, and threads may share the segments of one.
//
// Queries go in groups of up to kGroup, (token, head) by (token, head), that share what is read of the cache, and converted: processors do
// that beside sums and products (converting once for several groups was slower).

namespace headrace::HEADRACE_ISA {

constexpr int64_t kGroup = 6;
// Floats between the scores of two queries: room for the vectors that begin before the segment and end behind it; an odd number of cache
// lines, so that those of a group do not share a set.
constexpr int64_t kScores = 35 * kLanes;
static_assert(kScores >= kSegment + 2 * kLanes);

inline F32 load_number(const uint16_t* p) { return load_f16(p); }
inline F32 load_number(const int8_t* p) { return load_i8(p); }

// Vectors of keys, or of numbers of a value, that so many queries go over at a time. A sum must wait for the one before, so there are to be
// many under way, up to 12, as long as there are registers for them, these vectors, and a query's number.
constexpr int tiles_of(int queries) {
  int tiles = 4;
  while (tiles > 1 && (queries * tiles > 12 || queries * tiles + tiles + 1 > kRegisters)) tiles /= 2;
  return tiles;
}

// Scores, without `scale`, of queries and kTiles vectors of keys; number d of a key is at keys + d * stride.
template <int kQueries, int kTiles, class Number>
inline void score_tiles(const float* const* queries, int64_t head_dim, const Number* keys, int64_t stride, const float* key_scales,
                        float* out) {
  F32 acc[kQueries][kTiles];
  for (int q = 0; q < kQueries; ++q)
    for (int t = 0; t < kTiles; ++t) acc[q][t] = broadcast(0);
  for (int64_t d = 0; d < head_dim; ++d, keys += stride) {
    F32 key[kTiles];
    for (int t = 0; t < kTiles; ++t) key[t] = load_number(keys + t * kLanes);
    for (int q = 0; q < kQueries; ++q) {
      const F32 x = broadcast(queries[q][d]);
      for (int t = 0; t < kTiles; ++t) acc[q][t] = fma(x, key[t], acc[q][t]);
    }
  }
  for (int q = 0; q < kQueries; ++q)
    for (int t = 0; t < kTiles; ++t)
      store(out + q * kScores + t * kLanes, key_scales ? mul(acc[q][t], load(key_scales + t * kLanes)) : acc[q][t]);
}

template <int kQueries, int kTiles, class Number>
inline void score(const float* const* queries, int64_t head_dim, const Number* keys, int64_t stride, const float* key_scales, int64_t count,
                  float* out) {
  int64_t key = 0;
  for (; key + (kTiles - 1) * kLanes < count; key += kTiles * kLanes)
    score_tiles<kQueries, kTiles>(queries, head_dim, keys + key, stride, key_scales ? key_scales + key : nullptr, out + key);
  if constexpr (kTiles > 1)
    score<kQueries, kTiles / 2>(queries, head_dim, keys + key, stride, key_scales ? key_scales + key : nullptr, count - key, out + key);
}

// acc += weights . values of `count` positions, kTiles vectors of each.
template <int kQueries, int kTiles, class Number>
inline void add_tiles(const float* weights, const Number* values, int64_t count, int64_t width, float* acc) {
  F32 sums[kQueries][kTiles];
  for (int q = 0; q < kQueries; ++q)
    for (int t = 0; t < kTiles; ++t) sums[q][t] = load(acc + q * width + t * kLanes);
  for (int64_t i = 0; i < count; ++i, values += width) {
    F32 value[kTiles];
    for (int t = 0; t < kTiles; ++t) value[t] = load_number(values + t * kLanes);
    for (int q = 0; q < kQueries; ++q) {
      const F32 weight = broadcast(weights[q * kScores + i]);
      for (int t = 0; t < kTiles; ++t) sums[q][t] = fma(weight, value[t], sums[q][t]);
    }
  }
  for (int q = 0; q < kQueries; ++q)
    for (int t = 0; t < kTiles; ++t) store(acc + q * width + t * kLanes, sums[q][t]);
}

template <int kQueries, int kTiles, class Number>
inline void add_values(const float* weights, const Number* values, int64_t count, int64_t width, int64_t begin, float* acc) {
  int64_t d = begin;
  for (; d + (kTiles - 1) * kLanes < width; d += kTiles * kLanes)
    add_tiles<kQueries, kTiles>(weights, values + d, count, width, acc + d);
  if constexpr (kTiles > 1) add_values<kQueries, kTiles / 2>(weights, values, count, width, d, acc);
}

// Positions [low, high).
struct Span {
  int64_t low, high;
  bool empty() const { return low >= high; }
  int64_t count() const { return high - low; }
};
inline Span both(Span a, Span b) { return {a.low > b.low ? a.low : b.low, a.high < b.high ? a.high : b.high}; }

// Of query `index` of a task.
inline Span visible(const Attention& task, int64_t index) {
  const int64_t position = task.start + index / task.heads;
  return {task.first_seen(position), position + 1};
}

// What segments have given for the queries of a task.
struct Partial {
  int64_t queries, width;
  float* values;    // [queries][width]
  float* greatest;  // [queries] scores
  float* sums;      // [queries] of weights; 0: the query has seen nothing yet

  Partial(const Attention& task, float* memory) : queries(task.tokens * task.heads), width(task.cache->value_stride()) {
    values = memory;
    greatest = values + queries * width;
    sums = greatest + queries;
  }

  void clear() { std::memset(sums, 0, queries * sizeof(float)); }

  void join(int64_t query, const float* acc, float most, float sum) {
    float* value = values + query * width;
    if (sums[query] == 0) {
      std::memcpy(value, acc, width * sizeof(float));
      greatest[query] = most;
      sums[query] = sum;
      return;
    }
    const F32 before = broadcast(greatest[query]), now = broadcast(most), after = max(before, now);
    const F32 keep = exp(sub(before, after)), take = exp(sub(now, after));
    for (int64_t d = 0; d < width; d += kLanes) store(value + d, fma(load(value + d), keep, mul(load(acc + d), take)));
    greatest[query] = any_lane(after);
    sums[query] = any_lane(fma(broadcast(sums[query]), keep, mul(broadcast(sum), take)));
  }

  void write(const Attention& task) const {
    const int64_t head_dim = task.cache->head_dim;
    for (int64_t query = 0; query < queries; ++query) {
      float* out = task.out + query / task.heads * task.out_stride + query % task.heads * head_dim;
      const F32 sum = broadcast(sums[query]);
      for (int64_t d = 0; d < head_dim; d += kLanes) store(out + d, div(load(values + query * width + d), sum), head_dim - d);
    }
  }
};

inline int64_t partial_floats(const Attention& task) { return padded(task.tokens * task.heads * (task.cache->value_stride() + 2)); }

template <class Number>
class Attend {
 public:
  Attend(const Attention& task, float* scratch) : task_(task), cache_(*task.cache), width_(cache_.value_stride()) {
    scores_ = scratch;
    fresh_ = scores_ + kGroup * kScores;
  }

  void run(int64_t begin, int64_t end, Partial& partial) {
    for (segment_ = {begin * kSegment, (begin + 1) * kSegment}; begin < end; ++begin, segment_ = {segment_.high, segment_.high + kSegment})
      for (int64_t query = 0; query < partial.queries;) {
        // The last groups are as alike as can be: two of four are faster than one of six and one of two.
        const int64_t left = partial.queries - query, count = left >= 2 * kGroup ? kGroup : left > kGroup ? (left + 1) / 2 : left;
        switch (count) {
          case 1: group<1>(query, partial); break;
          case 2: group<2>(query, partial); break;
          case 3: group<3>(query, partial); break;
          case 4: group<4>(query, partial); break;
          case 5: group<5>(query, partial); break;
          default: group<kGroup>(query, partial);
        }
        query += count;
      }
  }

 private:
  // Positions of one block: `token` is the first one's place in it.
  struct Piece {
    Span span;
    int64_t row, token;
  };

  // From `at` on, which is one of a span.
  Piece piece(int64_t at, Span of) const {
    const int64_t block = at / cache_.tokens_per_block, token = at % cache_.tokens_per_block, end = at - token + cache_.tokens_per_block;
    return {both(of, {at, end}), task_.table[block] * cache_.kv_heads + task_.kv_head, token};
  }

  // Where the score of a position is; a few before the segment have places too.
  float* scores_of(int64_t query, int64_t position) const { return scores_ + query * kScores + kLanes + position - segment_.low; }

  template <int kQueries>
  void group(int64_t begin, Partial& partial) {
    const float* queries[kQueries];
    Span spans[kQueries], any = {segment_.high, segment_.high}, all = segment_;  // what any, and what all of them see
    for (int q = 0; q < kQueries; ++q) {
      const int64_t query = begin + q;
      queries[q] = task_.queries + query / task_.heads * task_.query_stride + query % task_.heads * cache_.head_dim;
      spans[q] = both(visible(task_, query), segment_);
      all = both(all, spans[q]);
      if (!spans[q].empty()) any = {any.low < spans[q].low ? any.low : spans[q].low, spans[q].high};
    }
    if (any.empty()) return;
    if (all.empty()) all = {any.high, any.high};

    score_all<kQueries>(queries, any);
    float most[kQueries], sums[kQueries];
    std::memset(fresh_, 0, kQueries * width_ * sizeof(float));
    // What a query does not see is never touched: whatever it is, it does not matter.
    for (int q = 0; q < kQueries; ++q)
      if (!spans[q].empty()) {
        weigh(q, spans[q], &most[q], &sums[q]);
        add_all<1>(q, both(spans[q], {spans[q].low, all.low}));
      }
    add_all<kQueries>(0, all);
    for (int q = 0; q < kQueries; ++q)
      if (!spans[q].empty()) {
        add_all<1>(q, both(spans[q], {all.high, spans[q].high}));
        partial.join(begin + q, fresh_ + q * width_, most[q], sums[q]);
      }
  }

  // Scores of a span, and of what lies beside it in its vectors: of a block's last vector the next block overwrites it.
  template <int kQueries>
  void score_all(const float* const* queries, Span span) {
    const int64_t stride = cache_.key_stride();
    for (int64_t at = span.low; at < span.high;) {
      const Piece part = piece(at, span);
      at = part.span.high;
      const int64_t token = part.token / kLanes * kLanes, first = part.span.low - part.token + token;
      const Number* keys = static_cast<const Number*>(cache_.keys) + part.row * cache_.head_dim * stride + token;
      const float* scales = cache_.type == KVType::kInt8 ? cache_.key_scales + part.row * stride + token : nullptr;
      score<kQueries, tiles_of(kQueries)>(queries, cache_.head_dim, keys, stride, scales, at - first, scores_of(0, first));
    }
  }

  // A query's scores to weights; gives the greatest score and the sum of weights.
  void weigh(int64_t query, Span span, float* most, float* sum_of) {
    const F32 scale = broadcast(task_.scale), cap = broadcast(task_.softcap), lowest = broadcast(-HUGE_VALF);
    float* row = scores_of(query, segment_.low);
    const int64_t low = span.low - segment_.low, high = span.high - segment_.low, begin = low / kLanes * kLanes;
    F32 best = lowest;
    for (int64_t i = begin; i < high; i += kLanes) {
      F32 score = mul(load(row + i), scale);
      if (task_.softcap != 0) score = capped(score, cap);
      if (high - i < kLanes) score = first(high - i, score, lowest);
      if (i < low) score = first(low - i, lowest, score);
      store(row + i, score);
      best = max(best, score);
    }
    *most = greatest(best);
    const F32 shift = broadcast(*most);
    F32 total = broadcast(0);
    for (int64_t i = begin; i < high; i += kLanes) {
      const F32 weight = exp(sub(load(row + i), shift));
      store(row + i, weight);
      total = add(total, weight);
    }
    *sum_of = sum(total);
    if (cache_.type == KVType::kInt8) scale_weights(query, span);
  }

  void scale_weights(int64_t query, Span span) {
    for (int64_t at = span.low; at < span.high;) {
      const Piece part = piece(at, span);
      at = part.span.high;
      const float* scales = cache_.value_scales + part.row * cache_.key_stride() + part.token;
      float* weights = scores_of(query, part.span.low);
      for (int64_t i = 0; i < part.span.count(); i += kLanes) {
        const int64_t n = part.span.count() - i;
        store(weights + i, mul(load(weights + i, n), load(scales + i, n)), n);
      }
    }
  }

  // Values of a span, times the weights of kQueries queries from `query` on.
  template <int kQueries>
  void add_all(int64_t query, Span span) {
    for (int64_t at = span.low; at < span.high;) {
      const Piece part = piece(at, span);
      at = part.span.high;
      const Number* values = static_cast<const Number*>(cache_.values) + (part.row * cache_.tokens_per_block + part.token) * width_;
      const float* weights = scores_of(query, part.span.low);
      add_values<kQueries, tiles_of(kQueries)>(weights, values, part.span.count(), width_, 0, fresh_ + query * width_);
    }
  }

  const Attention& task_;
  const KVLayer& cache_;
  const int64_t width_;  // of a value, padded
  float* scores_;        // [kGroup][kScores]
  float* fresh_;         // [kGroup][width]: values of this segment
  Span segment_{};
};

inline int64_t segment_floats(const Attention& task) {
  return kGroup * (kScores + task.cache->value_stride());
}

// Of the segments from `begin` to before `end`, joined.
inline void attend_some(const Attention& task, int64_t begin, int64_t end, Partial& partial, float* scratch) {
  partial.clear();
  if (task.cache->type == KVType::kInt8) Attend<int8_t>(task, scratch).run(begin, end, partial);
  else Attend<uint16_t>(task, scratch).run(begin, end, partial);
}

inline int64_t attend_scratch(const Attention& task) { return partial_floats(task) + segment_floats(task); }

inline void attend(const Attention& task, float* scratch) {
  Partial all(task, scratch);
  attend_some(task, task.first_segment(), task.last_segment(), all, scratch + partial_floats(task));
  all.write(task);
}

inline void attend_segment(const Attention& task, int64_t segment, float* partial, float* scratch) {
  Partial given(task, partial);
  attend_some(task, segment, segment + 1, given, scratch);
}

inline void join_segments(const Attention& task, float* partials) {
  Partial all(task, partials);
  for (int64_t i = 1; i < task.last_segment() - task.first_segment(); ++i) {
    const Partial next(task, partials + i * partial_floats(task));
    for (int64_t q = 0; q < all.queries; ++q)
      if (next.sums[q] != 0) all.join(q, next.values + q * next.width, next.greatest[q], next.sums[q]);
  }
  all.write(task);
}

// A head's numbers to int8 and their scale; see KVLayer.
inline float to_int8(const float* x, int64_t n, int8_t* out) {
  F32 most = broadcast(0), finite = broadcast(0);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 a = load(x + i, n - i);
    most = max(abs(a), most);
    finite = fma(a, broadcast(0), finite);
  }
  const float nan_or_zero = sum(finite), scale = greatest(most) / 127.0f, inverse = 1.0f / scale;
  if (nan_or_zero != 0 || !(inverse < HUGE_VALF)) {
    std::memset(out, 0, n);
    return nan_or_zero;
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    float rounded[kLanes];
    store(rounded, round(mul(load(x + i, n - i), broadcast(inverse))));
    for (int64_t j = 0; j < kLanes && i + j < n; ++j) out[i + j] = int8_t(rounded[j]);
  }
  return scale;
}

template <class Number>
void store_head(const KVLayer& cache, int64_t row, int64_t offset, const Number* key, const Number* value) {
  const int64_t stride = cache.key_stride();
  Number* keys = static_cast<Number*>(cache.keys) + row * cache.head_dim * stride + offset;
  for (int64_t d = 0; d < cache.head_dim; ++d) keys[d * stride] = key[d];
  std::memcpy(static_cast<Number*>(cache.values) + (row * cache.tokens_per_block + offset) * cache.value_stride(), value,
              cache.head_dim * sizeof(Number));
}

inline void store_token(const KVLayer& cache, int32_t block, int64_t offset, const float* keys, const float* values) {
  const int64_t n = cache.head_dim;
  for (int64_t head = 0; head < cache.kv_heads; ++head, keys += n, values += n) {
    const int64_t row = block * cache.kv_heads + head;
    if (cache.type == KVType::kInt8) {
      int8_t key[kMaxHeadDim], value[kMaxHeadDim];
      cache.key_scales[row * cache.key_stride() + offset] = to_int8(keys, n, key);
      cache.value_scales[row * cache.key_stride() + offset] = to_int8(values, n, value);
      store_head(cache, row, offset, key, value);
    } else {
      uint16_t key[kMaxHeadDim], value[kMaxHeadDim];
      for (int64_t d = 0; d < n; d += kLanes) store_f16(key + d, load(keys + d, n - d)), store_f16(value + d, load(values + d, n - d));
      store_head(cache, row, offset, key, value);
    }
  }
}

inline void fill_attention(Kernels& table) {
  table.store = store_token;
  table.attend_scratch = attend_scratch;
  table.attend = attend;
  table.partial_floats = partial_floats;
  table.segment_floats = segment_floats;
  table.attend_segment = attend_segment;
  table.join_segments = join_segments;
}

}  // namespace headrace::HEADRACE_ISA
