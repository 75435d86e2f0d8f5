// amax on the CPU: one read of x. A long run is cut over threads, each keeping the largest bit
// pattern of its pieces; short runs are dealt out whole.
#include "kernels/amax.h"

#include "core/round.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

void AtomicMax(std::atomic<int32_t>& target, int32_t value) {
  int32_t seen = target.load(std::memory_order_relaxed);
  while (seen < value && !target.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

}  // namespace

template <class In>
Status Amax(const Exec<Cpu>& exec, const In* x, int64_t runs, int64_t length, float* amax) {
  const auto run_amax = Simd().amax[kInTypeOf<In>];
  const int64_t run_bytes = length * int64_t{sizeof(In)};
  if (run_bytes <= kTaskBytes) {
    ParallelRanges(exec, runs, run_bytes + int64_t{sizeof(float)}, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        amax[r] = CanonicalNan(FloatFromBits(run_amax(x + r * length, length)));
    });
    return {};
  }
  for (int64_t r = 0; r < runs; ++r) {
    std::atomic<int32_t> bits{0};
    ParallelRanges(exec, length, sizeof(In), [&](int64_t begin, int64_t end) {
      AtomicMax(bits, run_amax(x + r * length + begin, end - begin));
    });
    amax[r] = CanonicalNan(FloatFromBits(bits.load()));
  }
  return {};
}

template Status Amax(const Exec<Cpu>&, const float*, int64_t, int64_t, float*);
template Status Amax(const Exec<Cpu>&, const bfloat16*, int64_t, int64_t, float*);
template Status Amax(const Exec<Cpu>&, const float16*, int64_t, int64_t, float*);

}  // namespace qshard::kernels
