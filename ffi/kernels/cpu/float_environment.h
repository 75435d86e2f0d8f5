// XLA and torch may run us with subnormals flushed to zero; the formulas assume IEEE arithmetic.
#ifndef QSHARD_KERNELS_CPU_FLOAT_ENVIRONMENT_H_
#define QSHARD_KERNELS_CPU_FLOAT_ENVIRONMENT_H_

#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace qshard::kernels {

// Round to nearest even, no flushing, exceptions masked; the old state comes back at the end of the
// scope.
class ScopedFloatEnvironment {
 public:
  ScopedFloatEnvironment(const ScopedFloatEnvironment&) = delete;
  ScopedFloatEnvironment& operator=(const ScopedFloatEnvironment&) = delete;

#if defined(__x86_64__)
  ScopedFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~ScopedFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefaultMxcsr = 0x1F80;
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~ScopedFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  ScopedFloatEnvironment() {}
#endif
};

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_FLOAT_ENVIRONMENT_H_
