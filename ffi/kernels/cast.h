// Launchers for tensors with one scale or amax, or one per contiguous run of elements.
#ifndef QSHARD_KERNELS_CAST_H_
#define QSHARD_KERNELS_CAST_H_

#include "core/block_scale.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// amax[r] = max |x| over run r of x [runs, length], as a maximum over the bit patterns of |x|. NaN
// propagates as kNanBits. The result does not depend on the order. An empty run has amax 0.
QSHARD_LAUNCHER_TEMPLATE((class In), Amax, const In* x, int64_t runs, int64_t length, float* amax);

// A tensor with scales: element i is x[i] * scale[i / length], or a ScaledOrNan with
// Nonfinite::kNan. Delayed scaling (runs > 0) also records the amax of each run in the same read,
// replaces scale by ScaleOrFirst of scale and amax, and stores the inverse scales.
template <class In>
struct Scaled {
  const In* x;
  const float* scale;
  int64_t length;
  Nonfinite nonfinite = Nonfinite::kSaturate;
  int64_t runs = 0;  // for delayed scaling, else 0
  float target = 0.0f;
  float *amax = nullptr, *scale_inv = nullptr;
};

// Prepares a cast of delayed scaling on CUDA. Sets amaxes to 0 for the cast to raise, or to the
// final amax for runs with scale 0, and sets scale_inv.
template <class In>
Status BeginDelayed(const Exec<Cuda>& exec, const Scaled<In>& x);

// data[i] = Encode<Code>(element i of x), for n elements.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), Cast, const Scaled<In>& x, int64_t n,
                         uint8_t* data);

// Cast that also stores the transpose data_t[b, j, i] = data[b, i, j], for `batch` matrices [rows,
// cols].
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastTranspose, const Scaled<In>& x, int64_t batch,
                         int64_t rows, int64_t cols, uint8_t* data, uint8_t* data_t);

// x[r, i] = Narrow<Out>(Decode<Code>(data[r, i]) * scale_inv[r]) over data [runs, length].
QSHARD_LAUNCHER_TEMPLATE((class Code, class Out), Dequantize, const uint8_t* data,
                         const float* scale_inv, int64_t runs, int64_t length, Out* x);

// codes[i] = Encode<Code>(x[i]), one code a byte without a scale (E8M0 rounds up), and x[i] =
// Decode<Code>(codes[i]).
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), EncodeElements, const In* x, int64_t n,
                         uint8_t* codes);
QSHARD_LAUNCHER_TEMPLATE((class Code), DecodeElements, const uint8_t* codes, int64_t n, float* x);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CAST_H_
