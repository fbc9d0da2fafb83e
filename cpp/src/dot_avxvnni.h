// Products of int8 with the quantised weights of a panel on AVX2 with VNNI; see dot_portable.h for what each operation means.
#pragma once

#include "quad_avx2.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kQuantizedRows = 4;
constexpr int64_t kPlainRows = 6;

template <int kBits>
constexpr int64_t kDotColumns = 32;

// The instruction takes unsigned weights: those of 8 bits are made 128 more.
template <int kBits>
constexpr int32_t kDotOffset = kBits == 8 ? 128 : 0;

template <int kBits>
struct Dot {
  __m256i lo, hi;

  Dot() : lo(_mm256_setzero_si256()), hi(_mm256_setzero_si256()) {}
  void add(const Quad<kBits>& quad, const int8_t* x) {
    lo = _mm256_dpbusd_avx_epi32(lo, above_zero(quad.lo), four_of(x));
    hi = _mm256_dpbusd_avx_epi32(hi, above_zero(quad.hi), four_of(x));
  }
  I32 sum() const { return {lo, hi}; }

 private:
  static __m256i above_zero(__m256i weights) { return kBits == 8 ? _mm256_xor_si256(weights, _mm256_set1_epi8(-128)) : weights; }
};

}  // namespace headrace::HEADRACE_ISA
