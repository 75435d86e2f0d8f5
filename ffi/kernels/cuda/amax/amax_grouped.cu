// AmaxGrouped: amax[e] = max |x| over the rows of expert e, as a maximum over bit patterns.
//
// A warp takes kWarpRuns consecutive padded rows: it loads their numbers together, scans each row
// of x that is not padding, forwards, and raises the amax of an expert after its last row. A
// maximum is exact, so order does not matter. One warp zeroes all amaxes while the thread blocks
// start (raise_amax.cuh). Reads each row as often as padded rows hold it, and nothing for padding.
#include "kernels/cuda/amax/scan_run.cuh"
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/raise_amax.cuh"
#include "kernels/grouped.h"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 4;
constexpr int kWarpRuns = 4, kBlockRuns = kThreads / kWarp * kWarpRuns;

template <class In>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    AmaxOfExperts(const In* x, int64_t cols, const RowMap map, const ExpertStops experts,
                  float* amax) {
  const int lane = threadIdx.x % kWarp;
  const int64_t first = int64_t{blockIdx.x} * kBlockRuns + threadIdx.x / kWarp * kWarpRuns;
  int32_t own = -1;
  if (lane < kWarpRuns && first + lane < map.count)
    own = static_cast<int32_t>(map.Of(first + lane));
  int64_t expert = ExpertOfWarp(experts, first);
  int32_t bits = 0;
  const auto raise = [&] {
    const int32_t largest = TeamMax<kWarp>(bits);
    if (lane == 0 && largest > 0) {
      AwaitZeroing();
      RaiseAmax(amax + expert, largest);
    }
    bits = 0;
  };
  for (int i = 0; i < kWarpRuns && expert < experts.count; ++i) {
    const int32_t row = __shfl_sync(kAllLanes, own, i);
    const int64_t next = experts.ExpertOf(first + i, expert);
    if (next != expert) raise();
    expert = next;
    if (row < 0 || expert == experts.count) continue;
    bits = max(bits, ScanRun<In, kWarp>(x + row * cols, cols, 0, 1, lane).AsFloatBits());
  }
  if (expert < experts.count) raise();
}

}  // namespace

template <class In>
Status AmaxGrouped(const Exec<Cuda>& exec, const In* x, int64_t cols, const RowMap& map,
                   const ExpertStops& experts, float* amax) {
  if (experts.count == 0) return {};
  const int64_t blocks = std::max<int64_t>(1, CeilDiv(map.count, kBlockRuns));
  if (!FitsGrid(blocks)) return kTooManyBlocks;
  return LaunchAfterZeros(exec, AmaxOfExperts<In>, dim3(static_cast<unsigned>(blocks)), kThreads,
                          amax, /*second=*/nullptr, experts.count, x, cols, map, experts, amax);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, AmaxGrouped)

}  // namespace qshard::kernels
