// Products of int8 with the quantised weights of a panel on AVX2; see dot_portable.h for what each operation means.
#pragma once

#include "quad_avx2.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kQuantizedRows = 4;
constexpr int64_t kPlainRows = 6;

// Products of 4 and 5 bits are added up in 16 bits: 15 * 127 * 2 * 8 quads, or 31 * 127 * 2 * 4 quads, are less than 32768.
template <int kBits>
constexpr int64_t kDotColumns = kBits == 5 ? 16 : 32;

template <int kBits>
constexpr int32_t kDotOffset = 0;

// Says that both may have changed here. Where the compiler knows better it first makes all products of a block, for which there are too few
// registers, and adds them up behind: half as fast.
inline void keep_order(__m256i& a, __m256i& b) { asm("" : "+x"(a), "+x"(b)); }

template <int kBits>
struct Dot {
  __m256i lo, hi;

  // Written out: GCC compiles a constructor of its own making for the processor that the rest is for.
  Dot() : lo(_mm256_setzero_si256()), hi(_mm256_setzero_si256()) {}
  void add(const Quad<kBits>& quad, const int8_t* x) {
    lo = _mm256_add_epi16(lo, _mm256_maddubs_epi16(quad.lo, four_of(x)));
    hi = _mm256_add_epi16(hi, _mm256_maddubs_epi16(quad.hi, four_of(x)));
    keep_order(lo, hi);
  }
  I32 sum() const { return {_mm256_madd_epi16(lo, _mm256_set1_epi16(1)), _mm256_madd_epi16(hi, _mm256_set1_epi16(1))}; }
};

// Signed times signed: |weight| times x with the weight's sign. Two products are at most 2 * 128 * 127, less than 32768; sums need 32 bits.
template <>
struct Dot<8> {
  __m256i lo, hi;

  Dot() : lo(_mm256_setzero_si256()), hi(_mm256_setzero_si256()) {}
  void add(const Quad<8>& quad, const int8_t* x) {
    lo = _mm256_add_epi32(lo, products(quad.lo, four_of(x)));
    hi = _mm256_add_epi32(hi, products(quad.hi, four_of(x)));
    keep_order(lo, hi);
  }
  I32 sum() const { return {lo, hi}; }

 private:
  static __m256i products(__m256i w, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
  }
};

}  // namespace headrace::HEADRACE_ISA
