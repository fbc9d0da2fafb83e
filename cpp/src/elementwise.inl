// Norms, activations, rotary embedding: what is computed number by number.

namespace headrace::HEADRACE_ISA {

inline float sum_of_squares(const float* x, int64_t n) {
  F32 squares = broadcast(0);
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 a = load(x + i, n - i);
    squares = fma(a, a, squares);
  }
  return sum(squares);
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  const F32 factor = broadcast(1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps));
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, mul(mul(load(x + i, n - i), factor), load(weight + i, n - i)), n - i);
}

inline F32 silu(F32 x) { return times_sigmoid(x, x); }

// x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x³): (1 + tanh(u)) / 2 is the sigmoid of 2 u.
inline F32 gelu_tanh(F32 x) {
  const F32 cubic = fma(mul(x, x), broadcast(0.044715f), broadcast(1));
  return times_sigmoid(x, mul(mul(x, cubic), broadcast(1.5957691216f)));
}

inline void activate(Activation kind, const float* gate, const float* up, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const F32 x = load(gate + i, n - i);
    store(out + i, mul(kind == Activation::kSilu ? silu(x) : gelu_tanh(x), load(up + i, n - i)), n - i);
  }
}

inline void add_to(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, add(load(x + i, n - i), load(y + i, n - i)), n - i);
}

inline void softcap(float* x, float cap, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, capped(load(x + i, n - i), broadcast(cap)), n - i);
}

inline void rotate(float* heads, int64_t count, int64_t head_dim, int64_t pairs, const float* cosine, const float* sine) {
  for (int64_t head = 0; head < count; ++head, heads += head_dim) {
    for (int64_t i = 0; i < pairs; i += kLanes) {
      const int64_t n = pairs - i;
      const F32 a = load(heads + i, n), b = load(heads + pairs + i, n), c = load(cosine + i, n), s = load(sine + i, n);
      store(heads + i, sub(mul(a, c), mul(b, s)), n);
      store(heads + pairs + i, add(mul(b, c), mul(a, s)), n);
    }
  }
}

inline int64_t argmax(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    // Few vectors have a number that is greater than all before, or NaN.
    if (!exceeding(load(x + i, n - i), broadcast(x[best]))) continue;
    for (int64_t j = i; j < n && j < i + kLanes; ++j) {
      if (x[j] != x[j]) return j;
      if (x[j] > x[best]) best = j;
    }
  }
  return best;
}

inline void fill_elementwise(Kernels& table) {
  table.rms_norm = rms_norm;
  table.activate = activate;
  table.add = add_to;
  table.softcap = softcap;
  table.rotate = rotate;
  table.argmax = argmax;
}

}  // namespace headrace::HEADRACE_ISA
