// Sums over ranks on the CPU.
#include "kernels/add_ranks.h"

#include <algorithm>

#include "core/round.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

template <class In>
Status AddRanks(const Exec<Cpu>& exec, const In* parts, int64_t ranks, int64_t length, bool mean,
                const float* before, float* total) {
  const float divisor = mean && ranks > 0 ? static_cast<float>(ranks) : 1.0f;
  const auto add = Simd().add[kInputIndex<In>];
  const int64_t bytes = ranks * int64_t{sizeof(In)} + 2 * int64_t{sizeof(float)};
  ParallelRanges(exec, length, bytes, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kChunk) {
      const int64_t n = std::min(kChunk, end - begin);
      float sums[kChunk] = {};
      for (int64_t rank = 0; rank < ranks; ++rank)
        add(parts + rank * length + begin, n, rank == 0, sums);
      for (int64_t i = 0; i < n; ++i) {
        const float sum = sums[i] / divisor;
        total[begin + i] = CanonicalNan(before == nullptr ? sum : before[begin + i] + sum);
      }
    }
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, AddRanks)

}  // namespace qshard::kernels
