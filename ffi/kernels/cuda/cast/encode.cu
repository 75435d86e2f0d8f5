// EncodeElements and DecodeElements, one code a byte without a scale: codes[i] =
// Encode<Code>(x[i]), x[i] = Decode<Code>(codes[i]).
//
// One thread per element, any alignment. They serve to inspect a format, and to test the hardware
// conversions of convert.cuh, which every kernel uses, against core/round.h. Equals core/round.h
// bit for bit, NaNs included.
#include <type_traits>

#include "core/round.h"
#include "kernels/cast.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {

template <class In, class Code>
Status EncodeElements(const Exec<Cuda>& exec, const In* x, int64_t n, uint8_t* codes) {
  return ForEach(exec, n, [=] __device__(int64_t i) {
    codes[i] = static_cast<uint8_t>(EncodeOne<Code>(Widen(x[i])));
  });
}

template <class Code>
Status DecodeElements(const Exec<Cuda>& exec, const uint8_t* codes, int64_t n, float* x) {
  return ForEach(exec, n, [=] __device__(int64_t i) {
    float v, zero;
    DecodePair<Code>(codes[i], v, zero);
    x[i] = isnan(v) ? Decode<Code>(codes[i]) : v;
  });
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_CODE, QSHARD_INSTANTIATE_FOR, Cuda, EncodeElements)
QSHARD_FOR_EACH_CODE(QSHARD_INSTANTIATE_FOR, Cuda, DecodeElements)

}  // namespace qshard::kernels
