// Instead of the intrinsics of AVX-512 and AVX-VNNI those of SIMDe, which compute the same with AVX2: given to the compiler with -include, so
// that kernels_avx512.cpp is compiled as it is and runs where there is no such processor. Not everything here is in SIMDe: the rest is below,
// as Intel's guide defines it. The library says that this machine has every instruction set. scripts/emulate builds it.
#pragma once

#include <immintrin.h>

#include <cstring>

#include <simde/x86/avx512.h>

#include "target.h"

#undef HEADRACE_TARGET_BEGIN
#undef HEADRACE_TARGET_END
#define HEADRACE_TARGET_BEGIN(features)
#define HEADRACE_TARGET_END
#define __builtin_cpu_supports(feature) true

namespace emulated {

// Lane by lane, of registers as arrays.
template <class To, class ToLane, class FromLane, class From, class Convert>
inline To convert(From from, Convert convert_lane) {
  constexpr int n = sizeof(To) / sizeof(ToLane) < sizeof(From) / sizeof(FromLane) ? sizeof(To) / sizeof(ToLane) : sizeof(From) / sizeof(FromLane);
  FromLane in[sizeof(From) / sizeof(FromLane)];
  ToLane out[sizeof(To) / sizeof(ToLane)] = {};
  std::memcpy(in, &from, sizeof from);
  for (int i = 0; i < n; ++i) out[i] = convert_lane(in[i]);
  To to;
  std::memcpy(&to, out, sizeof to);
  return to;
}

template <class To, class ToLane, class FromLane, class From>
inline To convert(From from) {
  return convert<To, ToLane, FromLane>(from, [](FromLane x) { return ToLane(x); });
}

inline simde__m512 cvtepi32_ps(simde__m512i a) { return convert<simde__m512, float, int32_t>(a); }
inline simde__m512i cvtepi8_epi32(__m128i a) { return convert<simde__m512i, int32_t, int8_t>(a); }
inline simde__m512i cvtepu8_epi32(__m128i a) { return convert<simde__m512i, int32_t, uint8_t>(a); }
inline simde__m512i cvtepu16_epi32(__m256i a) { return convert<simde__m512i, int32_t, uint16_t>(a); }
inline __m128i cvtepi32_epi8(simde__m512i a) { return convert<__m128i, int8_t, int32_t>(a); }
inline simde__m512 cvtph_ps(__m256i a) {
  return convert<simde__m512, float, uint16_t>(a, [](uint16_t half) { return _cvtsh_ss(half); });
}
inline __m256i cvtps_ph(simde__m512 a, int) {
  return convert<__m256i, uint16_t, float>(a, [](float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); });
}
inline simde__m512i cvtps_epi32(simde__m512 a) {
  return convert<simde__m512i, int32_t, float>(a, [](float x) { return _mm_cvtss_si32(_mm_set_ss(x)); });
}
inline __m256 extractf32x8_ps(simde__m512 a, int half) {
  __m256 halves[2];
  std::memcpy(halves, &a, sizeof halves);
  return halves[half];
}

}  // namespace emulated

#define __m512 simde__m512
#define __m512i simde__m512i
#define __mmask16 simde__mmask16
#define __mmask64 simde__mmask64

#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtepi8_epi32 emulated::cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_ph emulated::cvtps_ph
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps

#define _mm512_add_epi32 simde_mm512_add_epi32
#define _mm512_add_ps simde_mm512_add_ps
#define _mm512_and_si512 simde_mm512_and_si512
#define _mm512_andnot_ps simde_mm512_andnot_ps
#define _mm512_castps512_ps256 simde_mm512_castps512_ps256
#define _mm512_castsi256_si512 simde_mm512_castsi256_si512
#define _mm512_castsi512_ps simde_mm512_castsi512_ps
#define _mm512_castps_si512 simde_mm512_castps_si512
#define _mm512_cmp_ps_mask simde_mm512_cmp_ps_mask
#define _mm512_div_ps simde_mm512_div_ps
#define _mm512_dpbusd_epi32 simde_mm512_dpbusd_epi32
#define _mm512_fmadd_ps simde_mm512_fmadd_ps
#define _mm512_inserti64x4 simde_mm512_inserti64x4
#define _mm512_loadu_ps simde_mm512_loadu_ps
#define _mm512_loadu_si512 simde_mm512_loadu_si512
#define _mm512_mask_blend_ps simde_mm512_mask_blend_ps
#define _mm512_maskz_set1_epi8 simde_mm512_maskz_set1_epi8
#define _mm512_max_ps simde_mm512_max_ps
#define _mm512_min_ps simde_mm512_min_ps
#define _mm512_mul_ps simde_mm512_mul_ps
#define _mm512_or_si512 simde_mm512_or_si512
#define _mm512_roundscale_ps simde_mm512_roundscale_ps
#define _mm512_set1_epi32 simde_mm512_set1_epi32
#define _mm512_set1_epi8 simde_mm512_set1_epi8
#define _mm512_set1_ps simde_mm512_set1_ps
#define _mm512_setzero_si512 simde_mm512_setzero_si512
#define _mm512_slli_epi32 simde_mm512_slli_epi32
#define _mm512_srli_epi16 simde_mm512_srli_epi16
#define _mm512_storeu_ps simde_mm512_storeu_ps
#define _mm512_storeu_si512 simde_mm512_storeu_si512
#define _mm512_sub_epi32 simde_mm512_sub_epi32
#define _mm512_sub_ps simde_mm512_sub_ps
#define _mm512_xor_si512 simde_mm512_xor_si512
#define _mm256_dpbusd_avx_epi32 simde_mm256_dpbusd_epi32
