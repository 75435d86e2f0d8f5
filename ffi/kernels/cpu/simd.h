// The serial inner loops, one set for each SIMD target, chosen once at load.
#ifndef QSHARD_KERNELS_CPU_SIMD_H_
#define QSHARD_KERNELS_CPU_SIMD_H_

#include <cstdint>

#include "core/format.h"

namespace qshard::kernels {

enum InType { kFloat32, kBFloat16, kFloat16, kNumInTypes };
enum CodeType { kE4M3, kE5M2, kNumFp8Types, kE2M1 = kNumFp8Types, kE8M0, kNumCodeTypes };

template <class T>
inline constexpr InType kInTypeOf = kNumInTypes;
template <>
inline constexpr InType kInTypeOf<float> = kFloat32;
template <>
inline constexpr InType kInTypeOf<bfloat16> = kBFloat16;
template <>
inline constexpr InType kInTypeOf<float16> = kFloat16;

template <class F>
inline constexpr CodeType kCodeTypeOf = kNumCodeTypes;
template <>
inline constexpr CodeType kCodeTypeOf<E4M3> = kE4M3;
template <>
inline constexpr CodeType kCodeTypeOf<E5M2> = kE5M2;
template <>
inline constexpr CodeType kCodeTypeOf<E2M1> = kE2M1;
template <>
inline constexpr CodeType kCodeTypeOf<E8M0> = kE8M0;

// Side of a square tile of bytes: a cache line in each direction.
constexpr int64_t kTile = 64;

// A scale for each run of `length` elements of a row-major buffer.
struct RunScales {
  const float* scale;
  int64_t length;
};

struct SimdKernels {
  const char* target;  // "scalar", "avx2" or "avx512"

  // The largest bit pattern of |x[i]|, i < n, with x widened to fp32.
  int32_t (*amax[kNumInTypes])(const void* x, int64_t n);

  // out[i - begin] = Encode(x[i] * scale[i / length]) for begin <= i < end. `x` points at element
  // 0, `out` at that of element `begin`; they do not overlap. Reading element i, x[i + ahead] is
  // prefetched, which need not exist.
  void (*cast[kNumInTypes][kNumFp8Types])(const void* x, int64_t begin, int64_t end,
                                          RunScales scales, int64_t ahead, uint8_t* out);

  // out[i - begin] = Narrow(Decode(codes[i]) * scale[i / length]), likewise.
  void (*dequantize[kNumFp8Types][kNumInTypes])(const uint8_t* codes, int64_t begin, int64_t end,
                                                RunScales scales, int64_t ahead, void* out);

  // codes[i] = Encode(x[i]), x[i] = Decode(codes[i]) for i < n.
  void (*encode[kNumInTypes][kNumCodeTypes])(const void* x, int64_t n, uint8_t* codes);
  void (*decode[kNumCodeTypes])(const uint8_t* codes, int64_t n, float* x);

  // out[j * out_stride + i] = in[i * in_stride + j], bytes, i and j < kTile.
  void (*transpose)(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride);
};

// The best target of this machine, or the one that the environment variable QSHARD_SIMD names. Its
// first call throws std::invalid_argument if this machine has no target of that name.
const SimdKernels& Simd();

// The targets of this machine, the best one last; null-terminated.
const SimdKernels* const* SimdTargets();

extern const SimdKernels kSimdScalar;
#if defined(QSHARD_X86_TARGETS)
extern const SimdKernels kSimdAvx2;
extern const SimdKernels kSimdAvx512;
#endif

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_H_
