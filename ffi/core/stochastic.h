// Stochastic rounding of E2M1: random bits that depend on a seed and on the place of an element in
// the WHOLE tensor, and on nothing else. A shard draws what the whole would, whatever the kernel,
// the tiling or the number of threads. The same on host and device.
//
// The bit-to-element map: one Philox4x32-10 call serves 16 elements. Of the element with index i
// (64 bits, row-major in the whole tensor) under a seed of 64 bits:
//   key = (low word of seed, high word)     counter = (low word of i >> 4, high word, 0, 0)
//   word = (i >> 2) % 4                     byte of the word = i % 4, the least significant is 0
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

// The random byte of the element with index i, from its call Philox4x32(i >> 4, seed).
QSHARD_INLINE uint8_t RandomByte(const PhiloxWords& words, uint64_t i) {
  const uint32_t even = i & 8 ? words.word[2] : words.word[0];
  const uint32_t odd = i & 8 ? words.word[3] : words.word[1];
  return static_cast<uint8_t>((i & 4 ? odd : even) >> (8 * (i & 3)));
}

// Encodes v as E2M1, rounded up in magnitude with a probability of its distance to the value below,
// in 256ths. With step(m) the distance of E2M1 values at m (0.5 below 2, 1 below 4, else 2):
//   t = fl(|v| + step(|v|) * random / 256)     q = min(floor(t / step(t)) * step(t), 6)
// The sign is kept, NaN gives 0x7: the rounding of the instruction cvt.rs.satfinite.e2m1x4.
QSHARD_INLINE uint8_t EncodeStochastic(float v, uint8_t random) {
  const int32_t w = FloatBits(v);
  const int32_t magnitude = w & kFloatMagnitudeMask;
  const int32_t max_bits = FloatBits(E2M1::kMax);
  // Above 6 the answer is 6, whatever is added. The arithmetic below is exact but for one addition.
  const float m = FloatFromBits(Select(magnitude < max_bits, magnitude, max_bits));
  const float unit = FloatFromBits(  // step(m) / 256
      Select(m < 2.0f, FloatBits(PowerOfTwo(-9)),
             Select(m < 4.0f, FloatBits(PowerOfTwo(-8)), FloatBits(PowerOfTwo(-7)))));
  const float t = m + unit * static_cast<float>(random);
  // Codes 0-3 are halves from 0, codes 4-5 ones from 2, codes 6-7 twos from 4.
  const int32_t halves = static_cast<int32_t>(t * 2.0f);  // floor, as t >= 0
  int32_t code = Select(t < 2.0f, halves, Select(t < 4.0f, (halves >> 1) + 2, (halves >> 2) + 4));
  code = Select(code < 7, code, 7) | (static_cast<int32_t>(static_cast<uint32_t>(w) >> 28) & 8);
  return static_cast<uint8_t>(
      Select(magnitude > kFloatInfinityBits, static_cast<int32_t>(E2M1::kNan), code));
}

// How the index of an element follows from its place in a part of the tensor:
// first + row * row_step + col * col_step.
struct IndexSteps {
  int64_t row, col;
};

}  // namespace qshard

#endif  // QSHARD_CORE_STOCHASTIC_H_
