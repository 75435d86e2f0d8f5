// Vectors of 1 to 64 bytes in registers, and their loads and stores.
#ifndef QSHARD_KERNELS_CUDA_VECTOR_CUH_
#define QSHARD_KERNELS_CUDA_VECTOR_CUH_

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace qshard::kernels {

// `kBytes` bytes as 32-bit words. Index only with compile-time constants: anything else moves it to
// local memory.
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

// Cache hints without effect on results. kOnce: data is read once and needs no place in L1.
// kStream: nothing reads the data soon, so it should leave L2 first and not evict an input that is
// read again. kWritten: the kernel reads the data again, and then writes there.
enum class Read { kCached, kOnce, kStream, kWritten };
enum class Write { kCached, kStream };

// The type that load and store instructions use for 4, 8 and 16 bytes.
template <int kBytes>
using MovedAs =
    std::conditional_t<kBytes == 16, uint4, std::conditional_t<kBytes == 8, uint2, uint32_t>>;

// Loads kBytes from p, which must be aligned to kBytes or to 16 if that is less. Nothing may write
// there while the kernel runs, unless kRead is kStream or kWritten. `volatile` keeps loads in
// program order and ahead of the first use, which determines how many are in flight.
template <int kBytes, Read kRead = Read::kOnce>
__device__ __forceinline__ Words<kBytes> Load(const void* p) {
  Words<kBytes> v;
  if constexpr (kBytes <= 2) {
    v.value = __ldg(static_cast<const decltype(v.value)*>(p));
  } else if constexpr (kBytes > 16) {
    // Halves of a sector or parts of a line: the second load must hit the line in L1.
    constexpr int kHalf = kBytes / 2;
    constexpr Read kHow = kRead == Read::kOnce ? Read::kCached : kRead;
    const Words<kHalf> a = Load<kHalf, kHow>(p);
    const Words<kHalf> b = Load<kHalf, kHow>(static_cast<const char*>(p) + kHalf);
#pragma unroll
    for (int i = 0; i < kHalf / 4; ++i) v.w[i] = a.w[i], v.w[kHalf / 4 + i] = b.w[i];
  } else if constexpr (kRead != Read::kOnce) {
    const auto* from = static_cast<const MovedAs<kBytes>*>(p);
    const MovedAs<kBytes> u = kRead == Read::kStream    ? __ldcs(from)
                              : kRead == Read::kWritten ? *from
                                                        : __ldg(from);
    memcpy(&v, &u, kBytes);
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v.w[0]) : "l"(p));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(v.w[0]), "=r"(v.w[1])
                 : "l"(p));
  } else {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
                 : "l"(p));
  }
  return v;
}

template <Write kWrite, class T>
__device__ __forceinline__ void Put(void* p, T value) {
  auto* to = static_cast<T*>(p);
  if constexpr (kWrite == Write::kStream)
    __stcs(to, value);
  else
    *to = value;
}

// Stores v to p, which must be aligned to kBytes or to 16 if that is less.
template <Write kWrite, int kBytes>
__device__ __forceinline__ void Store(void* p, const Words<kBytes>& v) {
  if constexpr (kBytes <= 2) {
    Put<Write::kCached>(p, v.value);
  } else if constexpr (kBytes == 4) {
    Put<kWrite>(p, v.w[0]);
  } else if constexpr (kBytes == 8) {
    Put<kWrite>(p, uint2{v.w[0], v.w[1]});
  } else if constexpr (kBytes == 16) {
    Put<kWrite>(p, uint4{v.w[0], v.w[1], v.w[2], v.w[3]});
  } else {
    static_assert(kBytes == 32);
    Store<kWrite>(p, Words<16>{{v.w[0], v.w[1], v.w[2], v.w[3]}});
    Store<kWrite>(static_cast<char*>(p) + 16, Words<16>{{v.w[4], v.w[5], v.w[6], v.w[7]}});
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_VECTOR_CUH_
