// cast_slices: the codes of flat slices of many weights, in place, in one launch.
//
// Reads each slice once and writes its codes: 5 bytes an element from float32 to FP8, 4.5 to E2M1,
// and 4 for each scale, from L1. Work is mapped to threads as slices.cuh says. A lane has the four
// elements of 4, or 2, bytes, so it alone writes them: whole where the slice has all, else byte by
// byte, and of a byte that the slice has half of, the other half is what was there. Equals the loop
// over core/slices.h: multiplication by __fmul_rn, EncodePair and EncodeE2M1 for Encode.
#include <type_traits>

#include "core/stochastic.h"
#include "kernels/cuda/e2m1.cuh"
#include "kernels/cuda/slices.cuh"
#include "kernels/slices.h"

namespace qshard::kernels {
namespace {

// codes(v, i): the codes of v, which lie from element i on in the weight, from the low bits up.
template <class Code>
struct Nearest {
  using Format = Code;

  __device__ __forceinline__ void Begin(int) {}
  __device__ __forceinline__ uint32_t operator()(const float (&v)[kSliceLane], int64_t) const {
    if constexpr (std::is_same_v<Code, E2M1>) {
      uint32_t codes = 0;
#pragma unroll
      for (int j = 0; j < kSliceLane; ++j) codes |= EncodeE2M1(v[j]) << (4 * j);
      return codes;
    } else {
      return EncodeWords<Code>(v).w[0];
    }
  }
};

struct Stochastic {
  using Format = E2M1;

  __device__ __forceinline__ void Begin(int index) { seed = FromWords(seeds + 2 * index); }
  __device__ __forceinline__ uint32_t operator()(const float (&v)[kSliceLane], int64_t i) const {
    // Four neighbours, of which the first has an even index, are in one or two calls of Philox.
    PhiloxWords words = Philox4x32(i >> 4, seed);
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < kSliceLane; ++j) {
      if (j > 0 && ((i + j) & 15) == 0) words = Philox4x32((i + j) >> 4, seed);
      codes |= EncodeStochasticE2M1(v[j], RandomByte(words, i + j)) << (4 * j);
    }
    return codes;
  }

  const uint32_t* seeds;
  uint64_t seed;
};

template <class In, TileKind kKind, class Encoder>
__device__ __forceinline__ void CastTile(const SliceTable& table, const SliceTile& tile,
                                         const Encoder& encode, const float* scale) {
  using Code = typename Encoder::Format;
  constexpr int kPerByte = 8 / Code::kBits;
  constexpr bool kWhole = kKind != TileKind::kPartial;
  const SliceEntry& slice = table.slices[tile.index];
  const int64_t width = (tile.cols + table.block_cols - 1) / table.block_cols;
  const bool one_row = table.block_rows % kSliceRows == 0 || table.block_rows > INT32_MAX;
  const bool one_col = table.block_cols % kSliceLane == 0;
  const float* scales = scale + slice.grid + tile.col / table.block_cols;
  const int64_t grid_row = tile.row / table.block_rows;
  uint8_t* data = slice.data - (table.pieces ? tile.begin / kPerByte : 0);
  const bool vectors = tile.cols % kSliceLane == 0 &&
                       reinterpret_cast<uintptr_t>(data) % (kSliceLane / kPerByte) == 0;
  float tile_scale = 0.0f;
  if (one_row && one_col && (kWhole || tile.col < tile.cols))
    tile_scale = __ldg(scales + grid_row * width);
  ForEachTileRow<In, kKind>(
      tile, static_cast<const In*>(slice.x), table.rounded_to, [&](int r, float (&v)[kSliceLane]) {
        const int64_t i = tile.Index(r);
        bool has[kSliceLane];
        bool any = kWhole;
        if constexpr (!kWhole) {
#pragma unroll
          for (int j = 0; j < kSliceLane; ++j) any |= has[j] = tile.Has(r, j);
        }
        if (!any) return;
        if (one_row && one_col) {
#pragma unroll
          for (int j = 0; j < kSliceLane; ++j) v[j] = __fmul_rn(v[j], tile_scale);
        } else {
          const int64_t row = table.block_rows == 1 ? tile.row + r
                              : one_row             ? grid_row
                                                    : (tile.row + r) / table.block_rows;
          if (one_col) {
            const float s = __ldg(scales + row * width);
#pragma unroll
            for (int j = 0; j < kSliceLane; ++j) v[j] = __fmul_rn(v[j], s);
          } else {
#pragma unroll
            for (int j = 0; j < kSliceLane; ++j)
              if (kWhole || has[j])
                v[j] = __fmul_rn(v[j], __ldg(scale + slice.grid + row * width +
                                             (tile.col + j) / table.block_cols));
          }
        }
        const uint32_t codes = encode(v, i);
        uint8_t* out = data + i / kPerByte;
        if (kWhole && vectors) {
          if constexpr (kPerByte == 1)
            Store<Write::kStream>(out, Words<4>{{codes}});
          else
            Store<Write::kStream>(out, Words<2>{static_cast<uint16_t>(codes)});
        } else if constexpr (kWhole) {
#pragma unroll
          for (int j = 0; j < kSliceLane / kPerByte; ++j)
            out[j] = static_cast<uint8_t>(codes >> (8 * j));
        } else {
#pragma unroll
          for (int j = 0; j < kSliceLane; j += kPerByte) {
            const uint32_t byte = codes >> (j * Code::kBits) & 0xFF;
            if constexpr (kPerByte == 1) {
              if (has[j]) out[j] = static_cast<uint8_t>(byte);
            } else if (has[j] && has[j + 1]) {
              out[j / 2] = static_cast<uint8_t>(byte);
            } else if (has[j] || has[j + 1]) {
              const uint32_t mine = has[j] ? 0x0F : 0xF0;
              out[j / 2] = static_cast<uint8_t>((out[j / 2] & ~mine) | (byte & mine));
            }
          }
        }
      });
}

template <class In, class Encoder>
__global__ void __launch_bounds__(kSliceThreads)
    CastSlicesKernel(const __grid_constant__ SliceTable table, Encoder encode, const float* scale) {
  const SliceTile tile(table);
  if (tile.Empty()) return;
  encode.Begin(tile.index);
  switch (KindOf(tile, static_cast<const In*>(table.slices[tile.index].x))) {
    case TileKind::kVectors:
      return CastTile<In, TileKind::kVectors>(table, tile, encode, scale);
    case TileKind::kScalars:
      return CastTile<In, TileKind::kScalars>(table, tile, encode, scale);
    case TileKind::kPartial:
      return CastTile<In, TileKind::kPartial>(table, tile, encode, scale);
  }
}

}  // namespace

template <class In, class Code>
Status CastSlices(const Exec<Cuda>& exec, const Slice* slices, int64_t n, const uint32_t* starts,
                  const SliceRule& rule, const float* scale) {
  return ForEachTable(
      slices, n, starts, rule, 0, [&](const SliceTable& table, int64_t, unsigned blocks) {
        CastSlicesKernel<In>
            <<<blocks, kSliceThreads, 0, exec.stream>>>(table, Nearest<Code>{}, scale);
      });
}

template <class In>
Status CastSlicesStochastic(const Exec<Cuda>& exec, const Slice* slices, int64_t n,
                            const uint32_t* starts, const uint32_t* seeds, const SliceRule& rule,
                            const float* scale) {
  return ForEachTable(slices, n, starts, rule, 0,
                      [&](const SliceTable& table, int64_t begin, unsigned blocks) {
                        CastSlicesKernel<In><<<blocks, kSliceThreads, 0, exec.stream>>>(
                            table, Stochastic{seeds + 2 * begin, 0}, scale);
                      });
}

#define QSHARD_INSTANTIATE_CODE(In, Code)                                                         \
  template Status CastSlices<In, Code>(const Exec<Cuda>&, const Slice*, int64_t, const uint32_t*, \
                                       const SliceRule&, const float*);
#define QSHARD_INSTANTIATE(In)                                                                 \
  template Status CastSlicesStochastic<In>(const Exec<Cuda>&, const Slice*, int64_t,           \
                                           const uint32_t*, const uint32_t*, const SliceRule&, \
                                           const float*);                                      \
  QSHARD_INSTANTIATE_CODE(In, E4M3)                                                            \
  QSHARD_INSTANTIATE_CODE(In, E5M2)                                                            \
  QSHARD_INSTANTIATE_CODE(In, E2M1)
QSHARD_INSTANTIATE(float)
QSHARD_INSTANTIATE(bfloat16)
QSHARD_INSTANTIATE(float16)
#undef QSHARD_INSTANTIATE
#undef QSHARD_INSTANTIATE_CODE

}  // namespace qshard::kernels
