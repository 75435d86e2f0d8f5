// Quantization in tiles of 128 x 128 elements, which contain whole blocks of 128, 32 or 16. Blocks
// along rows, along columns or both, stored in the order of x or transposed, in one read of x.
//
// As in transpose/tile.cuh, a thread keeps a patch of 8 x 8 elements in registers, and warps read
// and write whole lines. Threads exchange two things through shared memory: the amaxes of their
// patches' rows and columns, and then the scales. Each thread computes a few scales.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_TILES_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_TILES_CUH_

#include <cstdint>
#include <type_traits>

#include "core/padded_rows.h"
#include "kernels/cuda/quantize/codes.cuh"
#include "kernels/cuda/quantize/scales.cuh"
#include "kernels/cuda/transpose/tile.cuh"

namespace qshard::kernels {

// --- shared by tile kernels ---

// Rows of x that tiles load: their own rows, or the rows of x that padded rows hold.
struct OwnRows {
  static constexpr bool kGathered = false;
};
struct GatheredRows {
  static constexpr bool kGathered = true;
  RowMap map;
};

template <class In, class Scales, class Rows = OwnRows>
struct TileArguments : Rows {
  const In* x;
  Scales scales;
  TileGrid grid;
  Divider tile_rows;  // over all matrices
  Divider matrices;   // matrices that share a global scale,
  bool one_global;    // if each matrix has only one
  bool wide;          // WideColumns for the transposed codes
  // Null if not requested.
  uint8_t* data;
  typename Scales::Stored* scale_inv;
  uint8_t* second_data;
  typename Scales::Stored* second_scale_inv;
};

// Position of a thread's patch in its tile.
struct PatchPlace {
  __device__ __forceinline__ PatchPlace()
      : down(threadIdx.x / kPatches), across(threadIdx.x % kPatches) {}
  int down, across;
};

// Returns the tile of this thread block, in the order of the tuning. kDownFirst: the next tile is
// below, so that consecutive thread blocks write consecutive parts of the transposed plane.
template <class Tuning, class In, class Scales, class Rows>
__device__ __forceinline__ Tile TileOf(const TileArguments<In, Scales, Rows>& a) {
  uint32_t index = blockIdx.x;
  if constexpr (Tuning::kDownFirst) {
    const uint32_t across = a.tile_rows.Divide(index);
    index = (index - across * a.tile_rows.divisor()) * a.grid.across.divisor() + across;
  }
  return a.grid.At(Tuning::kBackward ? gridDim.x - 1 - index : index);
}

// A warp has two rows of patches. Lanes k and k + kWarpRows keep numbers of its row k.
constexpr int kWarpRows = 2 * kPatch;
static_assert(kWarp == 2 * kWarpRows && kWarp == 2 * kPatches);

// Returns this lane's row of x, or -1 for padding and rows outside the tile.
__device__ __forceinline__ int32_t LaneRow(const RowMap& map, const Tile& t) {
  const int row = threadIdx.x / kWarp * kWarpRows + threadIdx.x % kWarpRows;
  return row < t.height ? static_cast<int32_t>(map.Of(t.row + row)) : -1;
}

// Returns the value that the lane of row k of this thread's patch has. All lanes must call it.
template <class T>
__device__ __forceinline__ T OfPatchRow(T value, int k) {
  return __shfl_sync(kAllLanes, value, threadIdx.x / kPatches % 2 * kPatch + k);
}

// Returns whether the bytes of a row fit in 32 bits, for one multiplication per address.
template <class In>
bool HasShortRows(const TileGrid& grid) {
  return grid.cols <= int64_t{UINT32_MAX} / int64_t{sizeof(In)};
}

// Loads a patch of the rows of x that lanes have, and zeros for -1.
template <Read kRead, class In>
__device__ __forceinline__ void GatherPatch(const In* x, const TileGrid& grid, const Tile& t,
                                            const PatchPlace& p, int height, int32_t lane_row,
                                            EightOf<In> (&rows)[kPatch]) {
  const auto* from = reinterpret_cast<const char*>(x + t.col + p.across * kPatch);
  const auto row_bytes = static_cast<uint32_t>(grid.cols * sizeof(In));  // HasShortRows
#pragma unroll
  for (int k = 0; k < kPatch; ++k) {
    const int32_t row = OfPatchRow(lane_row, k);
    rows[k] = {};
    if (row >= 0 && height > 0)
      rows[k] = Load<kPatch * sizeof(In), kRead>(
          reinterpret_cast<const In*>(from + uint64_t{static_cast<uint32_t>(row)} * row_bytes));
  }
}

template <class Tuning, class In, class Scales, class Rows>
__device__ __forceinline__ void LoadPatch(const TileArguments<In, Scales, Rows>& a, const Tile& t,
                                          const PatchPlace& p, int height,
                                          EightOf<In> (&rows)[kPatch]) {
  if constexpr (Rows::kGathered)
    GatherPatch<Tuning::kRead>(a.x, a.grid, t, p, height, LaneRow(a.map, t), rows);
  else
    LoadRows<Tuning::kRead>(a.x + a.grid.Offset(t, p.down * kPatch, p.across * kPatch), a.grid.cols,
                            height, rows);
}

// Stores the codes of the patch's rows that exist; with `kWhole`, all of them. codes(k) computes
// row k. Row by row, to save registers.
template <class Code, Write kWrite, bool kWhole, class Codes>
__device__ __forceinline__ void StoreRows(uint8_t* data, const TileGrid& grid, const Tile& t,
                                          const PatchPlace& p, int height, const Codes& codes) {
  // Rows of x are whole vectors of eight.
  const uint64_t first = grid.Offset(t, p.down * kPatch, p.across * kPatch);
  uint8_t* to = data + first / kEight * kStoredBits<Code>;
  const uint64_t step = static_cast<uint64_t>(grid.cols) / kEight * kStoredBits<Code>;
#pragma unroll
  for (int k = 0; k < kPatch; ++k, to += step) {
    if (kWhole || k < height) Store<kWrite>(to, codes(k));
  }
}

// Task of a tile kernel.
enum class Work { kRows, kColumns, kBoth, kSquare, kSquareTransposed, kSquareBoth };

// Tuned on an H200.
template <class In, class Scales, Work kWork>
struct TileTuning {
  static constexpr bool kNvfp4 = Fast<Scales>::kGlobal;
  static constexpr bool kE8M0 = kFastBlock<Scales> == 32, kFloat = kFastBlock<Scales> == 128;
  static constexpr int Blocks() {
    // As many as the registers of a patch allow. The compiler widens a whole float16 patch at once.
    if (sizeof(In) == 4 || (std::is_same_v<In, float16> && kNvfp4)) return 2;
    if (kWork == Work::kBoth) return 3;
    if (kWork == Work::kSquareTransposed || kWork == Work::kSquareBoth) return 4;
    if (kE8M0) return 3;
    return kNvfp4 || kWork == Work::kColumns ? 4 : 3;
  }
  static constexpr int kBlocksPerSm = Blocks();
  static constexpr bool kBackward = kNvfp4;
  static constexpr bool kDownFirst =
      !kNvfp4 && (kWork == Work::kSquareTransposed || (kFloat && kWork == Work::kColumns));
  static constexpr Read kRead = !kNvfp4 && kWork == Work::kSquareBoth ? Read::kOnce : Read::kCached;
  static constexpr Write kWrite =
      !kNvfp4 && (kWork == Work::kBoth || (kE8M0 && kWork == Work::kColumns)) ? Write::kCached
                                                                              : Write::kStream;
};
// Starts at the end of x, which a preceding amax, which walks forwards, has left in L2.
template <class In, bool kAmax, Work kWork>
struct TileTuning<In, GivenScales<kAmax>, kWork> {
  static constexpr int kBlocksPerSm = sizeof(In) == 4 ? 2 : kAmax ? 3 : 4;
  static constexpr bool kBackward = true, kDownFirst = false;
  static constexpr Read kRead = kAmax ? Read::kOnce : Read::kCached;
  static constexpr Write kWrite = Write::kStream;
};

// Stores a scale. A tile's scales fill sectors only in part, and other tiles write the rest.
// Keeping sectors in L2 until they are complete is faster.
template <class Stored>
__device__ __forceinline__ void StoreScale(Stored* to, Stored scale_inv) {
  uint64_t last_to_leave;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(last_to_leave));
  if constexpr (std::is_same_v<Stored, float>)
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;"
                 :
                 : "l"(to), "f"(scale_inv), "l"(last_to_leave)
                 : "memory");
  else
    asm volatile("st.global.L2::cache_hint.u8 [%0], %1, %2;"
                 :
                 : "l"(to), "r"(uint32_t{scale_inv}), "l"(last_to_leave)
                 : "memory");
}

// --- blocks along rows (kRows) and along columns ---

// How fast kernels store blocks along columns. GEMMs of one-byte codes with E8M0 scales read them
// in the order of x, all others transposed.
template <class Code, class Scales>
constexpr bool kColumnsTransposed = kPacked<Code> || !std::is_same_v<Scales, E8M0Scales>;

// Row strides in shared memory: 16 bytes longer than all banks together, for accesses down columns.
template <class In>
constexpr int kBitsStride = kTile + 16 / sizeof(typename Magnitudes<In>::Bits);
constexpr int kScaleStride = kTile + 4;

// Scales of consecutive lines.
__device__ __forceinline__ void StoreScales(const float (&scale)[kPatch], float* to) {
  auto* four = reinterpret_cast<float4*>(to);
  four[0] = make_float4(scale[0], scale[1], scale[2], scale[3]);
  four[1] = make_float4(scale[4], scale[5], scale[6], scale[7]);
}
__device__ __forceinline__ void LoadScales(const float* from, float (&scale)[kPatch]) {
  const auto* four = reinterpret_cast<const float4*>(from);
  const float4 lo = four[0], hi = four[1];
  scale[0] = lo.x, scale[1] = lo.y, scale[2] = lo.z, scale[3] = lo.w;
  scale[4] = hi.x, scale[5] = hi.y, scale[6] = hi.z, scale[7] = hi.w;
}

template <class In, class Code, class Scales, Work kWork, class Rows>
__global__ void __launch_bounds__(kTileThreads, TileTuning<In, Scales, kWork>::kBlocksPerSm)
    QuantizeTiles(const TileArguments<In, Scales, Rows> a) {
  using Abs = Magnitudes<In>;
  using Tuning = TileTuning<In, Scales, kWork>;
  constexpr bool kRows = kWork != Work::kColumns, kAlongColumns = kWork != Work::kRows;
  constexpr bool kTransposed = kAlongColumns && kColumnsTransposed<Code, Scales>;
  constexpr int kBlock = kFastBlock<Scales>;
  constexpr int kAcross = kTile / kBlock;  // blocks in a row of the tile
  constexpr int kWords = EightOf<In>::kCount;
  constexpr int kWarps = kTileThreads / 32;
  using BitsOf = typename Abs::Bits;
  __shared__ alignas(16) BitsOf row_amax[kRows ? kAcross * kBitsStride<In> : 1];
  __shared__ alignas(16) BitsOf column_amax[kAlongColumns ? kWarps * kBitsStride<In> : 1];
  __shared__ alignas(16) float row_scale[kRows ? kAcross * kScaleStride : 1];
  __shared__ alignas(16) float column_scale[kAlongColumns ? kAcross * kScaleStride : 1];
  __shared__ alignas(16)
      uint8_t tile[kTransposed ? sizeof(typename TransposedTile<Code>::Bytes) : 16];
  __shared__ typename Fast<Scales>::Global global;

  const PatchPlace p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile t = TileOf<Tuning>(a);
  const int height = t.PatchHeight(p.down * kPatch, p.across * kPatch);
  EightOf<In> rows[kPatch];
  LoadPatch<Tuning>(a, t, p, height, rows);
  if constexpr (Fast<Scales>::kGlobal) {
    if (threadIdx.x == 0) global = GlobalAt(a.scales, a.matrices.Divide(t.matrix));
  }

  // Amaxes of rows and columns within a warp.
  uint32_t row_max[kPatch], column_max[kWords];
#pragma unroll
  for (int k = 0; k < kPatch; ++k) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t w = rows[k].w[i];
      row_max[k] = i == 0 ? w : Abs::MaxAbs(row_max[k], w);
      column_max[i] = k == 0 ? w : Abs::MaxAbs(column_max[i], w);
    }
    row_max[k] = Abs::Abs(row_max[k]);
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) column_max[i] = Abs::Abs(column_max[i]);
  if constexpr (kRows) {
    constexpr int kCount = kPatch / Abs::kPerWord, kFrom = kBlock / kPatch / 2;
    uint32_t m[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      m[i] = Abs::kPerWord == 2 ? Abs::Fold(row_max[2 * i % kPatch], row_max[2 * i % kPatch + 1])
                                : row_max[i];
    ReduceScatter<In, kFrom, 1, kCount>(m, lane);
    constexpr int kLeft = WordsLeft(kFrom, 1, kCount);
    // Lanes that went on after the last split have the same words.
    constexpr int kSame = kBlock / kPatch * kLeft / kCount;
    auto* to = reinterpret_cast<uint32_t*>(row_amax + p.across * kPatch / kBlock * kBitsStride<In> +
                                           p.down * kPatch) +
               FirstWord<kFrom, 1, kCount>(lane);
    if (lane % kSame == 0) {
#pragma unroll
      for (int i = 0; i < kLeft; ++i) to[i] = m[i];
    }
  }
  if constexpr (kAlongColumns) {
    ReduceScatter<In, 16, 16, kWords>(column_max, lane);
    auto* to =
        reinterpret_cast<uint32_t*>(column_amax + warp * kBitsStride<In> + p.across * kPatch) +
        FirstWord<16, 16, kWords>(lane);
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i) to[i] = column_max[i];
  }
  __syncthreads();

  // Scales.
  constexpr int kScales = kTile * kAcross;
  bool common = t.height == kTile && t.width == kTile;
  if constexpr (kRows) {
    const int64_t grid_cols = CeilDiv(a.grid.cols, int64_t{kBlock});
#pragma unroll
    for (int i = 0; i < CeilDiv(kScales, kTileThreads); ++i) {
      const int s = i * kTileThreads + threadIdx.x, b = s % kAcross, row = s / kAcross;
      if (kScales % kTileThreads != 0 && row >= kTile) break;
      const float amax = Abs::Value(row_amax[b * kBitsStride<In> + row]);
      const auto scale = ScaleOf<Code>(a.scales, global, amax);
      if constexpr (kPacked<Code>) common = common && IsPlainE2M1(amax, scale.scale);
      row_scale[b * kScaleStride + row] = scale.scale;
      if (row < t.height && b * kBlock < t.width && a.scale_inv != nullptr)
        StoreScale(
            a.scale_inv + (t.matrix * a.grid.rows + t.row + row) * grid_cols + t.col / kBlock + b,
            scale.scale_inv);
    }
  }
  if constexpr (kAlongColumns) {
    const int64_t grid_rows = CeilDiv(a.grid.rows, int64_t{kBlock});
#pragma unroll
    for (int i = 0; i < CeilDiv(kScales, kTileThreads); ++i) {
      // In the order of storage. If there are few, use the second half of the threads, because the
      // first half has worked on rows.
      const int s =
          i * kTileThreads + (kScales < kTileThreads ? static_cast<int>(threadIdx.x) - kScales
                                                     : static_cast<int>(threadIdx.x));
      if (kScales < kTileThreads && s < 0) break;
      const int b = kTransposed ? s % kAcross : s / kTile;
      const int col = kTransposed ? s / kAcross : s % kTile;
      const BitsOf* from = column_amax + b * (kBlock / kWarpRows) * kBitsStride<In> + col;
      uint32_t bits = from[0];
#pragma unroll
      for (int j = 1; j < kBlock / kWarpRows; ++j)
        bits = max(bits, uint32_t{from[j * kBitsStride<In>]});
      const float amax = Abs::Value(bits);
      const auto scale = ScaleOf<Code>(a.scales, global, amax);
      if constexpr (kPacked<Code>) common = common && IsPlainE2M1(amax, scale.scale);
      column_scale[b * kScaleStride + col] = scale.scale;
      const int64_t grid_row = t.row / kBlock + b, x_col = t.col + col;
      if (b * kBlock < t.height && col < t.width && a.second_scale_inv != nullptr)
        StoreScale(a.second_scale_inv +
                       (kTransposed ? (t.matrix * a.grid.cols + x_col) * grid_rows + grid_row
                                    : (t.matrix * grid_rows + grid_row) * a.grid.cols + x_col),
                   scale.scale_inv);
    }
  }
  // The common case, whole tiles of plain elements, has its own code.
  if constexpr (kPacked<Code>)
    common = __syncthreads_and(common);
  else
    __syncthreads();

  // Codes.
  const auto encode = [&](auto is_common) {
    constexpr bool kCommon = decltype(is_common)::value;
    if constexpr (kRows) {
      float scale[kPatch];
      LoadScales(row_scale + p.across * kPatch / kBlock * kScaleStride + p.down * kPatch, scale);
      StoreRows<Code, Tuning::kWrite, kCommon>(a.data, a.grid, t, p, height, [&](int k) {
        return EncodeRow<In, Code, kCommon>(rows[k], scale[k]);
      });
    }
    if constexpr (kAlongColumns) {
      float scale[kPatch];
      LoadScales(column_scale + p.down * kPatch / kBlock * kScaleStride + p.across * kPatch, scale);
      if constexpr (kTransposed) {
        EightCodes<Code> columns[kPatch];
        EncodeColumns<In, Code, kCommon>(rows, scale, columns);
        TransposedTile<Code>::Put(tile, p.down, p.across, columns);
      } else {
        StoreRows<Code, Tuning::kWrite, kCommon>(a.second_data, a.grid, t, p, height, [&](int k) {
          return EncodeRow<In, Code>(rows[k], scale);
        });
      }
    }
  };
  if (common)
    encode(std::true_type{});
  else
    encode(std::false_type{});
  if constexpr (kTransposed) {
    __syncthreads();
    TransposedTile<Code>::template WriteOut<Tuning::kWrite>(tile, t, a.grid, a.wide, a.second_data);
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_TILES_CUH_
