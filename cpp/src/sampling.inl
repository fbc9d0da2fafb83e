// What drawing a token does to all logits of a row. The meaning of both is headrace/engine/sampler.py's (_weights, race_numbers, _first), to the
// last bit: nothing is fused.

namespace headrace::HEADRACE_ISA {

// Cephes' expf.
inline F32 weight_of(F32 x, float maximum, float scale) {
  constexpr float kLeast = -87.0f;
  const F32 exponent = mul(sub(x, broadcast(maximum)), broadcast(scale));
  // 1 from kLeast on, 0 below it: a difference that is not 0 has some 1e-5.
  const F32 kept = max(min(add(mul(sub(exponent, broadcast(kLeast)), broadcast(1e30f)), broadcast(1)), broadcast(1)), broadcast(0));
  F32 rest = max(exponent, broadcast(kLeast));
  const F32 power = round(mul(rest, broadcast(1.44269504088896341f)));
  rest = sub(rest, mul(power, broadcast(0.693359375f)));
  rest = sub(rest, mul(power, broadcast(-2.12194440e-4f)));
  F32 weight = mul(rest, broadcast(1.9875691500e-4f));
  constexpr float kTerms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  for (const float term : kTerms)
    weight = mul(add(weight, broadcast(term)), rest);
  weight = add(add(mul(weight, rest), rest), broadcast(1));
  return mul(mul(weight, power_of_two(power)), kept);
}

inline void weigh(const float* x, float maximum, float scale, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, weight_of(load(x + i), maximum, scale));
  if (i == n) return;
  float rest[kLanes] = {};
  std::memcpy(rest, x + i, (n - i) * sizeof(float));
  store(rest, weight_of(load(rest), maximum, scale));
  std::memcpy(out + i, rest, (n - i) * sizeof(float));
}

inline float arrive(const float* weights, const int32_t* ids, int32_t first_id, int64_t n, uint32_t first_key, uint32_t second_key, float* out) {
  // A plain loop: compilers make vectors of it, and of the conversion from unsigned numbers, which is another one everywhere.
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t number = race_number(uint32_t(ids ? ids[i] : first_id + int32_t(i)), first_key, second_key);
    out[i] = (float(number) + 0.5f) * 0x1p-32f / weights[i];
  }
  F32 least = broadcast(out[0]);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) least = min(least, load(out + i));
  float each[kLanes];
  store(each, least);
  for (int64_t j = 1; j < kLanes; ++j) each[0] = each[j] < each[0] ? each[j] : each[0];
  for (; i < n; ++i) each[0] = out[i] < each[0] ? out[i] : each[0];
  return each[0];
}

inline uint32_t least_number(int32_t first_id, int64_t n, uint32_t first_key, uint32_t second_key) {
  uint32_t least = UINT32_MAX;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t number = race_number(uint32_t(first_id) + uint32_t(i), first_key, second_key);
    least = number < least ? number : least;
  }
  return least;
}

inline void fill_sampling(Kernels& table) {
  table.least_number = least_number;
  table.weigh = weigh;
  table.arrive = arrive;
}

}  // namespace headrace::HEADRACE_ISA
