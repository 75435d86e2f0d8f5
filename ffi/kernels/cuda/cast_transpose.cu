// cast_transpose: data[b, i, j] = Encode<Code>(x[b, i, j] * scale), and data_t[b, j, i] is the same
// code; cast_transpose_amax, which also finds amaxes of x.
//
// Where whole matrices have one scale, and one amax, these are square tiles with a given scale
// (quantize_block_square.cuh): x is read once and both planes are written once, 4 bytes an element
// for a 16-bit x, 6 for float32. Rows of a multiple of 8 elements will do, aligned to vectors.
// Anything else is a cast and a transpose. Needs compute capability 8.9. Equals core/round.h bit
// for bit.
#include "kernels/cast.h"
#include "kernels/cuda/instantiate.cuh"
#include "kernels/cuda/quantize_block_square.cuh"
#include "kernels/delayed.h"

namespace qshard::kernels {
namespace {

struct Matrices {
  // Whether runs of `length` elements are whole matrices: `each` of them, 0 for all.
  bool Fill(int64_t length, int64_t* each) const {
    const bool all = batch * rows * cols <= length;
    *each = all ? 0 : length / (rows * cols);
    return all || length % (rows * cols) == 0;
  }

  int64_t batch, rows, cols;
};

template <class In>
bool TakesTiles(const Matrices& m, const In* x, const uint8_t* data) {
  return m.batch > 0 && m.rows > 1 && m.cols > 0 && m.cols % kPatch == 0 && IsAligned(x, 16) &&
         IsAligned(data, kPatch);
}

template <class Code, class In, bool kAmax>
Status LaunchTiles(const Exec<Cuda>& exec, const In* x, const GivenScales<kAmax>& scales,
                   const Matrices& m, uint8_t* data, uint8_t* data_t) {
  using Scales = GivenScales<kAmax>;
  const TileGrid grid(m.batch, m.rows, m.cols);
  const TileArguments<In, Scales> a{
      x,    scales,  grid,   Divider(1), 1, WideColumns<Code>(m.rows, data_t),
      data, nullptr, data_t, nullptr};
  QuantizeSquareTiles<In, Code, Scales, Work::kSquareBoth>
      <<<TileBlocks(grid), kTileThreads, 0, exec.stream>>>(a);
  return LaunchStatus();
}

}  // namespace

template <class In, class Code>
Status CastTranspose(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t length,
                     int64_t batch, int64_t rows, int64_t cols, uint8_t* data, uint8_t* data_t) {
  const Matrices m{batch, rows, cols};
  GivenScales<false> scales{scale};
  if (TakesTiles(m, x, data) && m.Fill(length, &scales.scale_matrices))
    return LaunchTiles<Code>(exec, x, scales, m, data, data_t);
  const int64_t n = batch * rows * cols;
  if (n == 0) return {};
  const Status status = Cast<In, Code>(exec, x, scale, n / length, length, data);
  if (status.error != nullptr) return status;
  return Transpose(exec, data, batch, rows, cols, data_t);
}

template <class In, class Code>
Status CastTransposeAmax(const Exec<Cuda>& exec, const In* x, const float* scale,
                         int64_t scale_length, Nonfinite nonfinite, int64_t batch, int64_t rows,
                         int64_t cols, int64_t runs, int64_t amax_length, uint8_t* data,
                         uint8_t* data_t, float* amax) {
  const Matrices m{batch, rows, cols};
  GivenScales<true> scales{scale, 0, amax, 0, nonfinite};
  if (TakesTiles(m, x, data) && m.Fill(scale_length, &scales.scale_matrices) &&
      m.Fill(amax_length, &scales.amax_matrices)) {
    const cudaError_t error = cudaMemsetAsync(amax, 0, runs * sizeof(float), exec.stream);
    if (error != cudaSuccess) return ToStatus(error);
    return LaunchTiles<Code>(exec, x, scales, m, data, data_t);
  }
  const Status status = CastAmax<In, Code>(exec, x, scale, scale_length, nonfinite,
                                           batch * rows * cols, runs, amax_length, data, amax);
  if (status.error != nullptr) return status;
  return Transpose(exec, data, batch, rows, cols, data_t);
}

#define QSHARD_CAST_TRANSPOSE(In, Code)                                                            \
  template Status CastTranspose<In, Code>(const Exec<Cuda>&, const In*, const float*, int64_t,     \
                                          int64_t, int64_t, int64_t, uint8_t*, uint8_t*);          \
  template Status CastTransposeAmax<In, Code>(const Exec<Cuda>&, const In*, const float*, int64_t, \
                                              Nonfinite, int64_t, int64_t, int64_t, int64_t,       \
                                              int64_t, uint8_t*, uint8_t*, float*);
QSHARD_FLOATS_FP8(QSHARD_CAST_TRANSPOSE)

}  // namespace qshard::kernels
