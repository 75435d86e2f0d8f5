#include "kernels/cpu/simd.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace qshard::kernels {
namespace {

const SimdKernels& Choose() {
  const SimdKernels* const* target = SimdTargets();
  const char* env = std::getenv("QSHARD_SIMD");
  const std::string wanted = env ? env : "";
  std::string names;
  for (; *target != nullptr; ++target) {
    if (wanted == (*target)->target || (wanted.empty() && target[1] == nullptr)) return **target;
    names += (names.empty() ? "" : ", ") + std::string((*target)->target);
  }
  throw std::invalid_argument("QSHARD_SIMD (" + wanted +
                              ") is not a SIMD target of this machine (" + names +
                              "); set it to one of them, or unset it");
}

}  // namespace

const SimdKernels* const* SimdTargets() {
  struct Targets {
    const SimdKernels* list[4] = {&scalar::kKernels};
    Targets() {
#if defined(QSHARD_X86_TARGETS)
      __builtin_cpu_init();
      // A level includes every feature that its flags let the compiler use, and checks that the
      // system saves the wider registers.
      const SimdKernels** next = list + 1;
      if (__builtin_cpu_supports("x86-64-v3")) *next++ = &avx2::kKernels;
      if (__builtin_cpu_supports("x86-64-v4")) *next++ = &avx512::kKernels;
#endif
    }
  };
  static const Targets targets;
  return targets.list;
}

const SimdKernels& Simd() {
  static const SimdKernels& kernels = Choose();
  return kernels;
}

}  // namespace qshard::kernels
