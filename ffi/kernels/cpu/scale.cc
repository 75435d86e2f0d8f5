#include "core/scale.h"

#include "kernels/cpu/parallel_for.h"
#include "kernels/scale.h"

namespace qshard::kernels {

Status ScaleFromAmax(const Exec<Cpu>& exec, const float* amax, int64_t n, ScaleRule rule,
                     float* scale, float* scale_inv) {
  ParallelRanges(exec, n, 3 * sizeof(float), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      scale[i] = qshard::ScaleFromAmax(amax[i], rule.max, rule.eps, rule.pow2);
      scale_inv[i] = ScaleInverse(scale[i]);
    }
  });
  return {};
}

}  // namespace qshard::kernels
