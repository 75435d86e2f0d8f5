// cast_transpose: data[b, i, j] = Encode<Code>(x[b, i, j] * scale), and data_t[b, j, i] is the same
// code; cast_transpose_amax, which also finds amaxes of x.
//
// Where whole matrices have one scale, and one amax, these are square tiles with a given scale
// (quantize_block_square.cuh): x is read once and both planes are written once, 4 bytes an element
// for a 16-bit x, 6 for float32. Rows of a multiple of 8 elements will do, aligned to vectors.
// Anything else is a cast and a transpose. Needs compute capability 8.9. Equals core/round.h bit
// for bit.
#include "kernels/amax.h"
#include "kernels/cast.h"
#include "kernels/cuda/quantize_block_launch.cuh"
#include "kernels/delayed.h"

namespace qshard::kernels {
namespace {

// Whether runs of `length` elements are whole matrices: `each` of them, 0 for all.
bool AreMatrices(const Blocks& m, int64_t length, int64_t* each) {
  const int64_t matrix = m.rows * m.cols;
  const bool all = m.batch * matrix <= length;
  *each = all ? 0 : length / matrix;
  return all || length % matrix == 0;
}

}  // namespace

template <class In, class Code>
Status CastTranspose(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t length,
                     int64_t batch, int64_t rows, int64_t cols, uint8_t* data, uint8_t* data_t) {
  const Blocks m{batch, rows, cols, 1, 1};
  if (m.GridSize() == 0) return {};
  GivenScales<false> scales{scale};
  const bool fill = AreMatrices(m, length, &scales.scale_matrices);
  const auto a = ArgumentsOfTiles<Code>(x, scales, m, data, nullptr, data_t, nullptr);
  if (fill && rows > 1 && TakesTiles<Code>(a))
    return LaunchTiles<In, Code, GivenScales<false>, Work::kSquareBoth>(exec, a);
  const Status status = Cast<In, Code>(exec, x, scale, m.GridSize() / length, length, data);
  if (status.error != nullptr) return status;
  return Transpose(exec, data, batch, rows, cols, data_t);
}

template <class In, class Code>
Status CastTransposeAmax(const Exec<Cuda>& exec, const In* x, const float* scale,
                         int64_t scale_length, Nonfinite nonfinite, int64_t batch, int64_t rows,
                         int64_t cols, int64_t runs, int64_t amax_length, uint8_t* data,
                         uint8_t* data_t, float* amax) {
  const Blocks m{batch, rows, cols, 1, 1};
  if (m.GridSize() == 0) return Amax(exec, x, runs, 0, amax);
  GivenScales<true> scales{scale, 0, amax, 0, nonfinite};
  const bool fill = AreMatrices(m, scale_length, &scales.scale_matrices) &&
                    AreMatrices(m, amax_length, &scales.amax_matrices);
  const auto a = ArgumentsOfTiles<Code>(x, scales, m, data, nullptr, data_t, nullptr);
  if (fill && rows > 1 && TakesTiles<Code>(a)) {
    const cudaError_t error = cudaMemsetAsync(amax, 0, runs * sizeof(float), exec.stream);
    if (error != cudaSuccess) return ToStatus(error);
    return LaunchTiles<In, Code, GivenScales<true>, Work::kSquareBoth>(exec, a);
  }
  const Status status = CastAmax<In, Code>(exec, x, scale, scale_length, nonfinite, m.GridSize(),
                                           runs, amax_length, data, amax);
  if (status.error != nullptr) return status;
  return Transpose(exec, data, batch, rows, cols, data_t);
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cuda, CastTranspose)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cuda, CastTransposeAmax)

}  // namespace qshard::kernels
