// The quantised weights of a panel in registers of AVX2; see dot_portable.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace headrace::HEADRACE_ISA {

struct I32 {
  __m256i lo, hi;
};

inline I32 no_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline I32 add(I32 a, I32 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I32 sub(I32 a, int32_t b) { return {_mm256_sub_epi32(a.lo, _mm256_set1_epi32(b)), _mm256_sub_epi32(a.hi, _mm256_set1_epi32(b))}; }
inline F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

// Rows 0 to 7 and 8 to 15; a row's four columns are one 32-bit lane.
template <int kBits>
struct Quad {
  __m256i lo, hi;
};

inline __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Bit i of 32 as 16 in byte i.
inline __m256i fifth_bits(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  const __m256i of_byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(int32_t(word)), of_byte);
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit), _mm256_set1_epi8(16));
}

template <int kBits>
inline Quad<kBits> load_quad(const uint8_t* quants, int64_t index) {
  if constexpr (kBits == 8) {
    return {load_bytes(quants + index * 64), load_bytes(quants + index * 64 + 32)};
  } else {
    const __m256i packed = load_bytes(quants + index * 32), nibble = _mm256_set1_epi8(15);
    const __m256i lo = _mm256_and_si256(packed, nibble), hi = _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble);
    if constexpr (kBits == 4) return {lo, hi};
    const uint8_t* fifth = quants + 256 + index * 8;
    return {_mm256_or_si256(lo, fifth_bits(fifth)), _mm256_or_si256(hi, fifth_bits(fifth + 4))};
  }
}

template <int kBits>
inline void store_expanded(uint8_t* p, const Quad<kBits>& quad) {
  _mm256_storeu_si256((__m256i*)p, quad.lo), _mm256_storeu_si256((__m256i*)(p + 32), quad.hi);
}
template <int kBits>
inline Quad<kBits> load_expanded(const uint8_t* p) {
  return {load_bytes(p), load_bytes(p + 32)};
}

// Four numbers of x in each 32-bit lane.
inline __m256i four_of(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return _mm256_set1_epi32(four);
}

}  // namespace headrace::HEADRACE_ISA
