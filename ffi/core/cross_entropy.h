// Cross entropy of a row of logits. Host and device differ in ExpOfNegative alone. Work per logit
// is fp32 with one rounding per operation. Values computed once per row are fp64.
//
// A row is split into parts of kSoftmaxPart logits. Each part gives its largest logit m and the sum
// of e^(x - m). That sum has kPartLanes partial sums: element i is added to partial sum i %
// kPartLanes. Partial sums are then added in halves, first over eight neighbours, then over 32 such
// sums. kTeams teams each take every kTeams-th part in order, and the teams are merged in order. So
// a warp can take a part, and a thread block of kTeams warps a row.
#ifndef QSHARD_CORE_CROSS_ENTROPY_H_
#define QSHARD_CORE_CROSS_ENTROPY_H_

#include "core/exp_log.h"

namespace qshard {

constexpr int kSoftmaxPart = 1024, kPartLanes = 256, kTeams = 8;

// Statistics of some logits: the largest, ignoring NaN, the sum of e^(x - max), and the sum of x if
// requested.
struct RowStats {
  float max, sum, total;
};
QSHARD_INLINE RowStats NoLogits() { return {-FloatFromBits(kFloatInfinityBits), 0.0f, 0.0f}; }

// Returns the value to subtract in exponents: the largest logit, or 0 if there are none or all are
// -inf.
QSHARD_INLINE float Shift(float max) {
  return FloatFromBits(Select(max == -FloatFromBits(kFloatInfinityBits), 0, FloatBits(max)));
}

QSHARD_INLINE RowStats Merge(const RowStats& a, const RowStats& b) {
  const float max = b.max > a.max ? b.max : a.max, shift = Shift(max);
  return {max, a.sum * ExpOfNegative(a.max - shift) + b.sum * ExpOfNegative(b.max - shift),
          a.total + b.total};
}

struct CrossEntropyRule {
  int64_t classes;
  int32_t ignore_index;
  float smoothing, z_loss;

  QSHARD_INLINE bool IsIgnored(int32_t label) const { return label == ignore_index; }
  QSHARD_INLINE bool IsClass(int32_t label) const { return label >= 0 && label < classes; }
};

// Returns log(sum of e^x) of a row.
QSHARD_INLINE float LogSumExp(const RowStats& s) {
  return CanonicalNan(static_cast<float>(s.max + LogOf(s.sum)));
}

// Returns the loss of a row. `logit` is the label's logit. NaN if the label is not a class.
QSHARD_INLINE float CrossEntropyOf(const CrossEntropyRule& rule, int32_t label, float lse,
                                   float logit, float total) {
  if (rule.IsIgnored(label)) return 0.0f;
  if (!rule.IsClass(label)) return FloatFromBits(kNanBits);
  const double smoothing = rule.smoothing, l = lse;
  double loss = l - (1.0 - smoothing) * logit;
  if (rule.smoothing != 0.0f) loss = loss - smoothing * total / static_cast<double>(rule.classes);
  return CanonicalNan(static_cast<float>(loss + rule.z_loss * l * l));
}

// Merges the stats of `parts` parts of the classes, four numbers each (see ops.def), into a row's
// loss and lse.
QSHARD_INLINE void CrossEntropyOfParts(const CrossEntropyRule& rule, const float* stats,
                                       int64_t parts, int32_t label, float& loss, float& lse) {
  RowStats all = NoLogits();
  float logit = 0.0f;
  for (int64_t i = 0; i < parts; ++i, stats += 4) {
    all = Merge(all, {stats[0], stats[1], stats[3]});
    logit = logit + stats[2];
  }
  lse = LogSumExp(all);
  loss = CrossEntropyOf(rule, label, lse, logit, all.total);
}

// Gradient of logit x: fl(fl(slope * p) + shared), minus `own` at the label, with p = e^(x - lse).
struct CrossEntropyGrad {
  float lse, slope, shared, own;

  QSHARD_INLINE float Of(float x) const { return slope * ExpOfNegative(x - lse) + shared; }
};
QSHARD_INLINE CrossEntropyGrad CrossEntropyGradOf(const CrossEntropyRule& rule, int32_t label,
                                                  float lse, float grad) {
  const double smoothing = rule.smoothing, g = grad;
  const float g_or_nan = rule.IsClass(label) ? grad : FloatFromBits(kNanBits);
  return {lse, g_or_nan * static_cast<float>(1.0 + 2.0 * rule.z_loss * lse),
          static_cast<float>(-g * smoothing / static_cast<double>(rule.classes)),
          static_cast<float>(g * (1.0 - smoothing))};
}

}  // namespace qshard

#endif  // QSHARD_CORE_CROSS_ENTROPY_H_
