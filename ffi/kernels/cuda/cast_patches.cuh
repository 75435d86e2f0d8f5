// Patches of codes from x and its scales, written as they are made: the source of a transpose that
// casts.
#ifndef QSHARD_KERNELS_CUDA_CAST_PATCHES_CUH_
#define QSHARD_KERNELS_CUDA_CAST_PATCHES_CUH_

#include "core/round.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/transpose_tile.cuh"

namespace qshard::kernels {

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

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_CAST_PATCHES_CUH_
