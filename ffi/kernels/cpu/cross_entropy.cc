// Cross entropy on the CPU. A task takes rows.
#include "kernels/cross_entropy.h"

#include <algorithm>

#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

template <class In>
Status CrossEntropyStats(const Exec<Cpu>& exec, const In* logits, const int32_t* labels,
                         int64_t rows, int64_t cols, int64_t first, bool total, float* stats) {
  const auto part_of = Simd().softmax_part[kInputIndex<In>];
  ParallelRanges(exec, rows, cols * int64_t{sizeof(In)} + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const In* x = logits + row * cols;
      RowStats teams[kTeams];
      for (RowStats& team : teams) team = NoLogits();
      for (int64_t at = 0, part = 0; at < cols; at += kSoftmaxPart, ++part) {
        RowStats found;
        part_of(x + at, std::min<int64_t>(kSoftmaxPart, cols - at), total, &found);
        teams[part % kTeams] = Merge(teams[part % kTeams], found);
      }
      RowStats all = teams[0];
      for (int team = 1; team < kTeams; ++team) all = Merge(all, teams[team]);
      const int64_t column = labels[row] - first;
      float* to = stats + 4 * row;
      to[0] = all.max, to[1] = CanonicalNan(all.sum), to[3] = CanonicalNan(all.total);
      to[2] = column >= 0 && column < cols ? CanonicalNan(Widen(x[column])) : 0.0f;
    }
  });
  return {};
}

Status CrossEntropy(const Exec<Cpu>& exec, const float* stats, const int32_t* labels, int64_t rows,
                    int64_t parts, const CrossEntropyRule& rule, float* loss, float* lse) {
  ParallelRanges(exec, rows, (4 * parts + 2) * int64_t{sizeof(float)},
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row)
                     CrossEntropyOfParts(rule, stats + 4 * row * parts, parts, labels[row],
                                         loss[row], lse[row]);
                 });
  return {};
}

template <class In>
Status CrossEntropyBackward(const Exec<Cpu>& exec, const In* logits, const int32_t* labels,
                            const float* lse, const float* grad, int64_t rows, int64_t cols,
                            int64_t first, const CrossEntropyRule& rule, In* d) {
  const auto gradients = Simd().softmax_grad[kInputIndex<In>];
  ParallelRanges(exec, rows, 2 * cols * int64_t{sizeof(In)} + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const In* x = logits + row * cols;
      In* to = d + row * cols;
      if (rule.IsIgnored(labels[row])) {
        std::fill_n(to, cols, Narrow<In>(0.0f));
        continue;
      }
      const CrossEntropyGrad of = CrossEntropyGradOf(rule, labels[row], lse[row], grad[row]);
      const int64_t column = labels[row] - first;
      const bool here = column >= 0 && column < cols;
      const float at_label = here ? of.Of(Widen(x[column])) - of.own : 0.0f;
      gradients(x, cols, of, to);
      if (here) to[column] = Narrow<In>(at_label);
    }
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, CrossEntropyStats)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, CrossEntropyBackward)

}  // namespace qshard::kernels
