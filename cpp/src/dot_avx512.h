// Products of int8 with the quantised weights of a panel on AVX-512 with VNNI; see dot_portable.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace headrace::HEADRACE_ISA {

constexpr int64_t kQuantizedRows = 4;
constexpr int64_t kPlainRows = 6;

template <int kBits>
constexpr int64_t kDotColumns = 32;

// The instruction takes unsigned weights: those of 8 bits are 128 more.
template <int kBits>
constexpr int32_t kDotOffset = kBits == 8 ? 128 : 0;

struct I32 {
  __m512i all;
};

inline I32 no_sum() { return {_mm512_setzero_si512()}; }
inline I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.all, b.all)}; }
inline I32 sub(I32 a, int32_t b) { return {_mm512_sub_epi32(a.all, _mm512_set1_epi32(b))}; }
inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.all)}; }

// A row's four columns are one 32-bit lane.
template <int kBits>
struct Quad {
  __m512i all;
};

template <int kBits>
inline Quad<kBits> load_expanded(const uint8_t* p) {
  return {_mm512_loadu_si512(p)};
}
template <int kBits>
inline void store_expanded(uint8_t* p, const Quad<kBits>& quad) {
  _mm512_storeu_si512(p, quad.all);
}

template <int kBits>
inline Quad<kBits> load_quad(const uint8_t* quants, int64_t index) {
  if constexpr (kBits == 8) {
    return load_expanded<8>(quants + index * 64);
  } else {
    const __m256i packed = _mm256_loadu_si256((const __m256i*)(quants + index * 32));
    const __m512i nibbles = _mm512_inserti64x4(_mm512_castsi256_si512(packed), _mm256_srli_epi16(packed, 4), 1);
    const __m512i low = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
    if constexpr (kBits == 4) return {low};
    __mmask64 fifth;
    std::memcpy(&fifth, quants + 256 + index * 8, sizeof fifth);
    return {_mm512_or_si512(low, _mm512_maskz_set1_epi8(fifth, 16))};
  }
}

template <int kBits>
struct Dot {
  __m512i all;

  Dot() : all(_mm512_setzero_si512()) {}
  void add(const Quad<kBits>& quad, const int8_t* x) {
    int32_t four;
    std::memcpy(&four, x, sizeof four);
    const __m512i weights = kBits == 8 ? _mm512_xor_si512(quad.all, _mm512_set1_epi8(-128)) : quad.all;
    all = _mm512_dpbusd_epi32(all, weights, _mm512_set1_epi32(four));
  }
  I32 sum() const { return {all}; }
};

}  // namespace headrace::HEADRACE_ISA
