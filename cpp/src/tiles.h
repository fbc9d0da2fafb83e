// How products of rows and matrices are dealt out as tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace headrace {

// Rows of a tile: their int8 activations stay in the second-level cache while the panels of a task pass.
constexpr int64_t kTileRows = 64;
// Panels of a task, an even number: what they give of a tile stays there, too.
constexpr int64_t kMostPanels = 16;
// Tasks for each thread, so that one that is put aside by the system holds up little.
constexpr int64_t kTasksPerThread = 8;

constexpr int64_t divided(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// Some panels of a matrix, as one of their own.
inline Matrix slice(const Matrix& matrix, int64_t begin, int64_t end) {
  Matrix part = matrix;
  part.rows = std::min(end * kPanel, matrix.rows) - begin * kPanel;
  part.data = matrix.panel(begin);
  return part;
}

// How `panels` and `rows` are dealt out as tasks: tiles of rows are the inner ones, so that tasks of the same panels follow each other.
struct Dealt {
  int64_t rows, panels, tiles, chunk;

  Dealt(int64_t rows, int64_t panels, int64_t threads, int64_t unit) : rows(rows), panels(panels), tiles(divided(rows, kTileRows)) {
    const int64_t wanted = divided(panels * tiles, threads * kTasksPerThread);
    chunk = padded(std::clamp<int64_t>(wanted, 1, kMostPanels), unit);
  }
  int64_t count() const { return divided(panels, chunk) * tiles; }
  int64_t first_panel(int64_t index) const { return index / tiles * chunk; }
  int64_t last_panel(int64_t index) const { return std::min(first_panel(index) + chunk, panels); }
  int64_t first_row(int64_t index) const { return index % tiles * kTileRows; }
  int64_t last_row(int64_t index) const { return std::min(first_row(index) + kTileRows, rows); }
};

}  // namespace headrace
