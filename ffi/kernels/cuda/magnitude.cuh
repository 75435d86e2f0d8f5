// The largest |x|, as a maximum over bit patterns: what every amax comes from.
#ifndef QSHARD_KERNELS_CUDA_MAGNITUDE_CUH_
#define QSHARD_KERNELS_CUDA_MAGNITUDE_CUH_

#include <cstdint>

#include "core/round.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

// The largest |x| of what a thread has seen: one fp32 pattern, or two 16-bit ones for the two
// halves of each word.
template <class In>
class Magnitude {
 public:
  template <int kBytes>
  __device__ __forceinline__ void Add(const Words<kBytes>& x) {
    if constexpr (kBytes < 4) {
      bits_ = __vmaxu2(bits_, x.value & 0x7FFFu);
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) Merge(x.w[i] & kMask);
    }
  }

  // The largest over groups of `lanes` neighbouring lanes, a power of two; every lane of the warp
  // calls this.
  __device__ __forceinline__ void ReduceOver(int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      Merge(__shfl_xor_sync(0xFFFFFFFFu, bits_, offset));
  }

  // What it has seen, for AddBits of another.
  __device__ __forceinline__ uint32_t Bits() const { return bits_; }
  __device__ __forceinline__ void AddBits(uint32_t bits) { Merge(bits); }

  __device__ __forceinline__ int32_t AsFloatBits() const {
    uint32_t bits = bits_;
    if constexpr (sizeof(In) == 2) bits = max(bits_ & 0xFFFFu, bits_ >> 16);
    return FloatBits(CanonicalNan(Widen(FromBits(bits))));
  }

 private:
  static constexpr uint32_t kMask = sizeof(In) == 4 ? 0x7FFFFFFFu : 0x7FFF7FFFu;

  __device__ __forceinline__ void Merge(uint32_t bits) {
    bits_ = sizeof(In) == 4 ? max(bits_, bits) : __vmaxu2(bits_, bits);
  }
  static __device__ __forceinline__ In FromBits(uint32_t bits) {
    if constexpr (sizeof(In) == 4)
      return __uint_as_float(bits);
    else
      return {static_cast<uint16_t>(bits)};
  }

  uint32_t bits_ = 0;
};

// Raises *amax, which other blocks raise too and which holds no NaN but the canonical one. Looks
// first: most blocks find it high enough, and one word takes few atomics a microsecond.
__device__ __forceinline__ void RaiseAmax(float* amax, int32_t bits) {
  auto* target = reinterpret_cast<int32_t*>(amax);
  if (bits > *static_cast<volatile int32_t*>(target)) atomicMax(target, bits);
}

// Raises *amax by the maxima of all threads of a block. Every thread calls this.
template <int kThreads, class In>
__device__ __forceinline__ void RaiseByBlock(Magnitude<In> m, float* amax) {
  __shared__ int32_t warps[kThreads / kWarp];
  m.ReduceOver(kWarp);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = m.AsFloatBits();
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  int32_t bits = threadIdx.x < kThreads / kWarp ? warps[threadIdx.x] : 0;
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  if (threadIdx.x == 0) RaiseAmax(amax, bits);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_MAGNITUDE_CUH_
