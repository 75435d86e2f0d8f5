// Transposing bytes through shared memory: what transpose and cast_transpose share.
//
// A block of 256 threads takes a tile of 128 x 128 elements. Each thread holds a patch of 8 rows x
// 8 columns in registers, transposes it there, and puts each column of the patch, 8 bytes, into
// shared memory, where the tile lies transposed; the block then writes whole columns, 128 bytes
// each. So a warp reads and writes only whole lines of 128 bytes, on every side.
//
// Shared memory holds column c in bytes [128 c, 128 c + 128), as 16 chunks of 8 rows, chunk k at
// place k ^ (c / 8). A warp stores chunks of 16 patches side by side: 16 columns 8 apart, so 16
// places, so no two in one bank; it loads columns as they lie, in one order or another.
#ifndef QSHARD_KERNELS_CUDA_TRANSPOSE_TILE_CUH_
#define QSHARD_KERNELS_CUDA_TRANSPOSE_TILE_CUH_

#include <cstdint>
#include <limits>

#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

constexpr int kTile = 128;
constexpr int kPatch = 8;
constexpr int kPatches = kTile / kPatch;  // in a row or a column of the tile
constexpr int kTileThreads = kPatches * kPatches;

// --- which tile ---

struct Tile {
  int64_t matrix, row, col;  // its first element
  int height, width;         // of its part inside the matrix

  // Rows of the patch at (row, col) that the matrix has. Its columns exist together or not at all:
  // they are a vector.
  __device__ __forceinline__ int PatchHeight(int row, int col) const {
    return col < width ? height - row : 0;
  }
};

// The tiles of `batch` matrices of [rows, cols], rows and cols at least 2, numbered along rows of
// tiles.
struct TileGrid {
  TileGrid(int64_t batch, int64_t rows, int64_t cols)
      : rows(rows),
        cols(cols),
        across(CeilDiv(cols, kTile)),
        matrix(CeilDiv(rows, kTile) * CeilDiv(cols, kTile)),
        tiles(batch * matrix.divisor()) {}

  __device__ __forceinline__ Tile At(int64_t index) const {
    Tile t;
    t.matrix =
        index >> 31 == 0 ? matrix.Divide(static_cast<uint32_t>(index)) : index / matrix.divisor();
    const uint32_t in_matrix = static_cast<uint32_t>(index - t.matrix * matrix.divisor());
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

// The first `height` rows of a patch, and zeros. The whole patch has a branch to itself, so that
// nothing, not even a predicate, comes between its loads.
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

// --- registers to shared memory ---

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

// Where chunk `chunk` of column `col` is.
__device__ __forceinline__ int ChunkOffset(int col, int chunk) {
  return col * kTile + (chunk ^ (col / kPatch)) * kPatch;
}

// Puts the patch whose rows are `codes` at patch row `down`, patch column `across`.
__device__ __forceinline__ void PutPatch(uint8_t* tile, int down, int across,
                                         const Words<kPatch> (&codes)[kPatch]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t upper[4], lower[4];
    Transpose4x4(codes[0].w[half], codes[1].w[half], codes[2].w[half], codes[3].w[half], upper);
    Transpose4x4(codes[4].w[half], codes[5].w[half], codes[6].w[half], codes[7].w[half], lower);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int col = across * kPatch + half * 4 + i;
      *reinterpret_cast<uint2*>(tile + ChunkOffset(col, down)) = make_uint2(upper[i], lower[i]);
    }
  }
}

// --- shared memory to the transposed matrix ---

// Writes the tile to `out`, its place in a transpose of row length `rows`. `wide`: every column of
// the matrix starts at a multiple of 16 bytes and is one long.
template <Write kWrite>
__device__ __forceinline__ void WriteTile(const uint8_t* tile, const Tile& t, int64_t rows,
                                          bool wide, uint8_t* out) {
  if (wide) {
    constexpr int kLanes = kTile / 16;  // for a column
    constexpr int kColumns = kTileThreads / kLanes;
    const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
    const int width = lane * 16 < t.height ? t.width : 0;
    uint8_t* to = out + first * rows + lane * 16;
    const int64_t step = kColumns * rows;
#pragma unroll
    for (int i = 0; i < kTile / kColumns; ++i, to += step) {
      const int col = first + i * kColumns;
      // Chunks 2 lane and 2 lane + 1 are neighbours, in this order or the other.
      const bool swapped = col / kPatch % 2 == 1;
      const uint4 u = *reinterpret_cast<const uint4*>(tile + (ChunkOffset(col, 2 * lane) & ~15));
      if (col < width) {
        Store<kWrite>(to,
                      swapped ? Words<16>{{u.z, u.w, u.x, u.y}} : Words<16>{{u.x, u.y, u.z, u.w}});
      }
    }
    return;
  }
  // A warp takes a column: aligned words of 4 bytes, put together from two words of the tile, and
  // bytes at the ends.
  constexpr int kWarps = kTileThreads / 32;
  for (int col = threadIdx.x / 32; col < t.width; col += kWarps) {
    uint8_t* to = out + col * rows;
    const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(to) & 3);
    for (int row = threadIdx.x % 32 * 4 - skew; row < t.height; row += 32 * 4) {
      if (row >= 0 && row + 4 <= t.height) {
        const auto word = [&](int r) {
          return *reinterpret_cast<const uint32_t*>(tile + ChunkOffset(col, r / kPatch) +
                                                    r % kPatch / 4 * 4);
        };
        const uint32_t lo = word(row), hi = word(min(row + 3, kTile - 1));
        *reinterpret_cast<uint32_t*>(to + row) = __funnelshift_r(lo, hi, row % 4 * 8);
      } else {
        for (int r = max(row, 0); r < min(row + 4, t.height); ++r)
          to[r] = tile[ChunkOffset(col, r / kPatch) + r % kPatch];
      }
    }
  }
}

// --- kernels ---

struct TransposeTuning {
  static constexpr bool kBackward = false;  // the last tile first
  static constexpr Read kRead = Read::kCached;
  static constexpr Write kWrite = Write::kStream;
  static constexpr int kBlocksPerSm = 4;  // resident
};

template <class Tuning>
__device__ __forceinline__ Tile TileAt(const TileGrid& grid, int64_t index) {
  return grid.At(Tuning::kBackward ? grid.tiles - 1 - index : index);
}

// `source` gives codes by patches:
//   Patch                               registers of a patch as loaded
//   Load(patch, grid, tile, row, col)   starts loading the patch at (row, col) of the tile
//   Codes(patch, grid, tile, row, col, codes)   its 8 rows of 8 codes
template <class Source, class Tuning>
__global__ void __launch_bounds__(kTileThreads, Tuning::kBlocksPerSm)
    TransposePatches(const Source source, const TileGrid grid, bool wide, uint8_t* out) {
  __shared__ alignas(16) uint8_t tile[kTile * kTile];
  const int down = threadIdx.x / kPatches, across = threadIdx.x % kPatches;
  for (int64_t index = blockIdx.x; index < grid.tiles; index += gridDim.x) {
    const Tile t = TileAt<Tuning>(grid, index);
    typename Source::Patch patch;
    source.Load(patch, grid, t, down * kPatch, across * kPatch);
    Words<kPatch> codes[kPatch];
    source.Codes(patch, grid, t, down * kPatch, across * kPatch, codes);
    PutPatch(tile, down, across, codes);
    __syncthreads();
    WriteTile<Tuning::kWrite>(tile, t, grid.rows, wide, out + grid.OffsetT(t, 0, 0));
    __syncthreads();
  }
}

// `source(grid, tile, row, col)` gives one code: for what cannot be read in vectors. A thread takes
// 8 rows of a column, so that a warp's accesses are still side by side.
template <class Source, class Tuning>
__global__ void __launch_bounds__(kTileThreads)
    TransposeElements(const Source source, const TileGrid grid, bool wide, uint8_t* out) {
  __shared__ alignas(16) uint8_t tile[kTile * kTile];
  for (int64_t index = blockIdx.x; index < grid.tiles; index += gridDim.x) {
    const Tile t = TileAt<Tuning>(grid, index);
    for (int i = threadIdx.x; i < kTile * kPatches; i += kTileThreads) {
      const int col = i % kTile, chunk = i / kTile;
      uint32_t words[2] = {};
#pragma unroll
      for (int k = 0; k < kPatch; ++k) {
        const int row = chunk * kPatch + k;
        if (row < t.height && col < t.width)
          words[k / 4] |= static_cast<uint32_t>(source(grid, t, row, col)) << (k % 4 * 8);
      }
      *reinterpret_cast<uint2*>(tile + ChunkOffset(col, chunk)) = make_uint2(words[0], words[1]);
    }
    __syncthreads();
    WriteTile<Tuning::kWrite>(tile, t, grid.rows, wide, out + grid.OffsetT(t, 0, 0));
    __syncthreads();
  }
}

inline bool WideColumns(int64_t rows, const uint8_t* out) {
  return rows % 16 == 0 && IsAligned(out, 16);
}

// One block a tile; the loop in the kernels is for grids of more tiles than CUDA takes blocks.
inline unsigned TileBlocks(const TileGrid& grid) {
  return GridSize(std::min<int64_t>(grid.tiles, std::numeric_limits<int32_t>::max()));
}

template <class Tuning, class Source>
Status LaunchPatches(CUstream_st* stream, const Source& source, int64_t batch, int64_t rows,
                     int64_t cols, uint8_t* out) {
  const TileGrid grid(batch, rows, cols);
  TransposePatches<Source, Tuning>
      <<<TileBlocks(grid), kTileThreads, 0, stream>>>(source, grid, WideColumns(rows, out), out);
  return LaunchStatus();
}

template <class Tuning, class Source>
Status LaunchElements(CUstream_st* stream, const Source& source, int64_t batch, int64_t rows,
                      int64_t cols, uint8_t* out) {
  const TileGrid grid(batch, rows, cols);
  TransposeElements<Source, Tuning>
      <<<TileBlocks(grid), kTileThreads, 0, stream>>>(source, grid, WideColumns(rows, out), out);
  return LaunchStatus();
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_TRANSPOSE_TILE_CUH_
