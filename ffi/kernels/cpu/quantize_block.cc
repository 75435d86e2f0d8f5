// Quantizing in blocks on the CPU. A task takes a piece of x that stays in L2, and does all that is
// wanted of it: amaxes, scales, codes of one plane or of both.
#include "kernels/quantize_block.h"

#include <cstring>

#include "kernels/cpu/block_pieces.h"
#include "kernels/cpu/coded_rows.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/scales_of.h"

namespace qshard::kernels {
namespace {

// Part of the matrices, whole blocks but for the edges.
struct Rectangle {
  int64_t batch, row, col, rows, cols;
};

// --- one plane ---

template <class In, class Code, class Scales>
struct PlaneOf {
  using Stored = typename Scales::Stored;

  const In* x;
  Scales scales;
  Blocks blocks;
  BlockPlane<Stored> out;

  // Does all that is wanted of a rectangle.
  void Quantize(const Rectangle& all, Panel* panel) const {
    const int64_t most = out.data_t ? kPanelCols : kPieceCols;
    const int64_t wanted = std::clamp<int64_t>(most / blocks.block_cols, 1, kPieceBlocks);
    const int64_t width = (wanted > 1 ? wanted & ~int64_t{1} : wanted) * blocks.block_cols;
    Rectangle part = all;
    for (int64_t col = 0; col < all.cols; col += width) {
      part.col = all.col + col;
      part.cols = std::min(width, all.cols - col);
      const bool in_panel = out.data_t && part.rows <= kPanelRows && part.cols <= kPanelCols;
      Rectangle strip = part;
      for (int64_t row = 0; row < part.rows; row += blocks.block_rows) {
        strip.row = part.row + row;
        strip.rows = std::min(blocks.block_rows, part.rows - row);
        float scale[kPieceBlocks];
        MakeScales(strip, scale);
        if (!out.data_t)
          Cast(strip, scale);
        else if (in_panel)
          CastToPanel(strip, {scale, blocks.block_cols}, row, *panel);
        else
          CastByPanels(strip, scale, *panel);
      }
      if (in_panel) Turn(part, *panel);
    }
  }

 private:
  int64_t ElementAt(const Rectangle& r) const {
    return (r.batch * blocks.rows + r.row) * blocks.cols + r.col;
  }

  // Amaxes and scales of one row of blocks.
  void MakeScales(const Rectangle& strip, float* scale) const {
    const int64_t n = (strip.cols + blocks.block_cols - 1) / blocks.block_cols;
    float amax[kPieceBlocks];
    Stored scale_inv[kPieceBlocks];
    Simd().amax[kInputIndex<In>](x + ElementAt(strip), blocks.cols, strip.rows, strip.cols,
                                 blocks.block_cols, amax);
    const int64_t row = strip.row / blocks.block_rows, col = strip.col / blocks.block_cols;
    const int64_t rows = blocks.GridRows(), cols = blocks.GridCols();
    const int64_t grid = (strip.batch * rows + row) * cols + col;
    ScalesOf<Code>(scales, amax, grid, n, scale, scale_inv);
    if (out.scale_inv) std::memcpy(out.scale_inv + grid, scale_inv, n * sizeof(Stored));
    if (out.scale_inv_t) {
      Stored* to = out.scale_inv_t + (strip.batch * cols + col) * rows + row;
      for (int64_t i = 0; i < n; ++i) to[i * rows] = scale_inv[i];
    }
  }

  void Cast(const Rectangle& strip, const float* scale) const {
    const int64_t first = ElementAt(strip);
    for (int64_t i = first; i < first + strip.rows * blocks.cols; i += blocks.cols)
      CastRow<Code>(x + i, strip.cols, {scale, blocks.block_cols},
                    out.data + i / kCodesPerByte<Code>);
  }

  // Casts a rectangle into rows of the panel from `row` on, and into data if that is wanted too.
  void CastToPanel(const Rectangle& part, const RowScales& scales, int64_t row,
                   Panel& panel) const {
    const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
    for (int64_t r = 0; r < part.rows; ++r) {
      const int64_t i = ElementAt(part) + r * blocks.cols;
      uint8_t* codes = panel.codes[row + r];
      cast(x + i, part.cols, scales, /*ahead=*/0, codes);
      if (!out.data) continue;
      if (kCodesPerByte<Code> == 2)
        Simd().pack_pairs(codes, part.cols / 2, out.data + i / 2);
      else
        std::memcpy(out.data + i, codes, part.cols);
    }
  }

  // A row of blocks that are larger than a panel.
  void CastByPanels(const Rectangle& strip, const float* scale, Panel& panel) const {
    for (int64_t row = 0; row < strip.rows; row += kPanelRows) {
      for (int64_t col = 0; col < strip.cols; col += kPanelCols) {
        const Rectangle part{strip.batch, strip.row + row, strip.col + col,
                             std::min(kPanelRows, strip.rows - row),
                             std::min(kPanelCols, strip.cols - col)};
        CastToPanel(part, {scale, blocks.block_cols, col}, 0, panel);
        Turn(part, panel);
      }
    }
  }

  void Turn(const Rectangle& part, Panel& panel) const {
    constexpr int64_t kPerByte = kCodesPerByte<Code>;
    const int64_t height = part.rows / kPerByte, stride = blocks.rows / kPerByte;
    for (int64_t r = 0; kPerByte == 2 && r < height; ++r)
      Simd().pack_rows(panel.codes[2 * r], panel.codes[2 * r + 1], part.cols, panel.codes[r]);
    uint8_t* to = out.data_t + (part.batch * blocks.cols + part.col) * stride;
    panel.Turn(height, part.cols, to + part.row / kPerByte, stride, /*stream=*/false);
  }
};

// Calls body(rectangle, panel) on pieces that make up all of `blocks`, as pieces do. Those of a
// plane that is stored transposed are as high as a panel.
template <class Body>
void ParallelRectangles(const Exec<Cpu>& exec, Blocks blocks, bool transposed, const Body& body) {
  if (transposed) {
    const int64_t unit = blocks.block_rows % 2 == 0 ? blocks.block_rows : 2 * blocks.block_rows;
    blocks.block_rows = std::max<int64_t>(1, kPanelRows / unit) * unit;
  }
  ParallelPieces(exec, blocks, [&](const Piece& piece) {
    Panel panel;
    body({piece.batch, piece.grid_row * blocks.block_rows, piece.first_block * blocks.block_cols,
          piece.rows, piece.cols},
         &panel);
  });
}

}  // namespace

template <class In, class Code, class Scales>
Status QuantizeBlock(const Exec<Cpu>& exec, const In* x, const Scales& scales, const Blocks& blocks,
                     const BlockPlane<typename Scales::Stored>& out) {
  const PlaneOf<In, Code, Scales> plane{x, scales, blocks, out};
  ParallelRectangles(exec, blocks, out.data_t != nullptr,
                     [&](const Rectangle& all, Panel* panel) { plane.Quantize(all, panel); });
  return {};
}

template <class In, class Code, class Scales>
Status QuantizeBlockBoth(const Exec<Cpu>& exec, const In* x, const Scales& scales,
                         const Blocks& blocks, const BothPlanes<typename Scales::Stored>& out) {
  using Plane = PlaneOf<In, Code, Scales>;
  Blocks rowwise = blocks, columnwise = blocks;
  rowwise.block_rows = columnwise.block_cols = 1;
  BlockPlane<typename Scales::Stored> first, second;
  first.data = out.data;
  first.scale_inv = out.scale_inv;
  (out.second_transposed ? second.data_t : second.data) = out.second_data;
  (out.second_transposed ? second.scale_inv_t : second.scale_inv) = out.second_scale_inv;
  const Plane planes[] = {{x, scales, rowwise, first}, {x, scales, columnwise, second}};
  ParallelRectangles(exec, blocks, out.second_transposed, [&](const Rectangle& all, Panel* panel) {
    for (const Plane& plane : planes) plane.Quantize(all, panel);
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_SCALED_CODE, QSHARD_INSTANTIATE_FOR, Cpu, QuantizeBlock)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_SCALED_CODE, QSHARD_INSTANTIATE_FOR, Cpu, QuantizeBlockBoth)

}  // namespace qshard::kernels
