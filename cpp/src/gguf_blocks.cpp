// The quantised types of GGUF. Layouts: ggml-common.h of ggml.
#include <cstring>

#include "pack.h"

namespace headrace {

namespace {

uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, sizeof half);
  return half;
}

// Byte j has weight j in its low and weight j + 16 in its high nibble.
void decode_nibbles(const uint8_t* packed, uint8_t* quants) {
  for (int j = 0; j < 16; ++j) {
    quants[j] = packed[j] & 15;
    quants[j + 16] = packed[j] >> 4;
  }
}

// scale | nibbles [16]
void decode_q4_0(const uint8_t* block, Segment* segment) {
  segment->scales[0] = half_at(block);
  decode_nibbles(block + 2, segment->quants);
}

// scale | minimum | nibbles [16]
void decode_q4_1(const uint8_t* block, Segment* segment) {
  segment->scales[0] = half_at(block);
  segment->mins[0] = half_at(block + 2);
  decode_nibbles(block + 4, segment->quants);
}

// scale | signed bytes [32]
void decode_q8_0(const uint8_t* block, Segment* segment) {
  segment->scales[0] = half_at(block);
  std::memcpy(segment->quants, block + 2, kBlock);
}

constexpr Format quantized(int32_t bits, int32_t group, int32_t offset, bool has_min) {
  return {Kind::kQuantized, bits, group, offset, has_min};
}

constexpr BlockType kTypes[] = {
    {2, 32, 18, quantized(4, 32, 8, false), decode_q4_0},
    {3, 32, 20, quantized(4, 32, 0, true), decode_q4_1},
    {8, 32, 34, quantized(8, 32, 0, false), decode_q8_0},
};

}  // namespace

const BlockType* find_block_type(int32_t number) {
  for (const BlockType& type : kTypes)
    if (type.number == number) return &type;
  return nullptr;
}

}  // namespace headrace
