// The four elements of a kAdamBlock that a lane has: load, store, widen, narrow, and encode as
// state.
//
// Types are runtime values, the same for all threads, and constants in kernels compiled for them.
#ifndef QSHARD_KERNELS_CUDA_ADAM_FOUR_CUH_
#define QSHARD_KERNELS_CUDA_ADAM_FOUR_CUH_

#include "core/adam.h"
#include "kernels/adam.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {

constexpr int kFour = kAdamBlock / kWarp;

// Their bits, packed from w[0] on.
struct Four {
  uint32_t w[4];
};

// A block. With kNeighbours a lane has elements 4 * lane to 4 * lane + 3, and `length` is a
// multiple of four. Otherwise it has lane, lane + 32, and so on.
struct AdamBlock {
  int64_t begin;  // index of its first element in the tensor
  int length;
};

__device__ __forceinline__ int Lane() { return threadIdx.x % kWarp; }

// Returns whether element j of the lane is within the block.
template <bool kNeighbours>
__device__ __forceinline__ bool IsThere(const AdamBlock& at, int j) {
  return (kNeighbours ? kFour * Lane() : Lane() + kWarp * j) < at.length;
}

template <class Word>
__device__ __forceinline__ const Word* WordsAt(const void* data, int64_t begin, int64_t i) {
  return reinterpret_cast<const Word*>(static_cast<const char*>(data) + begin) + i;
}

// Loads with a streaming hint, because nothing is read twice.
template <bool kNeighbours>
__device__ __forceinline__ Four LoadFour(const void* data, AdamType type, const AdamBlock& at) {
  Four x = {};
  const int lane = Lane(), size = SizeOf(type);
  const int64_t begin = at.begin * size;
  if constexpr (kNeighbours) {
    if (!IsThere<true>(at, 0)) return x;
    if (size == 4) {
      const uint4 u = __ldcs(WordsAt<uint4>(data, begin, lane));
      x.w[0] = u.x, x.w[1] = u.y, x.w[2] = u.z, x.w[3] = u.w;
    } else if (size == 2) {
      const uint2 u = __ldcs(WordsAt<uint2>(data, begin, lane));
      x.w[0] = u.x, x.w[1] = u.y;
    } else {
      x.w[0] = __ldcs(WordsAt<uint32_t>(data, begin, lane));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const int i = lane + kWarp * j;
      if (!IsThere<false>(at, j)) continue;
      if (size == 4)
        x.w[j] = *WordsAt<uint32_t>(data, begin, i);
      else if (size == 2)
        x.w[j / 2] |= uint32_t{*WordsAt<uint16_t>(data, begin, i)} << 16 * (j % 2);
      else
        x.w[0] |= uint32_t{*WordsAt<uint8_t>(data, begin, i)} << 8 * j;
    }
  }
  return x;
}

template <bool kNeighbours>
__device__ __forceinline__ void StoreFour(void* data, AdamType type, const AdamBlock& at,
                                          const Four& x) {
  const int lane = Lane(), size = SizeOf(type);
  char* to = static_cast<char*>(data) + at.begin * size;
  if constexpr (kNeighbours) {
    if (!IsThere<true>(at, 0)) return;
    if (size == 4)
      reinterpret_cast<uint4*>(to)[lane] = {x.w[0], x.w[1], x.w[2], x.w[3]};
    else if (size == 2)
      reinterpret_cast<uint2*>(to)[lane] = {x.w[0], x.w[1]};
    else
      reinterpret_cast<uint32_t*>(to)[lane] = x.w[0];
  } else {
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const int i = lane + kWarp * j;
      if (!IsThere<false>(at, j)) continue;
      if (size == 4)
        reinterpret_cast<uint32_t*>(to)[i] = x.w[j];
      else if (size == 2)
        reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(x.w[j / 2] >> 16 * (j % 2));
      else
        reinterpret_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(x.w[0] >> 8 * j);
    }
  }
}

// --- values ---

__device__ __forceinline__ void WidenFour(const Four& x, AdamType type, float (&v)[kFour]) {
  if (type == kAdamFloat32) {
    WidenWords<float>(Words<16>{{x.w[0], x.w[1], x.w[2], x.w[3]}}, v);
  } else if (type == kAdamBFloat16) {
    WidenWords<bfloat16>(Words<8>{{x.w[0], x.w[1]}}, v);
  } else if (type == kAdamFloat16) {
    WidenWords<float16>(Words<8>{{x.w[0], x.w[1]}}, v);
  } else if (type == kAdamE4M3) {
    DecodeWords<E4M3>(Words<4>{{x.w[0]}}, v);
  } else {
    DecodeWords<E5M2>(Words<4>{{x.w[0]}}, v);
  }
}

template <class Out>
__device__ __forceinline__ Four Narrow16(const float (&v)[kFour]) {
  const bool any_nan = isunordered(v[0], v[1]) || isunordered(v[2], v[3]);
  const Words<8> w = NarrowExactly<Out>(v, any_nan);
  return {{w.w[0], w.w[1]}};
}

__device__ __forceinline__ Four NarrowFour(const float (&v)[kFour], AdamType type) {
  if (type == kAdamBFloat16) return Narrow16<bfloat16>(v);
  if (type == kAdamFloat16) return Narrow16<float16>(v);
  if (type == kAdamE4M3) return {{EncodeWords<E4M3>(v).w[0]}};
  if (type == kAdamE5M2) return {{EncodeWords<E5M2>(v).w[0]}};
  Four x;
#pragma unroll
  for (int j = 0; j < kFour; ++j) x.w[j] = static_cast<uint32_t>(FloatBits(Narrow<float>(v[j])));
  return x;
}

// JoinHalves of four bfloat16 and their lower halves.
__device__ __forceinline__ void JoinFour(const Four& upper, const Four& lower, float (&v)[kFour]) {
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    const auto half = [&](const Four& x) {
      return static_cast<uint16_t>(x.w[j / 2] >> 16 * (j % 2));
    };
    v[j] = JoinHalves({half(upper)}, half(lower));
  }
}

__device__ __forceinline__ void SplitFour(const float (&v)[kFour], Four& upper, Four& lower) {
  upper = lower = {};
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    const float whole = CanonicalNan(v[j]);
    upper.w[j / 2] |= uint32_t{UpperHalf(whole).bits} << 16 * (j % 2);
    lower.w[j / 2] |= uint32_t{LowerHalf(whole)} << 16 * (j % 2);
  }
}

// --- states ---

// Applies KeepPositive to the codes of second moments.
__device__ __forceinline__ void KeepPositiveFour(const float (&v)[kFour], AdamType type, Four& x) {
  const int bits = 8 * SizeOf(type);
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    uint32_t& w = bits == 16 ? x.w[j / 2] : x.w[0];
    const int shift = bits == 16 ? 16 * (j % 2) : 8 * j;
    if (v[j] > 0.0f && (w >> shift & ((1u << bits) - 1)) == 0) w |= 1u << shift;
  }
}

__device__ __forceinline__ float MaxOf(AdamType type) {
  return type == kAdamE4M3 ? E4M3::kMax : type == kAdamE5M2 ? E5M2::kMax : float16::kMax;
}

// Returns v as codes of a state. Sets scale_inv to the inverse scale of the block, if the state has
// scales. Every lane of the warp must call this.
__device__ __forceinline__ Four EncodeState(const float (&v)[kFour], AdamType type, bool positive,
                                            float& scale_inv) {
  if (!IsScaled(type)) return NarrowFour(v, type);
  unsigned amax = 0;
#pragma unroll
  for (int j = 0; j < kFour; ++j)
    amax = max(amax, static_cast<unsigned>(FloatBits(v[j]) & kFloatMagnitudeMask));
  amax = __reduce_max_sync(kAllLanes, amax);
  const float scale = AdamScale(FloatFromBits(static_cast<int32_t>(amax)), MaxOf(type));
  scale_inv = AdamScaleInverse(scale);
  float scaled[kFour];
#pragma unroll
  for (int j = 0; j < kFour; ++j) scaled[j] = v[j] * scale;
  Four x = NarrowFour(scaled, type);
  if (positive) KeepPositiveFour(v, type, x);
  return x;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_ADAM_FOUR_CUH_
