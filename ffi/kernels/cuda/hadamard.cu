// hadamard: HadamardTransform (core/hadamard.h) of 16 consecutive elements of a row, or of a
// column.
//
// Reads x and writes y once: 4 bytes an element for a 16-bit x. A thread takes the 16 elements of a
// block, two blocks at a time: 32 bytes each of a row, or two columns side by side, so that a warp
// moves whole lines. Needs rows aligned to 16 bytes, or columns to a pair of elements; otherwise an
// element at a time moves.
//
// Sums are exact in fp32 while the largest is less than 2^24 units of the smallest element, which
// holds for exponents that span at most 12: then the order does not matter and fp32 additions do.
// A block that is wider, not one in a hundred of ordinary data, but in a third of the warps, has
// its sums in fp64, which are exact while exponents span at most 41, and are rounded once; what is
// left goes through core/hadamard.h. Equals it bit for bit.
#include <type_traits>

#include "core/hadamard.h"
#include "kernels/block_layout.h"
#include "kernels/cuda/block_map.cuh"
#include "kernels/cuda/convert.cuh"

namespace qshard::kernels {
namespace {

constexpr int kSize = kHadamardSize;
constexpr int kExactSpan = 12;         // 8 bits of significand + 12 + 4 of summing 16 numbers = 24
constexpr int kDoubleSpan = 41;        // 8 + 41 + 4 = 53
constexpr int kLargestExponent = 249;  // sums of 16 / 4 stay finite

__device__ __noinline__ Words<32> TransformByDefinition(Words<32> x) {
  bfloat16 in[kSize], out[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) in[i] = {static_cast<uint16_t>(x.w[i / 2] >> (i % 2 * 16))};
  HadamardTransform(in, out);
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i)
    x.w[i] = out[2 * i].bits | static_cast<uint32_t>(out[2 * i + 1].bits) << 16;
  return x;
}

// Sums and differences of x * s / 4, which are exact in T.
template <class T, class Add>
__device__ __forceinline__ void Butterflies(T (&v)[kSize], const Add& add) {
#pragma unroll
  for (int half = 1; half < kSize; half *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i & half) continue;
      const T a = v[i], b = v[i + half];
      v[i] = add(a, b);
      v[i + half] = add(a, -b);
    }
  }
}

__device__ __noinline__ Words<32> TransformInDouble(Words<32> x) {
  float f[kSize];
  WidenWords<bfloat16>(x, f);
  double v[kSize];
  // + 0 leaves no -0, and so neither do sums.
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    v[i] = __fma_rn(static_cast<double>(f[i]), kHadamardSigns >> i & 1 ? -0.25 : 0.25, 0.0);
  Butterflies(v, [](double a, double b) { return __dadd_rn(a, b); });
  // Towards 0 with the last bit set if anything is lost: rounding that is rounding the sum.
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float toward_zero = __double2float_rz(v[i]);
    f[i] = __uint_as_float(__float_as_uint(toward_zero) |
                           (static_cast<double>(toward_zero) != v[i] ? 1 : 0));
  }
  return NarrowWords<bfloat16>(f);
}

// The transform of 16 numbers, packed in pairs.
__device__ __forceinline__ Words<32> Transform(const Words<32>& x) {
  // The largest magnitude; and the smallest but zero: in a signed comparison of magnitude + 0x7FFF,
  // zero is above all.
  uint32_t high = 0, low = 0x7FFF7FFFu;
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    const uint32_t m = x.w[i] & 0x7FFF7FFFu;
    high = __vmaxu2(high, m);
    low = __vmins2(low, m + 0x7FFF7FFFu);
  }
  high = max(high & 0xFFFF, high >> 16);
  low = __vmins2(low, low >> 16 | low << 16);
  low = (low - 0x8000) & 0xFFFF;  // magnitude - 1, or all ones
  const int top = static_cast<int>(high >> 7), bottom = static_cast<int>(low >> 7);
  if (top - bottom <= kExactSpan && top <= kLargestExponent) {
    float v[kSize];
    WidenWords<bfloat16>(x, v);
    // + 0 leaves no -0, and so neither do sums.
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      v[i] = __fmaf_rn(v[i], kHadamardSigns >> i & 1 ? -0.25f : 0.25f, 0.0f);
    Butterflies(v, [](float a, float b) { return __fadd_rn(a, b); });
    return NarrowWords<bfloat16>(v);
  }
  if (top - bottom <= kDoubleSpan && top <= kLargestExponent) return TransformInDouble(x);
  return TransformByDefinition(x);
}

// To bfloat16; a NaN is some NaN, which is all that the transform asks.
template <class In, int kCount>
__device__ __forceinline__ Words<kCount * 2> ToBfloat16(const Words<kCount * sizeof(In)>& x) {
  if constexpr (std::is_same_v<In, bfloat16>) {
    return x;
  } else {
    float v[kCount];
    WidenWords<In>(x, v);
    return NarrowWords<bfloat16>(v);
  }
}

constexpr int kThreads = 256;

// Blocks of a row: n of them, one after the other.
template <class In>
__global__ void __launch_bounds__(kThreads, 3) HadamardRows(const In* x, int64_t n, bfloat16* y) {
  constexpr int kUnroll = sizeof(In) == 4 ? 1 : 2;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  Words<kSize * sizeof(In)> in[kUnroll];
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t block = first + k * kThreads;
    in[k] = {};
    if (block < n) in[k] = Load<kSize * sizeof(In)>(x + block * kSize);
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t block = first + k * kThreads;
    const Words<32> out = Transform(ToBfloat16<In, kSize>(in[k]));
    if (block < n) Store<Write::kStream>(y + block * kSize, out);
  }
}

// Blocks of columns: n pairs of them, side by side in rows of `pairs`.
template <class In>
__global__ void __launch_bounds__(kThreads, 3)
    HadamardColumns(const In* x, int64_t n, int64_t pairs, bfloat16* y) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= n) return;
  const int64_t strip = t / pairs;
  const int64_t start = (strip * kSize * pairs + (t - strip * pairs)) * 2;
  uint32_t w[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    w[i] = ToBfloat16<In, 2>(Load<2 * sizeof(In)>(x + start + i * pairs * 2)).w[0];
  Words<32> left, right;
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    left.w[i] = __byte_perm(w[2 * i], w[2 * i + 1], 0x5410);
    right.w[i] = __byte_perm(w[2 * i], w[2 * i + 1], 0x7632);
  }
  left = Transform(left);
  right = Transform(right);
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    Store<Write::kStream>(
        y + start + i * pairs * 2,
        Words<4>{{__byte_perm(left.w[i / 2], right.w[i / 2], i % 2 == 0 ? 0x5410 : 0x7632)}});
}

}  // namespace

template <class In>
Status Hadamard(const Exec<Cuda>& exec, const In* x, const Blocks& blocks, bfloat16* y) {
  const int64_t n = blocks.GridSize();
  const int64_t cols = blocks.cols;
  const bool rows = blocks.block_rows == 1;
  if (rows && IsAligned(x, 16) && IsAligned(y, 16))
    return Launch(exec, HadamardRows<In>, CeilDiv(n, sizeof(In) == 4 ? kThreads : 2 * kThreads),
                  kThreads, x, n, y);
  if (!rows && cols % 2 == 0 && IsAligned(x, 2 * sizeof(In)) && IsAligned(y, 4))
    return Launch(exec, HadamardColumns<In>, CeilDiv(n / 2, kThreads), kThreads, x, n / 2, cols / 2,
                  y);
  // Any alignment: block t has 16 elements `step` apart, the first of them at `start`.
  return ForEach(exec, n, [=] __device__(int64_t t) {
    const int64_t start = rows ? t * kSize : t / cols * kSize * cols + t % cols;
    const int64_t step = rows ? 1 : cols;
    Words<32> w = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      w.w[i / 2] |= uint32_t{Narrow<bfloat16>(Widen(x[start + i * step])).bits} << i % 2 * 16;
    w = Transform(w);
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      y[start + i * step] = {static_cast<uint16_t>(w.w[i / 2] >> (i % 2 * 16))};
  });
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, Hadamard)

}  // namespace qshard::kernels
