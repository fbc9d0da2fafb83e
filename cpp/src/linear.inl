// Products with matrices in the layout of format.h.
//
// All kinds take one walk (multiply_panels): a panel, some rows of x, a piece of the columns, a tile of rows. A tile takes the sums of its rows
// from memory, carries them on over the piece, and leaves them there, so the operations that make a sum are the same in every tile. A piece
// that many tiles read is expanded first, from bits to bytes or from half to full precision: into room that stays in the nearest cache.

namespace headrace::HEADRACE_ISA {

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Blocks [begin, end) of a panel.
struct Blocks {
  const uint8_t* quants;  // of block begin
  int64_t quants_step;    // bytes from one block's to the next
  const uint8_t* scales;
  int64_t scales_step;
  int64_t begin, end;
  int32_t offset;
  bool has_min;
};

template <int kBits, int kGroup>
struct Quantized {
  static constexpr int64_t kTile = kQuantizedRows, kRows = 16 * kTile;
  static constexpr int64_t kColumns = 8 * kBlock;                          // of a piece
  static constexpr int64_t kRoom = kBits == 8 ? 0 : kColumns * kPanel;     // bytes for an expanded piece; 0: it is read as it is
  using Piece = Blocks;

  static Blocks piece(const Matrix& w, int64_t panel, int64_t begin, int64_t end) {
    const int64_t step = w.format.block_bytes();
    const uint8_t* quants = w.panel(panel) + begin / kBlock * step;
    return {quants, step, quants + w.format.quant_bytes(), step, begin / kBlock, (end + kBlock - 1) / kBlock, w.format.offset, w.format.has_min};
  }

  static Blocks expand(const Blocks& w, uint8_t* room) {
    for (int64_t b = 0; b < w.end - w.begin; ++b)
      for (int64_t quad = 0; quad < kBlock / 4; ++quad)
        store_expanded<kBits>(room + (b * (kBlock / 4) + quad) * 64, load_quad<kBits>(w.quants + b * w.quants_step, quad));
    Blocks expanded = w;
    expanded.quants = room, expanded.quants_step = kBlock * kPanel;
    return expanded;
  }

  // sums [kCount][kPanel] of rows `row` and following.
  template <int kCount, bool kExpanded>
  static void multiply(const Blocks& w, const Rows& x, int64_t row, float* sums) {
    constexpr int64_t kDot = smaller(kGroup, kDotColumns<kBits>);
    const int64_t width = padded(x.columns, kBlock);
    const int8_t* values = x.values + row * width;
    const float* scales = x.scales + row * (width / 32);
    const int32_t* column_sums = x.sums + row * (width / 16);
    F32 total[kCount];
    for (int r = 0; r < kCount; ++r) total[r] = load(sums + r * kPanel);
    for (int64_t b = w.begin; b < w.end; ++b) {
      const uint8_t* quants = w.quants + (b - w.begin) * w.quants_step;
      const uint16_t* w_scales = (const uint16_t*)(w.scales + (b - w.begin) * w.scales_step);
      for (int64_t group = 0; group < kBlock / kGroup; ++group) {
        I32 products[kCount];
        for (int r = 0; r < kCount; ++r) products[r] = no_sum();
        for (int64_t first = group * kGroup; first < (group + 1) * kGroup; first += kDot) {
          Dot<kBits> dot[kCount];
          for (int64_t quad = first / 4; quad < (first + kDot) / 4; ++quad) {
            const Quad<kBits> weights = kExpanded ? load_expanded<kBits>(quants + quad * 64) : load_quad<kBits>(quants, quad);
            for (int r = 0; r < kCount; ++r) dot[r].add(weights, values + r * width + b * kBlock + quad * 4);
          }
          for (int r = 0; r < kCount; ++r) products[r] = add(products[r], dot[r].sum());
        }
        const F32 scale = load_f16(w_scales + group * kPanel);
        for (int r = 0; r < kCount; ++r) {
          const int32_t* of_block = column_sums + r * (width / 16) + b * 2;
          const int32_t column_sum = kGroup == 32 ? of_block[0] + of_block[1] : of_block[group];
          const float x_scale = scales[r * (width / 32) + b];
          total[r] = fma(to_float(sub(products[r], (w.offset + kDotOffset<kBits>) * column_sum)), mul(scale, broadcast(x_scale)), total[r]);
          if (w.has_min) {
            const F32 min = load_f16(w_scales + (kBlock / kGroup + group) * kPanel);
            total[r] = fma(min, broadcast(x_scale * float(column_sum)), total[r]);
          }
        }
      }
    }
    for (int r = 0; r < kCount; ++r) store(sums + r * kPanel, total[r]);
  }
};

// Columns [begin, end) of a panel.
struct Columns {
  const uint8_t* numbers;
  int64_t begin, end;
};

template <Kind kKind>
struct Plain {
  static constexpr int64_t kTile = kPlainRows, kRows = 8 * kTile;
  static constexpr int64_t kColumns = 256;
  static constexpr int64_t kRoom = kKind == Kind::kFloat32 ? 0 : kColumns * kPanel * 4;
  static constexpr int64_t kBytes = kPanel * (kKind == Kind::kFloat32 ? 4 : 2);
  using Piece = Columns;

  static F32 load_column(const uint8_t* numbers, int64_t column) {
    const uint8_t* p = numbers + column * kBytes;
    if constexpr (kKind == Kind::kFloat16) return load_f16((const uint16_t*)p);
    if constexpr (kKind == Kind::kBFloat16) return load_bf16((const uint16_t*)p);
    return load((const float*)p);
  }

  static Columns piece(const Matrix& w, int64_t panel, int64_t begin, int64_t end) { return {w.panel(panel) + begin * kBytes, begin, end}; }

  static Columns expand(const Columns& w, uint8_t* room) {
    for (int64_t k = 0; k < w.end - w.begin; ++k) store((float*)room + k * kPanel, load_column(w.numbers, k));
    return {room, w.begin, w.end};
  }

  template <int kCount, bool kExpanded>
  static void multiply(const Columns& w, const Rows& x, int64_t row, float* sums) {
    const float* values = x.floats + row * x.stride + w.begin;
    F32 total[kCount];
    for (int r = 0; r < kCount; ++r) total[r] = load(sums + r * kPanel);
    for (int64_t k = 0; k < w.end - w.begin; ++k) {
      const F32 weights = kExpanded ? load((const float*)w.numbers + k * kPanel) : load_column(w.numbers, k);
      for (int r = 0; r < kCount; ++r) total[r] = fma(broadcast(values[r * x.stride + k]), weights, total[r]);
    }
    for (int r = 0; r < kCount; ++r) store(sums + r * kPanel, total[r]);
  }
};

// `count` rows of x, at most kCount.
template <class Product, bool kExpanded, int kCount>
inline void multiply_tile(const typename Product::Piece& w, const Rows& x, int64_t first, int64_t count, float* sums) {
  if constexpr (kCount > (kExpanded ? (2 * Product::kTile + 1) / 3 : 1))
    if (count < kCount) return multiply_tile<Product, kExpanded, kCount - 1>(w, x, first, count, sums);
  Product::template multiply<kCount, kExpanded>(w, x, first, sums);
}

// Rows [first, first + count) of x, in as few tiles as there can be and all about as high.
template <class Product, bool kExpanded>
inline void multiply_tiles(const typename Product::Piece& w, const Rows& x, int64_t first, int64_t count, float* sums) {
  for (int64_t tiles = (count + Product::kTile - 1) / Product::kTile; tiles > 0; --tiles) {
    const int64_t rows = (count + tiles - 1) / tiles;
    multiply_tile<Product, kExpanded, Product::kTile>(w, x, first, rows, sums);
    first += rows, count -= rows, sums += rows * kPanel;
  }
}

// The first `width` numbers of each row of sums, with bias, to out.
inline void write_sums(const float* sums, int64_t rows, int64_t width, const float* bias, float* out, int64_t out_stride, bool accumulate) {
  for (int64_t r = 0; r < rows; ++r, sums += kPanel, out += out_stride) {
    if (width == kPanel) {
      F32 sum = load(sums);
      if (bias) sum = add(sum, load(bias));
      if (accumulate) sum = add(sum, load(out));
      store(out, sum);
    } else {
      for (int64_t i = 0; i < width; ++i) {
        const float sum = bias ? sums[i] + bias[i] : sums[i];
        out[i] = accumulate ? sum + out[i] : sum;
      }
    }
  }
}

template <class Product>
inline void multiply_panels(const Matrix& w, const Rows& x, int64_t begin, int64_t end, const float* bias, float* out, int64_t out_stride,
                            bool accumulate) {
  alignas(64) float sums[Product::kRows * kPanel];
  alignas(64) uint8_t room[Product::kRoom + 64];
  for (int64_t panel = begin; panel < end; ++panel) {
    const int64_t row = panel * kPanel, width = smaller(kPanel, w.rows - row);
    for (int64_t first = 0; first < x.rows; first += Product::kRows) {
      const int64_t count = smaller(Product::kRows, x.rows - first);
      std::memset(sums, 0, count * kPanel * sizeof(float));
      const bool expand = Product::kRoom && count > 2 * Product::kTile;
      const int64_t step = count > Product::kTile ? Product::kColumns : w.columns;
      for (int64_t column = 0; column < w.columns; column += step) {
        const auto piece = Product::piece(w, panel, column, smaller(column + step, w.columns));
        if (expand)
          multiply_tiles<Product, Product::kRoom != 0>(Product::expand(piece, room), x, first, count, sums);
        else
          multiply_tiles<Product, false>(piece, x, first, count, sums);
      }
      write_sums(sums, count, width, bias ? bias + row : nullptr, out + first * out_stride + row, out_stride, accumulate);
    }
  }
}

inline void multiply(const Matrix& w, const Rows& x, int64_t begin, int64_t end, const float* bias, float* out, int64_t out_stride, bool accumulate) {
  const auto run = [&]<class Product>() { multiply_panels<Product>(w, x, begin, end, bias, out, out_stride, accumulate); };
  const auto run_bits = [&]<int kBits>() { w.format.group == 32 ? run.template operator()<Quantized<kBits, 32>>() : run.template operator()<Quantized<kBits, 16>>(); };
  switch (w.format.kind) {
    case Kind::kFloat32: return run.template operator()<Plain<Kind::kFloat32>>();
    case Kind::kFloat16: return run.template operator()<Plain<Kind::kFloat16>>();
    case Kind::kBFloat16: return run.template operator()<Plain<Kind::kBFloat16>>();
    case Kind::kQuantized: break;
  }
  switch (w.format.bits) {
    case 4: return run_bits.template operator()<4>();
    case 5: return run_bits.template operator()<5>();
    default: return run_bits.template operator()<8>();
  }
}

inline void read_row(const Matrix& w, int64_t index, float* out) {
  const Format& format = w.format;
  const uint8_t* panel = w.panel(index / kPanel);
  const int64_t row = index % kPanel;
  if (format.kind == Kind::kQuantized) {
    for (int64_t k = 0; k < w.columns; ++k) {
      const int64_t column = k % kBlock, quad = column / 4;
      const uint8_t* quants = panel + k / kBlock * format.block_bytes();
      const uint16_t* scales = (const uint16_t*)(quants + format.quant_bytes()) + column / format.group * kPanel + row;
      int32_t q;
      if (format.bits == 8) {
        q = int8_t(quants[quad * 64 + row * 4 + column % 4]);
      } else {
        q = quants[quad * 32 + row % 8 * 4 + column % 4] >> (row / 8 * 4) & 15;
        const int64_t bit = row * 4 + column % 4;
        if (format.bits == 5) q |= (quants[256 + quad * 8 + bit / 8] >> (bit % 8) & 1) << 4;
      }
      const float weight = float(q - format.offset) * half_to_float(*scales);
      out[k] = format.has_min ? weight + half_to_float(scales[kBlock / format.group * kPanel]) : weight;
    }
  } else if (format.kind == Kind::kFloat32) {
    for (int64_t k = 0; k < w.columns; ++k) out[k] = ((const float*)panel)[k * kPanel + row];
  } else {
    const uint16_t* numbers = (const uint16_t*)panel + row;
    const bool half = format.kind == Kind::kFloat16;
    for (int64_t k = 0; k < w.columns; ++k) out[k] = half ? half_to_float(numbers[k * kPanel]) : bfloat_to_float(numbers[k * kPanel]);
  }
}

inline void quantize(const float* x, int64_t columns, int8_t* values, float* scales, int32_t* sums) {
  for (int64_t first = 0; first < columns; first += kBlock, values += kBlock, ++scales, sums += 2) {
    float rest[kBlock] = {};
    const float* block = x + first;
    if (columns - first < kBlock) {
      std::memcpy(rest, block, (columns - first) * sizeof(float));
      block = rest;
    }
    const F32 low = load(block), high = load(block + kLanes), zero = broadcast(0);
    // 0 times a number is NaN where it is not finite.
    const float finite = sum(fma(low, zero, mul(high, zero)));
    float scale = greatest(max(abs(low), abs(high))) / 127.0f;
    if (!(scale >= kLeastScale)) scale = 0;
    const F32 inverse = broadcast(finite == 0 && scale > 0 ? 1.0f / scale : 0.0f);
    const F32 first_half = finite == 0 ? round(mul(low, inverse)) : zero, second_half = finite == 0 ? round(mul(high, inverse)) : zero;
    store_i8(values, first_half), store_i8(values + kLanes, second_half);
    // Sums of few small integers: exact.
    sums[0] = int32_t(sum(first_half)), sums[1] = int32_t(sum(second_half));
    *scales = finite == 0 ? scale : bits_to_float(0x7FC00000u);  // NaN
  }
}

inline void fill_linear(Kernels& table) {
  table.multiply = multiply;
  table.read_row = read_row;
  table.quantize = quantize;
}

}  // namespace headrace::HEADRACE_ISA
