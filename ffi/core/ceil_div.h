#ifndef QSHARD_CORE_CEIL_DIV_H_
#define QSHARD_CORE_CEIL_DIV_H_

#include <cstdint>

#include "core/round.h"

namespace qshard {

// Returns a / b rounded up, for b > 0. Does not overflow, unlike (a + b - 1) / b.
QSHARD_INLINE constexpr int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b > 0); }

// Returns the smallest multiple of `unit` that is at least `a`.
QSHARD_INLINE constexpr int64_t RoundUp(int64_t a, int64_t unit) { return CeilDiv(a, unit) * unit; }

}  // namespace qshard

#endif  // QSHARD_CORE_CEIL_DIV_H_
