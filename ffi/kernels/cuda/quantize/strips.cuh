// NVFP4 quantization of a 16-bit x along columns, stored transposed, alone or together with blocks
// along rows. Warps rarely wait for each other.
//
// A lane keeps a strip of 16 rows x 8 columns in registers: whole blocks along columns, and halves
// of blocks along rows, which it completes with its neighbour. So lanes below each other write the
// codes of a column. Only scales go through shared memory: scales of rows, half of them computed by
// each of two neighbours, and the codes of all scales, to be stored eight at a time.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_STRIPS_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_STRIPS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/quantize/tiles.cuh"

namespace qshard::kernels {

constexpr int kStripRows = kFastBlock<Nvfp4Scales>;
constexpr int kStripThreads = kTile * kTile / (kStripRows * kPatch);
static_assert(kStripRows == 2 * kPatch && kStripThreads == kTile && kStripThreads >= kScaleCodes);

// Codes of the scales of a tile's lines (rows or columns), eight blocks each.
constexpr int kLineBlocks = kTile / kStripRows;
using LineCodes = uint8_t[kTile][kLineBlocks];

// Computes multipliers and codes for eight consecutive lines, one block each, from magnitudes
// packed two a word. Returns whether all elements are known to be plain (IsPlainE2M1): a normal
// E4M3 number is within 1/16 of the value it represents, so amax * scale is at most 6 * 17/16. The
// same holds for the largest E4M3 number unless it is saturated.
template <class In>
__device__ __forceinline__ bool EightScales(const uint32_t (&amax)[kPatch / 2], GlobalNvfp4 global,
                                            const float (&table)[kScaleCodes],
                                            float (&scale)[kPatch], uint8_t* codes) {
  using Abs = Magnitudes<In>;
  const uint32_t top = Abs::Max(Abs::Max(amax[0], amax[1]), Abs::Max(amax[2], amax[3]));
  const float largest = Abs::Value(max(top & 0xFFFFu, top >> 16));
  const bool may_exceed = !(largest <= global.largest);
  uint32_t below = 0;
#pragma unroll
  for (int i = 0; i < kPatch; i += 4) {
    const float v[4] = {Abs::Value(amax[i / 2] & 0xFFFFu), Abs::Value(amax[i / 2] >> 16),
                        Abs::Value(amax[i / 2 + 1] & 0xFFFFu), Abs::Value(amax[i / 2 + 1] >> 16)};
    const uint32_t four =
        may_exceed ? FourScalesNvfp4<true>(v, global) : FourScalesNvfp4<false>(v, global);
    constexpr uint32_t kLeastNormal = (1u << E4M3::kMantissaBits) * 0x01010101u;
    below |= four - kLeastNormal;  // a smaller code sets the highest bit of its byte
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      scale[i + k] = table[four >> (8 * k) & (kScaleCodes - 1)];
      codes[(i + k) * kLineBlocks] = static_cast<uint8_t>(four >> (8 * k));
    }
  }
  return (below & 0x80808080u) == 0 &&
         __fmul_rn(largest, global.sixth) <= E4M3::kMax * (1 + 1.0f / 16);
}

// Stores the scale codes of a line, at most `left` of them.
__device__ __forceinline__ void StoreLineCodes(const uint8_t (&codes)[kLineBlocks], uint8_t* to,
                                               int left) {
  static_assert(kLineBlocks == sizeof(uint2));
  if (left >= kLineBlocks && (reinterpret_cast<uintptr_t>(to) & 7) == 0) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(codes);
  } else {
#pragma unroll 1
    for (int i = 0; i < min(left, kLineBlocks); ++i) to[i] = codes[i];
  }
}

template <class In, bool kRows>
__global__ void __launch_bounds__(kStripThreads, 4)
    QuantizeStrips(const TileArguments<In, Nvfp4Scales> a) {
  using Tuning = TileTuning<In, Nvfp4Scales, kRows ? Work::kBoth : Work::kColumns>;
  static_assert(sizeof(In) == 2);
  using Abs = Magnitudes<In>;
  constexpr int kWords = EightOf<In>::kCount;
  constexpr int kAcross = 8, kDown = kWarp / kAcross;  // neighbouring lanes, tuned on an H200
  constexpr int kWarpsAcross = kPatches / kAcross;
  __shared__ GlobalNvfp4 global;
  __shared__ float table[kScaleCodes];
  __shared__ alignas(8) LineCodes row_codes;
  __shared__ alignas(8) LineCodes column_codes;
  __shared__ alignas(16) float row_scales[kRows ? kLineBlocks * kScaleStride : 1];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int down = warp / kWarpsAcross * kDown + lane / kAcross;
  const int row0 = down * kStripRows;
  const int col0 = (warp % kWarpsAcross * kAcross + lane % kAcross) * kPatch;
  const Tile t = TileOf<Tuning>(a);
  const int height = t.PatchHeight(row0, col0);
  EightOf<In> rows[2][kPatch];
  const In* from = a.x + a.grid.Offset(t, row0, col0);
  LoadRows<Tuning::kRead>(from, a.grid.cols, height, rows[0]);
  LoadRows<Tuning::kRead>(from + kPatch * a.grid.cols, a.grid.cols, height - kPatch, rows[1]);
  if (threadIdx.x == 0) global = GlobalAt(a.scales, a.matrices.Divide(t.matrix));
  __syncthreads();
  FillMultipliers(global, table);
  __syncthreads();

  // The common case has its own code: the warp's strips are whole and all elements plain.
  const bool whole = height >= kStripRows;
  const auto in_case = [&](bool plain, const auto& encode) {
    if (__all_sync(0xFFFFFFFFu, plain && whole))
      encode(std::true_type{});
    else
      encode(std::false_type{});
  };

  {
    uint32_t amax[kWords];
#pragma unroll
    for (int k = 0; k < kStripRows; ++k) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t w = rows[k / kPatch][k % kPatch].w[i];
        amax[i] = k == 0 ? w : Abs::MaxAbs(amax[i], w);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) amax[i] = Abs::Abs(amax[i]);
    float scale[kPatch];
    const bool plain = EightScales<In>(amax, global, table, scale, &column_codes[col0][down]);
    in_case(plain, [&](auto is_common) {
      constexpr bool kCommon = decltype(is_common)::value;
      uint8_t* to = a.second_data + a.grid.OffsetT(t, row0, col0) / 2;
#pragma unroll
      for (int i = 0; i < kPatch; ++i, to += a.grid.rows / 2) {
        Words<kStripRows / 2> codes;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float v[kEight];
#pragma unroll
          for (int k = 0; k < kEight; ++k) v[k] = ElementOf<In>(rows[h][k], i);
          codes.w[h] = EncodeEight<E2M1, kCommon>(v, scale[i]).w[0];
        }
        if (kCommon || height > 0) Store<Tuning::kWrite>(to, codes);
      }
    });
  }
  if constexpr (kRows) {
    uint32_t amax[kPatch];  // of rows, two a word
#pragma unroll
    for (int k = 0; k < kStripRows; k += 2) {
      uint32_t two[2];
#pragma unroll
      for (int i = 0; i < 2 * kWords; ++i) {
        const uint32_t w = rows[k / kPatch][k % kPatch + i / kWords].w[i % kWords];
        two[i / kWords] = i % kWords == 0 ? w : Abs::MaxAbs(two[i / kWords], w);
      }
      amax[k / 2] = Abs::Fold(Abs::Abs(two[0]), Abs::Abs(two[1]));
    }
    // Two lanes share blocks. Each computes the scales of eight rows.
    ReduceScatter<In, 1, 1, kPatch>(amax, lane);
    const int half = lane % 2 * kPatch;
    const uint32_t own[kPatch / 2] = {amax[0], amax[1], amax[2], amax[3]};
    float of_half[kPatch];
    const bool plain =
        EightScales<In>(own, global, table, of_half, &row_codes[row0 + half][col0 / kStripRows]);
    float* const scale = row_scales + col0 / kStripRows * kScaleStride + row0;
    StoreScales(of_half, scale + half);
    __syncwarp();
    in_case(plain, [&](auto is_common) {
      constexpr bool kCommon = decltype(is_common)::value;
      float of_rows[2][kPatch];
      LoadScales(scale, of_rows[0]);
      LoadScales(scale + kPatch, of_rows[1]);
      uint8_t* to = a.data + a.grid.Offset(t, row0, col0) / 2;
#pragma unroll
      for (int k = 0; k < kStripRows; ++k, to += a.grid.cols / 2) {
        if (kCommon || k < height)
          Store<Tuning::kWrite>(to, EncodeRow<In, E2M1, kCommon>(rows[k / kPatch][k % kPatch],
                                                                 of_rows[k / kPatch][k % kPatch]));
      }
    });
  }

  __syncthreads();
  const int line = threadIdx.x;
  if (line < t.width && a.second_scale_inv != nullptr) {
    const int64_t count = CeilDiv(a.grid.rows, int64_t{kStripRows});
    StoreLineCodes(
        column_codes[line],
        a.second_scale_inv + (t.matrix * a.grid.cols + t.col + line) * count + t.row / kStripRows,
        CeilDiv(t.height, kStripRows));
  }
  if (kRows && line < t.height && a.scale_inv != nullptr) {
    const int64_t count = CeilDiv(a.grid.cols, int64_t{kStripRows});
    StoreLineCodes(
        row_codes[line],
        a.scale_inv + (t.matrix * a.grid.rows + t.row + line) * count + t.col / kStripRows,
        CeilDiv(t.width, kStripRows));
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_STRIPS_CUH_
