// The serial inner loops of the ops on blocks, one set for each SIMD target. A row is a run of n
// elements that starts where a block does; values of its blocks are consecutive.
#ifndef QSHARD_KERNELS_CPU_BLOCK_SIMD_H_
#define QSHARD_KERNELS_CPU_BLOCK_SIMD_H_

#include <cstdint>

#include "core/format.h"
#include "core/round.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

enum BlockCode { kBlockE4M3, kBlockE5M2, kBlockE2M1, kNumBlockCodes };

template <class F>
inline constexpr BlockCode kBlockCodeOf = kNumBlockCodes;
template <>
inline constexpr BlockCode kBlockCodeOf<E4M3> = kBlockE4M3;
template <>
inline constexpr BlockCode kBlockCodeOf<E5M2> = kBlockE5M2;
template <>
inline constexpr BlockCode kBlockCodeOf<E2M1> = kBlockE2M1;

struct FourOverSixBlock {
  int64_t stride, rows;                   // of x; the block has 16 columns
  float amax, global_amax, global_scale;  // of the block, and of its tensor or row
  float max;                              // 6 * scale_max
  bool squared;
};

// E2M1 codes are packed: n is even, and codes start with a whole byte.
struct BlockSimdKernels {
  // amax[i / block_cols] = the larger of itself and |x[i]|, as bit patterns.
  void (*amax[kNumInTypes])(const void* x, int64_t n, int64_t block_cols, float* amax);
  // amax[b] = the largest |x[r * stride + i]| of block b, i / block_cols = b, over r < rows.
  void (*amax_strip[kNumInTypes])(const void* x, int64_t stride, int64_t rows, int64_t n,
                                  int64_t block_cols, float* amax);
  // The formulas of core/scale.h and core/block_scale.h on n amaxes.
  void (*float_scales)(const float* amax, int64_t n, float max, float eps, bool pow2, float* scale,
                       float* scale_inv);
  void (*e8m0_scales)(const float* amax, int64_t n, float max, PowerRounding rounding, float* scale,
                      uint8_t* scale_inv);
  void (*nvfp4_scales)(const float* amax, int64_t n, float global_scale, float* scale,
                       uint8_t* scale_inv);
  // codes[i] = Encode(x[i] * scale[i / block_cols]).
  void (*cast[kNumInTypes][kNumBlockCodes])(const void* x, int64_t n, int64_t block_cols,
                                            const float* scale, uint8_t* codes);
  // The same, but E2M1 codes are one a byte, and n is any number.
  void (*cast_codes[kNumInTypes][kNumBlockCodes])(const void* x, int64_t n, int64_t block_cols,
                                                  const float* scale, uint8_t* codes);
  // packed[i] = codes[2 * i] | codes[2 * i + 1] << 4, for i < n.
  void (*pack_pairs)(const uint8_t* codes, int64_t n, uint8_t* packed);
  // packed[i] = even[i] | odd[i] << 4. `packed` may be one of them.
  void (*pack_rows)(const uint8_t* even, const uint8_t* odd, int64_t n, uint8_t* packed);
  // codes[i] = EncodeStochastic(x[i] * scale[i / block_cols], random[i]), E2M1.
  void (*cast_stochastic[kNumInTypes])(const void* x, int64_t n, int64_t block_cols,
                                       const float* scale, const uint8_t* random, uint8_t* codes);
  // random[i] = the random byte of the element with index first + i * step.
  void (*random)(uint64_t seed, uint64_t first, uint64_t step, int64_t n, uint8_t* random);
  // x[i] = Narrow(Decode(codes[i]) * scale_inv[i / block_cols]), NaN canonical.
  void (*dequantize[kNumBlockCodes][kNumInTypes])(const uint8_t* codes, int64_t n,
                                                  int64_t block_cols, const float* scale_inv,
                                                  void* x);
  // Whether four over six takes 4 for the block at x.
  bool (*takes_four[kNumInTypes])(const void* x, const FourOverSixBlock& block);
  // The transform of n blocks. Element i of block b is at [i * element_step + b * block_step], in x
  // and in y.
  void (*hadamard[kNumInTypes])(const void* x, int64_t n, int64_t element_step, int64_t block_step,
                                bfloat16* y);
  // even[i], odd[i] = the low, and the high, nibbles of bytes 2 * i and 2 * i + 1.
  void (*split_nibbles)(const uint8_t* bytes, int64_t n, uint8_t* even, uint8_t* odd);
};

// Those of the target of Simd().
const BlockSimdKernels& BlockSimd();

extern const BlockSimdKernels kBlockSimdScalar;
#if defined(QSHARD_X86_TARGETS)
extern const BlockSimdKernels kBlockSimdAvx2;
extern const BlockSimdKernels kBlockSimdAvx512;
#endif

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_BLOCK_SIMD_H_
