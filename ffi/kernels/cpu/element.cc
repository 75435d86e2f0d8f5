// encode and decode on the CPU: elements are cast and dequantized with scale 1.
#include "kernels/element.h"

#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

namespace {
constexpr float kOne = 1.0f;
}

template <class In, class Code>
Status EncodeElements(const Exec<Cpu>& exec, const In* x, int64_t n, uint8_t* codes) {
  ParallelRanges(exec, n, sizeof(In) + 1, [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<Code, E8M0>)
      Simd().encode_e8m0[kInputIndex<In>](x + begin, end - begin, codes + begin);
    else
      Simd().cast[kInputIndex<In>][kElementIndex<Code>](x + begin, end - begin, {&kOne, n},
                                                        /*ahead=*/0, codes + begin);
  });
  return {};
}

template <class Code>
Status DecodeElements(const Exec<Cpu>& exec, const uint8_t* codes, int64_t n, float* x) {
  ParallelRanges(exec, n, sizeof(float) + 1, [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<Code, E8M0>)
      Simd().decode_e8m0(codes + begin, end - begin, x + begin);
    else
      Simd().dequantize[kElementIndex<Code>][kInputIndex<float>](
          codes + begin, end - begin, {&kOne, n}, /*ahead=*/0, x + begin);
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_CODE, QSHARD_INSTANTIATE_FOR, Cpu, EncodeElements)
QSHARD_FOR_EACH_CODE(QSHARD_INSTANTIATE_FOR, Cpu, DecodeElements)

}  // namespace qshard::kernels
