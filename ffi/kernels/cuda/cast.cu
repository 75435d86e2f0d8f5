// cast: data[r, i] = Encode<Code>(x[r, i] * scale[r]). cast_amax: the same, and amaxes of x.
// dequantize: x[r, i] = Narrow<Out>(Decode<Code>(data[r, i]) * scale_inv[r]).
//
// Each reads its input and writes its output once: 3 bytes an element for a 16-bit x, 5 for
// float32, plus 4 for each scale. Work is mapped to threads, and any alignment dealt with, as
// scaled_map.cuh says. The cast walks from the END of x: after amax, which walks forwards, the end
// of x is what L2 still holds. Needs compute capability 8.9. Equals core/round.h bit for bit: NaN,
// from x or from the scale, gives the format's NaN.
#include "kernels/amax.h"
#include "kernels/cast.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/instantiate.cuh"
#include "kernels/cuda/scaled_map.cuh"
#include "kernels/delayed.h"

namespace qshard::kernels {
namespace {

template <class In, class Code, bool kWithAmax = false>
struct CastOp {
  using Input = In;
  using Output = uint8_t;
  static constexpr int kWidth = 32 / sizeof(In);  // a sector a thread
  static constexpr bool kAmax = kWithAmax;

  template <int kCount>
  __device__ __forceinline__ Words<kCount> Apply(const Words<kCount * sizeof(In)>& x,
                                                 float scale) const {
    float v[kCount];
    WidenWords<In>(x, v);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      v[i] = nonfinite == Nonfinite::kNan ? ShownProduct(v[i], scale) : __fmul_rn(v[i], scale);
    return EncodeWords<Code>(v);
  }

  Nonfinite nonfinite = Nonfinite::kSaturate;
};

template <class Code, class Out>
struct DequantizeOp {
  using Input = uint8_t;
  using Output = Out;
  static constexpr int kWidth = 16 / sizeof(Out);
  static constexpr bool kAmax = false;

  template <int kCount>
  static __device__ __forceinline__ Words<kCount * sizeof(Out)> Apply(const Words<kCount>& codes,
                                                                      float scale) {
    float v[kCount];
    DecodeWords<Code>(codes, v);
    bool any_nan = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v[i] = __fmul_rn(v[i], scale);
      any_nan |= isnan(v[i]);
    }
    return NarrowExactly<Out>(v, any_nan);
  }
};

}  // namespace

template <class In, class Code>
Status Cast(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t runs, int64_t length,
            uint8_t* data) {
  return LaunchMap<CastOp<In, Code>, MapBackward>(exec, x, scale, runs, length, data);
}

template <class Code, class Out>
Status Dequantize(const Exec<Cuda>& exec, const uint8_t* data, const float* scale_inv, int64_t runs,
                  int64_t length, Out* x) {
  return LaunchMap<DequantizeOp<Code, Out>, MapForward>(exec, data, scale_inv, runs, length, x);
}

template <class In, class Code>
Status CastAmax(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t scale_length,
                Nonfinite nonfinite, int64_t n, int64_t runs, int64_t amax_length, uint8_t* data,
                float* amax) {
  if (n == 0) return Amax(exec, x, runs, 0, amax);
  constexpr int kSpan = MapBackward::kThreads * MapBackward::kPerThread;
  if (amax_length < kSpan && runs > 1) {  // blocks would have a part in many: two passes
    const Status status = Amax(exec, x, runs, amax_length, amax);
    if (status.error != nullptr) return status;
    return LaunchMap<CastOp<In, Code>, MapBackward>(exec, x, scale, n / scale_length, scale_length,
                                                    data, 1, nullptr, CastOp<In, Code>{nonfinite});
  }
  const cudaError_t error = cudaMemsetAsync(amax, 0, runs * sizeof(float), exec.stream);
  if (error != cudaSuccess) return ToStatus(error);
  using Op = CastOp<In, Code, true>;
  return LaunchMap<Op, MapBackward>(exec, x, scale, n / scale_length, scale_length, data,
                                    amax_length, amax, Op{nonfinite});
}

#define QSHARD_CAST(T, Code)                                                                       \
  template Status Cast<T, Code>(const Exec<Cuda>&, const T*, const float*, int64_t, int64_t,       \
                                uint8_t*);                                                         \
  template Status Dequantize<Code, T>(const Exec<Cuda>&, const uint8_t*, const float*, int64_t,    \
                                      int64_t, T*);                                                \
  template Status CastAmax<T, Code>(const Exec<Cuda>&, const T*, const float*, int64_t, Nonfinite, \
                                    int64_t, int64_t, int64_t, uint8_t*, float*);
QSHARD_FLOATS_FP8(QSHARD_CAST)

}  // namespace qshard::kernels
