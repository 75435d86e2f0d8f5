// amax on the CPU: one read of x. A long run is cut over threads, each raising the amax to that of
// its pieces; short runs are dealt out whole.
#include "kernels/amax.h"

#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/raise_amax.h"

namespace qshard::kernels {

template <class In>
Status Amax(const Exec<Cpu>& exec, const In* x, int64_t runs, int64_t length, float* amax) {
  const int64_t run_bytes = length * int64_t{sizeof(In)};
  if (run_bytes <= kTaskBytes) {
    ParallelRanges(exec, runs, run_bytes + int64_t{sizeof(float)}, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) amax[r] = CanonicalNan(AmaxOf(x + r * length, length));
    });
    return {};
  }
  std::fill_n(amax, runs, 0.0f);
  ParallelRanges(exec, runs * length, sizeof(In),
                 [&](int64_t begin, int64_t end) { RaiseAmaxes(x, begin, end, length, amax); });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, Amax)

}  // namespace qshard::kernels
