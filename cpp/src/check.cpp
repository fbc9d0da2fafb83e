// What a decoder refuses: a specification that contradicts itself, and a plan that is not possible.
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "pack.h"
#include "tiles.h"

namespace headrace {

namespace {

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

void require(bool holds, const char* what) {
  if (!holds) refuse(std::string("a decoder needs ") + what);
}

void require_matrix(const Matrix& matrix, int64_t columns, const char* what) {
  if (matrix.data && matrix.rows > 0 && matrix.columns == columns) return static_cast<void>(matrix_bytes(matrix.format, matrix.rows, columns));
  refuse(std::string(what) + " of a decoder is a matrix of " + std::to_string(matrix.rows) + " rows and " + std::to_string(matrix.columns) +
         " columns" + (matrix.data ? "" : " without data") + "; it must have " + std::to_string(columns) + " columns");
}

void require_linear(const Linear& linear, int64_t columns, int64_t rows, const char* what) {
  if (linear.count < 1 || linear.count > 3) refuse(std::string(what) + " of a decoder has " + std::to_string(linear.count) + " parts, not 1 to 3");
  for (int64_t i = 0; i < linear.count; ++i) require_matrix(linear.parts[i], columns, what);
  if (linear.rows() != rows) refuse(std::string(what) + " of a decoder has " + std::to_string(linear.rows()) + " rows, not " + std::to_string(rows));
}

}  // namespace

void Decoder::check(const DecoderSpec& spec) {
  require(spec.hidden > 0 && spec.head_dim > 0 && spec.query_heads > 0 && spec.kv_heads > 0 && spec.vocabulary > 0, "sizes above 0");
  require(spec.head_dim <= kMaxHeadDim, "heads of at most 1024 numbers");
  require(spec.group > 0 && spec.first_slot >= 0 && spec.first_slot < spec.group && spec.first_slot + spec.query_heads <= spec.kv_heads * spec.group,
          "KV heads for all of its query heads");
  require(spec.first_slot + spec.query_heads > (spec.kv_heads - 1) * spec.group, "query heads for all of its KV heads");
  require(spec.pairs >= 0 && 2 * spec.pairs <= spec.head_dim, "no more rotated numbers than a head has");
  require(spec.max_seq_len > 0, "a max_seq_len above 0");
  require(spec.num_layers > 0 && spec.layers, "layers");
  const int64_t query = spec.query_heads * spec.head_dim;
  const int64_t heads = query + 2 * spec.kv_heads * spec.head_dim, mlp = spec.layers[0].gate_up.parts[0].rows;
  for (const Layer* each = spec.layers; each < spec.layers + spec.num_layers; ++each) {
    const Layer& layer = *each;
    require(layer.attention_norm && layer.mlp_norm, "a norm before attention and one before the MLP");
    require(!layer.query_norm == !layer.key_norm, "norms of query and key heads, or none of both");
    require_linear(layer.qkv, spec.hidden, heads, "qkv");
    require_linear(layer.output, query, spec.hidden, "output");
    require_linear(layer.gate_up, spec.hidden, 2 * mlp, "gate_up");
    require(layer.gate_up.count == 2 && layer.gate_up.parts[0].rows == mlp, "a gate and an up of as many rows");
    require_linear(layer.down, mlp, spec.hidden, "down");
    require(layer.rotation == 0 || layer.rotation == 1, "a rotation that there is");
    require(!spec.pairs || (spec.rotations[layer.rotation].cosine && spec.rotations[layer.rotation].sine), "tables to rotate by");
    require(layer.window >= 0, "windows of 0 or more tokens");
    const KVLayer &cache = layer.cache, &first = spec.layers[0].cache;
    require(cache.keys && cache.values && cache.num_blocks > 0 && cache.tokens_per_block > 0, "a KV cache");
    require(cache.kv_heads == spec.kv_heads && cache.head_dim == spec.head_dim, "a KV cache of its heads");
    require(cache.type == KVType::kFloat16 || (cache.type == KVType::kInt8 && cache.key_scales && cache.value_scales), "scales of an int8 KV cache");
    require(cache.num_blocks == first.num_blocks && cache.tokens_per_block == first.tokens_per_block && cache.type == first.type,
            "the same KV cache in all layers");
  }
  if (spec.embedding.data) {
    require_matrix(spec.embedding, spec.hidden, "embedding");
    require(spec.first_token >= 0 && spec.first_token + spec.embedding.rows <= spec.vocabulary, "an embedding of its part of the vocabulary");
  }
  if (spec.final_norm) require_matrix(spec.head, spec.hidden, "head");
}

void Decoder::check(const Plan& plan) const {
  const auto text = [](int64_t n) { return std::to_string(n); };
  const KVLayer& cache = layers_[0].cache;
  const auto check_size = [&](int64_t count, const int32_t* array, const char* name) {
    if (count < 0 || (count && !array)) refuse(std::string("the plan has ") + text(count) + " " + name + (array ? "" : ", and none are given"));
  };
  check_size(plan.num_tokens, plan.tokens, "tokens");
  check_size(plan.num_sequences, plan.starts, "starts");
  check_size(plan.num_sequences, plan.lengths, "lengths");
  check_size(plan.num_table_entries, plan.tables, "entries of tables");
  check_size(plan.num_samples, plan.samples, "samples");
  check_size(plan.num_copies, plan.copies, "copies");
  const auto check_block = [&](int64_t block, const char* where) {
    if (block < 0 || block >= cache.num_blocks) refuse(std::string(where) + " names block " + text(block) + " of " + text(cache.num_blocks));
  };
  int64_t tokens = 0, entries = 0;
  for (int64_t s = 0; s < plan.num_sequences; ++s) {
    const int64_t start = plan.starts[s], length = plan.lengths[s];
    if (start < 0 || length < 1 || start + length > spec_.max_seq_len)
      refuse("sequence " + text(s) + " of the plan has " + text(length) + " tokens from position " + text(start) + "; 1 or more must end by " +
             text(spec_.max_seq_len));
    tokens += length;
    entries += divided(start + length, cache.tokens_per_block);
  }
  if (tokens != plan.num_tokens) refuse("the plan has " + text(plan.num_tokens) + " tokens, and its sequences " + text(tokens));
  if (entries != plan.num_table_entries) refuse("the plan's tables have " + text(plan.num_table_entries) + " entries, its sequences need " + text(entries));
  for (int64_t i = 0; i < plan.num_tokens; ++i)
    if (plan.tokens[i] < 0 || plan.tokens[i] >= spec_.vocabulary)
      refuse("token " + text(plan.tokens[i]) + " is not in a vocabulary of " + text(spec_.vocabulary));
  for (int64_t i = 0; i < plan.num_table_entries; ++i) check_block(plan.tables[i], "a table of the plan");
  for (int64_t i = 0; i < plan.num_samples; ++i)
    if (plan.samples[i] < 0 || plan.samples[i] >= plan.num_tokens || (i && plan.samples[i] <= plan.samples[i - 1]))
      refuse("sample " + text(i) + " of the plan is row " + text(plan.samples[i]) + " of " + text(plan.num_tokens) + "; they must ascend");
  for (int64_t i = 0; plan.candidates && i < plan.num_samples; ++i)
    if (plan.candidates[i] < 0 || plan.candidates[i] > kMostCandidates)
      refuse("sample " + text(i) + " of the plan wants " + text(plan.candidates[i]) + " candidates; there may be " + text(kMostCandidates));
  for (int64_t i = 0; i < plan.num_copies; ++i) {
    const int32_t* each = plan.copies + 3 * i;
    check_block(each[0], "a copy of the plan");
    check_block(each[1], "a copy of the plan");
    if (each[2] < 0 || each[2] > cache.tokens_per_block)
      refuse("a copy of the plan is of " + text(each[2]) + " tokens, and a block has " + text(cache.tokens_per_block));
  }
}

}  // namespace headrace
