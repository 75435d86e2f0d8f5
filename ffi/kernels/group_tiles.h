// One-byte scales of the groups of an operand, in the tiles of 128 x 4 that block-scaled GEMMs
// read.
#ifndef QSHARD_KERNELS_GROUP_TILES_H_
#define QSHARD_KERNELS_GROUP_TILES_H_

#include "core/ceil_div.h"
#include "kernels/gemm.h"
#include "kernels/gemm_scales.h"

namespace qshard::kernels {

// Returns where group `group` begins, at the stop of the group before it.
QSHARD_INLINE int32_t StartOf(const int32_t* stops, int group) {
  return group == 0 ? 0 : stops[group - 1];
}

// Scales of an operand, and the tiles to which they are written. Groups have whole tiles of their
// own, and the rest of their last tiles is zero. `stops` are clamped.
//
// If groups divide rows or columns, group g begins at tile floor(start / size of a tile) + g of
// that axis. No prefix sum over groups is needed, because floor(a) + ceil(b) <= floor(a + b) + 1:
// no group reaches the next one. Within a group tiles are row-major, as in SwizzleScale.
struct GroupTiles {
  static constexpr int64_t kBytes = kScaleTileRows * kScaleTileCols;
  static constexpr int64_t kWords = kScaleTileRows;  // four scales of a row each

  enum Divided { kMatrices, kRows, kCols };

  const uint8_t* from;  // [rows / repeat, cols] for each matrix, or [cols, rows] if k_first
  uint8_t* to;
  int64_t rows, cols;  // of scales, one for each row of the operand
  int64_t repeat;      // rows of a block; 1 if groups divide rows
  int64_t block;       // elements of the divided axis that share a scale
  int groups;
  Divided divided;  // groups have a matrix each, or divide the rows or columns of one
  bool k_first;

  QSHARD_INLINE int64_t Down() const { return CeilDiv(rows, kScaleTileRows); }
  QSHARD_INLINE int64_t Across() const { return CeilDiv(cols, kScaleTileCols); }

  // Number of tiles, with those that only other group sizes need.
  QSHARD_INLINE int64_t Tiles() const {
    if (divided == kMatrices) return groups * Down() * Across();
    return divided == kRows ? (rows / kScaleTileRows + groups) * Across()
                            : (cols / kScaleTileCols + groups) * Down();
  }
  QSHARD_INLINE int64_t Words() const { return Tiles() * kWords; }

  // Number of a group's first tile along the divided axis.
  QSHARD_INLINE int64_t Slot(const int32_t* stops, int group) const {
    const int64_t start = StartOf(stops, group) / block;
    return start / (divided == kRows ? kScaleTileRows : kScaleTileCols) + group;
  }

  QSHARD_INLINE int64_t FirstTile(const int32_t* stops, int group) const {
    if (divided == kMatrices) return group * Down() * Across();
    return Slot(stops, group) * (divided == kRows ? Across() : Down());
  }

  QSHARD_INLINE const uint8_t* Address(const int32_t* stops, int group) const {
    return to + FirstTile(stops, group) * kBytes;
  }

  // Returns the last group that begins at `slot` or before it.
  QSHARD_INLINE int GroupAt(const int32_t* stops, int64_t slot) const {
    int low = 0, high = groups - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (Slot(stops, middle) <= slot)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }

  // Writes a word of a tile.
  QSHARD_INLINE void Move(int64_t word, const int32_t* stops) const {
    const int64_t tile = word / kWords, in_tile = word % kWords;
    const uint8_t* scales = from;
    // The part of the scales that the tile begins at, and where that group's scales end.
    int64_t row, col, last_row = rows, last_col = cols;
    if (divided == kMatrices) {
      const int64_t each = Down() * Across(), matrix = tile / each, own = tile - matrix * each;
      scales += matrix * CeilDiv(rows, repeat) * cols;
      row = own / Across() * kScaleTileRows;
      col = own % Across() * kScaleTileCols;
    } else if (divided == kRows) {
      const int64_t slot = tile / Across();
      const int group = GroupAt(stops, slot);
      row = StartOf(stops, group) / block + (slot - Slot(stops, group)) * kScaleTileRows;
      col = tile % Across() * kScaleTileCols;
      last_row = stops[group] / block;
    } else {
      const int group = GroupAt(stops, tile / Down());
      const int64_t start = StartOf(stops, group) / block, own = tile - FirstTile(stops, group);
      last_col = stops[group] / block;
      const int64_t across = CeilDiv(last_col - start, kScaleTileCols);
      if (own >= across * Down()) return;
      row = own / across * kScaleTileRows;
      col = start + own % across * kScaleTileCols;
    }
    row += in_tile % 4 * 32 + in_tile / 4;
    uint32_t scale = 0;
    for (int i = 0; i < kScaleTileCols; ++i)
      if (row < last_row && col + i < last_col)
        scale |= uint32_t{scales[k_first ? (col + i) * rows + row : row / repeat * cols + col + i]}
                 << 8 * i;
    reinterpret_cast<uint32_t*>(to)[word] = scale;
  }
};

// Returns whether scales are one byte, which the library reads in tiles.
inline bool HasTiles(const GemmProblem& gemm) {
  return gemm.scales == ScaleId::kE8M0 || gemm.scales == ScaleId::kE4M3;
}

// Returns the scales of the first operand, or of the second, and their tiles from `to`.
inline GroupTiles TilesOf(const GemmProblem& gemm, const GemmGroups& groups, bool first,
                          uint8_t* to) {
  const GemmOperand& operand = first ? gemm.a : gemm.b;
  GroupTiles tiles{};
  tiles.from = static_cast<const uint8_t*>(operand.scale_inv);
  tiles.to = to;
  tiles.rows = operand.rows;
  tiles.cols = GridCols(gemm);
  tiles.repeat = operand.block_rows;
  tiles.block = groups.by_k ? gemm.cols : 1;
  tiles.groups = static_cast<int>(groups.number);
  tiles.divided = groups.by_k ? GroupTiles::kCols
                  : first     ? GroupTiles::kRows
                              : GroupTiles::kMatrices;
  tiles.k_first = operand.k_first;
  return tiles;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GROUP_TILES_H_
