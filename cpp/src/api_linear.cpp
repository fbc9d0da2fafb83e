// C functions of matrices: packing them, and, for tests and measurements, the kernels of any instruction set.
#include <stdexcept>
#include <string>

#include "api.h"
#include "error.h"
#include "kernels.h"
#include "pack.h"
#include "pool.h"

using namespace headrace;

namespace {

Format format_of(const HeadraceFormat& format) {
  return {Kind(format.kind), format.bits, format.group, format.offset, format.has_min != 0};
}

Matrix matrix_of(const HeadraceMatrix& matrix) {
  const Matrix made{format_of(matrix.format), matrix.rows, matrix.columns, static_cast<const uint8_t*>(matrix.data)};
  matrix_bytes(made.format, made.rows, made.columns);
  if (!made.data) throw std::invalid_argument("the matrix has no data");
  return made;
}

const BlockType& block_type(int32_t number) {
  if (const BlockType* type = find_block_type(number)) return *type;
  throw std::invalid_argument("there are no products with blocks of GGUF's type " + std::to_string(number));
}

Pool& open(Pool* pool) {
  if (pool) return *pool;
  throw std::invalid_argument("the pool is closed");
}

}  // namespace

int32_t headrace_block_format(int32_t gguf_type, HeadraceFormat* out) {
  return guarded([&] {
    const Format& format = block_type(gguf_type).format;
    *out = {int32_t(format.kind), format.bits, format.group, format.offset, format.has_min};
    return 1;
  });
}

int64_t headrace_matrix_bytes(const HeadraceFormat* format, int64_t rows, int64_t columns) {
  return guarded([&] { return matrix_bytes(format_of(*format), rows, columns); });
}

int32_t headrace_pack_blocks(Pool* pool, int32_t gguf_type, const uint8_t* raw, int64_t raw_bytes, int64_t rows, int64_t columns,
                             int64_t begin, int64_t end, uint8_t* out) {
  return guarded([&] {
    const BlockType& type = block_type(gguf_type);
    matrix_bytes(type.format, rows, columns);
    if (raw_bytes != rows * (columns / type.weights) * type.bytes)
      throw std::invalid_argument(std::to_string(raw_bytes) + " bytes are not the blocks of " + std::to_string(rows) + " rows of " +
                                  std::to_string(columns) + " columns");
    pack_blocks(open(pool), type, raw, rows, columns, begin, end, out);
    return 1;
  });
}

int32_t headrace_pack_floats(Pool* pool, const HeadraceFormat* format, const float* values, int64_t rows, int64_t columns, uint8_t* out) {
  return guarded([&] {
    pack_floats(open(pool), format_of(*format), values, rows, columns, out);
    return 1;
  });
}

int32_t headrace_multiply(const char* set, const HeadraceMatrix* matrix, const HeadraceRows* x, int64_t begin, int64_t end, const float* bias,
                          float* out, int64_t out_stride, int32_t accumulate) {
  return guarded([&] {
    const Matrix w = matrix_of(*matrix);
    if (begin < 0 || begin > end || end > w.panels())
      throw std::invalid_argument("panels " + std::to_string(begin) + " to " + std::to_string(end) + " of " + std::to_string(w.panels()));
    const Rows rows{x->rows, w.columns, x->floats, x->stride, x->values, x->scales, x->sums};
    const bool quantized = w.format.kind == Kind::kQuantized;
    if (rows.rows < 0 || (rows.rows && (quantized ? !rows.values || !rows.scales || !rows.sums : !rows.floats)))
      throw std::invalid_argument("rows lack the numbers that this matrix multiplies");
    named_kernels(set).multiply(w, rows, begin, end, bias, out, out_stride, accumulate != 0);
    return 1;
  });
}

int32_t headrace_read_row(const char* set, const HeadraceMatrix* matrix, int64_t index, float* out) {
  return guarded([&] {
    const Matrix w = matrix_of(*matrix);
    if (index < 0 || index >= w.rows) throw std::invalid_argument("row " + std::to_string(index) + " of " + std::to_string(w.rows));
    named_kernels(set).read_row(w, index, out);
    return 1;
  });
}

int32_t headrace_quantize(const char* set, const float* x, int64_t columns, int8_t* values, float* scales, int32_t* sums) {
  return guarded([&] {
    if (columns < 0) throw std::invalid_argument(std::to_string(columns) + " columns");
    named_kernels(set).quantize(x, columns, values, scales, sums);
    return 1;
  });
}

int32_t headrace_quantize_weights(const char* set, const float* x, int64_t count, int32_t bits, int8_t* quants, uint16_t* scale) {
  return guarded([&] {
    if (count < 1 || count > kBlock) throw std::invalid_argument(std::to_string(count) + " weights do not share a scale: 1 to 32 do");
    if (bits != 4 && bits != 8) throw std::invalid_argument("weights are quantised to 4 or 8 bits, not to " + std::to_string(bits));
    named_kernels(set).quantize_weights(x, count, bits, quants, scale);
    return 1;
  });
}
