#include "kernels/cpu/adam_simd.h"

#include <string_view>

#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

const AdamSimdKernels& Choose() {
#if defined(QSHARD_X86_TARGETS)
  const std::string_view target = Simd().target;
  if (target == "avx512") return kAdamSimdAvx512;
  if (target == "avx2") return kAdamSimdAvx2;
#endif
  return kAdamSimdScalar;
}

}  // namespace

const AdamSimdKernels& AdamSimd() {
  static const AdamSimdKernels& kernels = Choose();
  return kernels;
}

}  // namespace qshard::kernels
