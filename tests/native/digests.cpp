// What every kernel computes from numbers made here, as one line each: instruction set, kernel, digest. Lines of the same kernel must be the
// same for every instruction set and on every machine: for processors without Python, and for emulated ones. scripts/emulate runs it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "half.h"
#include "kernels.h"

using namespace headrace;

namespace {

// splitmix64: the same numbers everywhere.
struct Random {
  uint64_t state;

  uint64_t next() {
    uint64_t x = state += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
  // In [-1, 1), times 2^0 to 2^-7; one in 16 is a half, so that there is something to round to even.
  float number() {
    if (below(16) == 0) return float(below(9)) / 2 - 2;
    const float unit = float(int64_t(next() >> 40) - (1 << 23)) / float(1 << 23);
    return unit / float(1 << below(8));
  }
};

template <class T>
struct Free {
  void operator()(T* p) const { std::free(p); }
};

// Zeros, at a multiple of 64 bytes.
template <class T>
std::unique_ptr<T[], Free<T>> zeros(int64_t n) {
  const int64_t bytes = padded(n * int64_t(sizeof(T)) + 1, 64);
  void* memory = std::aligned_alloc(64, bytes);
  if (!memory) std::abort();
  std::memset(memory, 0, bytes);
  return std::unique_ptr<T[], Free<T>>(static_cast<T*>(memory));
}

std::unique_ptr<float[], Free<float>> numbers(Random& random, int64_t n) {
  auto made = zeros<float>(n);
  for (int64_t i = 0; i < n; ++i) made[i] = random.number();
  return made;
}

// FNV-1a of the bits; every NaN is the same.
struct Digest {
  uint64_t hash = 0xCBF29CE484222325u;

  void bytes(const void* data, size_t n) {
    for (size_t i = 0; i < n; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001B3u;
  }
  template <class T>
  void take(const T* data, int64_t n) {
    bytes(data, n * sizeof(T));
  }
  void take(const float* data, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = data[i] != data[i] ? 0x7FC00000u : float_to_bits(data[i]);
      bytes(&bits, sizeof bits);
    }
  }
};

void say(const Kernels& set, const char* kernel, const Digest& digest) {
  std::printf("%s %s %016llx\n", set.name, kernel, (unsigned long long)digest.hash);
}

// A matrix of that format with content of any kind.
std::unique_ptr<uint8_t[], Free<uint8_t>> content(Random& random, const Matrix& matrix) {
  const Format& format = matrix.format;
  auto data = zeros<uint8_t>(matrix.bytes());
  const int64_t panels = matrix.panels();
  if (format.kind == Kind::kQuantized) {
    const int64_t blocks = panels * (format.panel_bytes(matrix.columns) / format.block_bytes());
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* block = data.get() + b * format.block_bytes();
      for (int64_t i = 0; i < format.quant_bytes(); ++i) block[i] = uint8_t(random.next());
      auto* halves = reinterpret_cast<uint16_t*>(block + format.quant_bytes());
      for (int64_t i = 0; i < (format.block_bytes() - format.quant_bytes()) / 2; ++i) halves[i] = float_to_half(random.number());
    }
    return data;
  }
  for (int64_t i = 0; i < panels * kPanel * matrix.columns; ++i) {
    const float x = random.number();
    if (format.kind == Kind::kFloat32) reinterpret_cast<float*>(data.get())[i] = x;
    if (format.kind == Kind::kFloat16) reinterpret_cast<uint16_t*>(data.get())[i] = float_to_half(x);
    if (format.kind == Kind::kBFloat16) reinterpret_cast<uint16_t*>(data.get())[i] = uint16_t(float_to_bits(x) >> 16);
  }
  return data;
}

void linear(const Kernels& set, const char* name, const Format& format) {
  Random random{7};
  Digest products, reading;
  for (const int64_t count : {1, 2, 3, 5, 8, 13, 33})
    for (const int64_t columns : {32, 96, 200, 576}) {
      if (format.kind == Kind::kQuantized && columns % format.group) continue;
      Matrix matrix{format, 16 + random.below(60), columns, nullptr};
      const auto data = content(random, matrix);
      matrix.data = data.get();
      const int64_t width = padded(columns, kBlock);
      const auto x = numbers(random, count * columns);
      const auto values = zeros<int8_t>(count * width);
      const auto scales = zeros<float>(count * width / 32);
      const auto sums = zeros<int32_t>(count * width / 16);
      for (int64_t r = 0; r < count; ++r)
        set.quantize(x.get() + r * columns, columns, values.get() + r * width, scales.get() + r * (width / 32), sums.get() + r * (width / 16));
      Rows rows{count, columns, x.get(), columns, values.get(), scales.get(), sums.get()};
      const auto bias = numbers(random, matrix.rows);
      const auto out = numbers(random, count * matrix.rows);
      set.multiply(matrix, rows, 0, matrix.panels(), nullptr, out.get(), matrix.rows, false);
      products.take(out.get(), count * matrix.rows);
      set.multiply(matrix, rows, 1, matrix.panels(), bias.get(), out.get(), matrix.rows, true);
      products.take(out.get(), count * matrix.rows);
      const auto row = zeros<float>(columns);
      set.read_row(matrix, random.below(matrix.rows), row.get());
      reading.take(row.get(), columns);
    }
  say(set, (std::string("multiply ") + name).c_str(), products);
  say(set, (std::string("read_row ") + name).c_str(), reading);
}

void quantize(const Kernels& set) {
  Random random{11};
  Digest digest;
  for (const int64_t columns : {1, 31, 32, 33, 576}) {
    const int64_t width = padded(columns, kBlock);
    const auto x = numbers(random, columns);
    if (columns == 576) x[100] = bits_to_float(0x7F800000u), x[200] = bits_to_float(0x7FC00000u);
    const auto values = zeros<int8_t>(width);
    const auto scales = zeros<float>(width / 32);
    const auto sums = zeros<int32_t>(width / 16);
    set.quantize(x.get(), columns, values.get(), scales.get(), sums.get());
    digest.take(values.get(), width), digest.take(scales.get(), width / 32), digest.take(sums.get(), width / 16);
  }
  say(set, "quantize", digest);
}

void elementwise(const Kernels& set) {
  Random random{13};
  Digest norm, silu, gelu, sum, cap, rotated, greatest;
  for (const int64_t n : {1, 15, 16, 17, 64, 577}) {
    const auto x = numbers(random, n), y = numbers(random, n), out = numbers(random, n);
    for (int64_t i = 0; i < n; ++i) y[i] *= 40;
    set.rms_norm(x.get(), y.get(), 1e-5f, n, out.get()), norm.take(out.get(), n);
    set.activate(Activation::kSilu, y.get(), x.get(), n, out.get()), silu.take(out.get(), n);
    set.activate(Activation::kGeluTanh, y.get(), x.get(), n, out.get()), gelu.take(out.get(), n);
    const int64_t index = set.argmax(y.get(), n);
    greatest.take(&index, 1);
    set.softcap(y.get(), 30, n), cap.take(y.get(), n);
    set.add(x.get(), y.get(), n), sum.take(x.get(), n);
  }
  for (const int64_t pairs : {3, 16, 32}) {
    const auto heads = numbers(random, 5 * 64), cosine = numbers(random, pairs), sine = numbers(random, pairs);
    set.rotate(heads.get(), 5, 64, pairs, cosine.get(), sine.get()), rotated.take(heads.get(), 5 * 64);
  }
  say(set, "rms_norm", norm), say(set, "silu", silu), say(set, "gelu_tanh", gelu), say(set, "softcap", cap), say(set, "add", sum);
  say(set, "rotate", rotated), say(set, "argmax", greatest);
}

void sampling(const Kernels& set) {
  Random random{19};
  Digest weighed, arrived;
  for (const int64_t n : {1, 16, 50, 333}) {
    const auto x = numbers(random, n), out = zeros<float>(n);
    const auto ids = zeros<int32_t>(n);
    for (int64_t i = 0; i < n; ++i) x[i] *= 60, ids[i] = int32_t(random.below(50000));
    const float maximum = x[set.argmax(x.get(), n)];
    set.weigh(x.get(), maximum, 1.25f, n, out.get()), weighed.take(out.get(), n);
    for (int64_t i = 0; i < n; ++i) x[i] = out[i] + 1e-6f;
    const uint32_t number = set.least_number(int32_t(random.below(50000)), n, 0x12345678u, 0x9ABCDEF0u);
    arrived.take(&number, 1);
    for (const int32_t* some : {static_cast<const int32_t*>(nullptr), static_cast<const int32_t*>(ids.get())}) {
      const float least = set.arrive(x.get(), some, 7, n, 0x12345678u, 0x9ABCDEF0u, out.get());
      arrived.take(out.get(), n), arrived.take(&least, 1);
    }
  }
  say(set, "weigh", weighed), say(set, "arrive", arrived);
}

void weights(const Kernels& set) {
  Random random{23};
  Digest digest;
  for (int round = 0; round < 40; ++round)
    for (const int32_t bits : {4, 8}) {
      const int64_t count = 1 + random.below(kBlock);
      const auto x = numbers(random, count);
      const auto quants = zeros<int8_t>(count);
      uint16_t scale = 0;
      set.quantize_weights(x.get(), count, bits, quants.get(), &scale);
      digest.take(quants.get(), count), digest.take(&scale, 1);
    }
  say(set, "quantize_weights", digest);
}

void attention(const Kernels& set, const char* name, KVType type) {
  Random random{17};
  Digest digest;
  for (const int64_t head_dim : {16, 20, 64})
    for (const int64_t per_block : {1, 12, 16, 32})
      for (const int64_t tokens : {1, 3, 9}) {
        KVLayer cache{type, 24, 2, per_block, head_dim, nullptr, nullptr, nullptr, nullptr};
        const int64_t bytes = type == KVType::kInt8 ? 1 : 2, slots = cache.num_blocks * cache.kv_heads;
        const auto keys = zeros<uint8_t>(slots * head_dim * cache.key_stride() * bytes);
        const auto values = zeros<uint8_t>(slots * per_block * cache.value_stride() * bytes);
        const auto key_scales = zeros<float>(slots * cache.key_stride()), value_scales = zeros<float>(slots * cache.key_stride());
        cache.keys = keys.get(), cache.values = values.get(), cache.key_scales = key_scales.get(), cache.value_scales = value_scales.get();
        std::vector<int32_t> table(cache.num_blocks);
        for (int64_t i = 0; i < cache.num_blocks; ++i) table[i] = int32_t((i * 7 + 3) % cache.num_blocks);
        const int64_t length = tokens + random.below(cache.num_blocks * per_block - tokens + 1);
        for (int64_t t = 0; t < length; ++t) {
          const auto key = numbers(random, 2 * head_dim), value = numbers(random, 2 * head_dim);
          set.store(cache, table[t / per_block], t % per_block, key.get(), value.get());
        }
        digest.take(keys.get(), slots * head_dim * cache.key_stride() * bytes);
        const int64_t heads = 1 + random.below(4), stride = heads * head_dim + 5;
        const auto queries = numbers(random, tokens * stride), out = zeros<float>(tokens * stride);
        Attention task;
        task.cache = &cache, task.table = table.data(), task.kv_head = random.below(2), task.start = length - tokens, task.tokens = tokens;
        task.heads = heads, task.queries = queries.get(), task.query_stride = stride, task.out = out.get(), task.out_stride = stride;
        task.scale = 0.125f, task.softcap = random.below(2) ? 20.0f : 0.0f, task.window = random.below(2) ? 1 + random.below(40) : 0;
        const auto scratch = zeros<float>(set.attend_scratch(task));
        set.attend(task, scratch.get());
        digest.take(out.get(), tokens * stride);
        const int64_t segments = task.last_segment() - task.first_segment(), floats = set.partial_floats(task);
        const auto partials = zeros<float>(segments * floats), room = zeros<float>(set.segment_floats(task));
        for (int64_t i = segments - 1; i >= 0; --i)
          set.attend_segment(task, task.first_segment() + i, partials.get() + i * floats, room.get());
        const auto joined = zeros<float>(tokens * stride);
        task.out = joined.get();
        set.join_segments(task, partials.get());
        if (std::memcmp(joined.get(), out.get(), tokens * stride * sizeof(float))) {
          std::fprintf(stderr, "%s %s: threads that share a call compute another\n", set.name, name);
          std::exit(1);
        }
      }
  say(set, name, digest);
}

}  // namespace

int main() {
  int64_t count = 0;
  const Kernels* const* sets = available_kernels(&count);
  for (int64_t i = 0; i < count; ++i) {
    const Kernels& set = *sets[i];
    linear(set, "float32", {Kind::kFloat32, 32, 32, 0, false});
    linear(set, "float16", {Kind::kFloat16, 16, 32, 0, false});
    linear(set, "bfloat16", {Kind::kBFloat16, 16, 32, 0, false});
    for (const int32_t bits : {4, 5, 8})
      for (const int32_t group : {16, 32})
        for (const bool has_min : {false, true}) {
          char name[64];
          std::snprintf(name, sizeof name, "%d bits, %d columns a scale%s", bits, group, has_min ? ", minimum" : "");
          linear(set, name, {Kind::kQuantized, bits, group, has_min ? 0 : bits == 8 ? 0 : 1 << (bits - 1), has_min});
        }
    quantize(set), weights(set), sampling(set);
    elementwise(set);
    attention(set, "attend float16", KVType::kFloat16);
    attention(set, "attend int8", KVType::kInt8);
  }
}
