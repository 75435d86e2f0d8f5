#include "kernels/cpu/block_simd.h"

#include <string_view>

namespace qshard::kernels {
namespace {

const BlockSimdKernels& Choose() {
#if defined(QSHARD_X86_TARGETS)
  const std::string_view target = Simd().target;
  if (target == "avx512") return kBlockSimdAvx512;
  if (target == "avx2") return kBlockSimdAvx2;
#endif
  return kBlockSimdScalar;
}

}  // namespace

const BlockSimdKernels& BlockSimd() {
  static const BlockSimdKernels& kernels = Choose();
  return kernels;
}

}  // namespace qshard::kernels
