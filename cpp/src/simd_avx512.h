// kLanes floats in one register of AVX-512; see simd_portable.h for what each operation means.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace headrace::HEADRACE_ISA {

constexpr int kRegisters = 32;

struct F32 {
  __m512 all;
};

inline F32 broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.all); }
inline F32 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_f16(uint16_t* p, F32 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.all, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F32 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline F32 load_i8(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline void store_i8(int8_t* p, F32 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.all))); }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.all, b.all)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.all, b.all)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.all, b.all)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.all, b.all)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.all, b.all)}; }
inline F32 abs(F32 a) { return {_mm512_andnot_ps(_mm512_set1_ps(-0.0f), a.all)}; }
inline F32 round(F32 a) { return {_mm512_roundscale_ps(a.all, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F32 power_of_two(F32 n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.all), _mm512_set1_epi32(127)), 23))};
}
inline F32 first(int64_t n, F32 a, F32 b) {
  const __mmask16 taken = n <= 0 ? 0 : n < 16 ? __mmask16((1u << n) - 1) : __mmask16(0xFFFF);
  return {_mm512_mask_blend_ps(taken, b.all, a.all)};
}
inline uint32_t exceeding(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.all, b.all, _CMP_NLE_UQ); }
inline float sum(F32 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.all), _mm512_extractf32x8_ps(a.all, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float greatest(F32 a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.all), _mm512_extractf32x8_ps(a.all, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

}  // namespace headrace::HEADRACE_ISA
