// Fast division of indices by numbers that the host knows.
#ifndef QSHARD_KERNELS_CUDA_DIVIDER_CUH_
#define QSHARD_KERNELS_CUDA_DIVIDER_CUH_

#include <cstdint>

namespace qshard::kernels {

constexpr int64_t kMaxDivided = int64_t{1} << 31;

// n / divisor for 0 <= n < kMaxDivided by multiplication (Granlund and Montgomery, 1994).
class Divider {
 public:
  explicit Divider(int64_t n = 1) : divisor_(static_cast<uint32_t>(n)) {
    while ((uint64_t{1} << shift_) < divisor_) ++shift_;
    magic_ = static_cast<uint32_t>(
        (uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor_) / divisor_ + 1);
  }
  __host__ __device__ uint32_t divisor() const { return divisor_; }
  __device__ __forceinline__ uint32_t Divide(uint32_t n) const {
    return (__umulhi(n, magic_) + n) >> shift_;
  }

 private:
  uint32_t divisor_, magic_;
  int shift_ = 0;
};

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_DIVIDER_CUH_
