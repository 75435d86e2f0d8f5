// Amaxes and scales of a cast on the CPU, for delayed scaling and for infinite elements.
#ifndef QSHARD_KERNELS_CPU_DELAYED_RUNS_H_
#define QSHARD_KERNELS_CPU_DELAYED_RUNS_H_

#include <algorithm>

#include "kernels/cast.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/raise_amax.h"

namespace qshard::kernels {

// The scales of a cast, and the amaxes that it records. Without delayed scaling it records nothing.
// Until Finish(), scale_inv stores the scales themselves.
template <class In>
class DelayedRuns {
 public:
  DelayedRuns(const Exec<Cpu>& exec, const Scaled<In>& x) : x_(x) {
    const ScopedFloatEnvironment environment;
    std::fill_n(x.amax, x.runs, 0.0f);
    for (int64_t r = 0; r < x.runs; ++r) {
      if (x.scale[r] == 0.0f) (void)Amax(exec, x.x + r * x.length, 1, x.length, x.amax + r);
      x.scale_inv[r] = ScaleOrFirst(x.scale[r], x.amax[r], x.target);
    }
  }

  const float* scale() const { return x_.runs > 0 ? x_.scale_inv : x_.scale; }

  // Records the amax of elements [begin, end), and returns whether all are finite. If there is
  // nothing to record and infinities saturate, returns true without reading them.
  bool Raise(int64_t begin, int64_t end) const {
    if (x_.runs > 0) return RaiseAmaxes(x_.x, begin, end, x_.length, x_.amax);
    return x_.nonfinite == Nonfinite::kSaturate ||
           FloatBits(AmaxOf(x_.x + begin, end - begin)) < kFloatInfinityBits;
  }

  // Inverts the scales, after all codes are written.
  void Finish() const {
    const ScopedFloatEnvironment environment;
    for (int64_t r = 0; r < x_.runs; ++r) x_.scale_inv[r] = ScaleInverse(x_.scale_inv[r]);
  }

 private:
  const Scaled<In>& x_;
};

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_DELAYED_RUNS_H_
