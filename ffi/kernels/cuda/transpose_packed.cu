// transpose_packed: code (j, i) of data_t is code (i, j) of data, 4-bit codes packed two a byte.
//
// Reads and writes each byte once: 1 byte a code. Vectors of 16 bytes on both sides move as
// transpose_each.cu says. Else the bytes of data_t, of two codes of a column each, are those of a
// matrix [rows / 2, cols] that a tile transposes, as transpose_tile.cuh says: a thread reads 16
// rows of 8 codes for its patch. Any shape and alignment will do; vectors need rows of a multiple
// of 8 codes, aligned to 4 bytes, on the way in, and of 32, to 16 bytes, on the way out.
#include "kernels/block_layout.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transpose_tile.cuh"
#include "kernels/slices.h"

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

}  // namespace

Status TransposePacked(const Exec<Cuda>& exec, const uint8_t* data, int64_t batch, int64_t rows,
                       int64_t cols, uint8_t* data_t) {
  if (batch * rows * cols == 0) return {};
  if (rows % 32 == 0 && cols % 32 == 0 && IsAligned(data, 16) && IsAligned(data_t, 16)) {
    const TransposePair pair{data, data_t, batch, rows, cols, 4};
    return TransposeEach(exec, &pair, 1);
  }
  if (cols % kPatch == 0 && IsAligned(data, kPatch / 2))
    return LaunchPatches<NibblesTuning>(exec.stream, NibblePatches<NibblesTuning>{data}, batch,
                                        rows / 2, cols, data_t);
  return LaunchElements<NibblesTuning>(exec.stream, Nibbles{data}, batch, rows / 2, cols, data_t);
}

}  // namespace qshard::kernels
