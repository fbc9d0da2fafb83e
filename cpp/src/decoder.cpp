#include "decoder.h"

#include <time.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <stdexcept>

#include "error.h"
#include "tiles.h"

namespace headrace {

namespace {

// Tokens of a piece of attention.
constexpr int64_t kPieceTokens = 32;
// Numbers that one thread works through sooner than others are woken up.
constexpr int64_t kSerialWork = 8192;
// Rows that scratch memory is taken for at first; it grows to the next power of two when a step has more.
constexpr int64_t kFirstRows = 64;

int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

Linear alone(const Matrix& matrix) {
  Linear linear;
  linear.count = 1;
  linear.parts[0] = matrix;
  return linear;
}

}  // namespace

int64_t Linear::rows() const {
  int64_t rows = 0;
  for (int64_t i = 0; i < count; ++i) rows += parts[i].rows;
  return rows;
}

int64_t Linear::panels() const {
  int64_t panels = 0;
  for (int64_t i = 0; i < count; ++i) panels += parts[i].panels();
  return panels;
}

bool Linear::reads_floats() const {
  return std::any_of(parts, parts + count, [](const Matrix& part) { return part.format.kind != Kind::kQuantized; });
}

bool Linear::reads_quants() const {
  return std::any_of(parts, parts + count, [](const Matrix& part) { return part.format.kind == Kind::kQuantized; });
}

Decoder::Decoder(const DecoderSpec& spec, Pool& pool, const Kernels& kernels) : spec_(spec), pool_(pool), kernels_(kernels) {
  check(spec);
  layers_.assign(spec.layers, spec.layers + spec.num_layers);
  spec_.layers = layers_.data();
  heads_width_ = (spec.query_heads + 2 * spec.kv_heads) * spec.head_dim;
  mlp_ = layers_[0].gate_up.parts[0].rows;
  if (spec.final_norm) head_ = alone(spec.head);
  reserve(kFirstRows, kFirstRows);
}

// Lays scratch memory out for at least so many rows.
void Decoder::reserve(int64_t tokens, int64_t samples) {
  if (tokens <= capacity_ && samples <= capacity_) return;
  const int64_t rows = int64_t(std::bit_ceil(uint64_t(std::max(tokens, samples))));
  int64_t attention = 0;
  for (const Layer& layer : layers_) {
    Attention longest;
    longest.cache = &layer.cache;
    longest.tokens = std::min(kPieceTokens, spec_.max_seq_len);
    longest.start = spec_.max_seq_len - longest.tokens;
    longest.heads = std::min(spec_.group, spec_.query_heads);
    longest.window = layer.window;
    attention = std::max(attention, kernels_.attend_scratch(longest));
  }
  const int64_t narrow = padded(spec_.hidden, kBlock), wide = padded(std::max(spec_.query_heads * spec_.head_dim, mlp_), kBlock);
  slot_floats_ = padded(std::max({attention, 2 * kTileRows * kMostPanels * kPanel, narrow, wide}));
  const auto lay_out = [&](uint8_t* base) {
    int64_t bytes = 0;
    const auto take = [&]<class T>(T*& pointer, int64_t count) {
      pointer = base ? reinterpret_cast<T*>(base + bytes) : nullptr;
      bytes += padded(count * int64_t(sizeof(T)), 64);
    };
    const auto take_input = [&](Input& input, int64_t width) {
      take(input.floats, rows * width);
      take(input.values, rows * width);
      take(input.scales, rows * (width / 32));
      take(input.sums, rows * (width / 16));
    };
    take(x_, rows * spec_.hidden);
    take(delta_, rows * spec_.hidden);
    take(heads_, rows * heads_width_);
    take_input(narrow_, narrow);
    take_input(wide_, wide);
    take(slots_, pool_.threads() * slot_floats_);
    return size_t(bytes);
  };
  capacity_ = 0;
  scratch_ = Memory();  // the old one goes first: both together may be too much
  scratch_ = Memory::allocate(lay_out(nullptr));
  if (!scratch_) throw std::bad_alloc();
  lay_out(scratch_.data());
  positions_.reserve(rows);
  blocks_.reserve(rows);
  pieces_.reserve(rows * spec_.kv_heads);
  capacity_ = rows;
}

void Decoder::step(const Plan& plan, const float* in, float* out, Candidate* best) {
  check(plan);
  if (plan.num_tokens && !spec_.embedding.data && !in) throw std::invalid_argument("a stage that is not the first needs the residual stream of the one before it");
  const int64_t chosen = spec_.final_norm && plan.candidates ? plan.num_samples - std::count(plan.candidates, plan.candidates + plan.num_samples, 0) : 0;
  if (((spec_.final_norm ? plan.num_samples - chosen : plan.num_tokens) && !out) || (chosen && !best)) throw std::invalid_argument("a step needs room for what it gives");
  reserve(plan.num_tokens, plan.num_samples);
  num_moments_ = 0;
  tokens_ = plan.num_tokens;
  if (plan.num_copies) timed(Phase::kCopy, -1, [&] { copy(plan); });
  if (!tokens_) return;
  place(plan);
  if (spec_.embedding.data)
    timed(Phase::kEmbed, -1, [&] { embed(plan); });
  else
    std::memcpy(x_, in, size_t(tokens_ * spec_.hidden) * sizeof(float));
  for (int64_t index = 0; index < int64_t(layers_.size()); ++index) run_layer(index);
  if (!spec_.final_norm)
    std::memcpy(out, x_, size_t(tokens_ * spec_.hidden) * sizeof(float));
  else if (plan.num_samples)
    timed(Phase::kHead, -1, [&] { head(plan, out, best); });
}

void Decoder::record(Moment* moments, int64_t capacity) {
  moments_ = moments;
  moment_capacity_ = moments ? capacity : 0;
  num_moments_ = 0;
}

// Copies follow each other, since one may read what another has written; layers have nothing to do with each other.
void Decoder::copy(const Plan& plan) {
  pool_.run(int64_t(layers_.size()), [&](int64_t index, int64_t) {
    const KVLayer& cache = layers_[index].cache;
    const int64_t size = cache.type == KVType::kFloat16 ? 2 : 1;
    // Lines of `count` numbers of which the first `kept` are copied and the others cleared.
    const auto copy_lines = [](void* data, int64_t bytes, int64_t from, int64_t to, int64_t lines, int64_t count, int64_t kept) {
      auto* target = static_cast<uint8_t*>(data) + to * lines * count * bytes;
      const auto* source = static_cast<const uint8_t*>(data) + from * lines * count * bytes;
      for (int64_t line = 0; line < lines; ++line, target += count * bytes, source += count * bytes) {
        if (from != to) std::memcpy(target, source, size_t(kept * bytes));
        std::memset(target + kept * bytes, 0, size_t((count - kept) * bytes));
      }
    };
    for (int64_t i = 0; i < plan.num_copies; ++i) {
      const int64_t from = plan.copies[3 * i], to = plan.copies[3 * i + 1], kept = plan.copies[3 * i + 2];
      copy_lines(cache.keys, size, from, to, cache.kv_heads * cache.head_dim, cache.key_stride(), kept);
      copy_lines(cache.values, size, from, to, cache.kv_heads, cache.tokens_per_block * cache.value_stride(), kept * cache.value_stride());
      if (cache.type != KVType::kInt8) continue;
      copy_lines(cache.key_scales, 4, from, to, cache.kv_heads, cache.key_stride(), kept);
      copy_lines(cache.value_scales, 4, from, to, cache.kv_heads, cache.key_stride(), kept);
    }
  });
}

void Decoder::place(const Plan& plan) {
  const int64_t size = layers_[0].cache.tokens_per_block;
  positions_.clear();
  blocks_.clear();
  pieces_.clear();
  const int32_t* table = plan.tables;
  int64_t row = 0;
  for (int64_t s = 0; s < plan.num_sequences; ++s) {
    const int64_t start = plan.starts[s], end = start + plan.lengths[s];
    for (int64_t position = start; position < end; ++position) {
      positions_.push_back(int32_t(position));
      blocks_.push_back(table[position / size]);
    }
    // The last tokens have the most to attend to: they come first, so that no thread begins with them when the others have nothing left.
    for (int64_t piece = divided(end - start, kPieceTokens) - 1; piece >= 0; --piece) {
      const int64_t begin = piece * kPieceTokens, tokens = std::min(kPieceTokens, end - start - begin);
      for (int64_t kv_head = 0; kv_head < spec_.kv_heads; ++kv_head) pieces_.push_back({table, row + begin, start + begin, tokens, kv_head});
    }
    row += end - start;
    table += divided(end, size);
  }
}

void Decoder::embed(const Plan& plan) {
  const Matrix& matrix = spec_.embedding;
  each_row(tokens_, spec_.hidden, [&](int64_t row, int64_t) {
    float* x = x_ + row * spec_.hidden;
    const int64_t index = plan.tokens[row] - spec_.first_token;
    if (index < 0 || index >= matrix.rows) {
      std::memset(x, 0, size_t(spec_.hidden) * sizeof(float));
      return;
    }
    kernels_.read_row(matrix, index, x);
    if (spec_.embedding_scale != 1)
      for (int64_t i = 0; i < spec_.hidden; ++i) x[i] *= spec_.embedding_scale;
  });
  // All but one rank add zeros.
  sum(x_, tokens_ * spec_.hidden);
}

void Decoder::run_layer(int64_t index) {
  const Layer& layer = layers_[index];
  timed(Phase::kNorm, index, [&] { normalise(x_, tokens_, layer.attention_norm, layer.qkv); });
  timed(Phase::kQKV, index, [&] { multiply(layer.qkv, narrow_, tokens_, heads_, heads_width_, false); });
  timed(Phase::kStore, index, [&] { store(layer); });
  timed(Phase::kAttend, index, [&] { attend(layer); });
  timed(Phase::kOutput, index, [&] { project(layer.output, wide_, layer.post_attention_norm); });
  timed(Phase::kNorm, index, [&] { normalise(x_, tokens_, layer.mlp_norm, layer.gate_up); });
  timed(Phase::kGateUp, index, [&] { gate(layer); });
  timed(Phase::kDown, index, [&] { project(layer.down, wide_, layer.post_mlp_norm); });
}

// Rows of x, normalised, to where `reader` reads them.
void Decoder::normalise(const float* x, int64_t rows, const float* weight, const Linear& reader) {
  const bool floats = reader.reads_floats(), quants = reader.reads_quants();
  const int64_t stride = padded(spec_.hidden, kBlock);
  each_row(rows, spec_.hidden, [&](int64_t row, int64_t slot) {
    float* out = floats ? narrow_.floats + row * stride : slots_ + slot * slot_floats_;
    kernels_.rms_norm(x + row * spec_.hidden, weight, spec_.eps, spec_.hidden, out);
    if (quants) quantize(narrow_, spec_.hidden, row, out, 0, spec_.hidden);
  });
}

void Decoder::multiply(const Linear& linear, const Input& input, int64_t rows, float* out, int64_t stride, bool add) {
  const Rows x = rows_of(input, linear.parts[0].columns, rows);
  const Dealt dealt(rows, linear.panels(), pool_.threads(), 1);
  pool_.run(dealt.count(), [&](int64_t index, int64_t) {
    const Rows tile = x.slice(dealt.first_row(index), dealt.last_row(index));
    float* place = out + dealt.first_row(index) * stride;
    const float* bias = linear.bias;
    int64_t begin = dealt.first_panel(index), end = dealt.last_panel(index);  // from this part's first panel on
    for (const Matrix* part = linear.parts; part < linear.parts + linear.count && end > 0; ++part) {
      const int64_t panels = part->panels();
      if (begin < panels) kernels_.multiply(*part, tile, std::max<int64_t>(begin, 0), std::min(end, panels), bias, place, stride, add);
      begin -= panels;
      end -= panels;
      place += part->rows;
      if (bias) bias += part->rows;
    }
  });
}

// Norms of query and key heads, rotation; keys and values of all tokens to the cache.
void Decoder::store(const Layer& layer) {
  const int64_t size = layer.cache.tokens_per_block, rotated = spec_.query_heads + spec_.kv_heads, dim = spec_.head_dim;
  const Rotation& rotation = spec_.rotations[layer.rotation];
  each_row(tokens_, heads_width_, [&](int64_t row, int64_t) {
    float* heads = heads_ + row * heads_width_;
    if (layer.query_norm)
      for (int64_t head = 0; head < rotated; ++head) {
        float* each = heads + head * dim;
        kernels_.rms_norm(each, head < spec_.query_heads ? layer.query_norm : layer.key_norm, spec_.eps, dim, each);
      }
    const int64_t position = positions_[row];
    if (spec_.pairs) kernels_.rotate(heads, rotated, dim, spec_.pairs, rotation.cosine + position * spec_.pairs, rotation.sine + position * spec_.pairs);
    kernels_.store(layer.cache, blocks_[row], position % size, heads + spec_.query_heads * dim, heads + rotated * dim);
  });
}

// x += linear(input), summed over ranks and normalised where that is so.
void Decoder::project(const Linear& linear, const Input& input, const float* post_norm) {
  if (!spec_.sum && !post_norm) return multiply(linear, input, tokens_, x_, spec_.hidden, true);
  multiply(linear, input, tokens_, delta_, spec_.hidden, false);
  sum(delta_, tokens_ * spec_.hidden);
  each_row(tokens_, spec_.hidden, [&](int64_t row, int64_t) {
    float* delta = delta_ + row * spec_.hidden;
    if (post_norm) kernels_.rms_norm(delta, post_norm, spec_.eps, spec_.hidden, delta);
    kernels_.add(x_ + row * spec_.hidden, delta, spec_.hidden);
  });
}

// f(gate(x)) * up(x): whoever multiplies some panels of both makes of them what `down` reads.
void Decoder::gate(const Layer& layer) {
  const Matrix &gate = layer.gate_up.parts[0], &up = layer.gate_up.parts[1];
  const Rows x = rows_of(narrow_, spec_.hidden, tokens_);
  const bool floats = layer.down.reads_floats(), quants = layer.down.reads_quants();
  const int64_t width = padded(mlp_, kBlock);
  const Dealt dealt(tokens_, gate.panels(), pool_.threads(), kBlock / kPanel);
  pool_.run(dealt.count(), [&](int64_t index, int64_t slot) {
    const int64_t begin = dealt.first_panel(index), end = dealt.last_panel(index);
    const int64_t first = begin * kPanel, last = std::min(end * kPanel, mlp_), stride = (end - begin) * kPanel;
    const int64_t top = dealt.first_row(index), bottom = dealt.last_row(index);
    const Rows tile = x.slice(top, bottom);
    const float* bias = layer.gate_up.bias;
    float *gated = slots_ + slot * slot_floats_, *raised = gated + (bottom - top) * stride;
    kernels_.multiply(slice(gate, begin, end), tile, 0, end - begin, bias ? bias + first : nullptr, gated, stride, false);
    kernels_.multiply(slice(up, begin, end), tile, 0, end - begin, bias ? bias + mlp_ + first : nullptr, raised, stride, false);
    for (int64_t row = top; row < bottom; ++row, gated += stride, raised += stride) {
      float* out = floats ? wide_.floats + row * width + first : gated;
      kernels_.activate(spec_.activation, gated, raised, last - first, out);
      if (quants) quantize(wide_, mlp_, row, out, first, last);
    }
  });
}

void Decoder::sum(float* data, int64_t count) {
  if (spec_.sum && spec_.sum(spec_.sum_context, data, count)) throw std::runtime_error(last_error);
}

// Columns [begin, end) of a row of `columns`; they begin with a block, and end with one or the row.
void Decoder::quantize(const Input& input, int64_t columns, int64_t row, const float* floats, int64_t begin, int64_t end) {
  const int64_t place = row * padded(columns, kBlock) + begin;
  kernels_.quantize(floats, end - begin, input.values + place, input.scales + place / 32, input.sums + place / 16);
}

Rows Decoder::rows_of(const Input& input, int64_t columns, int64_t rows) const {
  return {rows, columns, input.floats, padded(columns, kBlock), input.values, input.scales, input.sums};
}

// task(row, slot) of each row; in the pool if that is enough to do. `work`: numbers of a row.
template <class Task>
void Decoder::each_row(int64_t rows, int64_t work, Task&& task) {
  if (rows * work <= kSerialWork) {
    for (int64_t row = 0; row < rows; ++row) task(row, 0);
    return;
  }
  const int64_t chunk = std::max<int64_t>(1, std::min(kSerialWork / work, divided(rows, pool_.threads())));
  pool_.run(divided(rows, chunk), [&](int64_t index, int64_t slot) {
    for (int64_t row = index * chunk; row < std::min((index + 1) * chunk, rows); ++row) task(row, slot);
  });
}

template <class Task>
void Decoder::timed(Phase phase, int64_t layer, Task&& task) {
  if (num_moments_ >= moment_capacity_) return task();
  const int64_t begin = nanoseconds();
  task();
  moments_[num_moments_++] = {begin, nanoseconds(), int32_t(layer), phase};
}

}  // namespace headrace
