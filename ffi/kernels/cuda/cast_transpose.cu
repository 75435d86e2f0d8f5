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
#include "kernels/cuda/cast_patches.cuh"
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
