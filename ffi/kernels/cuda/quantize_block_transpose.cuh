// Transposing codes of 8 and of 4 bits: in registers, and on their way through shared memory.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_TRANSPOSE_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_TRANSPOSE_CUH_

#include <cstdint>

#include "kernels/cuda/quantize_block_codes.cuh"
#include "kernels/cuda/transpose_tile.cuh"

namespace qshard::kernels {

static_assert(kPatch == kEight);

// A tile of transposed codes in shared memory.
//
// Of FP8 it is laid out as transpose_tile.cuh says. Of 4-bit codes, column c is at 64 c, as 16
// chunks of 8 rows, 4 bytes, chunk k at place k ^ (c / 8), modulo 16.
template <class Code>
struct TransposedTile {
  static constexpr int kColumnBytes = kTile * Code::kBits / 8;
  static constexpr int kChunkBytes = Code::kBits;
  using Bytes = uint8_t[kTile * kColumnBytes];

  static __device__ __forceinline__ int Offset(int col, int chunk) {
    return col * kColumnBytes + (chunk ^ (col / kPatch)) * kChunkBytes;
  }

  // Puts the columns of the patch at patch row `down`, patch column `across`.
  static __device__ __forceinline__ void Put(uint8_t* tile, int down, int across,
                                             const EightCodes<Code> (&columns)[kPatch]) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      uint8_t* to = tile + Offset(across * kPatch + i, down);
      if constexpr (Code::kBits == 8)
        *reinterpret_cast<uint2*>(to) = make_uint2(columns[i].w[0], columns[i].w[1]);
      else
        *reinterpret_cast<uint32_t*>(to) = columns[i].w[0];
    }
  }

  // Writes the tile to its place in the transposed matrices. 4-bit codes: rows are a multiple of
  // 16, and `out` is aligned to 8.
  template <Write kWrite>
  static __device__ __forceinline__ void WriteOut(const uint8_t* tile, const Tile& t,
                                                  const TileGrid& grid, bool wide, uint8_t* out) {
    if constexpr (Code::kBits == 8) {
      WriteTile<kWrite>(tile, t, grid.rows, wide, out + grid.OffsetT(t, 0, 0));
    } else {
      constexpr int kLanes = kColumnBytes / 8, kColumns = kTileThreads / kLanes;
      const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
      const int width = lane * 16 < t.height ? t.width : 0;
      uint8_t* to = out + grid.OffsetT(t, lane * 16, first) / 2;
      const int64_t step = kColumns * grid.rows / 2;
#pragma unroll
      for (int i = 0; i < kTile / kColumns; ++i, to += step) {
        const int col = first + i * kColumns;
        // Chunks 2 lane and 2 lane + 1 are neighbours, in this order or the other.
        const bool swapped = col / kPatch % 2 == 1;
        const uint2 u = *reinterpret_cast<const uint2*>(tile + (Offset(col, 2 * lane) & ~7));
        if (col < width) Store<kWrite>(to, swapped ? Words<8>{{u.y, u.x}} : Words<8>{{u.x, u.y}});
      }
    }
  }
};

// Codes of eight rows, as columns.
template <class Code>
__device__ __forceinline__ void TransposeCodes(const EightCodes<Code> (&rows)[kPatch],
                                               EightCodes<Code> (&columns)[kPatch]) {
  if constexpr (Code::kBits == 8) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t upper[4], lower[4];
      Transpose4x4(rows[0].w[half], rows[1].w[half], rows[2].w[half], rows[3].w[half], upper);
      Transpose4x4(rows[4].w[half], rows[5].w[half], rows[6].w[half], rows[7].w[half], lower);
#pragma unroll
      for (int i = 0; i < 4; ++i) columns[half * 4 + i] = {{upper[i], lower[i]}};
    }
  } else {
    // Pairs of rows trade nibbles, so that bytes hold two rows of even, or of odd, columns.
    constexpr uint32_t kLow = 0x0F0F0F0Fu;
    uint32_t even[4], odd[4], out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t a = rows[2 * i].w[0], b = rows[2 * i + 1].w[0];
      even[i] = (a & kLow) | (b << 4 & ~kLow);
      odd[i] = (a >> 4 & kLow) | (b & ~kLow);
    }
    Transpose4x4(even[0], even[1], even[2], even[3], out);
#pragma unroll
    for (int i = 0; i < 4; ++i) columns[2 * i].w[0] = out[i];
    Transpose4x4(odd[0], odd[1], odd[2], odd[3], out);
#pragma unroll
    for (int i = 0; i < 4; ++i) columns[2 * i + 1].w[0] = out[i];
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_TRANSPOSE_CUH_
