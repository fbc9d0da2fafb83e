// float16 and bfloat16 without an instruction set: exact to float32, and rounded to the nearest, halves to even, back.
#pragma once

#include <cstdint>
#include <cstring>

namespace headrace {

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float bfloat_to_float(uint16_t b) { return bits_to_float(uint32_t(b) << 16); }

inline uint16_t float_to_bfloat(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(bits >> 16 | 0x40u);
  return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1Fu, mantissa = h & 0x3FFu;
  if (exponent == 0x1F)  // infinite, or NaN, which is made quiet as processors do
    return bits_to_float(sign | 0x7F800000u | (mantissa ? 0x400000u | mantissa << 13 : 0));
  if (exponent) return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = float(mantissa) * (1.0f / (1 << 24));
  return sign ? -small : small;
}

inline uint16_t float_to_half(float x) {
  const uint32_t bits = float_to_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return uint16_t(sign | 0x7E00u | (magnitude >> 13 & 0x3FFu));
  if (magnitude >= 0x477FF000u) return uint16_t(sign | 0x7C00u);  // 65520 and above round to infinity
  if (magnitude >= 0x38800000u) {                                 // normal
    const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1u);
    return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
  }
  // Subnormal: a multiple of 2^-24, which adding 0.5 rounds to.
  const float shifted = bits_to_float(magnitude) + 0.5f;
  return uint16_t(sign | (float_to_bits(shifted) - 0x3F000000u));
}

}  // namespace headrace
