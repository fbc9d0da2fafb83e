// Matrices into the layout of format.h, from GGUF's blocks and from floats.
#pragma once

#include <cstdint>

#include "format.h"

namespace headrace {

class Pool;

// Weights of one row in kBlock columns, and the float16 bits of their scales and minima: one for each group.
struct Segment {
  uint8_t quants[kBlock];
  uint16_t scales[2];
  uint16_t mins[2];
};

// A quantised type of GGUF: what its blocks are stored as, and how one becomes `weights` / kBlock segments.
struct BlockType {
  int32_t number;
  int64_t weights;
  int64_t bytes;
  Format format;
  void (*decode)(const uint8_t* block, Segment* segments);
};

// Null: there is none of that number, or none that products are made with.
const BlockType* find_block_type(int32_t number);

// Throws invalid_argument unless the kernels know the format.
void check_format(const Format& format);
// Bytes of such a matrix; throws invalid_argument for a format or a size that cannot be.
int64_t matrix_bytes(const Format& format, int64_t rows, int64_t columns);

// Columns [begin, end) of raw [rows][columns / type.weights][type.bytes] to out, matrix_bytes of type.format; all bytes of it are written. They
// may begin and end inside a block, but must begin with one of its groups. Threads share the panels. Throws invalid_argument.
void pack_blocks(Pool& pool, const BlockType& type, const uint8_t* raw, int64_t rows, int64_t columns, int64_t begin, int64_t end, uint8_t* out);

// values [rows][columns] to out, matrix_bytes of format. Rounded to the nearest, halves to even; quantised, by group:
//   8 bits; 4, offset 8: as Kernels::quantize_weights
//   another offset:   scale = -(the w of the greatest magnitude) / offset, so that this one is met exactly (as GGUF's Q4_0)
//   minimum:          min = least w, scale = (greatest - least) / greatest code (as GGUF's Q4_1)
// A group that is not finite, or whose scale is beyond float16, has products that are NaN. Throws invalid_argument.
void pack_floats(Pool& pool, const Format& format, const float* values, int64_t rows, int64_t columns, uint8_t* out);

}  // namespace headrace
