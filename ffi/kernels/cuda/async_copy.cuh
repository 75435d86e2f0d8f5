// Copies from device memory to shared memory that run while a thread computes.
#ifndef QSHARD_KERNELS_CUDA_ASYNC_COPY_CUH_
#define QSHARD_KERNELS_CUDA_ASYNC_COPY_CUH_

#include <cstdint>

namespace qshard::kernels {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 aligned bytes.
__device__ __forceinline__ void CopyAsync(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Ends a group of copies of this thread.
__device__ __forceinline__ void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last kLeft groups of copies of this thread have arrived.
template <int kLeft>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_ASYNC_COPY_CUH_
