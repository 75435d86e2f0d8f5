// Magnitude: the largest |x|, as a maximum over bit patterns. Every amax uses it.
#ifndef QSHARD_KERNELS_CUDA_MAGNITUDE_CUH_
#define QSHARD_KERNELS_CUDA_MAGNITUDE_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {

// |x| as integers, one or two per 32-bit word.
template <class In>
struct Magnitudes {
  static constexpr int kPerWord = 4 / sizeof(In);
  using Bits = std::conditional_t<kPerWord == 2, uint16_t, uint32_t>;
  static constexpr uint32_t kInfinity = kPerWord == 1                  ? 0x7F800000u
                                        : std::is_same_v<In, bfloat16> ? 0x7F80u
                                                                       : 0x7C00u;

  static __device__ __forceinline__ uint32_t Abs(uint32_t w) {
    return w & (kPerWord == 2 ? 0x7FFF7FFFu : 0x7FFFFFFFu);
  }
  static __device__ __forceinline__ uint32_t Max(uint32_t a, uint32_t b) {
    return kPerWord == 2 ? __vmaxu2(a, b) : max(a, b);
  }
  // Returns the larger magnitude, with any sign. NaN wins. One instruction, and without magnitudes
  // of single words, which the compiler would keep in registers from columns to rows.
  static __device__ __forceinline__ uint32_t MaxAbs(uint32_t a, uint32_t b) {
    uint32_t m;
    if constexpr (std::is_same_v<In, bfloat16>)
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    else if constexpr (std::is_same_v<In, float16>)
      asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    else
      asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
    return m;
  }
  // Returns the largest of a in the low half and the largest of b in the high half.
  static __device__ __forceinline__ uint32_t Fold(uint32_t a, uint32_t b) {
    return Max(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  }
  // Equals FloatBits(Widen(|x|)), except for the payload of NaN.
  static __device__ __forceinline__ float Value(uint32_t bits) {
    if constexpr (kPerWord == 1) {
      return __uint_as_float(bits);
    } else {
      float v[2];
      WidenWords<In, 4>(Words<4>{{bits}}, v);
      return v[0];
    }
  }
};

// The largest |x| that a thread has seen.
template <class In>
class Magnitude {
 public:
  using Abs = Magnitudes<In>;

  template <int kBytes>
  __device__ __forceinline__ void Add(const Words<kBytes>& x) {
    if constexpr (kBytes < 4) {
      AddBits(Abs::Abs(x.value));
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 4; ++i) AddBits(Abs::Abs(x.w[i]));
    }
  }

  // Reduces over groups of `lanes` neighbouring lanes, a power of two. Every lane of the warp must
  // call this.
  __device__ __forceinline__ void ReduceOver(int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      AddBits(__shfl_xor_sync(kAllLanes, bits_, offset));
  }

  // Its state, for AddBits of another Magnitude.
  __device__ __forceinline__ uint32_t Bits() const { return bits_; }
  __device__ __forceinline__ void AddBits(uint32_t bits) { bits_ = Abs::Max(bits_, bits); }

  __device__ __forceinline__ bool HasNan() const {
    const uint32_t most = Abs::kPerWord == 2 ? max(bits_ & 0xFFFFu, bits_ >> 16) : bits_;
    return most > Abs::kInfinity;
  }

  __device__ __forceinline__ int32_t AsFloatBits() const {
    const uint32_t bits = Abs::kPerWord == 2 ? max(bits_ & 0xFFFFu, bits_ >> 16) : bits_;
    return FloatBits(CanonicalNan(Abs::Value(bits)));
  }

 private:
  uint32_t bits_ = 0;
};

// Returns the maximum over a warp, or over the kTeam threads of a thread block. All of them must
// call it, and must synchronize before the next call.
template <int kTeam>
__device__ __forceinline__ int32_t TeamMax(int32_t bits) {
  bits = __reduce_max_sync(kAllLanes, bits);
  if constexpr (kTeam > kWarp) {
    __shared__ int32_t warps[kTeam / kWarp];
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = bits;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTeam / kWarp; ++i) bits = max(bits, warps[i]);
  }
  return bits;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_MAGNITUDE_CUH_
