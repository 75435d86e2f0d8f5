// One Adam step for some elements of one block, shared by CPU and CUDA. The kinds decide which
// operands are read and stored.
#ifndef QSHARD_KERNELS_ADAM_STEP_H_
#define QSHARD_KERNELS_ADAM_STEP_H_

#include "kernels/adam.h"

#if defined(__CUDACC__)
#define QSHARD_STEP_INLINE __device__ __forceinline__
#else
#define QSHARD_STEP_INLINE inline
#endif

namespace qshard::kernels {

// Elements of each operand, in registers or in memory.
template <class Stored>
struct AdamStored {
  Stored param, low, grad, exp_avg, exp_avg_sq;
};

// Inverse scales of the states of a block; 1 for states without scales.
struct AdamScales {
  float exp_avg = 1.0f, exp_avg_sq = 1.0f;
};

QSHARD_STEP_INLINE AdamScales LoadScales(const AdamTensor& t, const AdamKinds& kinds,
                                         int64_t block) {
  AdamScales s;
  if (IsScaled(kinds.exp_avg)) s.exp_avg = t.exp_avg.scale_inv[block];
  if (IsScaled(kinds.exp_avg_sq)) s.exp_avg_sq = t.exp_avg_sq.scale_inv[block];
  return s;
}

QSHARD_STEP_INLINE void StoreScales(const AdamTensor& t, const AdamKinds& kinds, int64_t block,
                                    const AdamScales& s) {
  if (IsScaled(kinds.exp_avg)) t.new_exp_avg.scale_inv[block] = s.exp_avg;
  if (IsScaled(kinds.exp_avg_sq)) t.new_exp_avg_sq.scale_inv[block] = s.exp_avg_sq;
}

// Runs a step on Count() elements, at most kCount, and replaces `scales` by the new ones.
// `Elements` is the platform's part. Widen gives values, Narrow rounds them to a type, Store stores
// them. Decode and Encode do the same for states, Join and StoreHalves for a bfloat16 with a
// remainder. Step updates p, m and v, and sets u to old p - new p.
template <class Elements, class Stored>
QSHARD_STEP_INLINE void StepElements(const Elements& e, const AdamKinds& kinds,
                                     const AdamConstants& c, const AdamTensor& t,
                                     const AdamStored<Stored>& x, AdamScales& scales) {
  constexpr int kCount = Elements::kCount;
  const bool master = kinds.low == AdamLow::kMaster, halves = kinds.low == AdamLow::kRemainder;
  float p[kCount] = {}, g[kCount], m[kCount], v[kCount], u[kCount];
  if (master)
    e.Widen(x.low, kAdamFloat32, p);
  else if (halves)
    e.Join(x.param, x.low, p);
  else if (kinds.reads_param())
    e.Widen(x.param, kinds.param, p);
  e.Widen(x.grad, kinds.grad, g);
  e.Decode(x.exp_avg, kinds.exp_avg, scales.exp_avg, m);
  e.Decode(x.exp_avg_sq, kinds.exp_avg_sq, scales.exp_avg_sq, v);
  e.Step(kinds.decay, c, g, p, m, v, u);
  e.Encode(m, kinds.exp_avg, /*positive=*/false, t.new_exp_avg.data, scales.exp_avg);
  e.Encode(v, kinds.exp_avg_sq, /*positive=*/true, t.new_exp_avg_sq.data, scales.exp_avg_sq);
  if (halves) return e.StoreHalves(p, t.new_param, t.new_low);
  if (master) e.Store(p, kAdamFloat32, t.new_low);
  if (!kinds.update) return e.Store(p, kinds.param, t.new_param);
  if (master) {
    e.Narrow(p, kinds.param, u);
    e.Widen(x.param, kinds.param, p);
  }
  for (int i = 0; i < e.Count(); ++i) u[i] = master ? u[i] - p[i] : -u[i];
  e.Store(u, kAdamFloat32, t.new_param);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_ADAM_STEP_H_
