// The random Hadamard transform of 16 numbers: y[j] = sum over i of x[i] * s[i] * H[i][j] / 4, an
// exact sum of bfloat16 numbers, rounded once to bfloat16. The same on host and device.
//
// H[i][j] = (-1)^popcount(i & j), and s[i] is -1 where bit i of 0xD7E8 is set, else 1. A sum of
// exactly 0 is +0. Infinities and NaN follow IEEE sums, and NaN is 0x7FC0.
//
// How a sum is made exact: all 16 numbers are whole multiples of the unit of the smallest. If their
// exponents span at most kSpan, as nearly always, the multiples and their sums fit in 32 bits.
// Otherwise a number with a place for every bit that a bfloat16 can have takes the sums.
#ifndef QSHARD_CORE_HADAMARD_H_
#define QSHARD_CORE_HADAMARD_H_

#include "core/round.h"

namespace qshard {

constexpr int kHadamardSize = 16;
constexpr uint32_t kHadamardSigns = 0xD7E8;  // bit i: x[i] is negated first

namespace hadamard {

constexpr int32_t kSpan = 18;  // 8 bits of significand + 18 + 4 of summing 16 numbers = 30

// |x| = significand * 2^(exponent - 134); exponent is 1..254, or 255 for infinity and NaN.
QSHARD_INLINE int32_t Exponent(bfloat16 x) {
  const int32_t field = (x.bits >> 7) & 0xFF;
  return Select(field == 0, 1, field);
}
QSHARD_INLINE int32_t Significand(bfloat16 x) {
  return (x.bits & 0x7F) | Select((x.bits & 0x7F80) != 0, 0x80, 0);
}

// Whether the exact path is needed, for numbers whose exponents, but for zeros, are low..high.
// (255, 0) where all are zeros.
QSHARD_INLINE bool IsWide(int32_t low, int32_t high) { return high == 255 || high - low > kSpan; }

// x[i] * s[i] in units of 2^(low - 134). No overflow, also where IsWide makes it meaningless.
QSHARD_INLINE int32_t Multiple(bfloat16 x, int i, int32_t low) {
  const int32_t significand = Significand(x);
  const int32_t shift = Select(significand == 0, 0, Exponent(x) - low);
  const int32_t multiple = significand << Select(shift < kSpan, shift, kSpan);
  return Select(((x.bits >> 15) ^ (kHadamardSigns >> i)) & 1, -multiple, multiple);
}

// sum * 2^(exponent - 136), rounded once: the 136 is the unit's 134 and the division by 4.
QSHARD_INLINE bfloat16 RoundSum(int32_t sum, int32_t exponent) {
  const int32_t sign = sum >> 31;
  const int32_t magnitude = (sum ^ sign) - sign;
  // To 24 bits for fp32, the last of them set if any bit below is: rounding that is rounding the
  // sum.
  const int32_t odd = (magnitude & ~0x3F) | (static_cast<int32_t>((magnitude & 0x3F) != 0) << 6);
  const float exact = static_cast<float>(Select(magnitude >= (1 << 24), odd, magnitude));
  const float value = exact * PowerOfTwo(-9) * FloatFromBits(exponent << 23);  // 2^(exponent - 127)
  return {static_cast<uint16_t>(Narrow<bfloat16>(value).bits | (sign & 0x8000))};
}

// A sum of numbers significand * 2^(exponent - 134) in digits of 32 bits, with room for carries.
struct WideSum {
  int64_t digit[9];

  QSHARD_INLINE void Add(int32_t signed_significand, int32_t exponent) {
    digit[(exponent - 1) >> 5] +=
        static_cast<int64_t>(signed_significand) * (int64_t{1} << ((exponent - 1) & 31));
  }

  // The sum / 4.
  QSHARD_INLINE bfloat16 Round() {
    Carry();
    const bool negative = digit[8] < 0;
    if (negative) {
      for (int64_t& d : digit) d = -d;
      Carry();
    }
    int top = 8;
    while (top > 0 && digit[top] == 0) --top;
    // The two highest digits, and in the last bit whether anything is below them.
    uint64_t bits = static_cast<uint64_t>(digit[top]) << 32;
    if (top > 0) bits |= static_cast<uint64_t>(digit[top - 1]);
    for (int i = 0; i < top - 1; ++i) bits |= static_cast<uint64_t>(digit[i] != 0);
    int32_t exponent = 32 * (top - 1) + 1;
    while (bits >= (1 << 24)) {
      bits = (bits >> 1) | (bits & 1);
      ++exponent;
    }
    const uint16_t sign = negative ? 0x8000 : 0;
    const double value = static_cast<double>(bits) * DoublePower(exponent - 136);
    return {static_cast<uint16_t>(Narrow<bfloat16>(static_cast<float>(value)).bits | sign)};
  }

 private:
  // Leaves digits in [0, 2^32), but for the highest, which has the sign.
  QSHARD_INLINE void Carry() {
    for (int i = 0; i < 8; ++i) {
      const int64_t carry = digit[i] >> 32;
      digit[i] -= carry * (int64_t{1} << 32);
      digit[i + 1] += carry;
    }
  }

  static QSHARD_INLINE double DoublePower(int32_t exponent) {
    const int64_t bits = static_cast<int64_t>(exponent + 1023) << 52;
#if defined(__CUDA_ARCH__)
    return __longlong_as_double(bits);
#else
    double v;
    std::memcpy(&v, &bits, sizeof(v));
    return v;
#endif
  }
};

QSHARD_INLINE bool Negated(int i, int j) {
  int n = static_cast<int>((kHadamardSigns >> i) & 1);
  for (int both = i & j; both != 0; both >>= 1) n += both & 1;
  return n & 1;
}

// Any numbers at all.
QSHARD_INLINE void TransformWide(const bfloat16* x, bfloat16* y) {
  for (int j = 0; j < kHadamardSize; ++j) {
    WideSum sum = {};
    bool nan = false, up = false, down = false;
    for (int i = 0; i < kHadamardSize; ++i) {
      const bool negative = Negated(i, j) != ((x[i].bits & 0x8000) != 0);
      if (Exponent(x[i]) == 255) {
        nan |= (x[i].bits & 0x7F) != 0;
        (negative ? down : up) = true;
      } else {
        sum.Add(negative ? -Significand(x[i]) : Significand(x[i]), Exponent(x[i]));
      }
    }
    if (nan || (up && down))
      y[j] = {0x7FC0};
    else if (up || down)
      y[j] = {static_cast<uint16_t>(down ? 0xFF80 : 0x7F80)};
    else
      y[j] = sum.Round();
  }
}

}  // namespace hadamard

// y may be x.
QSHARD_INLINE void HadamardTransform(const bfloat16* x, bfloat16* y) {
  int32_t low = 255, high = 0;
  for (int i = 0; i < kHadamardSize; ++i) {
    const int32_t e = hadamard::Exponent(x[i]);
    const bool zero = (x[i].bits & 0x7FFF) == 0;
    low = Select(zero || e >= low, low, e);
    high = Select(zero || e <= high, high, e);
  }
  if (hadamard::IsWide(low, high)) {
    bfloat16 wide[kHadamardSize];
    hadamard::TransformWide(x, wide);
    for (int i = 0; i < kHadamardSize; ++i) y[i] = wide[i];
    return;
  }
  low = Select(high == 0, 1, low);  // nothing but zeros
  int32_t sum[kHadamardSize];
  for (int i = 0; i < kHadamardSize; ++i) sum[i] = hadamard::Multiple(x[i], i, low);
  for (int half = 1; half < kHadamardSize; half *= 2) {
    for (int i = 0; i < kHadamardSize; ++i) {
      if (i & half) continue;
      const int32_t a = sum[i], b = sum[i + half];
      sum[i] = a + b;
      sum[i + half] = a - b;
    }
  }
  for (int i = 0; i < kHadamardSize; ++i) y[i] = hadamard::RoundSum(sum[i], low);
}

}  // namespace qshard

#endif  // QSHARD_CORE_HADAMARD_H_
