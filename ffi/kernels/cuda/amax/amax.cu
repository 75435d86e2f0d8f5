// Amax: amax[r] = max |x[r, i]| over i, as a maximum over bit patterns of |x|.
//
// Reads x once (2 or 4 bytes per element), forwards, so that its end is in L2 for a cast that walks
// backwards. Writes 4 bytes per run. Work is mapped to threads in three ways:
//
// - Short runs, up to 32 loads: a group of 1 to 32 lanes takes a run, kRunsAtOnce at a time.
// - Rows: a warp takes a run, or a thread block from 256 loads up.
// - Long runs: many thread blocks share a run, each taking every n-th chunk. They combine their
//   maxima by an integer atomicMax on an amax of 0. A maximum is exact, so order does not matter.
//
// Loads have 16 bytes. Elements before a run's first 16-byte boundary and after its last whole load
// are read one by one, so x needs only its natural alignment. 16-bit inputs are compared as 16-bit
// integers, two at a time, and the result is widened. Equals the maximum over FloatBits(Widen(x)):
// NaN propagates as kNanBits, and an empty run gives 0.
#include "kernels/cast.h"
#include "kernels/cuda/amax/scan_run.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/raise_amax.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kRunsAtOnce = 4;

// --- short runs: a run has `loads` loads of kBytes each; `lanes` is the smallest power of two that
// is at least `loads`, up to a warp ---

template <class In, int kBytes>
__global__ void __launch_bounds__(kThreads)
    AmaxShortRuns(const In* x, int64_t runs, int loads, int lanes, float* amax) {
  const int groups = kThreads / lanes;
  const int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int64_t first = int64_t{blockIdx.x} * groups * kRunsAtOnce;
  const char* from = reinterpret_cast<const char*>(x) + first * loads * kBytes;
  Words<kBytes> w[kRunsAtOnce];
#pragma unroll
  for (int k = 0; k < kRunsAtOnce; ++k) {
    const int run = k * groups + group;
    w[k] = {};
    if (lane < loads && first + run < runs)
      w[k] = Load<kBytes>(from + (run * loads + lane) * kBytes);
  }
#pragma unroll
  for (int k = 0; k < kRunsAtOnce; ++k) {
    const int64_t run = first + k * groups + group;
    Magnitude<In> m;
    m.Add(w[k]);
    m.ReduceOver(lanes);
    if (lane == 0 && run < runs) amax[run] = FloatFromBits(m.AsFloatBits());
  }
}

template <class In, int kBytes>
Status LaunchShortRuns(const Exec<Cuda>& exec, const In* x, int64_t runs, int loads, float* amax) {
  int lanes = 1;
  while (lanes < loads) lanes *= 2;
  const int64_t blocks = CeilDiv(runs, int64_t{kThreads} / lanes * kRunsAtOnce);
  return Launch(exec, AmaxShortRuns<In, kBytes>, blocks, kThreads, x, runs, loads, lanes, amax);
}

// --- rows and long runs ---

constexpr int kBlocksPerSm = 4;  // resident blocks, also the number that share a long run

// Grid: x is the run, y the split (LaunchRaising).
template <class In, int kTeam>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    AmaxRuns(const In* x, int64_t runs, int64_t length, float* amax) {
  constexpr int kTeams = kThreads / kTeam;
  const int thread = threadIdx.x % kTeam;
  const int64_t run = int64_t{blockIdx.x} * kTeams + threadIdx.x / kTeam;
  if (run >= runs) return;  // the whole team
  const Magnitude<In> m =
      ScanRun<In, kTeam>(x + run * length, length, blockIdx.y, gridDim.y, thread);
  const int32_t bits = TeamMax<kTeam>(m.AsFloatBits());
  if (thread != 0) return;
  AwaitZeros();
  StoreOrRaise(amax + run, bits);
}

}  // namespace

template <class In>
Status Amax(const Exec<Cuda>& exec, const In* x, int64_t runs, int64_t length, float* amax) {
  constexpr int kWidth = 16 / sizeof(In);
  if (runs == 0) return {};
  if (length == 0) return ToStatus(cudaMemsetAsync(amax, 0, runs * sizeof(float), exec.stream));
  if (length % kWidth == 0 && length / kWidth <= kWarp && IsAligned(x, 16))
    return LaunchShortRuns<In, 16>(exec, x, runs, static_cast<int>(length / kWidth), amax);
  if (length <= kWarp)
    return LaunchShortRuns<In, sizeof(In)>(exec, x, runs, static_cast<int>(length), amax);
  const int64_t loads = length / kWidth;
  const int64_t room = int64_t{Multiprocessors()} * kBlocksPerSm;
  if (loads <= 8 * kWarp && runs >= room)
    return Launch(exec, AmaxRuns<In, kWarp>, CeilDiv(runs, kThreads / kWarp), kThreads, x, runs,
                  length, amax);
  const int64_t splits =
      std::max<int64_t>(1, std::min(CeilDiv(loads, kThreads * kScanLoads), room / runs));
  return LaunchRaising(exec, AmaxRuns<In, kThreads>, runs, splits, kThreads, amax, nullptr, x, runs,
                       length, amax);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, Amax)

}  // namespace qshard::kernels
