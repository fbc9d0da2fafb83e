// C functions of attention and of what is computed number by number: each kernel of a named instruction set.
#include <cmath>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "api.h"
#include "error.h"
#include "kernels.h"

using namespace headrace;

namespace {

void require(bool holds, const char* what, int64_t number) {
  if (!holds) throw std::invalid_argument(what + (": " + std::to_string(number)));
}

// Sizes that can be multiplied, of memory that there may be.
void check_sizes(const KVLayer& cache) {
  require(cache.type == KVType::kFloat16 || cache.type == KVType::kInt8, "no type of a KV cache", int64_t(cache.type));
  require(cache.num_blocks > 0 && cache.num_blocks <= INT32_MAX, "the blocks of a KV cache are 1 to 2147483647", cache.num_blocks);
  require(cache.kv_heads > 0 && cache.kv_heads <= 65536, "KV heads are 1 to 65536", cache.kv_heads);
  require(cache.tokens_per_block > 0 && cache.tokens_per_block <= 65536, "tokens of a KV block are 1 to 65536", cache.tokens_per_block);
  require(cache.head_dim > 0 && cache.head_dim <= kMaxHeadDim, "numbers of a head are 1 to 1024", cache.head_dim);
  const double bytes = double(cache.num_blocks) * double(cache.kv_heads) * double(cache.key_stride()) * double(cache.value_stride());
  require(bytes < 1e15, "a KV cache of more bytes than any memory, in GB", int64_t(bytes / 1e9));
}

void check_cache(const KVLayer& cache) {
  check_sizes(cache);
  require(cache.keys && cache.values, "a KV cache without memory, of so many blocks", cache.num_blocks);
  const bool scaled = cache.key_scales && cache.value_scales;
  require(cache.type != KVType::kInt8 || scaled, "a KV cache without scales, of type", int64_t(cache.type));
}

// On a 64-byte boundary, and not one more than that, for the sanitizers to see who goes beyond.
struct Freed {
  void operator()(float* block) const { operator delete[](block, std::align_val_t(64)); }
};
std::unique_ptr<float[], Freed> floats(int64_t count) {
  return std::unique_ptr<float[], Freed>(new (std::align_val_t(64)) float[size_t(count)]);
}

void check_count(int64_t n) { require(n > 0, "a row has at least one number", n); }

}  // namespace

int32_t headrace_rms_norm(const char* set, const float* x, const float* weight, float eps, int64_t n, float* out) {
  return guarded([&] {
    check_count(n);
    return named_kernels(set).rms_norm(x, weight, eps, n, out), 1;
  });
}

int32_t headrace_activate(const char* set, int32_t kind, const float* gate, const float* up, int64_t n, float* out) {
  return guarded([&] {
    check_count(n);
    require(kind == int32_t(Activation::kSilu) || kind == int32_t(Activation::kGeluTanh), "no activation", kind);
    return named_kernels(set).activate(Activation(kind), gate, up, n, out), 1;
  });
}

int32_t headrace_add(const char* set, float* x, const float* y, int64_t n) {
  return guarded([&] {
    check_count(n);
    return named_kernels(set).add(x, y, n), 1;
  });
}

int32_t headrace_softcap(const char* set, float* x, float cap, int64_t n) {
  return guarded([&] {
    check_count(n);
    return named_kernels(set).softcap(x, cap, n), 1;
  });
}

int32_t headrace_rotate(const char* set, float* heads, int64_t count, int64_t head_dim, int64_t pairs, const float* cosine,
                        const float* sine) {
  return guarded([&] {
    require(count >= 0, "heads to rotate are 0 or more", count);
    require(pairs >= 0 && 2 * pairs <= head_dim, "pairs to rotate are 0 to half of a head", pairs);
    return named_kernels(set).rotate(heads, count, head_dim, pairs, cosine, sine), 1;
  });
}

int32_t headrace_argmax(const char* set, const float* x, int64_t n, int64_t* out) {
  return guarded([&] {
    check_count(n);
    *out = named_kernels(set).argmax(x, n);
    return 1;
  });
}

int32_t headrace_kv_bytes(const KVLayer* cache, int64_t* keys, int64_t* values, int64_t* scales) {
  return guarded([&] {
    check_sizes(*cache);
    *keys = padded(cache->key_bytes(), 64), *values = padded(cache->value_bytes(), 64), *scales = padded(cache->scale_bytes(), 64);
    return 1;
  });
}

int32_t headrace_kv_store(const char* set, const KVLayer* cache, int32_t block, int64_t offset, const float* keys, const float* values) {
  return guarded([&] {
    check_cache(*cache);
    require(block >= 0 && block < cache->num_blocks, "a block that the KV cache has not", block);
    require(offset >= 0 && offset < cache->tokens_per_block, "a token that a KV block has not", offset);
    return named_kernels(set).store(*cache, block, offset, keys, values), 1;
  });
}

int32_t headrace_attend(const char* set, const Attention* task, int64_t table_length, int32_t apart) {
  return guarded([&] {
    const KVLayer& cache = *task->cache;
    check_cache(cache);
    constexpr int64_t kMost = int64_t(1) << 31;
    require(task->kv_head >= 0 && task->kv_head < cache.kv_heads, "a KV head that the cache has not", task->kv_head);
    require(task->heads > 0 && task->heads <= 65536, "query heads of a KV head are 1 to 65536", task->heads);
    require(task->tokens > 0 && task->tokens < kMost, "tokens that attend are 1 to 2147483647", task->tokens);
    require(task->start >= 0 && task->start < kMost, "the position of a token is 0 to 2147483647", task->start);
    require(task->window >= 0, "a window is 0, which is none, or more", task->window);
    require(task->softcap >= 0 && std::isfinite(task->softcap), "a cap is 0, which is none, or more", int64_t(task->softcap));
    const int64_t end = task->start + task->tokens, blocks = (end + cache.tokens_per_block - 1) / cache.tokens_per_block;
    require(table_length >= blocks, "the table has fewer blocks than the sequence", table_length);
    for (int64_t i = 0; i < blocks; ++i)
      require(task->table[i] >= 0 && task->table[i] < cache.num_blocks, "a block that the KV cache has not", task->table[i]);
    const Kernels& kernels = named_kernels(set);
    if (!apart) {
      const auto scratch = floats(kernels.attend_scratch(*task));
      return kernels.attend(*task, scratch.get()), 1;
    }
    const auto scratch = floats(kernels.segment_floats(*task));
    const int64_t first = task->first_segment(), segments = task->last_segment() - first, each = kernels.partial_floats(*task);
    const auto partials = floats(segments * each);
    for (int64_t i = segments - 1; i >= 0; --i) kernels.attend_segment(*task, first + i, partials.get() + i * each, scratch.get());
    return kernels.join_segments(*task, partials.get()), 1;
  });
}
