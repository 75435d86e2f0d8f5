// CastGrouped: data[p, j] = Encode<Code>(x[row of p, j] * scale of the expert of p), and data_t is
// the transpose.
//
// In tiles of 128 x 128 elements (transpose/tile.cuh). A warp has 16 rows of the tile. Each lane
// loads the number, the expert and the scale of one of them, then the warp loads the rows. So x is
// read once, padding is not read, and each code is written once to each plane: 4 bytes per element
// for a 16-bit x. Rows must be multiples of 8 elements, aligned to vectors. Otherwise a warp casts
// a row element by element, and a transpose follows. Needs compute capability 8.9. Equals
// core/round.h bit for bit.
//
// Walks from the END of the rows, because after an amax, which walks forwards, L2 has the end of x.
#include <type_traits>

#include "core/scale.h"
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/quantize/quantize_block.cuh"
#include "kernels/grouped.h"
#include "kernels/transpose.h"

namespace qshard::kernels {

template <>
struct Fast<ExpertScales> : FastScales<128> {};

namespace {

template <class In>
using GroupedTiles = TileArguments<In, ExpertScales, GatheredRows>;

template <class In>
struct CastGroupedTuning {
  static constexpr int kBlocksPerSm = sizeof(In) == 4 ? 2 : 4;
  static constexpr bool kBackward = true, kDownFirst = false;
};

// Returns the scale of a row of an expert. Sets `own` to -1 in a row of no expert. The codes of
// such a row are then Encode(0 * 1) = 0.
__device__ __forceinline__ float ScaleOfRow(const ExpertScales& scales, int64_t expert,
                                            int32_t& own) {
  if (expert < scales.experts.count) return __ldg(scales.scale + expert);
  own = -1;
  return 1.0f;
}

template <class In, class Code, bool kTransposed>
__global__ void __launch_bounds__(kTileThreads, CastGroupedTuning<In>::kBlocksPerSm)
    CastGroupedTiles(const GroupedTiles<In> a) {
  __shared__ alignas(16)
      uint8_t tile[kTransposed ? sizeof(typename TransposedTile<Code>::Bytes) : 16];
  const PatchPlace p;
  const Tile t = TileOf<CastGroupedTuning<In>>(a);
  const int height = t.PatchHeight(p.down * kPatch, p.across * kPatch);
  int32_t own = LaneRow(a.map, t);
  const int64_t first = t.row + threadIdx.x / kWarp * kWarpRows;
  const int64_t expert = a.scales.experts.ExpertOf(first + threadIdx.x % kWarpRows,
                                                   ExpertOfWarp(a.scales.experts, first));
  const float scale = ScaleOfRow(a.scales, expert, own);
  EightOf<In> rows[kPatch];
  GatherPatch<Read::kCached>(a.x, a.grid, t, p, height, own, rows);
  if (a.scales.nonfinite == Nonfinite::kNan) ReplaceInfinityByNan<In>(rows);

  EightCodes<Code> codes[kPatch];
#pragma unroll
  for (int k = 0; k < kPatch; ++k) codes[k] = EncodeRow<In, Code>(rows[k], OfPatchRow(scale, k));
  const auto code = [&](int k) { return codes[k]; };
  if (__all_sync(kAllLanes, height >= kPatch))
    StoreRows<Code, Write::kStream, true>(a.data, a.grid, t, p, height, code);
  else
    StoreRows<Code, Write::kStream, false>(a.data, a.grid, t, p, height, code);
  if constexpr (kTransposed) {
    EightCodes<Code> columns[kPatch];
    TransposeCodes<Code>(codes, columns);
    TransposedTile<Code>::Put(tile, p.down, p.across, columns);
    __syncthreads();
    TransposedTile<Code>::template WriteOut<Write::kStream>(tile, t, a.grid, a.wide, a.second_data);
  }
}

// --- rows of any length and alignment ---

constexpr int kRowThreads = 256, kRowsOfBlock = kRowThreads / kWarp;

template <class In, class Code>
__global__ void __launch_bounds__(kRowThreads)
    CastGroupedRows(const In* x, int64_t cols, const RowMap map, const ExpertScales scales,
                    uint8_t* data) {
  const int64_t row = int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / kWarp;
  if (row >= map.count) return;  // the whole warp
  auto own = static_cast<int32_t>(map.Of(row));
  const float scale = ScaleOfRow(scales, ExpertOfWarp(scales.experts, row), own);
  for (int64_t col = threadIdx.x % kWarp; col < cols; col += kWarp) {
    const float v = own < 0 ? 0.0f : Widen(x[own * cols + col]);
    const float scaled =
        scales.nonfinite == Nonfinite::kNan ? ScaledOrNan(v, scale) : __fmul_rn(v, scale);
    data[row * cols + col] = static_cast<uint8_t>(EncodeOne<Code>(scaled));
  }
}

}  // namespace

template <class In, class Code>
Status CastGrouped(const Exec<Cuda>& exec, const In* x, int64_t cols, const RowMap& map,
                   const ExpertScales& scales, uint8_t* data, uint8_t* data_t) {
  const Blocks rows{1, map.count, cols, 1, 1};
  if (rows.GridSize() == 0) return {};
  const GroupedTiles<In> a =
      ArgumentsOfTiles<Code>(x, scales, rows, data, nullptr, data_t, nullptr, GatheredRows{map});
  if (TakesTiles<Code>(a))
    return Launch(
        exec,
        data_t == nullptr ? CastGroupedTiles<In, Code, false> : CastGroupedTiles<In, Code, true>,
        a.grid.tiles, kTileThreads, a);
  QSHARD_RETURN_IF_ERROR(Launch(exec, CastGroupedRows<In, Code>, CeilDiv(map.count, kRowsOfBlock),
                                kRowThreads, x, cols, map, scales, data));
  if (data_t == nullptr) return {};
  const TransposePair pair{data, data_t, 1, map.count, cols, 8};
  return TransposeEach(exec, &pair, 1);
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cuda, CastGrouped)

}  // namespace qshard::kernels
