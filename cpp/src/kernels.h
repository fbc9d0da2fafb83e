// The computations that are written for each instruction set: one table of functions for each, with the same results, bit for bit.
//
// The rule that makes a row's result independent of its batch, and of the processor: every number is computed by one fixed sequence of IEEE
// operations, given below, whatever else is computed beside it. Vectors have kLanes lanes on every instruction set (two registers of AVX2, one
// of AVX-512, four of NEON, an array without any), products and sums are fused where it says fma and nowhere else (-ffp-contract=off), and
// sums over lanes go by halves: l[i] += l[i + 8], then 4, 2, 1.
#pragma once

#include <cstdint>

#include "format.h"

namespace headrace {

constexpr int64_t kLanes = 16;

// The least normal number: its reciprocal is finite.
constexpr float kLeastScale = 0x1p-126f;

constexpr int64_t padded(int64_t n, int64_t unit = kLanes) { return (n + unit - 1) / unit * unit; }

// Rows that a matrix multiplies: floats for plain matrices, int8 for quantised ones (whoever makes them fills what is needed).
struct Rows {
  int64_t rows = 0;
  int64_t columns = 0;
  const float* floats = nullptr;  // [rows][stride]
  int64_t stride = 0;
  // Columns padded to kBlock with zeros. values [rows][padded], scales [rows][padded / 32], sums [rows][padded / 16] of values.
  const int8_t* values = nullptr;
  const float* scales = nullptr;
  const int32_t* sums = nullptr;

  Rows slice(int64_t begin, int64_t end) const {
    const int64_t width = padded(columns, kBlock);
    Rows part = *this;
    part.rows = end - begin;
    if (floats) part.floats += begin * stride;
    if (values) part.values += begin * width, part.scales += begin * (width / 32), part.sums += begin * (width / 16);
    return part;
  }
};

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// Numbers of a head at most.
constexpr int64_t kMaxHeadDim = 1024;

// Type of the numbers in the KV cache.
enum class KVType : int32_t { kFloat16 = 0, kInt8 = 1 };

// One layer's KV cache: blocks of tokens_per_block tokens. Token t of a block b and KV head h has
//   key d    keys[((b * kv_heads + h) * head_dim + d) * key_stride + t]        key_stride = padded(tokens_per_block): lanes are tokens
//   value d  values[((b * kv_heads + h) * tokens_per_block + t) * value_stride + d]    value_stride = padded(head_dim): lanes are numbers
// of float16, or of int8 times key_scales / value_scales [(b * kv_heads + h) * key_stride + t], float32.
struct KVLayer {
  KVType type = KVType::kFloat16;
  int64_t num_blocks = 0;
  int64_t kv_heads = 0;
  int64_t tokens_per_block = 0;
  int64_t head_dim = 0;
  void* keys = nullptr;
  void* values = nullptr;
  float* key_scales = nullptr;
  float* value_scales = nullptr;

  int64_t key_stride() const { return padded(tokens_per_block); }
  int64_t value_stride() const { return padded(head_dim); }
  int64_t number_bytes() const { return type == KVType::kInt8 ? 1 : 2; }
  int64_t key_bytes() const { return num_blocks * kv_heads * head_dim * key_stride() * number_bytes(); }
  int64_t value_bytes() const { return num_blocks * kv_heads * tokens_per_block * value_stride() * number_bytes(); }
  // Of either's scales.
  int64_t scale_bytes() const { return type == KVType::kInt8 ? num_blocks * kv_heads * key_stride() * 4 : 0; }
};

// Positions whose scores are computed at once; see attention.inl.
constexpr int64_t kSegment = 512;

// Some consecutive tokens of one sequence, and the query heads that share one KV head.
struct Attention {
  const KVLayer* cache = nullptr;
  const int32_t* table = nullptr;  // blocks of the sequence
  int64_t kv_head = 0;
  int64_t start = 0;   // position of the first of the tokens; its keys and those of all before it are in the cache
  int64_t tokens = 0;  // consecutive
  int64_t heads = 0;   // query heads
  const float* queries = nullptr;  // token i, head j: queries + i * query_stride + j * head_dim
  int64_t query_stride = 0;
  float* out = nullptr;  // the same with out_stride
  int64_t out_stride = 0;
  float scale = 1;
  float softcap = 0;   // 0: none
  int64_t window = 0;  // a token sees itself and window - 1 before it; 0: all before it

  // The first position that a token sees.
  int64_t first_seen(int64_t position) const { return window && position >= window ? position - window + 1 : 0; }
  // The segments that any of the tokens sees: from the first to before the last.
  int64_t first_segment() const { return first_seen(start) / kSegment; }
  int64_t last_segment() const { return (start + tokens - 1) / kSegment + 1; }
};

struct Kernels {
  const char* name;

  // out[r][j] (+)= sum over k of x[r][k] w[j][k], for rows j of the panels [begin, end) (not those that only pad) and all rows r of x;
  // out + r * out_stride + j. `add`: to what is there. bias [rows of w] or null is added to the sum first.
  //   quantised: acc = 0; for each group of columns, ascending: acc = fma(float(sum of q x - offset * sum of x), scale * x.scale, acc),
  //              then, with mins, acc = fma(min, x.scale * float(sum of x), acc)
  //   plain:     acc = 0; for each column, ascending: acc = fma(x, w, acc)
  void (*multiply)(const Matrix& w, const Rows& x, int64_t begin, int64_t end, const float* bias, float* out, int64_t out_stride, bool add);

  // Row `index` of a matrix as floats, out [columns]: (q - offset) * scale, then + min.
  void (*read_row)(const Matrix& w, int64_t index, float* out);

  // One row to int8 for multiply: scale = max |x| / 127 of each 32, or 0 where that is less than kLeastScale; values = round to even
  // (x * (1 / scale)), or 0 where the scale is. Where the row is not finite values are 0 and the scale is NaN, so that products are NaN, too.
  void (*quantize)(const float* x, int64_t columns, int8_t* values, float* scales, int32_t* sums);

  // Weights x [count] that share a scale, at most kBlock of them, to quants in [-127, 127] of 8 bits or [-8, 7] of 4, and that scale, float16.
  //   8 bits: scale = max |x| / 127
  //   4 bits: of 19 scales, which put the largest number at -8.9, -8.8, ... -7.1, the quants that each gives, and the scale that is best for
  //           these, sum(x q) / sum(q q): the one with the least squared error (make_qx_quants of ggml, ggml-quants.c)
  // then q = x / scale, to the nearest that there is. If not all x are finite, or the scale is beyond float16, it is NaN.
  void (*quantize_weights)(const float* x, int64_t count, int32_t bits, int8_t* quants, uint16_t* scale);

  // out = x / sqrt(mean(x²) + eps) * weight; out may be x. Sum of squares: lanes of fma over columns i, i + 16, ...
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t n, float* out);

  // out = f(gate) * up; out may be gate. What exponentials are: math.inl.
  void (*activate)(Activation kind, const float* gate, const float* up, int64_t n, float* out);

  // x = x + y.
  void (*add)(float* x, const float* y, int64_t n);

  // x = cap * tanh(x / cap).
  void (*softcap)(float* x, float cap, int64_t n);

  // Heads in rotate-half order, [heads][head_dim], rotated in place: the first 2 * pairs numbers of each; cosine and sine [pairs].
  void (*rotate)(float* heads, int64_t count, int64_t head_dim, int64_t pairs, const float* cosine, const float* sine);

  // Key and value of one token, [kv_heads][head_dim] each, into the cache. As int8: see quantize, the scale of each head of key and value.
  void (*store)(const KVLayer& cache, int32_t block, int64_t offset, const float* keys, const float* values);

  // Floats of scratch that attend needs for such a call: about (head_dim + 2) for each token and head, and 15 KiB, however many keys there
  // are.
  int64_t (*attend_scratch)(const Attention& task);
  // out = softmax(scale * query . keys) . values; causal; attention.inl says in which order. scratch: 64-byte aligned. What is read of the
  // cache is shared by six (token, head) of a call; a run of 16 to 64 tokens finds in the processor's caches what it reads once more.
  void (*attend)(const Attention& task, float* scratch);

  // The same, with the same bits, for threads that share a call: each of the task's segments gives a partial [partial_floats], which lie
  // one behind the other, and then one thread joins them, and works in the first of them. scratch [segment_floats], 64-byte aligned.
  int64_t (*partial_floats)(const Attention& task);
  int64_t (*segment_floats)(const Attention& task);
  void (*attend_segment)(const Attention& task, int64_t segment, float* partial, float* scratch);
  void (*join_segments)(const Attention& task, float* partials);

  // Index of the greatest, the lowest of equals; NaN counts as the greatest (as numpy.argmax).
  int64_t (*argmax)(const float* x, int64_t n);

  // out = exp((x - maximum) * scale), of a finite maximum that none exceeds; 0 below exp(-87). In float32, nothing fused.
  void (*weigh)(const float* x, float maximum, float scale, int64_t n, float* out);

  // Lower bounds of the times at which n > 0 tokens arrive that have these weights (race.h): out = (number + 1/2) / 2^32 / weight; gives the
  // least of them. ids null: first_id, first_id + 1, ...
  float (*arrive)(const float* weights, const int32_t* ids, int32_t first_id, int64_t n, uint32_t first_key, uint32_t second_key, float* out);

  // Least of the numbers of n > 0 tokens, first_id, first_id + 1, ... (race.h).
  uint32_t (*least_number)(int32_t first_id, int64_t n, uint32_t first_key, uint32_t second_key);
};

// Those that this machine can run, best first; the last is "portable".
const Kernels* const* available_kernels(int64_t* count);
// By name; null: this machine has it not.
const Kernels* find_kernels(const char* name);
// The same; throws std::invalid_argument.
const Kernels& named_kernels(const char* name);

// Names the instruction set to use instead of the best.
constexpr const char* kInstructionSetVariable = "HEADRACE_INSTRUCTION_SET";
// The one to use; null: that variable names one that this machine has not.
const Kernels* chosen_kernels();

}  // namespace headrace
