// Products of int8 with the quantised weights of a panel, without any instruction set: the meaning of every operation. All of it is exact.
//
// A quad is the weights of a panel (kPanel rows) in four columns. A Dot takes quads and the four numbers of a row of x that belong to each, and
// has the sum of products for each row of the panel: of at most kDotColumns<bits> columns, which is what its lanes hold without overflow.
// Weights of 4 and 5 bits are unsigned, those of 8 signed; x is in [-127, 127].
#pragma once

#include <cstdint>
#include <cstring>

namespace headrace::HEADRACE_ISA {

// Rows of x that are multiplied at once: as many as the registers hold.
constexpr int64_t kQuantizedRows = 1;
constexpr int64_t kPlainRows = 2;

template <int kBits>
constexpr int64_t kDotColumns = kBlock;

// What is added to every weight in a Dot's sum, where the instruction cannot take it as it is.
template <int kBits>
constexpr int32_t kDotOffset = 0;

struct I32 {
  int32_t lane[16];
};

inline I32 no_sum() { return {}; }
inline I32 add(I32 a, I32 b) {
  for (int i = 0; i < 16; ++i) a.lane[i] += b.lane[i];
  return a;
}
inline I32 sub(I32 a, int32_t b) {
  for (int i = 0; i < 16; ++i) a.lane[i] -= b;
  return a;
}
inline F32 to_float(I32 a) {
  float lane[16];
  for (int i = 0; i < 16; ++i) lane[i] = float(a.lane[i]);
  return load(lane);
}

// Byte i: row i / 4, column i % 4.
template <int kBits>
struct Quad {
  int8_t weight[64];
};

// Quad `index` of a block's quants, see format.h.
template <int kBits>
inline Quad<kBits> load_quad(const uint8_t* quants, int64_t index) {
  Quad<kBits> quad;
  if constexpr (kBits == 8) {
    std::memcpy(quad.weight, quants + index * 64, 64);
  } else {
    for (int i = 0; i < 32; ++i) {
      quad.weight[i] = quants[index * 32 + i] & 15;
      quad.weight[32 + i] = quants[index * 32 + i] >> 4;
    }
    if constexpr (kBits == 5)
      for (int i = 0; i < 64; ++i) quad.weight[i] |= (quants[256 + index * 8 + i / 8] >> (i % 8) & 1) << 4;
  }
  return quad;
}

// A quad whose weights are not packed any more, 64 bytes, and back.
template <int kBits>
inline void store_expanded(uint8_t* p, const Quad<kBits>& quad) {
  std::memcpy(p, quad.weight, 64);
}
template <int kBits>
inline Quad<kBits> load_expanded(const uint8_t* p) {
  Quad<kBits> quad;
  std::memcpy(quad.weight, p, 64);
  return quad;
}

template <int kBits>
struct Dot {
  I32 products{};

  void add(const Quad<kBits>& quad, const int8_t* x) {
    for (int i = 0; i < 64; ++i) products.lane[i / 4] += int32_t(quad.weight[i]) * x[i % 4];
  }
  I32 sum() const { return products; }
};

}  // namespace headrace::HEADRACE_ISA
