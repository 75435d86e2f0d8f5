// Serial inner loops: one table per SIMD target, chosen once at load.
#ifndef QSHARD_KERNELS_CPU_SIMD_H_
#define QSHARD_KERNELS_CPU_SIMD_H_

#include <cstdint>

#include "core/cross_entropy.h"
#include "kernels/adam.h"
#include "kernels/block_scale.h"

namespace qshard::kernels {

// --- indices into the tables ---

#define QSHARD_ENUMERATOR(kind, Type) kind##Type,
#define QSHARD_INDEX_OF(index, kind, Type) \
  template <>                              \
  inline constexpr auto index<Type> = kind##Type;

enum InputIndex { QSHARD_FOR_EACH_INPUT(QSHARD_ENUMERATOR, kInput_) kNumInputs };
template <class In>
inline constexpr InputIndex kInputIndex = kNumInputs;
QSHARD_FOR_EACH_INPUT(QSHARD_INDEX_OF, kInputIndex, kInput_)

enum ElementIndex { QSHARD_FOR_EACH_ELEMENT(QSHARD_ENUMERATOR, kElement_) kNumElements };
template <class Code>
inline constexpr ElementIndex kElementIndex = kNumElements;
QSHARD_FOR_EACH_ELEMENT(QSHARD_INDEX_OF, kElementIndex, kElement_)

#undef QSHARD_ENUMERATOR
#undef QSHARD_INDEX_OF

// --- the table ---

// Scales of a row of elements: element i has scale[(begin + i) / length].
struct RowScales {
  const float* scale;
  int64_t length;
  int64_t begin = 0;
};

struct FourOverSixBlock {
  int64_t stride, rows;  // of x; the block has 16 columns
  // AmaxOrNan of the block, and amax and scale of its tensor or row.
  float amax, global_amax, global_scale;
  float max;  // 6 * scale_max
  bool squared;
};

// Side of a square tile of bytes: one cache line in each direction.
constexpr int64_t kByteTile = 64;

// Elements of a buffer on the stack.
constexpr int64_t kChunk = 512;

// Loops over rows of n elements. Codes are one a byte unless packed. Outputs overlap no inputs
// unless stated.
struct SimdKernels {
  const char* target;  // "scalar", "avx2" or "avx512"

  // amax[b] = max |x[r * stride + i]| over r < rows and the i with i / block_cols = b, as a maximum
  // of bit patterns. NaN keeps its bits.
  void (*amax[kNumInputs])(const void* x, int64_t stride, int64_t rows, int64_t n,
                           int64_t block_cols, float* amax);

  // codes[i] = Encode(x[i] * scale of i). While reading element i, prefetches x[i + ahead], which
  // need not exist. Prefetches nothing if `ahead` is 0.
  void (*cast[kNumInputs][kNumElements])(const void* x, int64_t n, const RowScales& scales,
                                         int64_t ahead, uint8_t* codes);

  // x[i] = Narrow(Decode(codes[i]) * scale of i). `ahead` as above.
  void (*dequantize[kNumElements][kNumInputs])(const uint8_t* codes, int64_t n,
                                               const RowScales& scales, int64_t ahead, void* x);

  // codes[i] = EncodeStochastic(x[i] * scale of i, random[i]), E2M1.
  void (*cast_stochastic[kNumInputs])(const void* x, int64_t n, const RowScales& scales,
                                      const uint8_t* random, uint8_t* codes);

  // random[i] = random byte of the element with index first + i * step.
  void (*random)(uint64_t seed, uint64_t first, uint64_t step, int64_t n, uint8_t* random);

  // codes[i] = Encode<E8M0>(x[i]), and x[i] = Decode<E8M0>(codes[i]).
  void (*encode_e8m0[kNumInputs])(const void* x, int64_t n, uint8_t* codes);
  void (*decode_e8m0)(const uint8_t* codes, int64_t n, float* x);

  // scale[i], scale_inv[i] = scales.Of(amax[i], shared).
  template <class T>
  using ScalesFunction = void(const float* amax, int64_t n, const T& scales, float shared,
                              float* scale, typename T::Stored* scale_inv);
  ScalesFunction<FloatScales>* float_scales;
  ScalesFunction<E8M0Scales>* e8m0_scales;
  ScalesFunction<Nvfp4Scales>* nvfp4_scales;
  // Returns whether four over six picks 4 for the block at x.
  bool (*takes_four[kNumInputs])(const void* x, const FourOverSixBlock& block);

  // Transforms n blocks. Element i of block b is at [i * element_step + b * block_step] in x and y.
  void (*hadamard[kNumInputs])(const void* x, int64_t n, int64_t element_step, int64_t block_step,
                               bfloat16* y);

  // 4-bit codes: packed[i] = codes[2 * i] | codes[2 * i + 1] << 4 for i < n, and the inverse.
  void (*pack_pairs)(const uint8_t* codes, int64_t n, uint8_t* packed);
  void (*unpack_pairs)(const uint8_t* packed, int64_t n, uint8_t* codes);
  // packed[i] = even[i] | odd[i] << 4. `packed` may alias either input.
  void (*pack_rows)(const uint8_t* even, const uint8_t* odd, int64_t n, uint8_t* packed);
  // transposed[2 * i] has the low nibbles of even[i] and odd[i], and transposed[2 * i + 1] the high
  // nibbles.
  void (*transpose_pairs)(const uint8_t* even, const uint8_t* odd, int64_t n, uint8_t* transposed);
  // out[j * out_stride + i] = in[i * in_stride + j] for bytes, with i and j < kByteTile.
  void (*transpose)(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride);

  // sums[i] = Widen(x[i]) if `first`, else sums[i] + Widen(x[i]).
  void (*add[kNumInputs])(const void* x, int64_t n, bool first, float* sums);

  // --- SwiGLU and RMSNorm (core/swiglu.h, core/norm.h), for rows and weights of n elements ---

  void (*swiglu[kNumInputs])(const void* gate, const void* up, int64_t n, void* h);
  void (*swiglu_grad[kNumInputs])(const void* gate, const void* up, const void* grad, int64_t n,
                                  void* d_gate, void* d_up);
  float (*squares[kNumInputs])(const void* x, int64_t n);
  void (*rms_norm[kNumInputs])(const void* x, const float* weight, float rstd, int64_t n, void* y);
  // Returns the sum of grad * weight * x * rstd.
  float (*grad_along[kNumInputs])(const void* x, const void* grad, const float* weight, float rstd,
                                  int64_t n);
  // Adds the gradient of the weight to `sums`.
  void (*rms_norm_grad[kNumInputs])(const void* x, const void* grad, const float* weight,
                                    float rstd, float along, int64_t n, void* dx, float* sums);

  // sums[i] = FusedMultiplyAdd(weight, x[i], sums[i]), y[i] = Narrow(weight * x[i]), and the sum of
  // a * b (core/norm.h), for rows of n elements.
  void (*multiply_add[kNumInputs])(const void* x, float weight, int64_t n, float* sums);
  void (*multiply[kNumInputs])(const void* x, float weight, int64_t n, void* y);
  float (*dot[kNumInputs])(const void* a, const void* b, int64_t n);

  // --- cross entropy: core/cross_entropy.h ---

  // Computes the stats of a part of n <= kSoftmaxPart logits.
  void (*softmax_part[kNumInputs])(const void* x, int64_t n, bool total, RowStats* stats);
  // d[i] = Narrow(of.Of(logits[i])). `d` may alias `logits`.
  void (*softmax_grad[kNumInputs])(const void* logits, int64_t n, const CrossEntropyGrad& of,
                                   void* d);

  // --- Adam, for n <= kAdamBlock elements ---

  // x[i] = value of from[i]: a plain value, or a code with this scale_inv.
  void (*adam_decode[kNumAdamTypes])(const void* from, int64_t n, float scale_inv, float* x);
  void (*adam_join)(const void* upper, const void* lower, int64_t n, float* x);
  // The inverse: as plain values, as codes with a new scale computed from x, or as halves.
  // `positive` marks second moments.
  void (*adam_narrow[kNumAdamFloats])(const float* x, int64_t n, void* to);
  void (*adam_encode[kNumAdamTypes])(const float* x, int64_t n, bool positive, void* to,
                                     float* scale_inv);
  void (*adam_halve)(const float* x, int64_t n, void* upper, void* lower);
  // Updates p, m and v with gradients g. `update` receives lr * u, the decrease of p.
  void (*adam_step[3])(const AdamConstants& constants, const float* g, int64_t n, float* p,
                       float* m, float* v, float* update);
};

// Returns the fastest target of this machine, or the one that the environment variable QSHARD_SIMD
// names. The first call throws std::invalid_argument if this machine has no such target.
const SimdKernels& Simd();

// Returns the targets of this machine, fastest last, null-terminated.
const SimdKernels* const* SimdTargets();

// One table per target, compiled from kernels/cpu/simd/target.cc.
namespace scalar {
extern const SimdKernels kKernels;
}
namespace avx2 {
extern const SimdKernels kKernels;
}
namespace avx512 {
extern const SimdKernels kKernels;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_H_
