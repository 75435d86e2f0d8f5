// Amaxes that several threads raise atomically.
#ifndef QSHARD_KERNELS_CPU_RAISE_AMAX_H_
#define QSHARD_KERNELS_CPU_RAISE_AMAX_H_

#include <algorithm>

#include "core/round.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

// Raises *amax to `value`, a magnitude or NaN, as a maximum of bit patterns. Stores the canonical
// NaN.
inline void RaiseAmax(float* amax, float value) {
  typedef int32_t __attribute__((may_alias)) Bits;
  Bits* target = reinterpret_cast<Bits*>(amax);
  const Bits bits = FloatBits(CanonicalNan(value));
  Bits seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen < bits && !__atomic_compare_exchange_n(target, &seen, bits, /*weak=*/true,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// amax[i / block_cols] = max |x[i]| for i < n, as bit patterns.
template <class In>
void AmaxRow(const In* x, int64_t n, int64_t block_cols, float* amax) {
  Simd().amax[kInputIndex<In>](x, /*stride=*/0, /*rows=*/1, n, block_cols, amax);
}

// Returns max |x[i]| for i < n.
template <class In>
float AmaxOf(const In* x, int64_t n) {
  float amax = 0.0f;
  AmaxRow(x, n, std::max<int64_t>(1, n), &amax);
  return amax;
}

// Raises the amaxes of elements [begin, end) of x, one per run of `length`. Returns whether all
// elements are finite.
template <class In>
bool RaiseAmaxes(const In* x, int64_t begin, int64_t end, int64_t length, float* amax) {
  bool finite = true;
  while (begin < end) {
    const int64_t run = begin / length, stop = std::min(end, (run + 1) * length);
    const float largest = AmaxOf(x + begin, stop - begin);
    finite &= FloatBits(largest) < kFloatInfinityBits;
    RaiseAmax(amax + run, largest);
    begin = stop;
  }
  return finite;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_RAISE_AMAX_H_
