// Vectors of 1 to 64 bytes in registers, and how they move between registers and device memory.
#ifndef QSHARD_KERNELS_CUDA_VECTOR_CUH_
#define QSHARD_KERNELS_CUDA_VECTOR_CUH_

#include <cstdint>

namespace qshard::kernels {

// `kBytes` bytes held as 32-bit words. Indexed by compile-time constants only: anything else would
// move it to local memory.
template <int kBytes>
struct Words {
  static_assert(kBytes % 4 == 0);
  static constexpr int kCount = kBytes / 4;
  uint32_t w[kCount];
};
template <>
struct Words<1> {
  uint8_t value;
};
template <>
struct Words<2> {
  uint16_t value;
};

// Hints, not semantics. Data that is touched once needs no place in L1 (kOnce); a write that
// nothing reads soon should be the first to leave L2 (kStream), so that it does not push out an
// input that is about to be read again.
enum class Read { kCached, kOnce, kStream };
enum class Write { kCached, kStream };

// `p` is aligned to kBytes, or to 16 if that is less, and nothing writes there while the kernel
// runs. `volatile` keeps loads in the order they are written in, all ahead of the first use: that
// is how many are in flight.
template <int kBytes, Read kRead = Read::kOnce>
__device__ __forceinline__ Words<kBytes> Load(const void* p) {
  Words<kBytes> v;
  if constexpr (kBytes == 1) {
    v.value = __ldg(static_cast<const uint8_t*>(p));
  } else if constexpr (kBytes == 2) {
    v.value = __ldg(static_cast<const uint16_t*>(p));
  } else if constexpr (kBytes == 4) {
    const auto* from = static_cast<const uint32_t*>(p);
    if constexpr (kRead == Read::kOnce)
      asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v.w[0]) : "l"(from));
    else
      v.w[0] = kRead == Read::kStream ? __ldcs(from) : __ldg(from);
  } else if constexpr (kBytes == 8) {
    const auto* from = static_cast<const uint2*>(p);
    uint2 u;
    if constexpr (kRead == Read::kOnce)
      asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                   : "=r"(u.x), "=r"(u.y)
                   : "l"(from));
    else
      u = kRead == Read::kStream ? __ldcs(from) : __ldg(from);
    v.w[0] = u.x, v.w[1] = u.y;
  } else if constexpr (kBytes == 16) {
    const auto* from = static_cast<const uint4*>(p);
    uint4 u;
    if constexpr (kRead == Read::kOnce)
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(u.x), "=r"(u.y), "=r"(u.z), "=r"(u.w)
                   : "l"(from));
    else
      u = kRead == Read::kStream ? __ldcs(from) : __ldg(from);
    v.w[0] = u.x, v.w[1] = u.y, v.w[2] = u.z, v.w[3] = u.w;
  } else {
    // Halves of a sector, or parts of a line: the second must find in L1 what the first brought.
    static_assert(kBytes == 32 || kBytes == 64);
    constexpr int kHalf = kBytes / 2;
    constexpr Read kHow = kRead == Read::kOnce ? Read::kCached : kRead;
    const Words<kHalf> a = Load<kHalf, kHow>(p);
    const Words<kHalf> b = Load<kHalf, kHow>(static_cast<const char*>(p) + kHalf);
#pragma unroll
    for (int i = 0; i < kHalf / 4; ++i) v.w[i] = a.w[i], v.w[kHalf / 4 + i] = b.w[i];
  }
  return v;
}

// `p` is aligned to kBytes, or to 16 if that is less.
template <Write kWrite, int kBytes>
__device__ __forceinline__ void Store(void* p, const Words<kBytes>& v) {
  constexpr bool kStream = kWrite == Write::kStream;
  if constexpr (kBytes == 1) {
    *static_cast<uint8_t*>(p) = v.value;
  } else if constexpr (kBytes == 2) {
    *static_cast<uint16_t*>(p) = v.value;
  } else if constexpr (kBytes == 4) {
    auto* to = static_cast<uint32_t*>(p);
    kStream ? __stcs(to, v.w[0]) : static_cast<void>(*to = v.w[0]);
  } else if constexpr (kBytes == 8) {
    auto* to = static_cast<uint2*>(p);
    const uint2 u{v.w[0], v.w[1]};
    kStream ? __stcs(to, u) : static_cast<void>(*to = u);
  } else if constexpr (kBytes == 16) {
    auto* to = static_cast<uint4*>(p);
    const uint4 u{v.w[0], v.w[1], v.w[2], v.w[3]};
    kStream ? __stcs(to, u) : static_cast<void>(*to = u);
  } else {
    static_assert(kBytes == 32);
    Store<kWrite>(p, Words<16>{{v.w[0], v.w[1], v.w[2], v.w[3]}});
    Store<kWrite>(static_cast<char*>(p) + 16, Words<16>{{v.w[4], v.w[5], v.w[6], v.w[7]}});
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_VECTOR_CUH_
