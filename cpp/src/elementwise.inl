// Norms, activations, rotary embedding: what is computed number by number.

namespace headrace::HEADRACE_ISA {

inline float sum_of_squares(const float* x, int64_t n) {
  F32 squares = broadcast(0);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32 a = load(x + i);
    squares = fma(a, a, squares);
  }
  if (i < n) {
    float rest[kLanes] = {};
    std::memcpy(rest, x + i, (n - i) * sizeof(float));
    const F32 a = load(rest);
    squares = fma(a, a, squares);
  }
  return sum(squares);
}

inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

inline void add_to(float* x, const float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += y[i];
}

inline void fill_elementwise(Kernels& table) {
  table.rms_norm = rms_norm;
  table.add = add_to;
}

}  // namespace headrace::HEADRACE_ISA
