// Weights to quants, where floats are quantised when they are loaded.

namespace headrace::HEADRACE_ISA {

constexpr uint16_t kNoScale = 0x7E00;  // NaN: so are products

// kBlock numbers.
struct Weights {
  F32 low, high;
};

inline Weights nearest_quants(const Weights& x, float inverse, float least, float most) {
  const F32 factor = broadcast(inverse), lower = broadcast(least), upper = broadcast(most);
  return {round(min(max(mul(x.low, factor), lower), upper)), round(min(max(mul(x.high, factor), lower), upper))};
}

inline float product(const Weights& a, const Weights& b) { return sum(fma(a.high, b.high, mul(a.low, b.low))); }

// Of 19 shares of -8 that the largest number may have, the scale with the least squared error.
inline float best_scale_of_4_bits(const Weights& x, float largest) {
  float greatest_gain = -1, best = 0;
  for (int step = -9; step <= 9; ++step) {
    const Weights quants = nearest_quants(x, (-8.0f + 0.1f * float(step)) / largest, -8, 7);
    const float products = product(x, quants), scale = products / product(quants, quants);
    // The error is sum(x x) less this.
    const float gain = products * scale;
    if (gain > greatest_gain) greatest_gain = gain, best = scale;
  }
  return best;
}

inline void quantize_weights(const float* x, int64_t count, int32_t bits, int8_t* quants, uint16_t* scale) {
  float numbers[kBlock] = {};
  std::memcpy(numbers, x, count * sizeof(float));
  const Weights weights{load(numbers), load(numbers + kLanes)};
  std::memset(quants, 0, count);
  // Of an infinite number, and of none, it is none.
  if (!(sum(add(sub(weights.low, weights.low), sub(weights.high, weights.high))) == 0)) {
    *scale = kNoScale;
    return;
  }
  const F32 zero = broadcast(0);
  const float most = greatest(max(weights.low, weights.high)), least = -greatest(max(sub(zero, weights.low), sub(zero, weights.high)));
  const float largest = most >= -least ? most : least;
  *scale = float_to_half(bits == 8 || largest == 0 ? std::fabs(largest) / 127 : best_scale_of_4_bits(weights, largest));
  // Where a float16 is so small that it is coarse, the next one rather than one with which the largest number is half a step out of reach.
  if (bits == 8 && half_to_float(*scale) * 127.5f < std::fabs(largest)) ++*scale;
  const float rounded = half_to_float(*scale);
  if (rounded - rounded != 0) *scale = kNoScale;
  if (rounded == 0 || rounded - rounded != 0) return;
  const Weights nearest = bits == 8 ? nearest_quants(weights, 1 / rounded, -127, 127) : nearest_quants(weights, 1 / rounded, -8, 7);
  store(numbers, nearest.low);
  store(numbers + kLanes, nearest.high);
  for (int64_t i = 0; i < count; ++i) quants[i] = int8_t(numbers[i]);
}

inline void fill_weights(Kernels& table) { table.quantize_weights = quantize_weights; }

}  // namespace headrace::HEADRACE_ISA
