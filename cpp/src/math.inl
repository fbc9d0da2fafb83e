// What computations share: the ends of rows that are no multiple of kLanes, and functions that the standard library computes otherwise on
// every machine. Arguments of max and min are in the order that keeps, or drops, a NaN: the second is what they give for one.

namespace headrace::HEADRACE_ISA {

// Lanes from n on are zero, and what lies behind the n numbers is not read.
inline F32 load(const float* p, int64_t n) {
  if (n >= kLanes) return load(p);
  float lanes[kLanes] = {};
  std::memcpy(lanes, p, n * sizeof(float));
  return load(lanes);
}

// What lies behind the n numbers is not written.
inline void store(float* p, F32 a, int64_t n) {
  if (n >= kLanes) return store(p, a);
  float lanes[kLanes];
  store(lanes, a);
  std::memcpy(p, lanes, n * sizeof(float));
}

// Of a vector whose lanes are all the same.
inline float any_lane(F32 a) {
  float lanes[kLanes];
  store(lanes, a);
  return lanes[0];
}

// e^x is power * (1 + rest): power = 2^n of the integer next to x / ln 2, or 0 below -87.7; rest = e^r - 1 of what is left, r + r² q(r) with
// the polynomial q of Cephes' expf. Beyond ±88 it is that of ±88; NaN stays NaN, in rest.
struct Exponential {
  F32 power, rest;
};

inline Exponential exponential(F32 x) {
  x = min(broadcast(88.0f), max(broadcast(-88.0f), x));
  const F32 n = max(round(mul(x, broadcast(0x1.715476p+0f))), broadcast(-127.0f));
  const F32 r = fma(n, broadcast(0x1.05c610p-29f), fma(n, broadcast(-0x1.62e430p-1f), x));
  F32 q = broadcast(1.9875691500e-4f);
  q = fma(q, r, broadcast(1.3981999507e-3f));
  q = fma(q, r, broadcast(8.3334519073e-3f));
  q = fma(q, r, broadcast(4.1665795894e-2f));
  q = fma(q, r, broadcast(1.6666665459e-1f));
  q = fma(q, r, broadcast(5.0000001201e-1f));
  return {power_of_two(n), fma(q, mul(r, r), r)};
}

inline F32 exp(F32 x) {
  const Exponential e = exponential(x);
  return fma(e.power, e.rest, e.power);
}

// (e^2x - 1) / (e^2x + 1), by e^2x - 1 so that small numbers lose nothing.
inline F32 tanh(F32 x) {
  const Exponential e = exponential(add(x, x));
  const F32 less_one = fma(e.power, e.rest, sub(e.power, broadcast(1)));
  return div(less_one, add(less_one, broadcast(2)));
}

// 1 / (1 + e^-x), times y.
inline F32 times_sigmoid(F32 y, F32 x) { return div(y, add(broadcast(1), exp(sub(broadcast(0), x)))); }

inline F32 capped(F32 x, F32 cap) { return mul(cap, tanh(div(x, cap))); }

}  // namespace headrace::HEADRACE_ISA
