// encode and decode, one code a byte, no scale: codes[i] = Encode<Code>(x[i]), x[i] =
// Decode<Code>(codes[i]).
//
// One thread an element, any alignment. Not for speed: for looking at a format, and for holding the
// hardware's FP8 conversions, those of convert.cuh that every kernel here uses, against
// core/round.h. Equals core/round.h bit for bit, NaNs included.
#include <type_traits>

#include "core/round.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/instantiate.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/element.h"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256;

template <class In, class Code>
__global__ void __launch_bounds__(kThreads) EncodeKernel(const In* x, int64_t n, uint8_t* codes) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const float v = Widen(x[i]);
  if constexpr (std::is_same_v<Code, E8M0>)
    codes[i] = Encode<E8M0>(v);
  else
    codes[i] = EncodeWords<Code>({v}).value;
}

template <class Code>
__global__ void __launch_bounds__(kThreads)
    DecodeKernel(const uint8_t* codes, int64_t n, float* x) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  if constexpr (std::is_same_v<Code, E8M0>) {
    x[i] = Decode<E8M0>(codes[i]);
  } else {
    float v[1];
    DecodeWords<Code>(Words<1>{codes[i]}, v);
    x[i] = isnan(v[0]) ? Decode<Code>(codes[i]) : v[0];
  }
}

}  // namespace

template <class In, class Code>
Status EncodeElements(const Exec<Cuda>& exec, const In* x, int64_t n, uint8_t* codes) {
  if (n == 0) return {};
  EncodeKernel<In, Code><<<GridSize(CeilDiv(n, kThreads)), kThreads, 0, exec.stream>>>(x, n, codes);
  return LaunchStatus();
}

template <class Code>
Status DecodeElements(const Exec<Cuda>& exec, const uint8_t* codes, int64_t n, float* x) {
  if (n == 0) return {};
  DecodeKernel<Code><<<GridSize(CeilDiv(n, kThreads)), kThreads, 0, exec.stream>>>(codes, n, x);
  return LaunchStatus();
}

#define QSHARD_ENCODE(In, Code) \
  template Status EncodeElements<In, Code>(const Exec<Cuda>&, const In*, int64_t, uint8_t*);
#define QSHARD_DECODE(Code) \
  template Status DecodeElements<Code>(const Exec<Cuda>&, const uint8_t*, int64_t, float*);
QSHARD_FLOATS_CODES(QSHARD_ENCODE)
QSHARD_CODES(QSHARD_DECODE)

}  // namespace qshard::kernels
