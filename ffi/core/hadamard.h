// Random Hadamard transform of 16 numbers, the same on host and device: y[j] = sum over i of x[i] *
// s[i] * H[i][j] / 4. The sum of bfloat16 numbers is exact and is rounded once to bfloat16.
//
// H[i][j] = (-1)^popcount(i & j), and s[i] is -1 where bit i of 0xD7E8 is set, else 1. A sum of
// exactly 0 is +0. Infinities and NaN follow IEEE sums, and NaN is 0x7FC0.
//
// This version sums in a fixed-point number with a bit for every bit of a bfloat16. Kernels have
// faster paths for inputs with similar exponents, which is nearly always the case.
#ifndef QSHARD_CORE_HADAMARD_H_
#define QSHARD_CORE_HADAMARD_H_

#include "core/round.h"

namespace qshard {

constexpr int kHadamardSize = 16;
constexpr uint32_t kHadamardSigns = 0xD7E8;  // bit i set: x[i] is negated

namespace hadamard {

// |x| = significand * 2^(exponent - 134); exponent is 1..254, or 255 for infinity and NaN.
QSHARD_INLINE int32_t Exponent(bfloat16 x) {
  const int32_t field = (x.bits >> 7) & 0xFF;
  return Select(field == 0, 1, field);
}
QSHARD_INLINE int32_t Significand(bfloat16 x) {
  return (x.bits & 0x7F) | Select((x.bits & 0x7F80) != 0, 0x80, 0);
}

// Exact sum of terms significand * 2^(exponent - 134), in 32-bit digits with headroom for carries.
struct WideSum {
  int64_t digit[9];

  QSHARD_INLINE void Add(int32_t signed_significand, int32_t exponent) {
    digit[(exponent - 1) >> 5] +=
        static_cast<int64_t>(signed_significand) * (int64_t{1} << ((exponent - 1) & 31));
  }

  // Returns the sum / 4.
  QSHARD_INLINE bfloat16 Round() {
    Carry();
    const bool negative = digit[8] < 0;
    if (negative) {
      for (int64_t& d : digit) d = -d;
      Carry();
    }
    int top = 8;
    while (top > 0 && digit[top] == 0) --top;
    // The two highest digits, with a sticky last bit for everything below.
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
  // Normalizes all digits but the highest to [0, 2^32). The highest has the sign.
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

}  // namespace hadamard

QSHARD_INLINE void HadamardTransform(const bfloat16* x, bfloat16* y) {
  using namespace hadamard;
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

}  // namespace qshard

#endif  // QSHARD_CORE_HADAMARD_H_
