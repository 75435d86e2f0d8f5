// Quantization of 2-D blocks, or with a passed scale, in tiles of 128 x 128 elements. Stores codes
// in the order of x, transposed or both, and encodes each element once.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_SQUARE_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_SQUARE_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/quantize/tiles.cuh"
#include "kernels/cuda/raise_amax.cuh"

namespace qshard::kernels {

// Returns the run of `matrices` matrices that a matrix is in; 0: all are one run.
__device__ __forceinline__ int64_t RunOf(int64_t matrix, int64_t matrices) {
  return matrices == 0 ? 0 : matrix / matrices;
}

// Replaces infinite elements by NaN.
template <class In>
__device__ __forceinline__ void ReplaceInfinityByNan(EightOf<In> (&rows)[kPatch]) {
  using Abs = Magnitudes<In>;
#pragma unroll
  for (int k = 0; k < kPatch; ++k) {
#pragma unroll
    for (int i = 0; i < EightOf<In>::kCount; ++i) {
#pragma unroll
      for (int shift = 0; shift < 32; shift += 32 / Abs::kPerWord) {
        const uint32_t mask = Abs::kPerWord == 2 ? 0x7FFFu << shift : 0x7FFFFFFFu;
        // Any mantissa bit makes a NaN.
        if ((rows[k].w[i] & mask) == Abs::kInfinity << shift) rows[k].w[i] |= 1u << shift;
      }
    }
  }
}

// Encodes this thread's patch under its scale, and stores the codes of the tile: in the order of x
// if requested, and with kTransposed also transposed, through the shared memory `tile`. `common`:
// the patch is whole, and products are plain (IsPlainE2M1).
template <class In, class Code, bool kTransposed, Write kWrite, class Arguments>
__device__ __forceinline__ void StoreSquareTile(const Arguments& a, const Tile& t,
                                                const PatchPlace& p, int height,
                                                const EightOf<In> (&rows)[kPatch], float scale,
                                                bool common, uint8_t* tile) {
  EightCodes<Code> codes[kPatch];
  const auto encode = [&](auto is_common) {
    constexpr bool kCommon = decltype(is_common)::value;
#pragma unroll
    for (int k = 0; k < kPatch; ++k) codes[k] = EncodeRow<In, Code, kCommon>(rows[k], scale);
    if (!kTransposed || a.data != nullptr)
      StoreRows<Code, kWrite, kCommon>(a.data, a.grid, t, p, height,
                                       [&](int k) { return codes[k]; });
  };
  if (__all_sync(0xFFFFFFFFu, common))
    encode(std::true_type{});
  else
    encode(std::false_type{});
  if constexpr (kTransposed) {
    EightCodes<Code> columns[kPatch];
    TransposeCodes<Code>(codes, columns);
    TransposedTile<Code>::Put(tile, p.down, p.across, columns);
    __syncthreads();
    TransposedTile<Code>::template WriteOut<kWrite>(tile, t, a.grid, a.wide, a.second_data);
  }
}

template <class In, class Code, class Scales, Work kWork, class Rows>
__global__ void __launch_bounds__(kTileThreads, TileTuning<In, Scales, kWork>::kBlocksPerSm)
    QuantizeSquareTiles(const TileArguments<In, Scales, Rows> a) {
  using Abs = Magnitudes<In>;
  using Tuning = TileTuning<In, Scales, kWork>;
  constexpr bool kTransposed = kWork != Work::kSquare;
  constexpr int kBlock = kFastBlock<Scales>;
  constexpr int kPatchesOfBlock = kBlock / kPatch;
  constexpr int kAcross = kTile / kBlock, kWarps = kTileThreads / 32;
  constexpr bool kGlobal = Fast<Scales>::kGlobal, kGiven = Fast<Scales>::kGiven;
  constexpr bool kAmax = Fast<Scales>::kAmax;
  __shared__ uint32_t warp_amax[kWarps * kAcross];
  __shared__ alignas(16)
      uint8_t tile[kTransposed ? sizeof(typename TransposedTile<Code>::Bytes) : 16];
  __shared__ typename Fast<Scales>::Global global;

  const PatchPlace p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Tile t = TileOf<Tuning>(a);
  const int height = t.PatchHeight(p.down * kPatch, p.across * kPatch);
  EightOf<In> rows[kPatch];
  LoadPatch<Tuning>(a, t, p, height, rows);
  float scale = 0.0f;
  if constexpr (kGiven) {
    const int64_t run = RunOf(t.matrix, a.scales.matrices);
    scale = __ldg(a.scales.scale + run);
    if (kAmax && scale == 0.0f && a.scales.amax != nullptr)
      scale =
          ScaleOrFirst(scale, *static_cast<volatile float*>(a.scales.amax + run), a.scales.target);
  } else if constexpr (kGlobal) {
    if (warp == 0) {
      const auto g = GlobalAt(a.scales, a.matrices.Divide(t.matrix));
      if (lane == 0) global = g;
    }
  }

  uint32_t m = 0;
  if constexpr (kAmax) {
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
#pragma unroll
      for (int i = 0; i < EightOf<In>::kCount; ++i) m = Abs::MaxAbs(m, rows[k].w[i]);
    }
    m = Abs::Abs(m);
    if constexpr (Abs::kPerWord == 2) m = max(m & 0xFFFFu, m >> 16);
    // Reduce over the patches of the block in this warp, which has two rows of patches.
#pragma unroll
    for (int offset = 1; offset < kPatchesOfBlock; offset *= 2)
      m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, offset));
    m = max(m, __shfl_xor_sync(0xFFFFFFFFu, m, kPatches));
    if constexpr (kPatchesOfBlock > 2) {
      const int b = p.across / kPatchesOfBlock;
      if (lane < kPatches && lane % kPatchesOfBlock == 0) warp_amax[warp * kAcross + b] = m;
      __syncthreads();
      constexpr int kWarpsOfBlock = kPatchesOfBlock / 2;
      const int first = warp / kWarpsOfBlock * kWarpsOfBlock;
      m = warp_amax[first * kAcross + b];
#pragma unroll
      for (int i = 1; i < kWarpsOfBlock; ++i) m = max(m, warp_amax[(first + i) * kAcross + b]);
    } else if constexpr (kGlobal) {
      __syncthreads();
    }
  }

  if constexpr (kGiven) {
    if (kAmax && threadIdx.x == 0 && a.scales.amax != nullptr)
      RaiseAmax(a.scales.amax + RunOf(t.matrix, a.scales.matrices),
                FloatBits(CanonicalNan(Abs::Value(m))));
  } else {
    const auto s = ScaleOf<Code>(a.scales, global, Abs::Value(m));
    scale = s.scale;
    if (p.down % kPatchesOfBlock == 0 && p.across % kPatchesOfBlock == 0 && height > 0) {
      const int64_t grid_rows = CeilDiv(a.grid.rows, int64_t{kBlock});
      const int64_t grid_cols = CeilDiv(a.grid.cols, int64_t{kBlock});
      const int64_t i = t.row / kBlock + p.down / kPatchesOfBlock;
      const int64_t j = t.col / kBlock + p.across / kPatchesOfBlock;
      if (a.scale_inv != nullptr)
        a.scale_inv[(t.matrix * grid_rows + i) * grid_cols + j] = s.scale_inv;
      if (a.second_scale_inv != nullptr)
        a.second_scale_inv[(t.matrix * grid_cols + j) * grid_rows + i] = s.scale_inv;
    }
  }

  if constexpr (kGiven && kAmax) {
    if (a.scales.nonfinite == Nonfinite::kNan && !(Abs::Value(m) <= kFloatMax))
      ReplaceInfinityByNan<In>(rows);
  }

  bool common = height >= kPatch;
  if constexpr (kPacked<Code>) common = common && IsPlainE2M1(Abs::Value(m), scale);
  StoreSquareTile<In, Code, kTransposed, Tuning::kWrite>(a, t, p, height, rows, scale, common,
                                                         tile);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_SQUARE_CUH_
