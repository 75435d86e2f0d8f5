// Quantization of gathered rows in blocks of 1 x n, and of n x 1 stored transposed. It is a header,
// so that each kind of scales has its own .cu file.
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
Status QuantizeBlockRows(const Exec<Cuda>& exec, const In* x, int64_t cols, const RowMap& map,
                         int64_t block_cols, const Scales& scales,
                         const BothPlanes<typename Scales::Stored>& out) {
  const Blocks along_rows{1, map.count, cols, 1, block_cols};
  const Blocks along_columns{1, map.count, cols, block_cols, 1};
  if (along_rows.GridSize() == 0) return {};
  const bool both = out.second_data != nullptr;
  const auto a = ArgumentsOfTiles<Code>(x, scales, along_rows, out.data, out.scale_inv,
                                        out.second_data, out.second_scale_inv, GatheredRows{map});
  if (block_cols == kFastBlock<Scales> && TakesTiles<Code>(a))
    return Launch(exec,
                  both ? QuantizeTiles<In, Code, Scales, Work::kBoth, GatheredRows>
                       : QuantizeTiles<In, Code, Scales, Work::kRows, GatheredRows>,
                  a.grid.tiles, kTileThreads, a);
  const GatheredFloats gathered{AnyFloats(x), map, cols};
  QSHARD_RETURN_IF_ERROR(
      LaunchQuantizeUnits<Code>(exec, gathered, scales, along_rows, {out.data, out.scale_inv}));
  if (!both) return {};
  return LaunchQuantizeUnits<Code>(exec, gathered, scales, along_columns,
                                   {nullptr, nullptr, out.second_data, out.second_scale_inv});
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_QUANTIZE_BLOCK_ROWS_CUH_
