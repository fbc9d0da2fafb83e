#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "half.h"
#include "kernels.h"
#include "pool.h"

namespace headrace {

namespace {

// Rows, columns: none is as long, and no product of such sizes overflows.
constexpr int64_t kMaxSize = int64_t{1} << 28;

std::invalid_argument wrong(const std::string& what) { return std::invalid_argument(what); }

uint32_t four_at(const uint8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, sizeof four);
  return four;
}

// One block of a panel, from a segment of each of its rows.
void write_block(const Format& format, const Segment* rows, uint8_t* out) {
  constexpr uint32_t kNibbles = 0x0F0F0F0F, kOnes = 0x01010101;
  for (int64_t quad = 0; quad < kBlock / 4; ++quad) {
    uint32_t four[kPanel];  // weights of a row in four columns, one a byte
    for (int64_t row = 0; row < kPanel; ++row) four[row] = four_at(rows[row].quants + quad * 4);
    if (format.bits == 8) {
      std::memcpy(out + quad * sizeof four, four, sizeof four);
      continue;
    }
    for (int64_t row = 0; row < 8; ++row) {
      const uint32_t packed = (four[row] & kNibbles) | (four[row + 8] & kNibbles) << 4;
      std::memcpy(out + quad * 32 + row * 4, &packed, sizeof packed);
    }
    if (format.bits == 5) {
      uint64_t fifth = 0;
      // The product brings bit 0 of the bytes 0 to 3 to bits 24 to 27.
      for (int64_t row = 0; row < kPanel; ++row) fifth |= uint64_t((four[row] >> 4 & kOnes) * 0x01020408u >> 24 & 15) << row * 4;
      std::memcpy(out + 256 + quad * 8, &fifth, sizeof fifth);
    }
  }
  const int64_t groups = kBlock / format.group;
  uint16_t numbers[2 * 2 * kPanel];
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t row = 0; row < kPanel; ++row) {
      numbers[group * kPanel + row] = rows[row].scales[group];
      numbers[(groups + group) * kPanel + row] = rows[row].mins[group];
    }
  }
  std::memcpy(out + format.quant_bytes(), numbers, format.block_bytes() - format.quant_bytes());
}

// Columns [column, column + kBlock) of a row, from a group's beginning on; those from `end` on are padding.
Segment cut(const Segment* row, int64_t column, int64_t end, int64_t group) {
  Segment part = {};
  for (int64_t at = 0; at < kBlock && column + at < end; at += group) {
    const Segment& source = row[(column + at) / kBlock];
    const int64_t from = (column + at) % kBlock;
    std::memcpy(part.quants + at, source.quants + from, std::min(group, end - column - at));
    part.scales[at / group] = source.scales[from / group];
    part.mins[at / group] = source.mins[from / group];
  }
  return part;
}

// The float16 next to x / steps, or the one above it where x would be more than half a step beyond the last.
uint16_t scale_of(float x, float steps) {
  const uint16_t scale = float_to_half(x / steps);
  return std::fabs(half_to_float(scale)) * (std::fabs(steps) + 0.5f) < std::fabs(x) ? uint16_t(scale + 1) : scale;
}

// `count` numbers of one group, the rest of it padding.
void quantize_group(const Format& format, const float* values, int64_t count, uint8_t* quants, uint16_t* scale_bits, uint16_t* min_bits) {
  if (format.bits == 8 || (format.bits == 4 && format.offset == 8)) {
    static const Kernels* const kernels = [] {
      int64_t number;
      return available_kernels(&number)[0];
    }();
    *min_bits = 0;
    kernels->quantize_weights(values, count, format.bits, reinterpret_cast<int8_t*>(quants), scale_bits);
    for (int64_t i = 0; i < count; ++i) quants[i] = uint8_t(quants[i] + format.offset);
    return;
  }
  float low = values[0], high = values[0];
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    low = std::min(low, values[i]), high = std::max(high, values[i]);
    finite = finite && std::isfinite(values[i]);
  }
  const int32_t last = (1 << format.bits) - 1;
  const float extreme = -low > high ? low : high;
  if (format.has_min) {
    *min_bits = float_to_half(low);
    low = half_to_float(*min_bits);
    *scale_bits = scale_of(high - low, float(last));
  } else {
    *min_bits = 0, low = 0;
    *scale_bits = scale_of(extreme, -float(format.offset));
  }
  const float scale = half_to_float(*scale_bits), inverse = scale == 0 ? 0 : 1 / scale;
  if (!finite || !std::isfinite(scale) || !std::isfinite(low)) *scale_bits = 0x7E00;  // NaN
  for (int64_t i = 0; i < count; ++i) {
    const float code = finite ? std::nearbyint((values[i] - low) * inverse) + float(format.offset) : 0;
    quants[i] = uint8_t(int32_t(std::min(std::max(code, 0.0f), float(last))));
  }
}

void quantize_segment(const Format& format, const float* values, int64_t count, Segment& segment) {
  for (int64_t begin = 0; begin < count; begin += format.group) {
    const int64_t group = begin / format.group;
    quantize_group(format, values + begin, std::min<int64_t>(format.group, count - begin), segment.quants + begin, segment.scales + group,
                   segment.mins + group);
  }
}

// Column by column: rows are read side by side, and what is written is written in order.
template <class Number, class Convert>
void write_columns(const float* values, int64_t stride, int64_t rows, int64_t columns, uint8_t* out, Convert convert) {
  Number* numbers = reinterpret_cast<Number*>(out);
  for (int64_t k = 0; k < columns; ++k, numbers += kPanel) {
    for (int64_t row = 0; row < rows; ++row) numbers[row] = convert(values[row * stride + k]);
    for (int64_t row = rows; row < kPanel; ++row) numbers[row] = 0;
  }
}

void write_plain(const Format& format, const float* values, int64_t stride, int64_t rows, int64_t columns, uint8_t* out) {
  switch (format.kind) {
    case Kind::kFloat16: return write_columns<uint16_t>(values, stride, rows, columns, out, float_to_half);
    case Kind::kBFloat16: return write_columns<uint16_t>(values, stride, rows, columns, out, float_to_bfloat);
    default: return write_columns<float>(values, stride, rows, columns, out, [](float value) { return value; });
  }
}

}  // namespace

void check_format(const Format& format) {
  const auto is = [&](Kind kind, int32_t bits) { return format.kind == kind && format.bits == bits; };
  if (format.kind != Kind::kQuantized) {
    if (!is(Kind::kFloat32, 32) && !is(Kind::kFloat16, 16) && !is(Kind::kBFloat16, 16))
      throw wrong("there are no numbers of kind " + std::to_string(int32_t(format.kind)) + " with " + std::to_string(format.bits) + " bits");
    return;
  }
  if (format.bits != 4 && format.bits != 5 && format.bits != 8)
    throw wrong("quantised numbers have 4, 5 or 8 bits, not " + std::to_string(format.bits));
  if (format.group != 16 && format.group != 32) throw wrong("groups are of 16 or 32 columns, not " + std::to_string(format.group));
  const int32_t most = format.bits == 8 ? 127 : (1 << format.bits) - 1;
  if (format.offset < 0 || format.offset > most)
    throw wrong("the offset of " + std::to_string(format.bits) + " bits is 0 to " + std::to_string(most) + ", not " + std::to_string(format.offset));
}

int64_t matrix_bytes(const Format& format, int64_t rows, int64_t columns) {
  check_format(format);
  if (rows < 1 || rows > kMaxSize || columns < 1 || columns > kMaxSize)
    throw wrong("a matrix has 1 to 2^28 rows and columns, not " + std::to_string(rows) + " and " + std::to_string(columns));
  return Matrix{format, rows, columns}.bytes();
}

void pack_blocks(Pool& pool, const BlockType& type, const uint8_t* raw, int64_t rows, int64_t columns, int64_t begin, int64_t end, uint8_t* out) {
  if (columns % type.weights)
    throw wrong("rows of " + std::to_string(columns) + " columns are no whole blocks of " + std::to_string(type.weights));
  const Format& format = type.format;
  if (begin < 0 || begin % format.group || begin >= end || end > columns)
    throw wrong("columns " + std::to_string(begin) + " to " + std::to_string(end) + " of " + std::to_string(columns) +
                " do not begin with a group of " + std::to_string(format.group));
  matrix_bytes(format, rows, end - begin);
  const int64_t row_bytes = columns / type.weights * type.bytes, segments = type.weights / kBlock;
  const int64_t first_block = begin / type.weights, last_block = (end + type.weights - 1) / type.weights;
  const int64_t width = (last_block - first_block) * segments;
  const Matrix matrix{format, rows, end - begin};
  std::vector<Segment> room(pool.threads() * kPanel * width);
  pool.run(matrix.panels(), [&](int64_t panel, int64_t slot) {
    Segment* decoded = room.data() + slot * kPanel * width;
    const int64_t first = panel * kPanel, count = std::min(kPanel, rows - first);
    for (int64_t row = 0; row < count; ++row)
      for (int64_t block = first_block; block < last_block; ++block)
        type.decode(raw + (first + row) * row_bytes + block * type.bytes, decoded + row * width + (block - first_block) * segments);
    uint8_t* block_out = out + panel * format.panel_bytes(end - begin);
    const int64_t origin = first_block * type.weights;
    for (int64_t column = begin - origin; column < end - origin; column += kBlock, block_out += format.block_bytes()) {
      Segment one[kPanel] = {};
      for (int64_t row = 0; row < count; ++row) one[row] = cut(decoded + row * width, column, end - origin, format.group);
      write_block(format, one, block_out);
    }
  });
}

void pack_floats(Pool& pool, const Format& format, const float* values, int64_t rows, int64_t columns, uint8_t* out) {
  matrix_bytes(format, rows, columns);
  const bool quantized = format.kind == Kind::kQuantized;
  if (quantized && (format.bits == 8 ? format.offset != 0 || format.has_min : format.has_min != (format.offset == 0)))
    throw wrong("floats become 8 bits without offset and minimum, or less with one of the two");
  const Matrix matrix{format, rows, columns};
  pool.run(matrix.panels(), [&](int64_t panel, int64_t) {
    uint8_t* block_out = out + panel * format.panel_bytes(columns);
    const int64_t first = panel * kPanel, count = std::min(kPanel, rows - first);
    const float* panel_values = values + first * columns;
    if (!quantized) return write_plain(format, panel_values, columns, count, columns, block_out);
    for (int64_t column = 0; column < columns; column += kBlock, block_out += format.block_bytes()) {
      Segment segments[kPanel] = {};
      for (int64_t row = 0; row < count; ++row)
        quantize_segment(format, panel_values + row * columns + column, std::min(kBlock, columns - column), segments[row]);
      write_block(format, segments, block_out);
    }
  });
}

}  // namespace headrace
