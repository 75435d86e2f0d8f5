// Tiles of 128 x 128 elements, and the transpose of their codes in registers and shared memory.
//
// A thread block of 256 threads takes a tile. Each thread keeps a patch of 8 rows x 8 columns in
// registers, transposes its codes there, and puts each column of the patch into shared memory,
// which has the transposed tile. Then the thread block writes whole columns. So a warp reads and
// writes only whole lines on every side.
//
// Shared memory stores a column as 16 chunks with the codes of 8 rows each, and chunk k of column c
// at position k ^ (c / 8). A warp stores chunks of 16 neighbouring patches: 16 columns, 8 apart, so
// 16 positions and no bank conflicts. It loads columns in storage order.
#ifndef QSHARD_KERNELS_CUDA_TRANSPOSE_TILE_CUH_
#define QSHARD_KERNELS_CUDA_TRANSPOSE_TILE_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/quantize/codes.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

constexpr int kTile = 128;
constexpr int kPatch = kEight;
constexpr int kPatches = kTile / kPatch;  // in a row or a column of the tile
constexpr int kTileThreads = kPatches * kPatches;

// --- position of a tile ---

struct Tile {
  int64_t matrix, row, col;  // of its first element
  int height, width;         // of the part inside the matrix

  // Returns the rows of the patch at (row, col) that exist in the matrix. Its columns are one
  // vector, so all of them exist or none.
  __device__ __forceinline__ int PatchHeight(int row, int col) const {
    return col < width ? height - row : 0;
  }
};

// The tiles of `batch` matrices [rows, cols], numbered along rows of tiles. Fewer than 2^31.
struct TileGrid {
  TileGrid(int64_t batch, int64_t rows, int64_t cols)
      : rows(rows),
        cols(cols),
        across(CeilDiv(cols, kTile)),
        matrix(CeilDiv(rows, kTile) * CeilDiv(cols, kTile)),
        tiles(batch * matrix.divisor()) {}

  __device__ __forceinline__ Tile At(uint32_t index) const {
    Tile t;
    t.matrix = matrix.Divide(index);
    const uint32_t in_matrix = index - static_cast<uint32_t>(t.matrix) * matrix.divisor();
    const uint32_t down = across.Divide(in_matrix);
    t.row = static_cast<int64_t>(down) * kTile;
    t.col = static_cast<int64_t>(in_matrix - down * across.divisor()) * kTile;
    t.height = static_cast<int>(min(int64_t{kTile}, rows - t.row));
    t.width = static_cast<int>(min(int64_t{kTile}, cols - t.col));
    return t;
  }

  // Offset of element (row, col) of a tile in the matrices, and in their transposes.
  __device__ __forceinline__ int64_t Offset(const Tile& t, int row, int col) const {
    return (t.matrix * rows + t.row + row) * cols + t.col + col;
  }
  __device__ __forceinline__ int64_t OffsetT(const Tile& t, int row, int col) const {
    return (t.matrix * cols + t.col + col) * rows + t.row + row;
  }

  int64_t rows, cols;
  Divider across, matrix;
  int64_t tiles;
};

// --- device memory to registers ---

// Loads the first `height` rows of a patch, and zeros for the rest. Whole patches have their own
// branch, so that not even a predicate separates their loads.
template <Read kRead, class T>
__device__ __forceinline__ void LoadRows(const T* from, int64_t stride, int height,
                                         Words<kPatch * sizeof(T)> (&rows)[kPatch]) {
  if (height >= kPatch) {
#pragma unroll
    for (int k = 0; k < kPatch; ++k, from += stride)
      rows[k] = Load<kPatch * sizeof(T), kRead>(from);
  } else {
#pragma unroll
    for (int k = 0; k < kPatch; ++k, from += stride) {
      rows[k] = {};
      if (k < height) rows[k] = Load<kPatch * sizeof(T), kRead>(from);
    }
  }
}

// --- transpose in registers ---

// out[i] = byte i of a, b, c, d.
__device__ __forceinline__ void Transpose4x4(uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                             uint32_t (&out)[4]) {
  const uint32_t ab01 = __byte_perm(a, b, 0x5140), ab23 = __byte_perm(a, b, 0x7362);
  const uint32_t cd01 = __byte_perm(c, d, 0x5140), cd23 = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab01, cd01, 0x5410);
  out[1] = __byte_perm(ab01, cd01, 0x7632);
  out[2] = __byte_perm(ab23, cd23, 0x5410);
  out[3] = __byte_perm(ab23, cd23, 0x7632);
}

// Transposes codes of eight rows to columns.
template <class Code>
__device__ __forceinline__ void TransposeCodes(const EightCodes<Code> (&rows)[kPatch],
                                               EightCodes<Code> (&columns)[kPatch]) {
  if constexpr (!kPacked<Code>) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t upper[4], lower[4];
      Transpose4x4(rows[0].w[half], rows[1].w[half], rows[2].w[half], rows[3].w[half], upper);
      Transpose4x4(rows[4].w[half], rows[5].w[half], rows[6].w[half], rows[7].w[half], lower);
#pragma unroll
      for (int i = 0; i < 4; ++i) columns[half * 4 + i] = {{upper[i], lower[i]}};
    }
  } else {
    // Pairs of rows exchange nibbles, so that bytes have two rows of even, or of odd, columns.
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

// --- transpose through shared memory ---

// A tile of transposed codes in shared memory.
template <class Code>
struct TransposedTile {
  static constexpr int kChunkBytes = kStoredBits<Code>;
  static constexpr int kColumnBytes = kPatches * kChunkBytes;
  using Bytes = uint8_t[kTile * kColumnBytes];

  // Returns the offset of chunk `chunk` of column `col`.
  static __device__ __forceinline__ int Offset(int col, int chunk) {
    return col * kColumnBytes + (chunk ^ (col / kPatch)) * kChunkBytes;
  }

  // Stores the columns of the patch at patch row `down` and patch column `across`.
  static __device__ __forceinline__ void Put(uint8_t* tile, int down, int across,
                                             const EightCodes<Code> (&columns)[kPatch]) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      uint8_t* to = tile + Offset(across * kPatch + i, down);
      if constexpr (kPacked<Code>)
        *reinterpret_cast<uint32_t*>(to) = columns[i].w[0];
      else
        *reinterpret_cast<uint2*>(to) = make_uint2(columns[i].w[0], columns[i].w[1]);
    }
  }

  // Writes the tile to the transposed matrices. `wide`: each of their columns is aligned and has a
  // multiple of 16 codes. Packed codes require that.
  template <Write kWrite>
  static __device__ __forceinline__ void WriteOut(const uint8_t* tile, const Tile& t,
                                                  const TileGrid& grid, bool wide, uint8_t* out) {
    if (kPacked<Code> || wide) {
      using Vector = std::conditional_t<kPacked<Code>, uint2, uint4>;  // two chunks
      constexpr int kBytes = sizeof(Vector), kLanes = kPatches / 2;    // for a column
      constexpr int kColumns = kTileThreads / kLanes;
      const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
      const int width = lane * 2 * kPatch < t.height ? t.width : 0;
      const auto bytes = [](int64_t codes) { return codes * kStoredBits<Code> / 8; };
      uint8_t* to = out + bytes(grid.OffsetT(t, lane * 2 * kPatch, first));
      const int64_t step = bytes(kColumns * grid.rows);
#pragma unroll
      for (int i = 0; i < kTile / kColumns; ++i, to += step) {
        const int col = first + i * kColumns;
        const Vector u =
            *reinterpret_cast<const Vector*>(tile + (Offset(col, 2 * lane) & ~(kBytes - 1)));
        Words<kBytes> loaded, chunks;
        memcpy(&loaded, &u, kBytes);
        // Chunks 2 lane and 2 lane + 1 are neighbours, in this order or swapped.
        const bool swapped = col / kPatch % 2 == 1;
        constexpr int kWords = kBytes / 4;
#pragma unroll
        for (int k = 0; k < kWords; ++k)
          chunks.w[k] = swapped ? loaded.w[(k + kWords / 2) % kWords] : loaded.w[k];
        if (col < width) Store<kWrite>(to, chunks);
      }
    } else if constexpr (!kPacked<Code>) {
      out += grid.OffsetT(t, 0, 0);
      // A warp takes a column: aligned 4-byte words, assembled from two words of the tile, and
      // single bytes at the ends.
      constexpr int kWarps = kTileThreads / 32;
      for (int col = threadIdx.x / 32; col < t.width; col += kWarps) {
        uint8_t* to = out + col * grid.rows;
        const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(to) & 3);
        for (int row = threadIdx.x % 32 * 4 - skew; row < t.height; row += 32 * 4) {
          if (row >= 0 && row + 4 <= t.height) {
            const auto word = [&](int r) {
              return *reinterpret_cast<const uint32_t*>(tile + Offset(col, r / kPatch) +
                                                        r % kPatch / 4 * 4);
            };
            const uint32_t lo = word(row), hi = word(min(row + 3, kTile - 1));
            *reinterpret_cast<uint32_t*>(to + row) = __funnelshift_r(lo, hi, row % 4 * 8);
          } else {
            for (int r = max(row, 0); r < min(row + 4, t.height); ++r)
              to[r] = tile[Offset(col, r / kPatch) + r % kPatch];
          }
        }
      }
    }
  }
};

// Returns whether WriteOut can be `wide`.
template <class Code>
bool WideColumns(int64_t rows, const uint8_t* out) {
  return rows % 16 == 0 && IsAligned(out, 2 * kStoredBits<Code>);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_TRANSPOSE_TILE_CUH_
