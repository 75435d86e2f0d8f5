// Chooses the kernel of NVFP4 quantization: the kernels for all formats without options, and
// nvfp4_options.cuh with a Hadamard transform, stochastic rounding, or rows of experts.
#include <algorithm>

#include "kernels/cuda/quantize/nvfp4_blocks.cuh"
#include "kernels/cuda/quantize/nvfp4_options.cuh"
#include "kernels/quantize_block.h"

namespace qshard::kernels {
namespace {

template <class In>
bool TakesNvfp4Tiles(const Nvfp4TileArguments<In, OwnNvfp4Rows>& a, const Blocks& cells,
                     const Philox* philox) {
  // One region must have all 16 elements of a row of a block, or everything.
  const bool draws =
      philox == nullptr || (philox->steps.col == 1 && (a.one_region || cells.block_cols > 1));
  return draws && a.grid.cols % kEight == 0 && IsAligned(a.x, 16) && IsAligned(a.data, 8) &&
         IsAligned(a.second_data, 8) && a.grid.tiles < kMaxDivided && HasSmallIndices(cells);
}

template <class In, bool kRandom, class Rows>
Status LaunchNvfp4Tiles(const Exec<Cuda>& exec, const Nvfp4TileArguments<In, Rows>& a) {
  constexpr int kBytes = sizeof(Nvfp4Memory<In, kRandom, Rows::kGathered>);
  return LaunchShared(exec, QuantizeNvfp4Tiles<In, kRandom, Rows>, a.grid.tiles, kTileThreads,
                      kBytes, a);
}

// Quantizes one plane or both, in the order of x and transposed. Blocks are 1 x 16 and 16 x 1.
// Without a second plane, blocks in the order of x may be 16 x 16.
template <class In>
Status Quantize(const Exec<Cuda>& exec, const In* x, const Nvfp4Scales& scales,
                const Nvfp4Scales& second_scales, const Nvfp4Options& options, const Blocks& cells,
                const BothPlanes<uint8_t>& out) {
  Blocks rows = cells, columns = cells;
  if (out.second_data != nullptr) rows.block_rows = 1, rows.block_cols = kBlock16;
  columns.block_rows = kBlock16, columns.block_cols = 1;
  const int64_t matrices = MatricesOfGlobal(scales, out.data != nullptr ? rows : columns);
  const int64_t second_matrices =
      out.second_data != nullptr ? MatricesOfGlobal(second_scales, columns) : matrices;
  const auto divider = [](int64_t n) {
    return Divider(std::clamp<int64_t>(n, 1, kMaxDivided - 1));
  };
  const Nvfp4TileArguments<In, OwnNvfp4Rows> a = {
      {{},
       scales,
       second_scales,
       divider(matrices),
       divider(second_matrices),
       RegionsOf(options.philox != nullptr ? *options.philox : Philox{nullptr, nullptr, 1, {}},
                 cells),
       divider(cells.block_rows),
       divider(cells.block_cols),
       options.philox != nullptr && options.philox->run >= cells.GridSize()},
      x,
      TileGrid(cells.batch, cells.rows, cells.cols),
      options.hadamard,
      rows.block_rows > 1,
      out.data,
      out.scale_inv,
      out.second_data,
      out.second_scale_inv};
  if (matrices > 0 && second_matrices > 0 && TakesNvfp4Tiles(a, cells, options.philox))
    return options.philox != nullptr ? LaunchNvfp4Tiles<In, true>(exec, a)
                                     : LaunchNvfp4Tiles<In, false>(exec, a);
  const bool random = options.philox != nullptr;
  if (out.data != nullptr) {
    const Status status = LaunchNvfp4Blocks(
        exec, x, {scales, rows, false, random, a.regions, cells, {out.data, out.scale_inv}});
    if (status || out.second_data == nullptr) return status;
  }
  return LaunchNvfp4Blocks(exec, x,
                           {second_scales,
                            columns,
                            options.hadamard,
                            random,
                            a.regions,
                            cells,
                            {nullptr, nullptr, out.second_data, out.second_scale_inv}});
}

}  // namespace

template <class In>
Status QuantizeNvfp4(const Exec<Cuda>& exec, const In* x, const Nvfp4Scales& scales,
                     const Nvfp4Options& options, const Blocks& blocks,
                     const BlockPlane<uint8_t>& out) {
  if (blocks.GridSize() == 0) return {};
  if (!options.hadamard && options.philox == nullptr)
    return QuantizeBlock<In, E2M1>(exec, x, scales, blocks, out);
  return Quantize(exec, x, scales, scales, options, blocks,
                  {out.data, out.scale_inv, out.data_t, out.scale_inv_t, true});
}

template <class In>
Status QuantizeNvfp4Both(const Exec<Cuda>& exec, const In* x, const Nvfp4Scales& scales,
                         const Nvfp4Scales& second_scales, const Nvfp4Options& options,
                         const Blocks& blocks, const BothPlanes<uint8_t>& out) {
  if (blocks.GridSize() == 0) return {};
  // Without options, one kernel writes both planes if they share global scales.
  const bool one = scales.global_amax == second_scales.global_amax &&
                   scales.run == second_scales.run && scales.step == second_scales.step;
  if (!options.hadamard && options.philox == nullptr && one)
    return QuantizeBlockBoth<In, E2M1>(exec, x, scales, blocks, out);
  return Quantize(exec, x, scales, second_scales, options, blocks, out);
}

template <class In>
Status QuantizeNvfp4Rows(const Exec<Cuda>& exec, const In* x, int64_t cols, const RowMap& map,
                         const Nvfp4Experts& experts, const Nvfp4RowPlanes& out) {
  if (map.count == 0 || cols == 0) return {};
  const TileGrid grid(1, map.count, cols);
  if (!FitsGrid(grid.tiles)) return kTooManyBlocks;
  const bool vectors = IsAligned(x, 16) && IsAligned(out.data, 8) && IsAligned(out.data_t, 8);
  const Nvfp4TileArguments<In, ExpertNvfp4Rows> a = {{{map}, experts, vectors},
                                                     x,
                                                     grid,
                                                     out.hadamard,
                                                     out.square,
                                                     out.data,
                                                     out.scale_inv,
                                                     out.data_t,
                                                     out.scale_inv_t};
  return experts.seeds != nullptr ? LaunchNvfp4Tiles<In, true>(exec, a)
                                  : LaunchNvfp4Tiles<In, false>(exec, a);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, QuantizeNvfp4)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, QuantizeNvfp4Both)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, QuantizeNvfp4Rows)

}  // namespace qshard::kernels
