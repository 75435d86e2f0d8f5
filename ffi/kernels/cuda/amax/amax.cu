// amax: amax[r] = max |x[r, i]| over i, as a maximum over bit patterns of |x|.
//
// Reads x once (2 or 4 bytes an element), forwards, so that its end stays in L2 for a cast that
// walks backwards; writes 4 bytes a run. Three ways to map work to threads:
//
// - Short runs, of up to 32 loads: a group of 1 to 32 lanes takes a run, kRunsAtOnce of them at
// once.
// - Rows: a warp takes a run, or from 256 loads up a block does.
// - Long runs: many blocks share a run, each taking every so many pieces of it. Their maxima meet
//   in an integer atomicMax on the bits of an amax of 0; a maximum is exact, so the order they come
//   in does not show.
//
// Loads are of 16 bytes; the elements of a run before the first 16-byte boundary and after the last
// whole load go one by one, so x needs only its natural alignment. 16-bit inputs are compared as
// 16-bit integers, two at a time, and the result widened. Equals the maximum over
// FloatBits(Widen(x)): NaN propagates, as kNanBits; an empty run gives 0.
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

// --- short runs: `loads` loads of kBytes each make a run; `lanes` is the power of two from `loads`
// up, at most a warp ---

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

constexpr int kBlocksPerSm = 4;  // resident, and the blocks of a run that many share

// Grid: x for runs, y for splits (LaunchRaising).
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
