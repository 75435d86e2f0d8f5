// Delayed scaling on the CPU. Casts go through x in pieces that stay in cache between taking their
// amax and encoding them.
#include "kernels/delayed.h"

#include <cstring>

#include "core/block_scale.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

// Raises *amax, which other threads may raise too, to the magnitude with these bits.
void RaiseAmax(float* amax, int32_t bits) {
  typedef int32_t __attribute__((may_alias)) Bits;
  Bits* target = reinterpret_cast<Bits*>(amax);
  if (bits > kFloatInfinityBits) bits = kNanBits;
  Bits seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen < bits && !__atomic_compare_exchange_n(target, &seen, bits, /*weak=*/true,
                                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Raises the amaxes of elements [begin, end), each run of `length` of which has one.
template <class In>
void RaiseAmaxes(const In* x, int64_t begin, int64_t end, int64_t length, float* amax) {
  while (begin < end) {
    const int64_t run = begin / length, stop = std::min(end, (run + 1) * length);
    RaiseAmax(amax + run, Simd().amax[kInTypeOf<In>](x + begin, stop - begin));
    begin = stop;
  }
}

}  // namespace

template <class In, class Code>
Status CastAmax(const Exec<Cpu>& exec, const In* x, const float* scale, int64_t scale_length,
                int64_t n, int64_t runs, int64_t amax_length, uint8_t* data, float* amax) {
  constexpr int64_t kPiece = 1 << 12, kPieces = 4;
  const auto cast = Simd().cast[kInTypeOf<In>][kCodeTypeOf<Code>];
  std::fill_n(amax, runs, 0.0f);
  ParallelRanges(exec, n, kPieces * kPiece, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kPiece) {
      const int64_t stop = std::min(end, begin + kPiece);
      RaiseAmaxes(x, begin, stop, amax_length, amax);
      cast(x, begin, stop, {scale, scale_length}, /*ahead=*/0, data + begin);
    }
  });
  return {};
}

template <class In, class Code>
Status CastTransposeAmax(const Exec<Cpu>& exec, const In* x, const float* scale,
                         int64_t scale_length, int64_t batch, int64_t rows, int64_t cols,
                         int64_t runs, int64_t amax_length, uint8_t* data, uint8_t* data_t,
                         float* amax) {
  const auto cast = Simd().cast[kInTypeOf<In>][kCodeTypeOf<Code>];
  const auto transpose = Simd().transpose;
  const int64_t down = (rows + kTile - 1) / kTile;
  std::fill_n(amax, runs, 0.0f);
  ParallelFor(exec, cols == 0 ? 0 : batch * down, [&](int64_t strip) {
    const int64_t row = strip % down * kTile;
    const int64_t height = std::min(kTile, rows - row);
    const int64_t base = strip / down * rows * cols;
    uint8_t codes[kTile][kTile], codes_t[kTile][kTile];
    for (int64_t col = 0; col < cols; col += kTile) {
      const int64_t width = std::min(kTile, cols - col);
      const int64_t start = base + row * cols + col;
      for (int64_t i = 0; i < height; ++i) {
        const int64_t begin = start + i * cols;
        RaiseAmaxes(x, begin, begin + width, amax_length, amax);
        cast(x, begin, begin + width, {scale, scale_length}, /*ahead=*/cols, codes[i]);
        std::memcpy(data + begin, codes[i], width);
      }
      transpose(codes[0], kTile, codes_t[0], kTile);
      for (int64_t j = 0; j < width; ++j)
        std::memcpy(data_t + base + (col + j) * rows + row, codes_t[j], height);
    }
  });
  return {};
}

Status UpdateDelayedScale(const Exec<Cpu>& exec, const float* amax, const float* history,
                          const float* scale, int64_t n, int64_t length, DelayedRule rule,
                          float* new_history, float* new_scale, float* scale_inv) {
  constexpr int64_t kGrain = 256;
  ParallelRanges(exec, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t shift = amax[i] != 0.0f;  // NaN is an amax too.
      const float* from = history + i * length + shift;
      float* to = new_history + i * length;
      int32_t largest = 0;
      for (int64_t j = 0; j < length; ++j) {
        to[j] = j + shift < length ? from[j] : amax[i];
        largest = std::max(largest, FloatBits(to[j]));
      }
      const float a = rule.most_recent ? amax[i] : FloatFromBits(largest);
      new_scale[i] = shift ? DelayedScale(scale[i], a, rule.target) : scale[i];
      scale_inv[i] = CanonicalNan(ScaleInverse(new_scale[i]));
    }
  });
  return {};
}

#define QSHARD_INSTANTIATE(In, Code)                                                              \
  template Status CastAmax<In, Code>(const Exec<Cpu>&, const In*, const float*, int64_t, int64_t, \
                                     int64_t, int64_t, uint8_t*, float*);                         \
  template Status CastTransposeAmax<In, Code>(const Exec<Cpu>&, const In*, const float*, int64_t, \
                                              int64_t, int64_t, int64_t, int64_t, int64_t,        \
                                              uint8_t*, uint8_t*, float*);
QSHARD_INSTANTIATE(float, E4M3)
QSHARD_INSTANTIATE(float, E5M2)
QSHARD_INSTANTIATE(bfloat16, E4M3)
QSHARD_INSTANTIATE(bfloat16, E5M2)
QSHARD_INSTANTIATE(float16, E4M3)
QSHARD_INSTANTIATE(float16, E5M2)
#undef QSHARD_INSTANTIATE

}  // namespace qshard::kernels
