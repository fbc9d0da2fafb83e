// One rank's share of one stage of a decoder: the weights and the KV cache are someone else's memory, and a step is one call.
//
//   x = embedding[tokens]
//   in each layer:  x += output(attention(rotate(qkv(norm(x)))));  x += down(f(gate(norm(x))) * up(norm(x)))
//   logits = head(norm(x[samples]))
//
// Shapes: T tokens of S sequences. What a row gets depends on nothing but its own sequence: see kernels.h; here work is only dealt out.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "candidates.h"
#include "kernels.h"
#include "memory.h"
#include "pool.h"

namespace headrace {

// Matrices that read the same rows and write side by side: queries, keys and values, or gate and up, or one alone.
struct Linear {
  int64_t count = 0;
  Matrix parts[3];
  const float* bias = nullptr;  // [rows of all parts], or null

  int64_t rows() const;
  int64_t panels() const;
  bool reads_floats() const;
  bool reads_quants() const;
};

struct Layer {
  const float* attention_norm = nullptr;       // [hidden]
  Linear qkv;                                  // query heads, then key heads, then value heads
  const float* query_norm = nullptr;           // [head_dim], or null: none
  const float* key_norm = nullptr;             // the same
  Linear output;                               // [hidden, query heads]
  const float* post_attention_norm = nullptr;  // [hidden], or null: none
  const float* mlp_norm = nullptr;             // [hidden]
  Linear gate_up;                              // two parts of as many rows
  Linear down;                                 // [hidden, rows of gate]
  const float* post_mlp_norm = nullptr;        // [hidden], or null: none
  KVLayer cache;
  float scale = 1;
  float softcap = 0;     // 0: none
  int64_t window = 0;    // 0: none
  int64_t rotation = 0;  // which of the tables it rotates by
};

// Cosine and sine of each position and pair: [max_seq_len][pairs].
struct Rotation {
  const float* cosine = nullptr;
  const float* sine = nullptr;
};

// data [count] becomes the sum over ranks; 0, or another number, and what was wrong is in headrace_error().
using Sum = int32_t (*)(void* context, float* data, int64_t count);

struct DecoderSpec {
  int64_t hidden = 0;
  int64_t head_dim = 0;
  int64_t query_heads = 0;  // of this rank
  int64_t kv_heads = 0;     // of this rank
  int64_t group = 0;        // query heads that share a KV head, on all ranks together
  int64_t first_slot = 0;   // place of this rank's first query head among the kv_heads * group that its KV heads serve
  int64_t vocabulary = 0;   // of all ranks
  int64_t first_token = 0;  // whose row is the first of this rank's part of the embedding
  int64_t pairs = 0;        // rotated, of each head
  int64_t max_seq_len = 0;
  float eps = 0;
  float embedding_scale = 1;
  float final_softcap = 0;  // 0: none
  Activation activation = Activation::kSilu;
  Rotation rotations[2];
  Matrix embedding;                   // data null: this is not the first stage
  const float* final_norm = nullptr;  // null: this is not the last stage
  Matrix head;
  int64_t num_layers = 0;
  const Layer* layers = nullptr;
  Sum sum = nullptr;  // null: one rank has all of each layer
  void* sum_context = nullptr;
};

// What is done with them is StepPlan's to say (headrace/engine/plan.py).
struct Plan {
  const int32_t* tokens = nullptr;
  int64_t num_tokens = 0;
  const int32_t* starts = nullptr;
  const int32_t* lengths = nullptr;
  int64_t num_sequences = 0;
  const int32_t* tables = nullptr;
  int64_t num_table_entries = 0;
  const int32_t* samples = nullptr;
  int64_t num_samples = 0;
  const int32_t* copies = nullptr;  // [3 num_copies]
  int64_t num_copies = 0;
  const int32_t* candidates = nullptr;  // [num_samples], or null: all rows want all their logits
};

enum class Phase : int32_t { kCopy, kEmbed, kNorm, kQKV, kStore, kAttend, kOutput, kGateUp, kDown, kHead };

// When a part of a step ran, in nanoseconds of CLOCK_REALTIME.
struct Moment {
  int64_t begin = 0;
  int64_t end = 0;
  int32_t layer = 0;  // in this stage; -1: none
  Phase phase = Phase::kCopy;
};

class Decoder {
 public:
  // The pool must outlive it. Throws std::invalid_argument for a specification that contradicts itself, std::bad_alloc.
  Decoder(const DecoderSpec& spec, Pool& pool, const Kernels& kernels);

  // Runs a plan. in [T][hidden]: the residual stream behind the stage before; null in the first. out: in the last stage logits
  // [samples that want no candidates][rows of head], else [T][hidden]. best: in the last stage [samples that do][the most that one of them wants],
  // those of this rank's part of the vocabulary. Throws std::invalid_argument, before anything is computed, for a plan that is not possible;
  // std::bad_alloc; std::runtime_error where ranks could not sum.
  void step(const Plan& plan, const float* in, float* out, Candidate* best);

  // From now on each step leaves its moments; null: it does not. What does not fit is left out.
  void record(Moment* moments, int64_t capacity);
  // Of the last step.
  int64_t recorded() const { return num_moments_; }

 private:
  // Rows that a linear layer reads: as floats, as int8, or both.
  struct Input {
    float* floats;
    int8_t* values;
    float* scales;
    int32_t* sums;
  };
  // Tokens of one sequence, and one KV head.
  struct Piece {
    const int32_t* table;
    int64_t row;  // of the first token
    int64_t start;
    int64_t tokens;
    int64_t kv_head;
  };
  // What one thread does of a piece: one segment, which gives a partial behind those of the segments before, or all of them.
  struct Part {
    int64_t piece;
    int64_t segment;
    int64_t partials;  // of the piece, in partials_
  };
  static constexpr int64_t kAllSegments = -1;

  // Both throw std::invalid_argument.
  static void check(const DecoderSpec& spec);
  void check(const Plan& plan) const;
  void reserve(int64_t tokens, int64_t samples);
  void copy(const Plan& plan);
  void place(const Plan& plan);
  void embed(const Plan& plan);
  void run_layer(int64_t index);
  void normalise(const float* x, int64_t rows, const float* weight, const Linear& reader);
  void multiply(const Linear& linear, const Input& input, int64_t rows, float* out, int64_t stride, bool add);
  void store(const Layer& layer);
  Attention task_of(const Layer& layer, const Piece& piece) const;
  void deal_attention(const Layer& layer);
  void attend(const Layer& layer);
  void project(const Linear& linear, const Input& input, const float* post_norm);
  void gate(const Layer& layer);
  void head(const Plan& plan, float* logits, Candidate* best);
  void choose(const Plan& plan, float* logits, Candidate* best);
  void sum(float* data, int64_t count);
  void quantize(const Input& input, int64_t columns, int64_t row, const float* floats, int64_t begin, int64_t end);
  Rows rows_of(const Input& input, int64_t columns, int64_t rows) const;

  template <class Task>
  void each_row(int64_t rows, int64_t work, Task&& task);
  template <class Task>
  void timed(Phase phase, int64_t layer, Task&& task);

  DecoderSpec spec_;
  std::vector<Layer> layers_;
  Linear head_;
  Pool& pool_;
  const Kernels& kernels_;
  int64_t mlp_ = 0;        // rows of gate
  int64_t heads_width_ = 0;  // query, key and value heads

  // Of the step: places of each token in the KV cache, and the pieces of attention.
  int64_t tokens_ = 0;
  std::vector<int32_t> positions_, blocks_;
  std::vector<Piece> pieces_;
  // Of attention in one layer.
  std::vector<Part> parts_;
  std::vector<float> partials_;
  std::unique_ptr<std::atomic<int64_t>[]> segments_left_;  // of each piece whose segments are dealt out
  // Of its sampled rows.
  std::vector<int64_t> places_;
  std::vector<Candidate> found_;

  Memory scratch_;
  int64_t capacity_ = 0;  // rows that it is laid out for
  float *x_ = nullptr, *delta_ = nullptr, *heads_ = nullptr;
  Input narrow_{}, wide_{};  // [T] rows of the residual stream; of attention's or the MLP's
  float* slots_ = nullptr;   // slot_floats_ for each thread
  int64_t slot_floats_ = 0;

  Moment* moments_ = nullptr;
  int64_t moment_capacity_ = 0, num_moments_ = 0;
};

}  // namespace headrace
