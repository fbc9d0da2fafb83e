// How matrices are stored for products: the one layout that every instruction set reads.
//
// A matrix [rows, columns] multiplies x [columns] to y [rows]. Its rows are dealt in panels of kPanel, and a panel's columns in blocks of
// kBlock; both are padded with zeros. Panels lie one after the other, so threads share a matrix by panels.
//
// Quantised: a weight is scale * (q - offset) + min. A block of a panel (kPanel rows x kBlock columns) is
//   quants   bits = 4: for each group g of 4 columns 32 bytes: byte i has row i / 4, column 4 g + i % 4 in its low nibble, and row
//                      8 + i / 4 of the same column in its high nibble
//            bits = 5: the low four bits as above (256 bytes), then for each group a little-endian 64-bit word (64 bytes): bit i is the
//                      fifth bit of row i / 4, column 4 g + i % 4
//            bits = 8: for each group 64 bytes: byte i is row i / 4, column 4 g + i % 4, signed
//   scales   float16 [kBlock / group][kPanel]
//   mins     the same, if has_min
//
// Plain (float32, float16, bfloat16): a panel is [columns][kPanel] numbers, columns not padded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int64_t kPanel = 16;
constexpr int64_t kBlock = 32;

enum class Kind : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kQuantized = 3 };

// What one stored number means.
struct Format {
  Kind kind = Kind::kFloat32;
  int32_t bits = 32;       // of kQuantized: 4, 5 or 8 (8: signed)
  int32_t group = kBlock;  // columns that share a scale: 32 or 16
  int32_t offset = 0;      // of kQuantized
  bool has_min = false;

  constexpr int64_t quant_bytes() const { return kPanel * kBlock * bits / 8; }
  constexpr int64_t scale_bytes() const { return kPanel * (kBlock / group) * 2; }
  // Of one block of a panel.
  constexpr int64_t block_bytes() const { return quant_bytes() + scale_bytes() * (has_min ? 2 : 1); }
  constexpr int64_t panel_bytes(int64_t columns) const {
    return kind == Kind::kQuantized ? (columns + kBlock - 1) / kBlock * block_bytes() : columns * kPanel * bits / 8;
  }
};

// A matrix in that layout; the memory is someone else's (64-byte aligned).
struct Matrix {
  Format format;
  int64_t rows = 0;
  int64_t columns = 0;
  const uint8_t* data = nullptr;

  int64_t panels() const { return (rows + kPanel - 1) / kPanel; }
  int64_t bytes() const { return panels() * format.panel_bytes(columns); }
  const uint8_t* panel(int64_t index) const { return data + index * format.panel_bytes(columns); }
};

}  // namespace headrace
