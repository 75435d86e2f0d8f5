// Which kernel quantizes: the same for all scales, so that each has a .cu file of its own.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_LAUNCH_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_LAUNCH_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/instantiate.cuh"
#include "kernels/cuda/quantize_block_any.cuh"
#include "kernels/cuda/quantize_block_rows.cuh"
#include "kernels/cuda/quantize_block_square.cuh"
#include "kernels/cuda/quantize_block_strips.cuh"
#include "kernels/cuda/quantize_block_tile.cuh"
#include "kernels/quantize_block.h"

namespace qshard::kernels {

// How many matrices in a row have one global scale; 0 if a matrix has more than one.
template <class Scales>
int64_t MatricesOfGlobal(const Scales& scales, const Blocks& b) {
  if constexpr (Fast<Scales>::kGlobal) {
    const int64_t grid = b.GridRows() * b.GridCols();
    return scales.run % grid == 0 ? scales.run / grid : 0;
  } else {
    return 1;
  }
}

// Whether rows are vectors of 8 elements in x and, where there are codes, in `data`.
template <class In, class Code>
bool RowsAreVectors(const In* x, const Blocks& b, const uint8_t* data) {
  return b.cols % kEight == 0 && IsAligned(x, 16) && IsAligned(data, kStoredBits<Code>);
}

// Whether transposed codes can be written from tiles.
template <class Code>
bool TilesTranspose(const Blocks& b, const uint8_t* data_t) {
  return !kPacked<Code> || WideColumns<Code>(b.rows, data_t);
}

// How fast kernels store blocks along columns. GEMMs of bytes with E8M0 scales take them in the
// order of x, all others transposed.
template <class Code, class Scales>
constexpr bool kColumnsTransposed = kPacked<Code> || !std::is_same_v<Scales, E8M0Scales>;

template <class Code, class In, class Scales>
TileArguments<In, Scales> ArgumentsOfTiles(const In* x, const Scales& scales, const Blocks& b,
                                           const uint8_t* data_t) {
  TileArguments<In, Scales> a{x, scales, TileGrid(b.batch, b.rows, b.cols),
                              Divider(b.batch * CeilDiv(b.rows, kTile)),
                              MatricesOfGlobal(scales, b)};
  a.wide = WideColumns<Code>(b.rows, data_t);
  return a;
}

template <class In, class Code, class Scales, bool kRows, Columns kColumns>
Status LaunchQuantizeTiles(CUstream_st* stream, const TileArguments<In, Scales>& a) {
  QuantizeTiles<In, Code, Scales, kRows, kColumns>
      <<<TileBlocks(a.grid), kTileThreads, 0, stream>>>(a);
  return LaunchStatus();
}

// Both planes of a strip of float16, which the compiler widens but once, do not fit in registers.
template <class In, class Scales, bool kRows>
constexpr bool kTakesStrips =
    Fast<Scales>::kGlobal && sizeof(In) == 2 && !(kRows && std::is_same_v<In, float16>);

template <class In, bool kRows>
Status LaunchQuantizeStrips(CUstream_st* stream, const TileArguments<In, Nvfp4Scales>& a) {
  QuantizeStrips<In, kRows><<<TileBlocks(a.grid), kStripThreads, 0, stream>>>(a);
  return LaunchStatus();
}

template <class In, class Code, class Scales, Work kWork>
Status LaunchQuantizeSquareTiles(CUstream_st* stream, const TileArguments<In, Scales>& a) {
  QuantizeSquareTiles<In, Code, Scales, kWork><<<TileBlocks(a.grid), kTileThreads, 0, stream>>>(a);
  return LaunchStatus();
}

template <class In, class Code, class Scales>
Status QuantizeBlock(const Exec<Cuda>& exec, const In* x, const Scales& scales,
                     const Blocks& blocks, const BlockPlane<typename Scales::Stored>& out) {
  constexpr int kBlock = kFastBlock<Scales>;
  constexpr bool kTransposed = kColumnsTransposed<Code, Scales>;
  if (blocks.GridSize() == 0) return {};
  const bool in_order = out.data != nullptr && out.data_t == nullptr && out.scale_inv_t == nullptr;
  const bool transposed = out.data == nullptr && out.data_t != nullptr && out.scale_inv == nullptr;
  const bool tall = blocks.block_rows == kBlock, wide = blocks.block_cols == kBlock;
  const bool row = blocks.block_rows == 1, column = blocks.block_cols == 1;
  const bool vectors = RowsAreVectors<In, Code>(x, blocks, out.data);
  const bool global = MatricesOfGlobal(scales, blocks) > 0;

  if (row && wide && in_order && vectors && blocks.cols % kBlock == 0)
    return LaunchQuantizeRows<In, Code>(exec.stream, x, scales, blocks, out.data, out.scale_inv);
  if (vectors && global) {
    TileArguments<In, Scales> a = ArgumentsOfTiles<Code>(x, scales, blocks, out.data_t);
    a.data = out.data;
    a.scale_inv = out.scale_inv;
    a.second_data = out.data_t;
    a.second_scale_inv = out.scale_inv_t;
    if (tall && wide && out.data_t == nullptr && out.data != nullptr)
      return LaunchQuantizeSquareTiles<In, Code, Scales, Work::kSquare>(exec.stream, a);
    if (tall && wide && out.data_t != nullptr && TilesTranspose<Code>(blocks, out.data_t))
      return out.data == nullptr
                 ? LaunchQuantizeSquareTiles<In, Code, Scales, Work::kSquareTransposed>(exec.stream,
                                                                                        a)
                 : LaunchQuantizeSquareTiles<In, Code, Scales, Work::kSquareBoth>(exec.stream, a);
    if constexpr (kBlock == kTile) {
      if (row && wide && in_order)  // cut
        return LaunchQuantizeTiles<In, Code, Scales, true, Columns::kNone>(exec.stream, a);
    }
    if constexpr (!kTransposed) {
      if (tall && column && in_order) {
        a.second_data = out.data;
        a.second_scale_inv = out.scale_inv;
        return LaunchQuantizeTiles<In, Code, Scales, false, Columns::kInOrder>(exec.stream, a);
      }
    } else {
      if (tall && column && transposed && TilesTranspose<Code>(blocks, out.data_t)) {
        if constexpr (kTakesStrips<In, Scales, false>)
          return LaunchQuantizeStrips<In, false>(exec.stream, a);
        else
          return LaunchQuantizeTiles<In, Code, Scales, false, Columns::kTransposed>(exec.stream, a);
      }
    }
  }
  return LaunchQuantizeUnits<In, Code>(exec.stream, x, scales, blocks, out);
}

template <class In, class Code, class Scales>
Status QuantizeBlockBoth(const Exec<Cuda>& exec, const In* x, const Scales& scales,
                         const Blocks& blocks, const BothPlanes<typename Scales::Stored>& out) {
  constexpr int kBlock = kFastBlock<Scales>;
  constexpr bool kTransposed = kColumnsTransposed<Code, Scales>;
  if (blocks.GridSize() == 0) return {};
  Blocks along_rows = blocks, along_columns = blocks;
  along_rows.block_rows = 1;
  along_columns.block_cols = 1;
  const uint8_t* data_t = kTransposed ? out.second_data : nullptr;
  if (blocks.block_rows == kBlock && blocks.block_cols == kBlock &&
      out.second_transposed == kTransposed && RowsAreVectors<In, Code>(x, blocks, out.data) &&
      MatricesOfGlobal(scales, along_rows) > 0 &&
      (kTransposed ? TilesTranspose<Code>(blocks, data_t)
                   : IsAligned(out.second_data, kStoredBits<Code>))) {
    TileArguments<In, Scales> a = ArgumentsOfTiles<Code>(x, scales, along_rows, data_t);
    a.data = out.data;
    a.scale_inv = out.scale_inv;
    a.second_data = out.second_data;
    a.second_scale_inv = out.second_scale_inv;
    if constexpr (kTakesStrips<In, Scales, true>)
      return LaunchQuantizeStrips<In, true>(exec.stream, a);
    else
      return LaunchQuantizeTiles<In, Code, Scales, true,
                                 kTransposed ? Columns::kTransposed : Columns::kInOrder>(
          exec.stream, a);
  }
  const Status status =
      QuantizeBlock<In, Code, Scales>(exec, x, scales, along_rows, {out.data, out.scale_inv});
  if (status.error != nullptr) return status;
  BlockPlane<typename Scales::Stored> second;
  (out.second_transposed ? second.data_t : second.data) = out.second_data;
  (out.second_transposed ? second.scale_inv_t : second.scale_inv) = out.second_scale_inv;
  return QuantizeBlock<In, Code, Scales>(exec, x, scales, along_columns, second);
}

#define QSHARD_QUANTIZE(In, Code, Scales)                                                          \
  template Status QuantizeBlock<In, Code, Scales>(const Exec<Cuda>&, const In*, const Scales&,     \
                                                  const Blocks&,                                   \
                                                  const BlockPlane<Scales::Stored>&);              \
  template Status QuantizeBlockBoth<In, Code, Scales>(const Exec<Cuda>&, const In*, const Scales&, \
                                                      const Blocks&,                               \
                                                      const BothPlanes<Scales::Stored>&);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_LAUNCH_CUH_
