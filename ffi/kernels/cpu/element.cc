// encode and decode on the CPU, through the loops that each SIMD target compiles from core/round.h.
#include "kernels/element.h"

#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

template <class In, class Code>
Status EncodeElements(const Exec<Cpu>& exec, const In* x, int64_t n, uint8_t* codes) {
  const auto encode = Simd().encode[kInTypeOf<In>][kCodeTypeOf<Code>];
  ParallelRanges(exec, n, sizeof(In) + 1, [&](int64_t begin, int64_t end) {
    encode(x + begin, end - begin, codes + begin);
  });
  return {};
}

template <class Code>
Status DecodeElements(const Exec<Cpu>& exec, const uint8_t* codes, int64_t n, float* x) {
  const auto decode = Simd().decode[kCodeTypeOf<Code>];
  ParallelRanges(exec, n, sizeof(float) + 1, [&](int64_t begin, int64_t end) {
    decode(codes + begin, end - begin, x + begin);
  });
  return {};
}

#define QSHARD_INSTANTIATE(Code)                                                                  \
  template Status EncodeElements<float, Code>(const Exec<Cpu>&, const float*, int64_t, uint8_t*); \
  template Status EncodeElements<bfloat16, Code>(const Exec<Cpu>&, const bfloat16*, int64_t,      \
                                                 uint8_t*);                                       \
  template Status EncodeElements<float16, Code>(const Exec<Cpu>&, const float16*, int64_t,        \
                                                uint8_t*);                                        \
  template Status DecodeElements<Code>(const Exec<Cpu>&, const uint8_t*, int64_t, float*);
QSHARD_INSTANTIATE(E4M3)
QSHARD_INSTANTIATE(E5M2)
QSHARD_INSTANTIATE(E2M1)
QSHARD_INSTANTIATE(E8M0)
#undef QSHARD_INSTANTIATE

}  // namespace qshard::kernels
