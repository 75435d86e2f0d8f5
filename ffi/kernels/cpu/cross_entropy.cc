// Cross entropy on the CPU. A task takes rows.
#include "kernels/cross_entropy.h"

#include <algorithm>

#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

namespace {

// Writes the stats of a row of logits to `to`, four numbers (see ops.def).
template <class In>
void StatsOfRow(const In* x, int32_t label, int64_t cols, int64_t first, bool total, float* to) {
  const auto part_of = Simd().softmax_part[kInputIndex<In>];
  RowStats teams[kTeams];
  for (RowStats& team : teams) team = NoLogits();
  for (int64_t at = 0, part = 0; at < cols; at += kSoftmaxPart, ++part) {
    RowStats found;
    part_of(x + at, std::min<int64_t>(kSoftmaxPart, cols - at), total, &found);
    teams[part % kTeams] = Merge(teams[part % kTeams], found);
  }
  RowStats all = teams[0];
  for (int team = 1; team < kTeams; ++team) all = Merge(all, teams[team]);
  const int64_t column = label - first;
  to[0] = all.max, to[1] = CanonicalNan(all.sum), to[3] = CanonicalNan(all.total);
  to[2] = column >= 0 && column < cols ? CanonicalNan(Widen(x[column])) : 0.0f;
}

// Writes the gradient of a row of logits to `d`, which may alias them.
template <class In>
void GradOfRow(const In* x, int32_t label, float lse, float grad, int64_t cols, int64_t first,
               const CrossEntropyRule& rule, In* d) {
  if (rule.IsIgnored(label)) {
    std::fill_n(d, cols, Narrow<In>(0.0f));
    return;
  }
  const CrossEntropyGrad of = CrossEntropyGradOf(rule, label, lse, grad);
  const int64_t column = label - first;
  const bool here = column >= 0 && column < cols;
  const float at_label = here ? of.Of(Widen(x[column])) - of.own : 0.0f;
  Simd().softmax_grad[kInputIndex<In>](x, cols, of, d);
  if (here) d[column] = Narrow<In>(at_label);
}

}  // namespace

template <class In>
Status CrossEntropyStats(const Exec<Cpu>& exec, const In* logits, const int32_t* labels,
                         int64_t rows, int64_t cols, int64_t first, bool total, float* stats) {
  ParallelRanges(exec, rows, cols * int64_t{sizeof(In)} + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      StatsOfRow(logits + row * cols, labels[row], cols, first, total, stats + 4 * row);
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
  ParallelRanges(exec, rows, 2 * cols * int64_t{sizeof(In)} + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      GradOfRow(logits + row * cols, labels[row], lse[row], grad[row], cols, first, rule,
                d + row * cols);
  });
  return {};
}

template <class In>
Status CrossEntropyWithGrad(const Exec<Cpu>& exec, const In* logits, const int32_t* labels,
                            const float* grad, int64_t rows, int64_t cols,
                            const CrossEntropyRule& rule, float* loss, In* d) {
  ParallelRanges(exec, rows, 3 * cols * int64_t{sizeof(In)} + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const In* x = logits + row * cols;
      float stats[4], lse;
      StatsOfRow(x, labels[row], cols, 0, rule.smoothing > 0, stats);
      CrossEntropyOfParts(rule, stats, 1, labels[row], loss[row], lse);
      GradOfRow(x, labels[row], lse, grad[row], cols, 0, rule, d + row * cols);
    }
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, CrossEntropyStats)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, CrossEntropyBackward)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, CrossEntropyWithGrad)

}  // namespace qshard::kernels
