// Cross entropy of a row of logits, the same on host and device: fp32, one rounding an operation,
// what is one for a row in fp64.
//
// A row is cut into parts of kSoftmaxPart logits. Of each come the largest, m, and the sum of e^(x
// - m): element i is added to that of i % kPartLanes partial sums, and these are added as halves,
// eight side by side first, then 32 such. kTeams teams take every kTeams-th part, one after the
// other, and then all teams are merged in order. So a warp can take a part, and a block of kTeams a
// row.
#ifndef QSHARD_CORE_CROSS_ENTROPY_H_
#define QSHARD_CORE_CROSS_ENTROPY_H_

#include "core/exp_log.h"

namespace qshard {

constexpr int kSoftmaxPart = 1024, kPartLanes = 256, kTeams = 8;

// Of some logits: the largest, but for NaN; the sum of e^(x - max); and the sum of x, if asked for.
struct RowStats {
  float max, sum, total;
};
QSHARD_INLINE RowStats NoLogits() { return {-FloatFromBits(kFloatInfinityBits), 0.0f, 0.0f}; }

// What exponents are of: the largest, or 0 where all logits are -inf, or there are none.
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

// log(sum of e^x) of a row.
QSHARD_INLINE float LogSumExp(const RowStats& s) {
  return CanonicalNan(static_cast<float>(s.max + LogOf(s.sum)));
}

// The loss of a row, of `logit` of its label. NaN if the label is no class.
QSHARD_INLINE float CrossEntropyOf(const CrossEntropyRule& rule, int32_t label, float lse,
                                   float logit, float total) {
  if (rule.IsIgnored(label)) return 0.0f;
  if (!rule.IsClass(label)) return FloatFromBits(kNanBits);
  const double smoothing = rule.smoothing, l = lse;
  double loss = l - (1.0 - smoothing) * logit;
  if (rule.smoothing != 0.0f) loss = loss - smoothing * total / static_cast<double>(rule.classes);
  return CanonicalNan(static_cast<float>(loss + rule.z_loss * l * l));
}

// Of the stats of `parts` of the classes, four numbers each (ops.def).
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

// The gradient of logit x: fl(fl(slope * p) + shared), less `own` at the label, with p = e^(x -
// lse).
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
