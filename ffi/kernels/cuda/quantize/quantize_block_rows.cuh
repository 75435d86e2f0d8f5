// Quantization of gathered rows: blocks in their order, 2-D blocks also transposed, or blocks of
// 1 x n and n x 1. It is a header, so that each kind of scales has its own .cu file.
//
// Fast blocks are quantized in tiles (quantize/tiles.cuh). A tile loads the numbers of its rows,
// and then the rows: x is read once for both planes, and padding is not read. Other blocks and
// alignments take any.cuh.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_QUANTIZE_BLOCK_ROWS_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_QUANTIZE_BLOCK_ROWS_CUH_

#include <cstdint>

#include "kernels/cuda/quantize/quantize_block.cuh"
#include "kernels/grouped.h"

namespace qshard::kernels {

template <class In, class Code, class Scales>
Status QuantizeBlockRows(const Exec<Cuda>& exec, const In* x, const RowMap& map,
                         const Scales& scales, const Blocks& blocks,
                         const BlockPlane<typename Scales::Stored>& out) {
  constexpr int kBlock = kFastBlock<Scales>;
  if (blocks.GridSize() == 0) return {};
  const auto a = ArgumentsOfTiles<Code>(x, scales, blocks, out.data, out.scale_inv, out.data_t,
                                        out.scale_inv_t, GatheredRows{map});
  if (blocks.block_cols == kBlock && TakesTiles<Code>(a)) {
    if (blocks.block_rows == kBlock)
      return out.data_t != nullptr ? LaunchTiles<In, Code, Scales, Work::kSquareBoth>(exec, a)
                                   : LaunchTiles<In, Code, Scales, Work::kSquare>(exec, a);
    if (blocks.block_rows == 1 && out.data_t == nullptr)
      return LaunchTiles<In, Code, Scales, Work::kRows>(exec, a);
  }
  return LaunchQuantizeUnits<Code>(exec, GatheredFloats{AnyFloats(x), map, blocks.cols}, scales,
                                   blocks, out);
}

template <class In, class Code, class Scales>
Status QuantizeBlockBothRows(const Exec<Cuda>& exec, const In* x, const RowMap& map,
                             const Scales& scales, const Blocks& blocks,
                             const BothPlanes<typename Scales::Stored>& out) {
  if (blocks.GridSize() == 0) return {};
  Blocks along_rows = blocks, along_columns = blocks;
  along_rows.block_rows = 1;
  along_columns.block_cols = 1;
  const auto a = ArgumentsOfTiles<Code>(x, scales, along_rows, out.data, out.scale_inv,
                                        out.second_data, out.second_scale_inv, GatheredRows{map});
  if (TakesBothTiles<Code>(a, blocks, out.second_transposed))
    return LaunchTiles<In, Code, Scales, Work::kBoth>(exec, a);
  const GatheredFloats gathered{AnyFloats(x), map, blocks.cols};
  QSHARD_RETURN_IF_ERROR(
      LaunchQuantizeUnits<Code>(exec, gathered, scales, along_rows, {out.data, out.scale_inv}));
  BlockPlane<typename Scales::Stored> second;
  (out.second_transposed ? second.data_t : second.data) = out.second_data;
  (out.second_transposed ? second.scale_inv_t : second.scale_inv) = out.second_scale_inv;
  return LaunchQuantizeUnits<Code>(exec, gathered, scales, along_columns, second);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_QUANTIZE_BLOCK_ROWS_CUH_
