// encode and decode, one code a byte, no scale: codes[i] = Encode<Code>(x[i]), x[i] =
// Decode<Code>(codes[i]).
//
// One thread an element, any alignment. Not for speed: for looking at a format, and for holding the
// hardware's FP8 conversions, those of convert.cuh that every kernel here uses, against
// core/round.h. Equals core/round.h bit for bit, NaNs included.
#include <type_traits>

#include "core/round.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/element.h"

namespace qshard::kernels {

template <class In, class Code>
Status EncodeElements(const Exec<Cuda>& exec, const In* x, int64_t n, uint8_t* codes) {
  return ForEach(exec, n, [=] __device__(int64_t i) {
    const float v = Widen(x[i]);
    uint8_t& code = codes[i];
    if constexpr (std::is_same_v<Code, E8M0>)
      code = EncodeE8M0<PowerRounding::kUp>(v);
    else
      code = static_cast<uint8_t>(EncodeOne<Code>(v));
  });
}

template <class Code>
Status DecodeElements(const Exec<Cuda>& exec, const uint8_t* codes, int64_t n, float* x) {
  return ForEach(exec, n, [=] __device__(int64_t i) {
    const uint8_t code = codes[i];
    float& to = x[i];
    if constexpr (std::is_same_v<Code, E8M0>) {
      to = DecodeE8M0(code);
    } else {
      float v, zero;
      DecodePair<Code>(code, v, zero);
      to = isnan(v) ? Decode<Code>(code) : v;
    }
  });
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_CODE, QSHARD_INSTANTIATE_FOR, Cuda, EncodeElements)
QSHARD_FOR_EACH_CODE(QSHARD_INSTANTIATE_FOR, Cuda, DecodeElements)

}  // namespace qshard::kernels
