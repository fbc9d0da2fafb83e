// Blocks of GGUF's types as numbers. Layouts: ggml-common.h and dequantize_row_* of ggml.
#include <cstring>

#include "half.h"
#include "pack.h"

namespace headrace {

namespace {

// The first kWeights quants, and of each kGroup of them a scale and perhaps a minimum, float16. Scales and minima that are products in the file
// (of the block's and the group's) are rounded to float16; all else is as it is.
struct Numbers {
  int8_t quants[256];
  uint16_t scales[16];
  uint16_t mins[16];
};

uint16_t word_at(const uint8_t* p) {
  uint16_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

float half_at(const uint8_t* p) { return half_to_float(word_at(p)); }

// Bits [kBits * plane, ...) of every byte: of each kWidth bytes first all lowest bits, then the next ones. Adds (bits << kShift) to what is
// in `quants`, or puts them there.
template <int kWidth, int kBits, int kShift = 0>
void planes(const uint8_t* bytes, int64_t count, int8_t* quants) {
  for (int64_t start = 0; start < count; start += kWidth)
    for (int plane = 0; plane < 8; plane += kBits)
      for (int64_t i = 0; i < kWidth; ++i) {
        const int8_t part = int8_t((bytes[start + i] >> plane & ((1 << kBits) - 1)) << kShift);
        if constexpr (kShift == 0) {
          *quants++ = part;
        } else {
          *quants++ += part;
        }
      }
}

void shift(int8_t* quants, int64_t count, int by) {
  for (int64_t i = 0; i < count; ++i) quants[i] = int8_t(quants[i] + by);
}

void fifth_bits(const uint8_t* bytes, int8_t* quants) {
  for (int i = 0; i < 32; ++i) quants[i] = int8_t(quants[i] | (bytes[i / 8] >> i % 8 & 1) << 4);
}

// Of the 16 codes of IQ4_NL and IQ4_XS.
void look_up(int8_t* quants, int64_t count) {
  static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  for (int64_t i = 0; i < count; ++i) quants[i] = kValues[quants[i]];
}

// d, quants.
void unpack_q4_0(const uint8_t* block, Numbers& out) {
  out.scales[0] = word_at(block);
  planes<16, 4>(block + 2, 16, out.quants);
}

// d, min, quants.
void unpack_q4_1(const uint8_t* block, Numbers& out) {
  out.scales[0] = word_at(block);
  out.mins[0] = word_at(block + 2);
  planes<16, 4>(block + 4, 16, out.quants);
}

// d, fifth bits, quants.
void unpack_q5_0(const uint8_t* block, Numbers& out) {
  out.scales[0] = word_at(block);
  planes<16, 4>(block + 6, 16, out.quants);
  fifth_bits(block + 2, out.quants);
}

// d, min, fifth bits, quants.
void unpack_q5_1(const uint8_t* block, Numbers& out) {
  out.scales[0] = word_at(block);
  out.mins[0] = word_at(block + 2);
  planes<16, 4>(block + 8, 16, out.quants);
  fifth_bits(block + 4, out.quants);
}

// d, quants.
void unpack_q8_0(const uint8_t* block, Numbers& out) {
  out.scales[0] = word_at(block);
  std::memcpy(out.quants, block + 2, 32);
}

// Scales and minima [16] of 4 bits, quants [64] of 2 bits, d, dmin.
void unpack_q2_k(const uint8_t* block, Numbers& out) {
  const float d = half_at(block + 80), dmin = half_at(block + 82);
  for (int g = 0; g < 16; ++g) {
    out.scales[g] = float_to_half(d * float(block[g] & 15));
    out.mins[g] = float_to_half(-(dmin * float(block[g] >> 4)));
  }
  planes<32, 2>(block + 16, 64, out.quants);
}

// Third bits [32], quants [64] of 2 bits, scales [12] of 6 bits, d. Quants are less 4: here more 4, less 8.
void unpack_q3_k(const uint8_t* block, Numbers& out) {
  const float d = half_at(block + 108);
  int8_t scales[16];
  planes<8, 4>(block + 96, 8, scales);
  planes<4, 2, 4>(block + 104, 4, scales);
  for (int g = 0; g < 16; ++g) out.scales[g] = float_to_half(d * float(scales[g] - 32));
  planes<32, 2>(block + 32, 64, out.quants);
  planes<32, 1, 2>(block, 32, out.quants);
  shift(out.quants, 256, 4);
}

// d, dmin, then scales and minima [12] of 6 bits: of the last four of eight the upper two bits lie above those of the first four.
void scales_of_q4_k(const uint8_t* block, Numbers& out) {
  const float d = half_at(block), dmin = half_at(block + 2);
  const uint8_t* const packed = block + 4;
  for (int g = 0; g < 8; ++g) {
    const int scale = g < 4 ? packed[g] & 63 : (packed[g + 4] & 15) | packed[g - 4] >> 6 << 4;
    const int min = g < 4 ? packed[g + 4] & 63 : packed[g + 4] >> 4 | packed[g] >> 6 << 4;
    out.scales[g] = float_to_half(d * float(scale));
    out.mins[g] = float_to_half(-(dmin * float(min)));
  }
}

// Scales, quants [128].
void unpack_q4_k(const uint8_t* block, Numbers& out) {
  scales_of_q4_k(block, out);
  planes<32, 4>(block + 16, 128, out.quants);
}

// Scales, fifth bits [32], quants [128].
void unpack_q5_k(const uint8_t* block, Numbers& out) {
  scales_of_q4_k(block, out);
  planes<32, 4>(block + 48, 128, out.quants);
  planes<32, 1, 4>(block + 16, 32, out.quants);
}

// Quants [128], upper bits [64], scales [16], d.
void unpack_q6_k(const uint8_t* block, Numbers& out) {
  const float d = half_at(block + 208);
  for (int g = 0; g < 16; ++g) out.scales[g] = float_to_half(d * float(int8_t(block[192 + g])));
  planes<64, 4>(block, 128, out.quants);
  planes<32, 2, 4>(block + 128, 64, out.quants);
  shift(out.quants, 256, -32);
}

// d as float32, quants [256], sums that are for products.
void unpack_q8_k(const uint8_t* block, Numbers& out) {
  float d;
  std::memcpy(&d, block, sizeof d);
  for (int g = 0; g < 8; ++g) out.scales[g] = float_to_half(d);
  std::memcpy(out.quants, block + 4, 256);
}

// d, codes [16].
void unpack_iq4_nl(const uint8_t* block, Numbers& out) {
  out.scales[0] = word_at(block);
  planes<16, 4>(block + 2, 16, out.quants);
  look_up(out.quants, 32);
}

// d, upper two bits of scales, lower four bits of scales [4], codes [128].
void unpack_iq4_xs(const uint8_t* block, Numbers& out) {
  const float d = half_at(block);
  const int high = word_at(block + 2);
  for (int g = 0; g < 8; ++g) {
    const int scale = (block[4 + g / 2] >> g % 2 * 4 & 15) | (high >> 2 * g & 3) << 4;
    out.scales[g] = float_to_half(d * float(scale - 32));
  }
  planes<16, 4>(block + 8, 128, out.quants);
  look_up(out.quants, 256);
}

template <void (*kUnpack)(const uint8_t*, Numbers&), int64_t kWeights, int64_t kGroup>
void decode(const uint8_t* block, Segment* segments) {
  constexpr int64_t kGroups = kBlock / kGroup;
  Numbers numbers;
  std::memset(numbers.mins, 0, sizeof numbers.mins);
  kUnpack(block, numbers);
  for (int64_t i = 0; i < kWeights / kBlock; ++i) {
    std::memcpy(segments[i].quants, numbers.quants + i * kBlock, kBlock);
    std::memcpy(segments[i].scales, numbers.scales + i * kGroups, kGroups * sizeof(uint16_t));
    std::memcpy(segments[i].mins, numbers.mins + i * kGroups, kGroups * sizeof(uint16_t));
  }
}

template <void (*kUnpack)(const uint8_t*, Numbers&), int64_t kWeights, int32_t kGroup>
constexpr BlockType type(int32_t number, int64_t bytes, int32_t bits, int32_t offset, bool has_min) {
  return {number, kWeights, bytes, {Kind::kQuantized, bits, kGroup, offset, has_min}, decode<kUnpack, kWeights, kGroup>};
}

constexpr BlockType kTypes[] = {
    type<unpack_q4_0, 32, 32>(2, 18, 4, 8, false),
    type<unpack_q4_1, 32, 32>(3, 20, 4, 0, true),
    type<unpack_q5_0, 32, 32>(6, 22, 5, 16, false),
    type<unpack_q5_1, 32, 32>(7, 24, 5, 0, true),
    type<unpack_q8_0, 32, 32>(8, 34, 8, 0, false),
    type<unpack_q2_k, 256, 16>(10, 84, 4, 0, true),
    type<unpack_q3_k, 256, 16>(11, 110, 4, 8, false),
    type<unpack_q4_k, 256, 32>(12, 144, 4, 0, true),
    type<unpack_q5_k, 256, 32>(13, 176, 5, 0, true),
    type<unpack_q6_k, 256, 16>(14, 210, 8, 0, false),
    type<unpack_q8_k, 256, 32>(15, 292, 8, 0, false),
    type<unpack_iq4_nl, 32, 32>(20, 18, 8, 0, false),
    type<unpack_iq4_xs, 256, 32>(23, 136, 8, 0, false),
};

}  // namespace

const BlockType* find_block_type(int32_t number) {
  for (const BlockType& type : kTypes)
    if (type.number == number) return &type;
  return nullptr;
}

}  // namespace headrace
