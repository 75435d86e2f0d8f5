// transpose: data_t[b, j, i] = data[b, i, j], bytes.
//
// Reads and writes each byte once: 2 bytes an element. Vectors of 16 bytes on both sides move as
// transpose_each.cu says. Else work is mapped to threads as transpose_tile.cuh says: any shape and
// alignment will do, and vectors of 8 bytes come in if rows are multiples of 8 and start so
// aligned.
#include "kernels/cast.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transpose_tile.cuh"
#include "kernels/slices.h"

namespace qshard::kernels {
namespace {

struct BytesTuning : TransposeTuning {
  static constexpr Read kRead = Read::kCached;
  static constexpr int kBlocksPerSm = 6;
};

// Rows of 8 bytes at a time.
template <class Tuning>
struct BytePatches {
  struct Patch {
    Words<kPatch> rows[kPatch];
  };

  template <class Grid>
  __device__ __forceinline__ void Load(Patch& patch, const Grid& grid, const Tile& t, int row,
                                       int col) const {
    LoadRows<Tuning::kRead>(data + grid.Offset(t, row, col), grid.cols, t.PatchHeight(row, col),
                            patch.rows);
  }

  template <class Grid>
  __device__ __forceinline__ void Codes(const Patch& patch, const Grid&, const Tile&, int, int,
                                        Words<kPatch> (&codes)[kPatch]) const {
#pragma unroll
    for (int k = 0; k < kPatch; ++k) codes[k] = patch.rows[k];
  }

  const uint8_t* data;
};

struct Bytes {
  template <class Grid>
  __device__ __forceinline__ uint8_t operator()(const Grid& grid, const Tile& t, int row,
                                                int col) const {
    return __ldg(data + grid.Offset(t, row, col));
  }

  const uint8_t* data;
};

}  // namespace

Status Transpose(const Exec<Cuda>& exec, const uint8_t* data, int64_t batch, int64_t rows,
                 int64_t cols, uint8_t* data_t) {
  const int64_t n = batch * rows * cols;
  if (n == 0) return {};
  if (rows == 1 || cols == 1)
    return ToStatus(cudaMemcpyAsync(data_t, data, n, cudaMemcpyDeviceToDevice, exec.stream));
  if (rows % 16 == 0 && cols % 16 == 0 && IsAligned(data, 16) && IsAligned(data_t, 16)) {
    const TransposePair pair{data, data_t, batch, rows, cols, 8};
    return TransposeEach(exec, &pair, 1);
  }
  if (cols % kPatch == 0 && IsAligned(data, kPatch))
    return LaunchPatches<BytesTuning>(exec.stream, BytePatches<BytesTuning>{data}, batch, rows,
                                      cols, data_t);
  return LaunchElements<BytesTuning>(exec.stream, Bytes{data}, batch, rows, cols, data_t);
}

}  // namespace qshard::kernels
