// kLanes floats in four registers of NEON; see simd_portable.h for what each operation means.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace headrace::HEADRACE_ISA {

constexpr int kRegisters = 8;

struct F32 {
  float32x4_t quarter[4];
};

// One instruction for each quarter.
template <class Operation, class... Operands>
inline F32 each(Operation operation, const Operands&... operands) {
  return {operation(operands.quarter[0]...), operation(operands.quarter[1]...), operation(operands.quarter[2]...),
          operation(operands.quarter[3]...)};
}

inline F32 broadcast(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, F32 a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.quarter[i]);
}
inline float32x4_t widen_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline F32 load_f16(const uint16_t* p) { return {widen_f16(p), widen_f16(p + 4), widen_f16(p + 8), widen_f16(p + 12)}; }
inline void store_f16(uint16_t* p, F32 a) {
  for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.quarter[i])));
}
inline float32x4_t widen_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline F32 load_bf16(const uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 4), widen_bf16(p + 8), widen_bf16(p + 12)}; }
inline F32 load_i8(const int8_t* p) {
  const int8x16_t bytes = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))};
}
inline int16x8_t narrow(float32x4_t a, float32x4_t b) { return vcombine_s16(vmovn_s32(vcvtq_s32_f32(a)), vmovn_s32(vcvtq_s32_f32(b))); }
inline void store_i8(int8_t* p, F32 a) {
  vst1_s8(p, vmovn_s16(narrow(a.quarter[0], a.quarter[1]))), vst1_s8(p + 8, vmovn_s16(narrow(a.quarter[2], a.quarter[3])));
}
inline F32 add(F32 a, F32 b) { return each([](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); }, a, b); }
inline F32 sub(F32 a, F32 b) { return each([](float32x4_t x, float32x4_t y) { return vsubq_f32(x, y); }, a, b); }
inline F32 mul(F32 a, F32 b) { return each([](float32x4_t x, float32x4_t y) { return vmulq_f32(x, y); }, a, b); }
inline F32 div(F32 a, F32 b) { return each([](float32x4_t x, float32x4_t y) { return vdivq_f32(x, y); }, a, b); }
inline F32 fma(F32 a, F32 b, F32 c) {
  return each([](float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(z, x, y); }, a, b, c);
}
// Not vmaxq and vminq: those give NaN, where all others give the second number.
inline float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t less(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline F32 max(F32 a, F32 b) { return each(greater, a, b); }
inline F32 min(F32 a, F32 b) { return each(less, a, b); }
inline F32 abs(F32 a) { return each([](float32x4_t x) { return vabsq_f32(x); }, a); }
inline F32 round(F32 a) { return each([](float32x4_t x) { return vrndnq_f32(x); }, a); }
inline F32 power_of_two(F32 n) {
  return each([](float32x4_t x) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(x), vdupq_n_s32(127)), 23)); }, n);
}
inline F32 first(int64_t n, F32 a, F32 b) {
  const int32_t count = n < 16 ? int32_t(n) : 16;
  const int32x4_t lanes = {0, 1, 2, 3};
  F32 r;
  for (int i = 0; i < 4; ++i)
    r.quarter[i] = vbslq_f32(vcltq_s32(lanes, vdupq_n_s32(count - 4 * i)), a.quarter[i], b.quarter[i]);
  return r;
}
inline uint32_t exceeding(F32 a, F32 b) {
  const uint32x4_t bits = {1, 2, 4, 8};
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= vaddvq_u32(vbicq_u32(bits, vcleq_f32(a.quarter[i], b.quarter[i]))) << 4 * i;
  return r;
}
inline float sum(F32 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.quarter[0], a.quarter[2]), vaddq_f32(a.quarter[1], a.quarter[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float greatest(F32 a) {
  const float32x4_t four = greater(greater(a.quarter[0], a.quarter[2]), greater(a.quarter[1], a.quarter[3]));
  const float x = vgetq_lane_f32(four, 0) > vgetq_lane_f32(four, 2) ? vgetq_lane_f32(four, 0) : vgetq_lane_f32(four, 2);
  const float y = vgetq_lane_f32(four, 1) > vgetq_lane_f32(four, 3) ? vgetq_lane_f32(four, 1) : vgetq_lane_f32(four, 3);
  return x > y ? x : y;
}

}  // namespace headrace::HEADRACE_ISA
