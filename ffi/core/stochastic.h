// Stochastic rounding to E2M1, the same on host and device. Random bits depend only on the seed and
// on the index of an element in the WHOLE tensor. So a shard draws the bits of the whole tensor,
// with any kernel, tiling or number of threads.
//
// Random bits of an element: one Philox4x32-10 call serves 16 elements. For the element with 64-bit
// index i (row-major in the whole tensor) and a 64-bit seed:
//   key = (low half of seed, high half)     counter = (low half of i >> 4, high half, 0, 0)
//   word = (i >> 2) % 4                     byte of the word = i % 4, where 0 is the least
//   significant
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#ifndef QSHARD_CORE_STOCHASTIC_H_
#define QSHARD_CORE_STOCHASTIC_H_

#include "core/round.h"

namespace qshard {

struct PhiloxWords {
  uint32_t word[4];
};

QSHARD_INLINE PhiloxWords Philox4x32(uint64_t counter, uint64_t key) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0, product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(product0);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

// Returns the random byte of element i. `words` is Philox4x32(i >> 4, seed).
QSHARD_INLINE uint8_t RandomByte(const PhiloxWords& words, uint64_t i) {
  const uint32_t even = i & 8 ? words.word[2] : words.word[0];
  const uint32_t odd = i & 8 ? words.word[3] : words.word[1];
  return static_cast<uint8_t>((i & 4 ? odd : even) >> (8 * (i & 3)));
}

// Encodes v as E2M1 with stochastic rounding. The probability of rounding up in magnitude is the
// distance to the value below, in 256ths of a step. With step(m) the distance of E2M1 values at m
// (0.5 below 2, 1 below 4, else 2):
//   t = fl(|v| + step(|v|) * random / 256)     q = min(floor(t / step(t)) * step(t), 6)
// The sign is kept, and NaN gives 0x7. Rounds like the instruction cvt.rs.satfinite.e2m1x4.
QSHARD_INLINE uint8_t EncodeStochastic(float v, uint8_t random) {
  const int32_t w = FloatBits(v);
  const int32_t magnitude = w & kFloatMagnitudeMask;
  const int32_t max_bits = FloatBits(E2M1::kMax);
  // Above 6 the result is 6 for any random byte. All arithmetic below is exact except one addition.
  const float m = FloatFromBits(Select(magnitude < max_bits, magnitude, max_bits));
  const float unit = FloatFromBits(  // step(m) / 256
      Select(m < 2.0f, FloatBits(PowerOfTwo(-9)),
             Select(m < 4.0f, FloatBits(PowerOfTwo(-8)), FloatBits(PowerOfTwo(-7)))));
  const float t = m + unit * static_cast<float>(random);
  // Codes 0-3 step by 0.5 from 0, codes 4-5 by 1 from 2, codes 6-7 by 2 from 4.
  const int32_t halves = static_cast<int32_t>(t * 2.0f);  // floor, as t >= 0
  int32_t code = Select(t < 2.0f, halves, Select(t < 4.0f, (halves >> 1) + 2, (halves >> 2) + 4));
  code = Select(code < 7, code, 7) | (static_cast<int32_t>(static_cast<uint32_t>(w) >> 28) & 8);
  return static_cast<uint8_t>(
      Select(magnitude > kFloatInfinityBits, static_cast<int32_t>(E2M1::kNan), code));
}

// Strides of the Philox index in a part of the tensor. The index of an element is offset + row *
// row_step + col * col_step.
struct IndexSteps {
  int64_t row, col;
};

}  // namespace qshard

#endif  // QSHARD_CORE_STOCHASTIC_H_
