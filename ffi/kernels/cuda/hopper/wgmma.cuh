// Products of FP8 codes on Hopper's tensor cores, 64 x 128 x 32, by the 128 threads of a warpgroup.
//
// Thread t has d[4 * j + c] of rows 16 * (t / 32) + t % 32 / 4 (+ 8 for c = 2, 3) and columns 8 * j
// + t % 4 * 2 (+ 1 for c = 1, 3). Sources: PTX ISA 9.0, "wgmma.mma_async" and "matrix-descriptor
// format".
#ifndef QSHARD_KERNELS_CUDA_HOPPER_WGMMA_CUH_
#define QSHARD_KERNELS_CUDA_HOPPER_WGMMA_CUH_

#include <cstdint>

#include "core/format.h"
#include "kernels/cuda/hopper/ptx.cuh"

namespace qshard::kernels::hopper {

constexpr int kSums = 64;  // of a thread, 64 * 128 / 128

// Bytes of a row of a tile in shared memory. The TMA unit stores 16-byte column c of row r at c ^
// (r % 8), so that neither it nor the tensor cores meet bank conflicts.
constexpr int kSwizzle = 128;
constexpr int kSwizzleRows = 8;

// Returns the descriptor of a tile of rows of 128 bytes, swizzled, aligned to 1,024 bytes. Adding
// 2 moves it by 32 codes along a row.
__device__ inline uint64_t DescriptorOf(const void* tile) {
  constexpr uint64_t kSwizzled128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{kSwizzle * kSwizzleRows / 16} << 32;
  return kSwizzled128 | kEightRows | (uint64_t{1} << 16) | (SharedAddress(tile) & 0x3FFFF) >> 4;
}
constexpr uint64_t kDescriptorStep = 2;

// Orders this warpgroup's use of registers and shared memory before the products that follow.
__device__ inline void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void CommitProducts() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits for all products of this warpgroup.
__device__ inline void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Keeps the compiler from moving uses of sums across a product or a wait for one.
__device__ inline void Pin(float (&d)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d = a @ b.T, plus d if `add`, for 64 rows of `a`, 128 of b and 32 codes of each.
template <class A, class B>
__device__ void Multiply(float (&d)[kSums], uint64_t a, uint64_t b, bool add);

#define QSHARD_WGMMA(A, B, TYPES)                                                                 \
  template <>                                                                                     \
  __device__ inline void Multiply<A, B>(float (&d)[kSums], uint64_t a, uint64_t b, bool add) {    \
    asm volatile(                                                                                 \
        "{\n"                                                                                     \
        ".reg .pred add;\n"                                                                       \
        "setp.ne.b32 add, %66, 0;\n"                                                              \
        "wgmma.mma_async.sync.aligned.m64n128k32.f32." TYPES                                      \
        " "                                                                                       \
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                 \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "        \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "        \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "       \
        "%64, %65, add, 1, 1;\n"                                                                  \
        "}"                                                                                       \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),     \
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),           \
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]),           \
          "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),           \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]),           \
          "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),           \
          "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),           \
          "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),           \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]),           \
          "+f"(d[62]), "+f"(d[63])                                                                \
        : "l"(a), "l"(b), "r"(static_cast<int32_t>(add)));                                        \
  }

QSHARD_WGMMA(E4M3, E4M3, "e4m3.e4m3")
QSHARD_WGMMA(E4M3, E5M2, "e4m3.e5m2")
QSHARD_WGMMA(E5M2, E4M3, "e5m2.e4m3")
#undef QSHARD_WGMMA

}  // namespace qshard::kernels::hopper

#endif  // QSHARD_KERNELS_CUDA_HOPPER_WGMMA_CUH_
