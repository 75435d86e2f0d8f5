// The largest |x| of a run of any length and alignment, read once by a team of threads.
#ifndef QSHARD_KERNELS_CUDA_AMAX_SCAN_RUN_CUH_
#define QSHARD_KERNELS_CUDA_AMAX_SCAN_RUN_CUH_

#include <cstdint>

#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

constexpr int kScanLoads = 8;  // in flight per thread

// Returns the largest |x| that thread `thread` of kTeam finds in chunks `split`, `split` +
// `splits`, and so on of the run.
template <class In, int kTeam>
__device__ __forceinline__ Magnitude<In> ScanRun(const In* run, int64_t length, int split,
                                                 int splits, int thread) {
  constexpr int kWidth = 16 / sizeof(In);
  constexpr int kChunk = kTeam * kScanLoads;  // loads
  static_assert(kTeam >= 2 * kWidth);
  const int to_boundary = -static_cast<int>(reinterpret_cast<uintptr_t>(run)) & 15;
  const int head = static_cast<int>(min(length, int64_t{to_boundary / int(sizeof(In))}));
  const int64_t loads = (length - head) / kWidth;
  Magnitude<In> m;
  if (split == 0) {
    const int tail = static_cast<int>(length - head - loads * kWidth);
    if (thread < head) m.Add(Load<sizeof(In)>(run + thread));
    if (thread < tail) m.Add(Load<sizeof(In)>(run + length - tail + thread));
  }
  int64_t chunk = int64_t{split} * kChunk;
  const int64_t step = int64_t{splits} * kChunk;
  const In* from = run + head + (chunk + thread) * kWidth;
  Words<16> w[kScanLoads];
  for (; chunk + kChunk <= loads; chunk += step, from += step * kWidth) {
#pragma unroll
    for (int k = 0; k < kScanLoads; ++k) w[k] = Load<16>(from + k * kTeam * kWidth);
#pragma unroll
    for (int k = 0; k < kScanLoads; ++k) m.Add(w[k]);
  }
  for (int64_t i = chunk + thread; i < loads; i += kTeam, from += kTeam * kWidth)
    m.Add(Load<16>(from));  // the partial last chunk of the run
  return m;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_AMAX_SCAN_RUN_CUH_
