// Attention over the paged KV cache.
//
// A query sees the positions [low, high) of its sequence. They are dealt in segments of kSegment by their absolute number, so that what is
// computed does not depend on where a chunk, a window or a block begins. In each segment, ascending:
//   score   acc = 0; for each number d of the head, ascending: acc = fma(query d, key d, acc); times the key's scale (int8); times `scale`;
//           capped
//   weight  e^(score - greatest of the segment)
//   sum     lane p % kLanes of positions p, ascending; lanes by halves
//   value   acc = 0; for each position, ascending: acc = fma(weight (times the value's scale, int8), value d, acc)
// What the segments gave is joined as they come: with the greatest score so far, before and after,
//   value = fma(value, e^(before - after), acc * e^(segment's - after)), the sum alike, and at last value / sum.
// So scores take little room however long a sequence is, and the keys and values of a segment stay near for the next queries.
//
// Queries go in groups of up to kGroup, (token, head) by (token, head): what is read of the cache is converted once for a group.

namespace headrace::HEADRACE_ISA {

constexpr int64_t kSegment = 512;
constexpr int64_t kGroup = 6;
// Floats between the scores of two queries: room for the vectors that begin before the segment and end behind it; an odd number of cache
// lines, so that those of a group do not share a set.
constexpr int64_t kScores = 35 * kLanes;
static_assert(kScores >= kSegment + 2 * kLanes);

inline F32 load_number(const uint16_t* p) { return load_f16(p); }
inline F32 load_number(const int8_t* p) { return load_i8(p); }

// Vectors of keys, or of numbers of a value, that a group of that many queries goes over at a time: enough sums under way to hide how long one
// takes, and not more than there are registers.
constexpr int tiles_of(int queries) { return queries >= 3 ? 1 : queries == 2 ? 2 : 4; }

// Positions [low, high), inside of one segment or not.
struct Span {
  int64_t low, high;
};

// Of query `index` of a task.
inline Span visible(const Attention& task, int64_t index) {
  const int64_t position = task.start + index / task.heads;
  return {task.window && position >= task.window ? position - task.window + 1 : 0, position + 1};
}

// What is computed for one task: its cache with the type of its numbers, and its scratch.
template <class Number>
struct Attend {
  const Attention& task;
  const KVLayer& cache;
  int64_t width;  // of a value, padded
  float* values;  // [queries][width] of all queries: what the segments before have given
  float* greatest;  // [queries], and sums
  float* sums;
  float* scores;  // [kGroup][kScores]: position p of the segment has number kLanes + p % kSegment
  float* fresh;  // [kGroup][width]: values of this segment

  Attend(const Attention& of, float* scratch) : task(of), cache(*of.cache), width(of.cache->value_stride()) {
    const int64_t queries = padded(task.tokens * task.heads);
    values = scratch;
    greatest = values + queries * width;
    sums = greatest + queries;
    scores = sums + queries;
    fresh = scores + kGroup * kScores;
  }

  // The positions from `at` on that lie in one block, none from `high` on.
  struct Piece {
    int64_t row;    // of the block and head in the cache
    int64_t token;  // of `at` in its block
    int64_t count;
  };
  Piece piece(int64_t at, int64_t high) const {
    const int64_t block = at / cache.tokens_per_block, token = at % cache.tokens_per_block, left = cache.tokens_per_block - token;
    return {task.table[block] * cache.kv_heads + task.kv_head, token, high - at < left ? high - at : left};
  }

  // Scores of queries and kTiles vectors of keys of one block, from `token` on.
  template <int kQueries, int kTiles>
  void score_tiles(const float* const* queries, int64_t row, int64_t token, float* out) const {
    const int64_t stride = cache.key_stride();
    const Number* keys = static_cast<const Number*>(cache.keys) + row * cache.head_dim * stride + token;
    F32 acc[kQueries][kTiles];
    for (int q = 0; q < kQueries; ++q)
      for (int t = 0; t < kTiles; ++t) acc[q][t] = broadcast(0);
    for (int64_t d = 0; d < cache.head_dim; ++d, keys += stride) {
      F32 key[kTiles];
      for (int t = 0; t < kTiles; ++t) key[t] = load_number(keys + t * kLanes);
      for (int q = 0; q < kQueries; ++q) {
        const F32 x = broadcast(queries[q][d]);
        for (int t = 0; t < kTiles; ++t) acc[q][t] = fma(x, key[t], acc[q][t]);
      }
    }
    for (int q = 0; q < kQueries; ++q)
      for (int t = 0; t < kTiles; ++t) {
        F32 score = acc[q][t];
        if constexpr (sizeof(Number) == 1) score = mul(score, load(cache.key_scales + row * stride + token + t * kLanes));
        store(out + q * kScores + t * kLanes, score);
      }
  }

  // Scores of the keys of a span, and of what lies beside them in their vectors: of a block's last vector what the next block overwrites.
  template <int kQueries>
  void score(const float* const* queries, int64_t segment, Span span) const {
    constexpr int kTiles = tiles_of(kQueries);
    for (int64_t at = span.low; at < span.high;) {
      const Piece part = piece(at, span.high);
      float* out = scores + kLanes + at - part.token - segment;
      const int64_t end = part.token + part.count;
      int64_t token = part.token / kLanes * kLanes;
      for (; token + (kTiles - 1) * kLanes < end; token += kTiles * kLanes)
        score_tiles<kQueries, kTiles>(queries, part.row, token, out + token);
      for (; token < end; token += kLanes) score_tiles<kQueries, 1>(queries, part.row, token, out + token);
      at += part.count;
    }
  }

  // A query's scores in a span to weights; gives the greatest score and the sum of weights.
  void weigh(float* row, int64_t segment, Span span, float* most, float* sum_of) const {
    const F32 scale = broadcast(task.scale), cap = broadcast(task.softcap), lowest = broadcast(-HUGE_VALF);
    const int64_t low = span.low - segment, high = span.high - segment, first_tile = low / kLanes * kLanes;
    row += kLanes;
    F32 best = lowest;
    for (int64_t i = first_tile; i < high; i += kLanes) {
      F32 score = mul(load(row + i), scale);
      if (task.softcap != 0) score = capped(score, cap);
      score = first(high - i, score, lowest);
      if (i < low) score = first(low - i, lowest, score);
      store(row + i, score);
      best = max(best, score);
    }
    *most = headrace::HEADRACE_ISA::greatest(best);
    const F32 shift = broadcast(*most);
    F32 total = broadcast(0);
    for (int64_t i = first_tile; i < high; i += kLanes) {
      const F32 weight = exp(sub(load(row + i), shift));
      store(row + i, weight);
      total = add(total, weight);
    }
    *sum_of = sum(total);
  }

  // Weights of a span times the scales of their values.
  void scale_weights(float* row, int64_t segment, Span span) const {
    for (int64_t at = span.low; at < span.high;) {
      const Piece part = piece(at, span.high);
      const float* scales = cache.value_scales + part.row * cache.key_stride() + part.token;
      float* weights = row + kLanes + at - segment;
      for (int64_t i = 0; i < part.count; i += kLanes) {
        const int64_t n = part.count - i;
        store(weights + i, mul(load(weights + i, n), load(scales + i, n)), n);
      }
      at += part.count;
    }
  }

  // acc += weights . values of `count` positions of one block; kTiles vectors of each.
  template <int kQueries, int kTiles>
  void add_tiles(const float* weights, const Number* numbers, int64_t count, float* acc) const {
    F32 sums_of[kQueries][kTiles];
    for (int q = 0; q < kQueries; ++q)
      for (int t = 0; t < kTiles; ++t) sums_of[q][t] = load(acc + q * width + t * kLanes);
    for (int64_t i = 0; i < count; ++i, numbers += width) {
      F32 value[kTiles];
      for (int t = 0; t < kTiles; ++t) value[t] = load_number(numbers + t * kLanes);
      for (int q = 0; q < kQueries; ++q) {
        const F32 weight = broadcast(weights[q * kScores + i]);
        for (int t = 0; t < kTiles; ++t) sums_of[q][t] = fma(weight, value[t], sums_of[q][t]);
      }
    }
    for (int q = 0; q < kQueries; ++q)
      for (int t = 0; t < kTiles; ++t) store(acc + q * width + t * kLanes, sums_of[q][t]);
  }

  // The same of all positions of a span, which all of the queries see: others' numbers are never touched.
  template <int kQueries>
  void add_values(const float* rows, int64_t segment, Span span, float* acc) const {
    constexpr int kTiles = tiles_of(kQueries);
    for (int64_t at = span.low; at < span.high;) {
      const Piece part = piece(at, span.high);
      const Number* numbers = static_cast<const Number*>(cache.values) + (part.row * cache.tokens_per_block + part.token) * width;
      const float* weights = rows + kLanes + at - segment;
      int64_t d = 0;
      for (; d + (kTiles - 1) * kLanes < width; d += kTiles * kLanes) add_tiles<kQueries, kTiles>(weights, numbers + d, part.count, acc + d);
      for (; d < width; d += kLanes) add_tiles<kQueries, 1>(weights, numbers + d, part.count, acc + d);
      at += part.count;
    }
  }

  // What this segment gave for one query, joined with what those before gave.
  void join(int64_t query, bool is_first, float most, float sum_of, const float* acc) {
    float* value = values + query * width;
    if (is_first) {
      std::memcpy(value, acc, width * sizeof(float));
      greatest[query] = most;
      sums[query] = sum_of;
      return;
    }
    const F32 before = broadcast(greatest[query]), now = broadcast(most), after = max(before, now);
    const F32 keep = exp(sub(before, after)), take = exp(sub(now, after));
    for (int64_t d = 0; d < width; d += kLanes) store(value + d, fma(load(value + d), keep, mul(load(acc + d), take)));
    greatest[query] = headrace::HEADRACE_ISA::greatest(after);
    sums[query] = headrace::HEADRACE_ISA::greatest(fma(broadcast(sums[query]), keep, mul(broadcast(sum_of), take)));
  }

  // Queries [query, query + kQueries) in one segment.
  template <int kQueries>
  void group(int64_t query, int64_t segment) {
    const float* queries[kQueries];
    Span spans[kQueries], all = {segment + kSegment, segment}, common = {segment, segment + kSegment};
    for (int q = 0; q < kQueries; ++q) {
      const int64_t index = query + q;
      queries[q] = task.queries + index / task.heads * task.query_stride + index % task.heads * cache.head_dim;
      Span& span = spans[q] = visible(task, index);
      if (span.low < segment) span.low = segment;
      if (span.high > segment + kSegment) span.high = segment + kSegment;
      if (span.low >= span.high) span = {segment, segment};  // sees nothing here
      else {
        if (span.low < all.low) all.low = span.low;
        if (span.high > all.high) all.high = span.high;
      }
      if (span.low > common.low) common.low = span.low;
      if (span.high < common.high) common.high = span.high;
    }
    if (all.low >= all.high) return;
    if (common.low >= common.high) common = {all.high, all.high};
    score<kQueries>(queries, segment, all);

    float most[kQueries], sum_of[kQueries];
    std::memset(fresh, 0, kQueries * width * sizeof(float));
    for (int q = 0; q < kQueries; ++q) {
      if (spans[q].low == spans[q].high) continue;
      float* row_of = scores + q * kScores;
      weigh(row_of, segment, spans[q], &most[q], &sum_of[q]);
      if constexpr (sizeof(Number) == 1) scale_weights(row_of, segment, spans[q]);
      const int64_t until = spans[q].high < common.low ? spans[q].high : common.low;
      add_values<1>(row_of, segment, {spans[q].low, until}, fresh + q * width);
    }
    add_values<kQueries>(scores, segment, common, fresh);
    for (int q = 0; q < kQueries; ++q) {
      if (spans[q].low == spans[q].high) continue;
      if (common.low < common.high) add_values<1>(scores + q * kScores, segment, {common.high, spans[q].high}, fresh + q * width);
      join(query + q, spans[q].low == visible(task, query + q).low, most[q], sum_of[q], fresh + q * width);
    }
  }

  void run() {
    const int64_t queries = task.tokens * task.heads;
    const int64_t low = visible(task, 0).low, high = visible(task, queries - 1).high;
    for (int64_t segment = low / kSegment * kSegment; segment < high; segment += kSegment)
      for (int64_t query = 0; query < queries;) {
        // Groups of the last queries are alike in size: two of four are faster than one of six and one of two.
        const int64_t left = queries - query, count = left >= 2 * kGroup || left == kGroup ? kGroup : left > kGroup ? (left + 1) / 2 : left;
        switch (count) {
          case 1: group<1>(query, segment); break;
          case 2: group<2>(query, segment); break;
          case 3: group<3>(query, segment); break;
          case 4: group<4>(query, segment); break;
          case 5: group<5>(query, segment); break;
          default: group<kGroup>(query, segment);
        }
        query += count;
      }
    for (int64_t query = 0; query < queries; ++query) {
      float* out = task.out + query / task.heads * task.out_stride + query % task.heads * cache.head_dim;
      const F32 total = broadcast(sums[query]);
      for (int64_t d = 0; d < cache.head_dim; d += kLanes)
        store(out + d, div(load(values + query * width + d), total), cache.head_dim - d);
    }
  }
};

inline int64_t attend_scratch(const Attention& task) {
  const int64_t queries = padded(task.tokens * task.heads), width = task.cache->value_stride();
  return queries * (width + 2) + kGroup * (kScores + width);
}

inline void attend(const Attention& task, float* scratch) {
  if (task.cache->type == KVType::kInt8) Attend<int8_t>(task, scratch).run();
  else Attend<uint16_t>(task, scratch).run();
}

// A head's numbers to int8 and their scale; see KVLayer.
inline float to_int8(const float* x, int64_t n, int8_t* out) {
  F32 most = broadcast(0), finite = broadcast(0);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 a = load(x + i, n - i);
    most = max(abs(a), most);
    finite = fma(a, broadcast(0), finite);
  }
  const float nan_or_zero = sum(finite), scale = headrace::HEADRACE_ISA::greatest(most) / 127.0f, inverse = 1.0f / scale;
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
}

}  // namespace headrace::HEADRACE_ISA
