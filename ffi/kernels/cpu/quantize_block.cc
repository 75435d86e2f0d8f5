// Fused block quantization on the CPU. A task takes a span of x that stays in L2, and computes
// amaxes, scales and codes of one plane or both.
#include "kernels/quantize_block.h"

#include <cstring>
#include <type_traits>
#include <utility>

#include "core/hadamard.h"
#include "kernels/cast.h"
#include "kernels/cpu/block_spans.h"
#include "kernels/cpu/coded_rows.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/random_rows.h"
#include "kernels/cpu/scales_of.h"
#include "kernels/grouped.h"

namespace qshard::kernels {
namespace {

// Part of the matrices: whole blocks, except at the edges.
struct Rectangle {
  int64_t batch, row, col, rows, cols;
};

// --- one plane ---

// Rows of elements, and the position of the first in the matrices.
template <class In>
struct Elements {
  const In* at;
  int64_t stride;
  Rectangle where;
};

template <class In, class Code, class Scales>
struct PlaneOf {
  using Stored = typename Scales::Stored;

  const In* x;
  Scales scales;
  Blocks blocks;
  BlockPlane<Stored> out;
  Nvfp4Options options = {};
  Blocks philox_blocks = {};
  int64_t first_row = 0;  // that x has

  // Returns the plane for an x that begins with a row of the matrix.
  PlaneOf Of(const In* rows_of_x, int64_t row) const {
    PlaneOf plane = *this;
    plane.x = rows_of_x;
    plane.first_row = row;
    return plane;
  }

  // Quantizes a rectangle into all requested outputs.
  void Quantize(const Rectangle& all, Panel* panel) const {
    const int64_t most = out.data_t ? kPanelCols : kSpanCols;
    const int64_t wanted = std::clamp<int64_t>(most / blocks.block_cols, 1, kSpanBlocks);
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
        Panel* whole = in_panel ? panel : nullptr;
        if (options.hadamard)
          QuantizeRotated(strip, row, whole, *panel);
        else
          QuantizeStrip(Elements<In>{InputAt(strip), blocks.cols, strip}, row, whole, *panel);
      }
      if (in_panel) TransposePanel(part, *panel);
    }
  }

 private:
  int64_t ElementAt(const Rectangle& r) const {
    return (r.batch * blocks.rows + r.row) * blocks.cols + r.col;
  }

  const In* InputAt(const Rectangle& r) const {
    return x + (ElementAt(r) - first_row * blocks.cols);
  }

  // Quantizes a row of blocks. With `whole`, writes codes to its rows from `row` on, to be
  // transposed later.
  template <class T>
  void QuantizeStrip(const Elements<T>& strip, int64_t row, Panel* whole, Panel& panel) const {
    float scale[kSpanBlocks];
    MakeScales(strip, scale);
    if (!out.data_t)
      Cast(strip, scale);
    else if (whole)
      CastToPanel(strip, {scale, blocks.block_cols}, row, *whole);
    else
      CastByPanels(strip, scale, panel);
  }

  // Does the same for the Hadamard transform of a strip of 16 rows, at most as wide as a panel.
  void QuantizeRotated(const Rectangle& strip, int64_t row, Panel* whole, Panel& panel) const {
    In copy[kHadamardSize][kPanelCols];
    bfloat16 rotated[kHadamardSize][kPanelCols];
    for (int64_t r = 0; r < kHadamardSize; ++r)
      std::memcpy(copy[r], InputAt(strip) + r * blocks.cols, strip.cols * sizeof(In));
    Simd().hadamard[kInputIndex<In>](copy, strip.cols, kPanelCols, 1, rotated[0]);
    QuantizeStrip(Elements<bfloat16>{rotated[0], kPanelCols, strip}, row, whole, panel);
  }

  // Computes amaxes and scales of one row of blocks.
  template <class T>
  void MakeScales(const Elements<T>& elements, float* scale) const {
    const Rectangle& strip = elements.where;
    const int64_t n = CeilDiv(strip.cols, blocks.block_cols);
    float amax[kSpanBlocks];
    Stored scale_inv[kSpanBlocks];
    Simd().amax[kInputIndex<T>](elements.at, elements.stride, strip.rows, strip.cols,
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

  // Fills the random bytes of row r of a rectangle.
  void Random(const Rectangle& part, int64_t r, uint8_t* random) const {
    RandomRow(*options.philox, philox_blocks, part.batch, part.row + r, part.col, part.cols,
              random);
  }

  template <class T>
  void Cast(const Elements<T>& strip, const float* scale) const {
    const RowScales of_row{scale, blocks.block_cols};
    for (int64_t r = 0; r < strip.where.rows; ++r) {
      const T* from = strip.at + r * strip.stride;
      uint8_t* to = out.data + (ElementAt(strip.where) + r * blocks.cols) / kCodesPerByte<Code>;
      if constexpr (std::is_same_v<Code, E2M1>) {
        if (options.philox) {
          uint8_t random[kSpanCols];
          Random(strip.where, r, random);
          CastRowStochastic<Code>(from, strip.where.cols, of_row, random, to);
          continue;
        }
      }
      CastRow<Code>(from, strip.where.cols, of_row, to);
    }
  }

  // Casts elements into the panel's rows from `row` on, and into data if requested.
  template <class T>
  void CastToPanel(const Elements<T>& part, const RowScales& scales, int64_t row,
                   Panel& panel) const {
    const auto cast = Simd().cast[kInputIndex<T>][kElementIndex<Code>];
    const int64_t cols = part.where.cols;
    for (int64_t r = 0; r < part.where.rows; ++r) {
      const T* from = part.at + r * part.stride;
      uint8_t* codes = panel.codes[row + r];
      if (options.philox) {
        uint8_t random[kPanelCols];
        Random(part.where, r, random);
        Simd().cast_stochastic[kInputIndex<T>](from, cols, scales, random, codes);
      } else {
        cast(from, cols, scales, /*ahead=*/0, codes);
      }
      if (!out.data) continue;
      const int64_t i = ElementAt(part.where) + r * blocks.cols;
      if (kCodesPerByte<Code> == 2)
        Simd().pack_pairs(codes, cols / 2, out.data + i / 2);
      else
        std::memcpy(out.data + i, codes, cols);
    }
  }

  // Casts a row of blocks that are larger than a panel.
  template <class T>
  void CastByPanels(const Elements<T>& strip, const float* scale, Panel& panel) const {
    const Rectangle& all = strip.where;
    for (int64_t row = 0; row < all.rows; row += kPanelRows) {
      for (int64_t col = 0; col < all.cols; col += kPanelCols) {
        const Rectangle part{all.batch, all.row + row, all.col + col,
                             std::min(kPanelRows, all.rows - row),
                             std::min(kPanelCols, all.cols - col)};
        CastToPanel(Elements<T>{strip.at + row * strip.stride + col, strip.stride, part},
                    {scale, blocks.block_cols, col}, 0, panel);
        TransposePanel(part, panel);
      }
    }
  }

  void TransposePanel(const Rectangle& part, Panel& panel) const {
    constexpr int64_t kPerByte = kCodesPerByte<Code>;
    const int64_t height = part.rows / kPerByte, stride = blocks.rows / kPerByte;
    for (int64_t r = 0; kPerByte == 2 && r < height; ++r)
      Simd().pack_rows(panel.codes[2 * r], panel.codes[2 * r + 1], part.cols, panel.codes[r]);
    uint8_t* to = out.data_t + (part.batch * blocks.cols + part.col) * stride;
    panel.Transpose(height, part.cols, to + part.row / kPerByte, stride, /*stream=*/false);
  }
};

// Returns the height of spans of a transposed plane: whole blocks, whole bytes of 4-bit codes, and
// a panel if they fit.
int64_t TransposedHeight(int64_t block_rows) {
  const int64_t unit = block_rows % 2 == 0 ? block_rows : 2 * block_rows;
  return std::max<int64_t>(1, kPanelRows / unit) * unit;
}

// Calls body(rectangle, panel) for spans that cover all of `blocks`, like ParallelSpans. For a
// transposed plane, spans are as high as a panel.
template <class Body>
void ParallelRectangles(const Exec<Cpu>& exec, Blocks blocks, bool transposed, const Body& body) {
  if (transposed) blocks.block_rows = TransposedHeight(blocks.block_rows);
  ParallelSpans(exec, blocks, [&](const BlockSpan& span) {
    Panel panel;
    body({span.batch, span.grid_row * blocks.block_rows, span.first_block * blocks.block_cols,
          span.rows, span.cols},
         &panel);
  });
}

template <class Plane>
Status QuantizeOne(const Exec<Cpu>& exec, const Plane& plane) {
  ParallelRectangles(exec, plane.blocks, plane.out.data_t != nullptr,
                     [&](const Rectangle& all, Panel* panel) { plane.Quantize(all, panel); });
  return {};
}

// Returns two planes of `blocks`, the first along rows, with the output pointers of `out`.
template <class Plane, class Stored>
std::pair<Plane, Plane> PlanesOfBoth(const Blocks& blocks, Plane rows, Plane columns,
                                     const BothPlanes<Stored>& out) {
  rows.blocks = columns.blocks = blocks;
  rows.blocks.block_rows = columns.blocks.block_cols = 1;
  rows.out.data = out.data;
  rows.out.scale_inv = out.scale_inv;
  (out.second_transposed ? columns.out.data_t : columns.out.data) = out.second_data;
  (out.second_transposed ? columns.out.scale_inv_t : columns.out.scale_inv) = out.second_scale_inv;
  return {rows, columns};
}

// Quantizes one block that covers the matrix. All threads share it, while a span has whole blocks.
template <class Code, class In>
Status QuantizeWhole(const Exec<Cpu>& exec, const In* x, const FloatScales& scales,
                     const Blocks& blocks, const BlockPlane<float>& out) {
  const int64_t n = blocks.rows * blocks.cols;
  float amax, scale, scale_inv;
  QSHARD_RETURN_IF_ERROR(Amax(exec, x, 1, n, &amax));
  QSHARD_RETURN_IF_ERROR(BlockScales<Code>(exec, &amax, 1, scales, &scale, &scale_inv));
  if (out.scale_inv) *out.scale_inv = scale_inv;
  if (out.scale_inv_t) *out.scale_inv_t = scale_inv;
  const Scaled<In> scaled{x, &scale, n};
  if (!out.data_t) return Cast<In, Code>(exec, scaled, n, out.data);
  return CastTranspose<In, Code>(exec, scaled, 1, blocks.rows, blocks.cols, out.data, out.data_t);
}

template <class Plane, class Stored>
Status QuantizeTwo(const Exec<Cpu>& exec, const Blocks& blocks, const Plane& first,
                   const Plane& second, const BothPlanes<Stored>& out) {
  const auto [rows, columns] = PlanesOfBoth(blocks, first, second, out);
  ParallelRectangles(exec, blocks, out.second_transposed,
                     [&, &rows = rows, &columns = columns](const Rectangle& all, Panel* panel) {
                       rows.Quantize(all, panel);
                       columns.Quantize(all, panel);
                     });
  return {};
}

// Gathers strips of padded rows into scratch, and calls body(gathered, rectangle, panel) for each.
// `blocks` describe the padded rows, and row_of(row) returns the row of x in one of them, or -1.
template <class In, class RowOf, class Body>
void ParallelGathered(const Exec<Cpu>& exec, const In* x, const Blocks& blocks, const RowOf& row_of,
                      const Body& body) {
  if (blocks.GridSize() == 0) return;
  const int64_t cols = blocks.cols;
  const int64_t height = std::min(blocks.rows, TransposedHeight(blocks.block_rows));
  ParallelForWithScratch<In>(
      exec, CeilDiv(blocks.rows, height), height * cols, [&](int64_t i, In* gathered) {
        const Rectangle all{0, i * height, 0, std::min(height, blocks.rows - i * height), cols};
        for (int64_t r = 0; r < all.rows; ++r) {
          const int64_t own = row_of(all.row + r);
          if (own < 0)
            std::fill_n(gathered + r * cols, cols, In{});
          else
            std::memcpy(gathered + r * cols, x + own * cols, cols * sizeof(In));
        }
        Panel panel;
        body(gathered, all, &panel);
      });
}

}  // namespace

template <class In, class Code, class Scales>
Status QuantizeBlock(const Exec<Cpu>& exec, const In* x, const Scales& scales, const Blocks& blocks,
                     const BlockPlane<typename Scales::Stored>& out) {
  if constexpr (std::is_same_v<Scales, FloatScales>) {
    if (blocks.GridSize() == 1 && out.data)
      return QuantizeWhole<Code>(exec, x, scales, blocks, out);
  }
  return QuantizeOne(exec, PlaneOf<In, Code, Scales>{x, scales, blocks, out});
}

template <class In, class Code, class Scales>
Status QuantizeBlockBoth(const Exec<Cpu>& exec, const In* x, const Scales& scales,
                         const Blocks& blocks, const BothPlanes<typename Scales::Stored>& out) {
  const PlaneOf<In, Code, Scales> plane{x, scales, blocks, {}};
  return QuantizeTwo(exec, blocks, plane, plane, out);
}

template <class In, class Code, class Scales>
Status QuantizeBlockRows(const Exec<Cpu>& exec, const In* x, const RowMap& map,
                         const Scales& scales, const Blocks& blocks,
                         const BlockPlane<typename Scales::Stored>& out) {
  const PlaneOf<In, Code, Scales> plane{nullptr, scales, blocks, out};
  ParallelGathered(
      exec, x, blocks, [&](int64_t row) { return map.Of(row); },
      [&](const In* gathered, const Rectangle& all, Panel* panel) {
        plane.Of(gathered, all.row).Quantize(all, panel);
      });
  return {};
}

template <class In, class Code, class Scales>
Status QuantizeBlockBothRows(const Exec<Cpu>& exec, const In* x, const RowMap& map,
                             const Scales& scales, const Blocks& blocks,
                             const BothPlanes<typename Scales::Stored>& out) {
  const PlaneOf<In, Code, Scales> plane{nullptr, scales, blocks, {}};
  const auto [rows, columns] = PlanesOfBoth(blocks, plane, plane, out);
  ParallelGathered(
      exec, x, blocks, [&](int64_t row) { return map.Of(row); },
      [&, &rows = rows, &columns = columns](const In* gathered, const Rectangle& all,
                                            Panel* panel) {
        rows.Of(gathered, all.row).Quantize(all, panel);
        columns.Of(gathered, all.row).Quantize(all, panel);
      });
  return {};
}

template <class In>
Status QuantizeNvfp4(const Exec<Cpu>& exec, const In* x, const Nvfp4Scales& scales,
                     const Nvfp4Options& options, const Blocks& blocks,
                     const BlockPlane<uint8_t>& out) {
  return QuantizeOne(exec, PlaneOf<In, E2M1, Nvfp4Scales>{x, scales, blocks, out, options, blocks});
}

template <class In>
Status QuantizeNvfp4Both(const Exec<Cpu>& exec, const In* x, const Nvfp4Scales& scales,
                         const Nvfp4Scales& second_scales, const Nvfp4Options& options,
                         const Blocks& blocks, const BothPlanes<uint8_t>& out) {
  using Plane = PlaneOf<In, E2M1, Nvfp4Scales>;
  const Plane rows{x, scales, blocks, {}, {false, options.philox}, blocks};
  const Plane columns{x, second_scales, blocks, {}, options, blocks};
  return QuantizeTwo(exec, blocks, rows, columns, out);
}

// Quantizes runs of strips of one expert, as matrices of their own.
template <class In>
Status QuantizeNvfp4Rows(const Exec<Cpu>& exec, const In* x, int64_t cols, const RowMap& map,
                         const Nvfp4Experts& experts, const Nvfp4RowPlanes& out) {
  using Plane = PlaneOf<In, E2M1, Nvfp4Scales>;
  constexpr int64_t kStrip = kNvfp4Block;
  const auto expert_of = [&](int64_t row) { return experts.stops.ExpertOf(row / kStrip * kStrip); };
  const auto row_of = [&](int64_t row) {
    return expert_of(row) < experts.stops.count ? map.Of(row) : -1;
  };
  const Blocks blocks{1, map.count, cols, kStrip, kStrip};
  Blocks along_rows = blocks, along_columns = blocks;
  if (!out.square) along_rows.block_rows = 1;
  along_columns.block_cols = 1;
  ParallelGathered(exec, x, blocks, row_of, [&](const In* gathered, Rectangle all, Panel* panel) {
    const int64_t end = all.row + all.rows;
    Rectangle part = all;
    for (; part.row < end; part.row += part.rows) {
      const int64_t expert = expert_of(part.row);
      part.rows = std::min(kStrip, end - part.row);
      while (part.row + part.rows < end && expert_of(part.row + part.rows) == expert)
        part.rows += std::min(kStrip, end - part.row - part.rows);
      const bool none = expert == experts.stops.count;  // rows of zeros
      const float zero = 0.0f;
      const uint32_t no_seed[2] = {};
      // Modulo 2^64, the index of element 0 of all padded rows.
      const auto begin = none
                             ? uint64_t{0}
                             : uint64_t{0} - static_cast<uint64_t>(experts.stops.FirstRow(expert)) *
                                                 static_cast<uint64_t>(cols);
      const uint32_t first[2] = {static_cast<uint32_t>(begin), static_cast<uint32_t>(begin >> 32)};
      const Philox philox{none || !experts.seeds ? no_seed : experts.seeds + 2 * expert,
                          first,
                          INT64_MAX,
                          {cols, 1}};
      const auto quantize = [&](const float* amaxes, const Blocks& own, bool hadamard,
                                const BlockPlane<uint8_t>& plane) {
        const Nvfp4Scales scales{none ? &zero : amaxes + expert, INT64_MAX, 1, experts.scale_max,
                                 experts.nonfinite};
        Plane{gathered, scales, own, plane, {hadamard, experts.seeds ? &philox : nullptr},
              blocks,   all.row}
            .Quantize(part, panel);
      };
      quantize(experts.global_amax, along_rows, false, {out.data, out.scale_inv});
      if (out.data_t)
        quantize(experts.global_amax_t, along_columns, out.hadamard,
                 {nullptr, nullptr, out.data_t, out.scale_inv_t});
    }
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_SCALED_CODE, QSHARD_INSTANTIATE_FOR, Cpu, QuantizeBlock)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_SCALED_CODE, QSHARD_INSTANTIATE_FOR, Cpu, QuantizeBlockBoth)
#define QSHARD_INSTANTIATE_ROWS(...) \
  QSHARD_FOR_EACH_BLOCK_FORMAT(FloatScales, E8M0Scales, QSHARD_INSTANTIATE_FOR, Cpu, __VA_ARGS__)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_ROWS, QuantizeBlockRows)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_ROWS, QuantizeBlockBothRows)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, QuantizeNvfp4)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, QuantizeNvfp4Both)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, QuantizeNvfp4Rows)

}  // namespace qshard::kernels
