#include "kernels/combine_rows.h"

#include <algorithm>

#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/raise_amax.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

template <class In>
Status CombineRows(const Exec<Cpu>& exec, const In* y, const RowSums& sums, int64_t cols, In* x) {
  const SimdKernels& simd = Simd();
  const int64_t bytes = (sums.choices + 1) * cols * int64_t{sizeof(In)} + 1;
  ParallelRanges(exec, sums.tokens, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < cols; i += kChunk) {
        const int64_t n = std::min(kChunk, cols - i);
        float total[kChunk] = {};
        for (int64_t c = t * sums.choices; c < (t + 1) * sums.choices; ++c) {
          const int64_t row = sums.positions[c];
          if (row < 0 || row >= sums.rows) continue;
          simd.multiply_add[kInputIndex<In>](y + row * cols + i, sums.weights[c], n, total);
        }
        for (int64_t j = 0; j < n; ++j) x[t * cols + i + j] = Narrow<In>(total[j]);
      }
    }
  });
  return {};
}

template <class In>
Status CombineRowsGrad(const Exec<Cpu>& exec, const In* y, const RowTokens& of, const In* grad,
                       int64_t cols, In* dy, float* dweights, float* amax) {
  const SimdKernels& simd = Simd();
  ParallelRanges(
      exec, of.rows, 3 * cols * int64_t{sizeof(In)} + 1, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
          const int64_t token = of.tokens[p];
          if (token < 0 || token >= of.count) {
            std::fill_n(dy + p * cols, cols, Narrow<In>(0.0f));
            dweights[p] = amax[p] = 0.0f;
            continue;
          }
          const In* from = grad + token * cols;
          simd.multiply[kInputIndex<In>](from, of.weights[p], cols, dy + p * cols);
          dweights[p] = CanonicalNan(simd.dot[kInputIndex<In>](y + p * cols, from, cols));
          amax[p] = CanonicalNan(AmaxOf(dy + p * cols, cols));
        }
      });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, CombineRows)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, CombineRowsGrad)

}  // namespace qshard::kernels
