// cast: data[r, i] = Encode<Code>(x[r, i] * scale[r]).
//
// Reads x and writes data once: 3 bytes an element for a 16-bit x, 5 for float32, plus 4 for each
// scale. Work is mapped to threads, and any alignment dealt with, as scaled_map.cuh says. Walks
// from the END of x: after amax, which walks forwards, the end of x is what L2 still holds. Needs
// compute capability 8.9. Equals core/round.h bit for bit: NaN, from x or from the scale, gives the
// format's NaN.
#include "kernels/cast.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/scaled_map.cuh"

namespace qshard::kernels {
namespace {

template <class In, class Code>
struct CastOp {
  using Input = In;
  using Output = uint8_t;
  static constexpr int kWidth = 32 / sizeof(In);  // a sector a thread

  template <int kCount>
  static __device__ __forceinline__ Words<kCount> Apply(const Words<kCount * sizeof(In)>& x,
                                                        float scale) {
    float v[kCount];
    WidenWords<In>(x, v);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = __fmul_rn(v[i], scale);
    return EncodeWords<Code>(v);
  }
};

}  // namespace

template <class In, class Code>
Status Cast(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t runs, int64_t length,
            uint8_t* data) {
  return LaunchMap<CastOp<In, Code>, MapBackward>(exec, x, scale, runs, length, data);
}

#define QSHARD_INSTANTIATE(In)                                                                 \
  template Status Cast<In, E4M3>(const Exec<Cuda>&, const In*, const float*, int64_t, int64_t, \
                                 uint8_t*);                                                    \
  template Status Cast<In, E5M2>(const Exec<Cuda>&, const In*, const float*, int64_t, int64_t, \
                                 uint8_t*);
QSHARD_INSTANTIATE(float)
QSHARD_INSTANTIATE(bfloat16)
QSHARD_INSTANTIATE(float16)
#undef QSHARD_INSTANTIATE

}  // namespace qshard::kernels
