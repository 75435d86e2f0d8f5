// Chooses the kernel of fused quantization. It is a header, so that each kind of scales has its own
// .cu file. Fast kernels read x once. Blocks of other sizes, or buffers that are not aligned to
// vectors, take any.cuh, which reads x more than once. The FP8 conversions need compute capability
// 8.9.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_QUANTIZE_BLOCK_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_QUANTIZE_BLOCK_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/quantize/any.cuh"
#include "kernels/cuda/quantize/rows.cuh"
#include "kernels/cuda/quantize/square.cuh"
#include "kernels/cuda/quantize/strips.cuh"
#include "kernels/cuda/quantize/tiles.cuh"
#include "kernels/cuda/quantize/whole.cuh"
#include "kernels/quantize_block.h"

namespace qshard::kernels {

template <class Code, class In, class Scales, class Rows = OwnRows>
TileArguments<In, Scales, Rows> ArgumentsOfTiles(const In* x, const Scales& scales, const Blocks& b,
                                                 uint8_t* data, typename Scales::Stored* scale_inv,
                                                 uint8_t* second_data,
                                                 typename Scales::Stored* second_scale_inv,
                                                 const Rows& rows = {}) {
  const int64_t matrices = MatricesOfGlobal(scales, b);
  return {rows,
          x,
          scales,
          TileGrid(b.batch, b.rows, b.cols),
          Divider(b.batch * CeilDiv(b.rows, kTile)),
          Divider(std::clamp<int64_t>(matrices, 1, kMaxDivided - 1)),
          matrices > 0,
          WideColumns<Code>(b.rows, second_data),
          data,
          scale_inv,
          second_data,
          second_scale_inv};
}

// Returns whether the tile kernels apply: rows are vectors of 8 elements in x and, if requested, in
// `data`, and 4-bit codes can be written transposed.
template <class Code, class In, class Scales, class Rows>
bool TakesTiles(const TileArguments<In, Scales, Rows>& a) {
  return a.grid.cols % kEight == 0 && IsAligned(a.x, 16) && IsAligned(a.data, kStoredBits<Code>) &&
         (!kPacked<Code> || a.second_data == nullptr || a.wide) && a.one_global &&
         a.grid.tiles < kMaxDivided && (!Rows::kGathered || HasShortRows<In>(a.grid));
}

// Returns whether they apply to blocks of 1 x n and n x 1, where n are the sides of `blocks`.
template <class Code, class In, class Scales, class Rows>
bool TakesBothTiles(const TileArguments<In, Scales, Rows>& a, const Blocks& blocks,
                    bool second_transposed) {
  constexpr int kBlock = kFastBlock<Scales>;
  constexpr bool kTransposed = kColumnsTransposed<Code, Scales>;
  return blocks.block_rows == kBlock && blocks.block_cols == kBlock &&
         second_transposed == kTransposed && TakesTiles<Code>(a) &&
         (kTransposed || IsAligned(a.second_data, kStoredBits<Code>));
}

template <class In, class Code, class Scales, Work kWork, class Rows>
Status LaunchTiles(const Exec<Cuda>& exec, const TileArguments<In, Scales, Rows>& a) {
  // Both planes of a strip of float16 do not fit in registers, because the compiler widens it only
  // once.
  constexpr bool kBoth = kWork == Work::kBoth;
  constexpr bool kStrips =
      Fast<Scales>::kGlobal && sizeof(In) == 2 && !(kBoth && std::is_same_v<In, float16>);
  if constexpr (kWork >= Work::kSquare)
    return Launch(exec, QuantizeSquareTiles<In, Code, Scales, kWork, Rows>, a.grid.tiles,
                  kTileThreads, a);
  else if constexpr (kStrips && kWork != Work::kRows)
    return Launch(exec, QuantizeStrips<In, kBoth>, a.grid.tiles, kStripThreads, a);
  else
    return Launch(exec, QuantizeTiles<In, Code, Scales, kWork, Rows>, a.grid.tiles, kTileThreads,
                  a);
}

template <class In, class Code, class Scales>
Status QuantizeBlock(const Exec<Cuda>& exec, const In* x, const Scales& scales,
                     const Blocks& blocks, const BlockPlane<typename Scales::Stored>& out) {
  constexpr int kBlock = kFastBlock<Scales>;
  if (blocks.GridSize() == 0) return {};
  const bool in_order = out.data != nullptr && out.data_t == nullptr && out.scale_inv_t == nullptr;
  const bool transposed = out.data == nullptr && out.data_t != nullptr && out.scale_inv == nullptr;
  // A side that covers the matrix is as good as any longer side.
  const auto is_fast = [](int64_t side, int64_t size) {
    return side == kBlock || (side >= size && size <= kBlock);
  };
  const bool tall = is_fast(blocks.block_rows, blocks.rows);
  const bool wide = is_fast(blocks.block_cols, blocks.cols);
  const bool row = blocks.block_rows == 1, column = blocks.block_cols == 1;

  if (row && wide && in_order && blocks.cols % kBlock == 0 && IsAligned(x, 16) &&
      IsAligned(out.data, kStoredBits<Code>)) {
    const int64_t vectors = blocks.batch * blocks.rows * blocks.cols / kEight;
    constexpr int kThreads = QuantizeRowsTuning<In, Scales>::kThreads;
    return Launch(exec, QuantizeRows<In, Code, Scales>, CeilDiv(vectors, kThreads * kRuns),
                  kThreads, x, scales, vectors, out.data, out.scale_inv);
  }
  TileArguments<In, Scales> a = ArgumentsOfTiles<Code>(x, scales, blocks, out.data, out.scale_inv,
                                                       out.data_t, out.scale_inv_t);
  if constexpr (std::is_same_v<Scales, FloatScales>) {
    if (blocks.GridSize() == 1 && !(tall && wide) && out.data != nullptr) {
      Status status;
      if (TakesTiles<Code>(a) && LaunchWholeTiles<Code>(exec, a, &status)) return status;
      if (blocks.rows * blocks.cols > kTile * kTile)  // any.cuh is one thread block for a block
        return QuantizeWholeInSteps<Code>(exec, x, scales, blocks, out);
    }
  }
  if (TakesTiles<Code>(a)) {
    if (tall && wide && out.data_t != nullptr)
      return out.data == nullptr ? LaunchTiles<In, Code, Scales, Work::kSquareTransposed>(exec, a)
                                 : LaunchTiles<In, Code, Scales, Work::kSquareBoth>(exec, a);
    if (tall && wide && out.data != nullptr)
      return LaunchTiles<In, Code, Scales, Work::kSquare>(exec, a);
    if constexpr (kBlock == kTile) {
      if (row && wide && in_order)  // partial blocks at the end of rows
        return LaunchTiles<In, Code, Scales, Work::kRows>(exec, a);
    }
    if (tall && column && (kColumnsTransposed<Code, Scales> ? transposed : in_order)) {
      if (in_order) a.second_data = out.data, a.second_scale_inv = out.scale_inv;
      return LaunchTiles<In, Code, Scales, Work::kColumns>(exec, a);
    }
  }
  return LaunchQuantizeUnits<Code>(exec, AnyFloats(x), scales, blocks, out);
}

template <class In, class Code, class Scales>
Status QuantizeBlockBoth(const Exec<Cuda>& exec, const In* x, const Scales& scales,
                         const Blocks& blocks, const BothPlanes<typename Scales::Stored>& out) {
  if (blocks.GridSize() == 0) return {};
  Blocks along_rows = blocks, along_columns = blocks;
  along_rows.block_rows = 1;
  along_columns.block_cols = 1;
  const TileArguments<In, Scales> a = ArgumentsOfTiles<Code>(
      x, scales, along_rows, out.data, out.scale_inv, out.second_data, out.second_scale_inv);
  if (TakesBothTiles<Code>(a, blocks, out.second_transposed))
    return LaunchTiles<In, Code, Scales, Work::kBoth>(exec, a);
  QSHARD_RETURN_IF_ERROR(
      QuantizeBlock<In, Code, Scales>(exec, x, scales, along_rows, {out.data, out.scale_inv}));
  BlockPlane<typename Scales::Stored> second;
  (out.second_transposed ? second.data_t : second.data) = out.second_data;
  (out.second_transposed ? second.scale_inv_t : second.scale_inv) = out.second_scale_inv;
  return QuantizeBlock<In, Code, Scales>(exec, x, scales, along_columns, second);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_QUANTIZE_BLOCK_CUH_
