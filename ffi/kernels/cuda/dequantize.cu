// dequantize: x[r, i] = Narrow<Out>(Decode<Code>(data[r, i]) * scale_inv[r]).
//
// Reads data and writes x once: 3 bytes an element for a 16-bit x, 5 for float32, plus 4 for each
// scale. Work is mapped to threads, and any alignment dealt with, as scaled_map.cuh says. Needs
// compute capability 8.9. Equals core/round.h bit for bit, NaNs included: a vector with a NaN in it
// is narrowed again by the definition, a branch that ordinary data never takes.
#include "kernels/cast.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/scaled_map.cuh"

namespace qshard::kernels {
namespace {

template <class Code, class Out>
struct DequantizeOp {
  using Input = uint8_t;
  using Output = Out;
  static constexpr int kWidth = 16 / sizeof(Out);

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

template <class Code, class Out>
Status Dequantize(const Exec<Cuda>& exec, const uint8_t* data, const float* scale_inv, int64_t runs,
                  int64_t length, Out* x) {
  return LaunchMap<DequantizeOp<Code, Out>, MapForward>(exec, data, scale_inv, runs, length, x);
}

#define QSHARD_INSTANTIATE(Out)                                                                   \
  template Status Dequantize<E4M3, Out>(const Exec<Cuda>&, const uint8_t*, const float*, int64_t, \
                                        int64_t, Out*);                                           \
  template Status Dequantize<E5M2, Out>(const Exec<Cuda>&, const uint8_t*, const float*, int64_t, \
                                        int64_t, Out*);
QSHARD_INSTANTIATE(float)
QSHARD_INSTANTIATE(bfloat16)
QSHARD_INSTANTIATE(float16)
#undef QSHARD_INSTANTIATE

}  // namespace qshard::kernels
