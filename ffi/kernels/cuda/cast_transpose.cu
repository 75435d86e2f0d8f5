// cast_transpose: data[b, i, j] = Encode<Code>(x[b, i, j] * scale), and data_t[b, j, i] is the same
// code.
//
// Reads x once and writes both planes once: 4 bytes an element for a 16-bit x, 6 for float32, plus
// 4 for each scale. Work is mapped to threads as transpose_tile.cuh says; tiles are taken from the
// END of x, as in cast.cu. Any shape and alignment will do; whole lines move if rows have a
// multiple of 8 elements and columns one of 16, the buffers start so aligned, and the runs that
// share a scale are parts or multiples of rows, of a multiple of 8 elements. Needs compute
// capability 8.9. Equals core/round.h bit for bit.
#include <type_traits>

#include "kernels/cast.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transpose_tile.cuh"

namespace qshard::kernels {
namespace {

template <class In, bool kOneScale>
struct CastTransposeTuning : TransposeTuning {
  static constexpr bool kBackward = true;
  // As many as the registers of a patch allow.
  static constexpr int kBlocksPerSm = sizeof(In) == 4 ? 2 : kOneScale ? 4 : 3;
};

// The runs of a row-major [rows, cols] buffer, each a part of a row or some whole rows.
struct RowRuns {
  int64_t rows_per_run, runs_per_row, cols_per_run;

  // Calls body(k, run) with the run of (row + k, col), for k < kPatch.
  template <class Body>
  __device__ __forceinline__ void ForRows(int64_t row, int64_t col, const Body& body) const {
    const int64_t down = rows_per_run == 1 ? row : row / rows_per_run;
    int64_t run = down * runs_per_row + (runs_per_row == 1 ? 0 : col / cols_per_run);
    // Rows until the next run; beyond the patch it does not matter how many.
    const int again = static_cast<int>(min(rows_per_run, int64_t{kPatch}));
    int left = static_cast<int>(min((down + 1) * rows_per_run - row, int64_t{kPatch}));
#pragma unroll
    for (int k = 0; k < kPatch; ++k) {
      body(k, run);
      if (--left == 0) run += runs_per_row, left = again;
    }
  }
};

// Rows of 8 elements at a time, which have one scale.
template <class In, class Code, bool kOneScale, class Tuning>
struct CastPatches {
  struct Patch {
    Words<kPatch * sizeof(In)> rows[kPatch];
    float scale[kOneScale ? 1 : kPatch];
  };

  template <class Grid>
  __device__ __forceinline__ void Load(Patch& patch, const Grid& grid, const Tile& t, int row,
                                       int col) const {
    const int height = t.PatchHeight(row, col);
    LoadRows<Tuning::kRead>(x + grid.Offset(t, row, col), grid.cols, height, patch.rows);
    if constexpr (kOneScale) {
      patch.scale[0] = __ldg(scale);
    } else {
      const int64_t first = t.matrix * grid.rows + t.row + row;
      runs.ForRows(first, t.col + col, [&](int k, int64_t run) {
        patch.scale[k] = k < height ? __ldg(scale + run) : 0.0f;
      });
    }
  }

  template <class Grid>
  __device__ __forceinline__ void Codes(const Patch& patch, const Grid& grid, const Tile& t,
                                        int row, int col, Words<kPatch> (&codes)[kPatch]) const {
    const int height = t.PatchHeight(row, col);
    uint8_t* to = data + grid.Offset(t, row, col);
#pragma unroll
    for (int k = 0; k < kPatch; ++k, to += grid.cols) {
      float v[kPatch];
      WidenWords<In>(patch.rows[k], v);
#pragma unroll
      for (int i = 0; i < kPatch; ++i) v[i] = __fmul_rn(v[i], patch.scale[kOneScale ? 0 : k]);
      codes[k] = EncodeWords<Code>(v);
      if (k < height) Store<Tuning::kWrite>(to, codes[k]);
    }
  }

  const In* x;
  const float* scale;
  RowRuns runs;
  uint8_t* data;
};

template <class In, class Code>
struct CastElements {
  template <class Grid>
  __device__ __forceinline__ uint8_t operator()(const Grid& grid, const Tile& t, int row,
                                                int col) const {
    const int64_t i = grid.Offset(t, row, col);
    const float s = __ldg(scale + (one_scale ? 0 : i / length));
    const float v[1] = {__fmul_rn(Widen(x[i]), s)};
    return data[i] = EncodeWords<Code>(v).value;
  }

  const In* x;
  const float* scale;
  int64_t length;
  bool one_scale;
  uint8_t* data;
};

}  // namespace

template <class In, class Code>
Status CastTranspose(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t length,
                     int64_t batch, int64_t rows, int64_t cols, uint8_t* data, uint8_t* data_t) {
  const int64_t n = batch * rows * cols;
  if (n == 0) return {};
  if (rows == 1 || cols == 1) {  // the transpose is the same memory
    const Status status = Cast<In, Code>(exec, x, scale, n / length, length, data);
    if (status.error != nullptr) return status;
    return ToStatus(cudaMemcpyAsync(data_t, data, n, cudaMemcpyDeviceToDevice, exec.stream));
  }
  const bool one_scale = n <= length;
  const bool row_runs = length % cols == 0 || (cols % length == 0 && length % kPatch == 0);
  const bool vectors = cols % kPatch == 0 && IsAligned(x, 16) && IsAligned(data, kPatch);
  const RowRuns runs{std::max<int64_t>(1, length / cols), std::max<int64_t>(1, cols / length),
                     length};
  const auto launch_patches = [&](auto kOne) {
    using Tuning = CastTransposeTuning<In, kOne.value>;
    const CastPatches<In, Code, kOne.value, Tuning> source{x, scale, runs, data};
    return LaunchPatches<Tuning>(exec.stream, source, batch, rows, cols, data_t);
  };
  if (vectors && one_scale) return launch_patches(std::true_type{});
  if (vectors && row_runs) return launch_patches(std::false_type{});
  const CastElements<In, Code> source{x, scale, length, one_scale, data};
  return LaunchElements<CastTransposeTuning<In, true>>(exec.stream, source, batch, rows, cols,
                                                       data_t);
}

#define QSHARD_INSTANTIATE(In)                                                                 \
  template Status CastTranspose<In, E4M3>(const Exec<Cuda>&, const In*, const float*, int64_t, \
                                          int64_t, int64_t, int64_t, uint8_t*, uint8_t*);      \
  template Status CastTranspose<In, E5M2>(const Exec<Cuda>&, const In*, const float*, int64_t, \
                                          int64_t, int64_t, int64_t, uint8_t*, uint8_t*);
QSHARD_INSTANTIATE(float)
QSHARD_INSTANTIATE(bfloat16)
QSHARD_INSTANTIATE(float16)
#undef QSHARD_INSTANTIATE

}  // namespace qshard::kernels
