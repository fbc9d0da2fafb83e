// kLanes floats without any instruction set: the meaning of every operation. Included by one file alone, see kernels_portable.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

namespace headrace::HEADRACE_ISA {

// How many of these a processor has registers for; no result depends on it.
constexpr int kRegisters = 8;

struct F32 {
  float lane[16];
};

#define HEADRACE_EACH(expression)       \
  F32 r;                                \
  for (int i = 0; i < 16; ++i) r.lane[i] = (expression); \
  return r

inline F32 broadcast(float x) { HEADRACE_EACH(x); }
inline F32 load(const float* p) { HEADRACE_EACH(p[i]); }
inline void store(float* p, F32 a) { std::memcpy(p, a.lane, sizeof a.lane); }
inline F32 load_f16(const uint16_t* p) { HEADRACE_EACH(half_to_float(p[i])); }
inline void store_f16(uint16_t* p, F32 a) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(a.lane[i]);
}
inline F32 load_bf16(const uint16_t* p) { HEADRACE_EACH(bfloat_to_float(p[i])); }
inline F32 load_i8(const int8_t* p) { HEADRACE_EACH(float(p[i])); }
// Integers in [-128, 127].
inline void store_i8(int8_t* p, F32 a) {
  for (int i = 0; i < 16; ++i) p[i] = int8_t(a.lane[i]);
}
inline F32 add(F32 a, F32 b) { HEADRACE_EACH(a.lane[i] + b.lane[i]); }
inline F32 sub(F32 a, F32 b) { HEADRACE_EACH(a.lane[i] - b.lane[i]); }
inline F32 mul(F32 a, F32 b) { HEADRACE_EACH(a.lane[i] * b.lane[i]); }
inline F32 div(F32 a, F32 b) { HEADRACE_EACH(a.lane[i] / b.lane[i]); }
// a * b + c, rounded once.
inline F32 fma(F32 a, F32 b, F32 c) { HEADRACE_EACH(std::fma(a.lane[i], b.lane[i], c.lane[i])); }
// The second where either is NaN, as x86 has it.
inline F32 max(F32 a, F32 b) { HEADRACE_EACH(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
inline F32 min(F32 a, F32 b) { HEADRACE_EACH(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
inline F32 abs(F32 a) { HEADRACE_EACH(std::fabs(a.lane[i])); }
// To the nearest integer, halves to even.
inline F32 round(F32 a) { HEADRACE_EACH(std::nearbyint(a.lane[i])); }
// 2^n of integers n in [-126, 127], and 0 of -127.
inline F32 power_of_two(F32 n) { HEADRACE_EACH(bits_to_float(uint32_t(int(n.lane[i]) + 127) << 23)); }
// Lanes below n of a, the others of b.
inline F32 first(int64_t n, F32 a, F32 b) { HEADRACE_EACH(i < n ? a.lane[i] : b.lane[i]); }

#undef HEADRACE_EACH

// Bit i: lane i of a is greater than that of b, or one of them is NaN.
inline uint32_t exceeding(F32 a, F32 b) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= uint32_t(!(a.lane[i] <= b.lane[i])) << i;
  return bits;
}

// By halves; see kernels.h.
inline float sum(F32 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.lane[i] += a.lane[i + half];
  return a.lane[0];
}
inline float greatest(F32 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
  return a.lane[0];
}

}  // namespace headrace::HEADRACE_ISA
