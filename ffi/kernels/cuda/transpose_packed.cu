// transpose_packed: code (j, i) of data_t is code (i, j) of data, 4-bit codes packed two a byte.
//
// Reads and writes each byte once: 1 byte a code. The bytes of data_t, of two codes of a column
// each, are those of a matrix [rows / 2, cols] that a tile transposes, as transpose_tile.cuh says:
// a thread reads 16 rows of 8 codes for its patch. Any shape and alignment will do; vectors need
// rows of a multiple of 8 codes, aligned to 4 bytes, on the way in, and of 32, to 16 bytes, on the
// way out.
#include "kernels/block_layout.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transpose_tile.cuh"

namespace qshard::kernels {
namespace {

struct NibblesTuning : TransposeTuning {
  static constexpr Read kRead = Read::kCached;
  static constexpr int kBlocksPerSm = 6;
};

// Bytes with a code of an even row low and that of the odd row below it high. Rows of the grid are
// pairs of rows of data, and columns are codes.
template <class Tuning>
struct NibblePatches {
  struct Patch {
    Words<kPatch / 2> rows[2 * kPatch];
  };

  template <class Grid>
  __device__ __forceinline__ void Load(Patch& patch, const Grid& grid, const Tile& t, int row,
                                       int col) const {
    const int height = t.PatchHeight(row, col);
    const int64_t width = grid.cols / 2;  // bytes
    const uint8_t* from =
        data + (t.matrix * grid.rows + t.row + row) * 2 * width + (t.col + col) / 2;
    const auto load = [&](int k) {
      return kernels::Load<kPatch / 2, Tuning::kRead>(from + k * width);
    };
    if (height >= kPatch) {
#pragma unroll
      for (int k = 0; k < 2 * kPatch; ++k) patch.rows[k] = load(k);
    } else {
#pragma unroll
      for (int k = 0; k < 2 * kPatch; ++k) {
        patch.rows[k] = {};
        if (k < 2 * height) patch.rows[k] = load(k);
      }
    }
  }

  template <class Grid>
  __device__ __forceinline__ void Codes(const Patch& patch, const Grid&, const Tile&, int, int,
                                        Words<kPatch> (&codes)[kPatch]) const {
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
      const uint32_t upper = patch.rows[2 * k].w[0], lower = patch.rows[2 * k + 1].w[0];
      const uint32_t even = (upper & 0x0F0F0F0Fu) | (lower & 0x0F0F0F0Fu) << 4;
      const uint32_t odd = (upper >> 4 & 0x0F0F0F0Fu) | (lower & 0xF0F0F0F0u);
      codes[k].w[0] = __byte_perm(even, odd, 0x5140);
      codes[k].w[1] = __byte_perm(even, odd, 0x7362);
    }
  }

  const uint8_t* data;
};

struct Nibbles {
  template <class Grid>
  __device__ __forceinline__ uint8_t operator()(const Grid& grid, const Tile& t, int row,
                                                int col) const {
    const int64_t width = grid.cols / 2, at = t.col + col;
    const uint8_t* upper = data + (t.matrix * grid.rows + t.row + row) * 2 * width + at / 2;
    const int shift = static_cast<int>(at % 2) * 4;
    return static_cast<uint8_t>((__ldg(upper) >> shift & 0xF) |
                                (__ldg(upper + width) >> shift & 0xF) << 4);
  }

  const uint8_t* data;
};

// --- whole vectors on both sides: tiles of 256 x 256 codes ---

// A thread reads 16 rows of 16 codes, so that a warp reads whole lines. The tile lies transposed in
// shared memory, two columns of 128 pairs of rows side by side for each patch: column c in bytes
// [128 c, 128 c + 128), as 16 chunks of 8 pairs, chunk k at place k ^ (c / 16).
constexpr int kWideCols = 256;

struct WideGrid {
  int64_t pairs, cols;  // of a matrix: pairs of rows, a multiple of 16; codes, a multiple of 16
  Divider across, down;
};

__device__ __forceinline__ int WideOffset(int col, int chunk) {
  return col * kTile + (chunk ^ (col / 16)) * kPatch;
}

template <int kBlocksPerSm>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerSm)
    TransposeWideNibbles(const uint8_t* data, const WideGrid g, uint8_t* out) {
  __shared__ alignas(16) uint8_t tile[kWideCols * kTile];
  const uint32_t strip = g.across.Divide(blockIdx.x);
  const uint32_t matrix = g.down.Divide(strip);
  const int64_t first_row = int64_t{strip - matrix * g.down.divisor()} * kTile;
  const int64_t first_col = int64_t{blockIdx.x - strip * g.across.divisor()} * kWideCols;

  const int down = threadIdx.x / 16, across = threadIdx.x % 16;
  const int64_t row = first_row + down * kPatch, col = first_col + across * 16;
  if (row < g.pairs && col < g.cols) {
    const int64_t width = g.cols / 2;  // bytes
    const uint8_t* from = data + (matrix * g.pairs + row) * 2 * width + col / 2;
    Words<8> rows[2 * kPatch];
#pragma unroll
    for (int k = 0; k < 2 * kPatch; ++k, from += width)
      rows[k] = Load<8, NibblesTuning::kRead>(from);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Bytes of codes 0, 2, 4, 6, and 1, 3, 5, 7, of the pairs of rows.
      uint32_t even[kPatch], odd[kPatch];
#pragma unroll
      for (int k = 0; k < kPatch; ++k) {
        const uint32_t upper = rows[2 * k].w[half], lower = rows[2 * k + 1].w[half];
        even[k] = (upper & 0x0F0F0F0Fu) | (lower & 0x0F0F0F0Fu) << 4;
        odd[k] = (upper >> 4 & 0x0F0F0F0Fu) | (lower & 0xF0F0F0F0u);
      }
      const auto put = [&](const uint32_t (&w)[kPatch], int parity) {
        uint32_t upper[4], lower[4];
        Transpose4x4(w[0], w[1], w[2], w[3], upper);
        Transpose4x4(w[4], w[5], w[6], w[7], lower);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = across * 16 + half * 8 + 2 * i + parity;
          *reinterpret_cast<uint2*>(tile + WideOffset(c, down)) = make_uint2(upper[i], lower[i]);
        }
      };
      put(even, 0);
      put(odd, 1);
    }
  }
  __syncthreads();

  constexpr int kLanes = kTile / 16, kColumns = kTileThreads / kLanes;
  const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
  if (first_row + lane * 16 >= g.pairs) return;
  uint8_t* to = out + (matrix * g.cols + first_col + first) * g.pairs + first_row + lane * 16;
  const int width = static_cast<int>(min(int64_t{kWideCols}, g.cols - first_col));
  const int64_t step = kColumns * g.pairs;
#pragma unroll
  for (int i = 0; i < kWideCols / kColumns; ++i, to += step) {
    const int c = first + i * kColumns;
    // Chunks 2 lane and 2 lane + 1 are neighbours, in this order or the other.
    const bool swapped = c / 16 % 2 == 1;
    const uint4 u = *reinterpret_cast<const uint4*>(tile + (WideOffset(c, 2 * lane) & ~15));
    if (c < width)
      Store<NibblesTuning::kWrite>(
          to, swapped ? Words<16>{{u.z, u.w, u.x, u.y}} : Words<16>{{u.x, u.y, u.z, u.w}});
  }
}

}  // namespace

Status TransposePacked(const Exec<Cuda>& exec, const uint8_t* data, int64_t batch, int64_t rows,
                       int64_t cols, uint8_t* data_t) {
  if (batch * rows * cols == 0) return {};
  const int64_t across = CeilDiv(cols, kWideCols), down = CeilDiv(rows, 2 * kTile);
  if (rows % 32 == 0 && cols % 16 == 0 && IsAligned(data, 8) && IsAligned(data_t, 16) &&
      batch * down * across <= std::numeric_limits<int32_t>::max()) {
    TransposeWideNibbles<4><<<GridSize(batch * down * across), kTileThreads, 0, exec.stream>>>(
        data, WideGrid{rows / 2, cols, Divider(across), Divider(down)}, data_t);
    return LaunchStatus();
  }
  if (cols % kPatch == 0 && IsAligned(data, kPatch / 2))
    return LaunchPatches<NibblesTuning>(exec.stream, NibblePatches<NibblesTuning>{data}, batch,
                                        rows / 2, cols, data_t);
  return LaunchElements<NibblesTuning>(exec.stream, Nibbles{data}, batch, rows / 2, cols, data_t);
}

}  // namespace qshard::kernels
