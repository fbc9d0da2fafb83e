// Products of int8 with the quantised weights of a panel on NEON with dotprod; see dot_portable.h for what each operation means.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace headrace::HEADRACE_ISA {

constexpr int64_t kQuantizedRows = 4;
constexpr int64_t kPlainRows = 4;

template <int kBits>
constexpr int64_t kDotColumns = 32;

template <int kBits>
constexpr int32_t kDotOffset = 0;

struct I32 {
  int32x4_t quarter[4];
};

inline I32 no_sum() { return {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}; }
inline I32 add(const I32& a, const I32& b) {
  return {vaddq_s32(a.quarter[0], b.quarter[0]), vaddq_s32(a.quarter[1], b.quarter[1]), vaddq_s32(a.quarter[2], b.quarter[2]),
          vaddq_s32(a.quarter[3], b.quarter[3])};
}
inline I32 sub(const I32& a, int32_t b) {
  const int32x4_t less = vdupq_n_s32(-b);
  return add(a, {less, less, less, less});
}
inline F32 to_float(const I32& a) {
  return {vcvtq_f32_s32(a.quarter[0]), vcvtq_f32_s32(a.quarter[1]), vcvtq_f32_s32(a.quarter[2]), vcvtq_f32_s32(a.quarter[3])};
}

// Four rows in each; a row's four columns are one 32-bit lane.
template <int kBits>
struct Quad {
  int8x16_t quarter[4];
};

inline int8x16_t load_bytes(const uint8_t* p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }

// Bit i of 16 as 16 in byte i.
inline int8x16_t fifth_bits(const uint8_t* p) {
  const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
  const uint8x16_t bytes = vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1]));
  return vreinterpretq_s8_u8(vandq_u8(vtstq_u8(bytes, bit), vdupq_n_u8(16)));
}

template <int kBits>
inline Quad<kBits> load_expanded(const uint8_t* p) {
  return {load_bytes(p), load_bytes(p + 16), load_bytes(p + 32), load_bytes(p + 48)};
}
template <int kBits>
inline void store_expanded(uint8_t* p, const Quad<kBits>& quad) {
  for (int i = 0; i < 4; ++i) vst1q_s8((int8_t*)p + 16 * i, quad.quarter[i]);
}

template <int kBits>
inline Quad<kBits> load_quad(const uint8_t* quants, int64_t index) {
  if constexpr (kBits == 8) {
    return load_expanded<8>(quants + index * 64);
  } else {
    const uint8x16_t packed[2] = {vld1q_u8(quants + index * 32), vld1q_u8(quants + index * 32 + 16)};
    Quad<kBits> quad;
    for (int i = 0; i < 2; ++i) {
      quad.quarter[i] = vreinterpretq_s8_u8(vandq_u8(packed[i], vdupq_n_u8(15)));
      quad.quarter[2 + i] = vreinterpretq_s8_u8(vshrq_n_u8(packed[i], 4));
    }
    if constexpr (kBits == 5)
      for (int i = 0; i < 4; ++i) quad.quarter[i] = vorrq_s8(quad.quarter[i], fifth_bits(quants + 256 + index * 8 + i * 2));
    return quad;
  }
}

template <int kBits>
struct Dot {
  I32 products;

  Dot() : products(no_sum()) {}
  void add(const Quad<kBits>& quad, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    const int8x16_t values = vreinterpretq_s8_s32(vdupq_n_s32(four));
    for (int i = 0; i < 4; ++i) products.quarter[i] = vdotq_s32(products.quarter[i], quad.quarter[i], values);
  }
  I32 sum() const { return products; }
};

}  // namespace headrace::HEADRACE_ISA
