// Tensors that have one scale or amax, or one for each contiguous run of elements.
#ifndef QSHARD_KERNELS_CAST_H_
#define QSHARD_KERNELS_CAST_H_

#include "core/block_scale.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// amax[r] = max |x| over run r of x [runs, length], as a maximum over the bit patterns of |x|: NaN
// propagates, as kNanBits; the result does not depend on the order. An empty run has amax 0.
QSHARD_LAUNCHER_TEMPLATE((class In), Amax, const In* x, int64_t runs, int64_t length, float* amax);

// x[i] * scale[i / length]; products are ShownProducts if infinities are to show. Delayed scaling
// also records amaxes, Amax of x [runs, length], from the same read; has ScaleOrFirst of scale and
// amax in place of scale; and gives the inverses.
template <class In>
struct Scaled {
  const In* x;
  const float* scale;
  int64_t length;
  Nonfinite nonfinite = Nonfinite::kSaturate;
  int64_t runs = 0;  // of delayed scaling; else 0
  float target = 0.0f;
  float *amax = nullptr, *scale_inv = nullptr;
};

// What a cast on CUDA, of delayed scaling, comes after: amaxes of 0, to be raised, or, of runs
// whose scale is 0, as they are; and scale_inv.
template <class In>
Status BeginDelayed(const Exec<Cuda>& exec, const Scaled<In>& x);

// data[i] = Encode<Code>(element i of x), of n elements.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), Cast, const Scaled<In>& x, int64_t n,
                         uint8_t* data);

// The same, and data_t[b, j, i] = data[b, i, j], for `batch` matrices of [rows, cols].
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastTranspose, const Scaled<In>& x, int64_t batch,
                         int64_t rows, int64_t cols, uint8_t* data, uint8_t* data_t);

// x[r, i] = Narrow<Out>(Decode<Code>(data[r, i]) * scale_inv[r]) over data [runs, length].
QSHARD_LAUNCHER_TEMPLATE((class Code, class Out), Dequantize, const uint8_t* data,
                         const float* scale_inv, int64_t runs, int64_t length, Out* x);

// One code a byte, no scale: codes[i] = Encode<Code>(x[i]) (E8M0: rounded up), x[i] =
// Decode<Code>(codes[i]).
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), EncodeElements, const In* x, int64_t n,
                         uint8_t* codes);
QSHARD_LAUNCHER_TEMPLATE((class Code), DecodeElements, const uint8_t* codes, int64_t n, float* x);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CAST_H_
