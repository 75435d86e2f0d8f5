// Hopper instructions that CUDA C++ has no function for: barriers that count bytes, copies of
// tiles by the TMA unit, tensor maps that a kernel changes, and clusters.
//
// Sources: PTX ISA 9.0, "mbarrier", "cp.async.bulk.tensor", "tensormap.replace" and "fence.proxy";
// github.com/NVIDIA/cutlass include/cute/arch/copy_sm90_desc.hpp, cutlass/arch/barrier.h.
#ifndef QSHARD_KERNELS_CUDA_HOPPER_PTX_CUH_
#define QSHARD_KERNELS_CUDA_HOPPER_PTX_CUH_

#include <cuda.h>

#include <cstdint>

namespace qshard::kernels::hopper {

// Returns an address for instructions that take one of shared memory.
__device__ inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- clusters ---

__device__ inline uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster. Writes before it are seen after it.
__device__ inline void SyncCluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// --- barriers in shared memory ---

__device__ inline void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}

// Shows initialized barriers to the TMA unit and the cluster.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and adds bytes that copies will bring before the phase ends.
__device__ inline void ArriveAndExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// Arrives at the barrier of this place in shared memory of a block of the cluster.
__device__ inline void ArriveAt(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(rank)
      : "memory");
}

// Waits until the phase of this parity has ended. On a new barrier, phase 1 has.
__device__ inline void Wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra stop;\n"
      "bra again;\n"
      "stop:\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// --- copies by the TMA unit ---

// Copies the tile of a matrix that begins at column x and row y, in this block.
__device__ inline void LoadTile(const CUtensorMap* map, uint64_t* barrier, void* to, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "r"(x), "r"(y)
      : "memory");
}

// Copies a tile to the same place in all blocks of `mask`, and tells the barrier of each.
__device__ inline void LoadTileToAll(const CUtensorMap* map, uint64_t* barrier, void* to, int x,
                                     int y, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(SharedAddress(to)),
      "l"(map), "r"(SharedAddress(barrier)), "h"(mask), "r"(x), "r"(y)
      : "memory");
}

// Copies contiguous bytes, a multiple of 16.
__device__ inline void LoadBytes(const void* from, uint64_t* barrier, void* to, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// Copies a tile to column x, row y of matrix z. What lies outside of the matrix is left out.
__device__ inline void StoreTile(const CUtensorMap* map, const void* from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(SharedAddress(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

__device__ inline void CommitStores() { asm volatile("cp.async.bulk.commit_group;"); }

// Waits until all but the last `kPending` groups of stores of this thread have read their source.
template <int kPending>
__device__ void WaitForReads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Shows this thread's writes of shared memory to the TMA unit, after a barrier.
__device__ inline void FenceToTma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- tensor maps in global memory ---

__device__ inline void Prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Moves a map to an address, 16-byte aligned, and sets the length of its innermost axis. The TMA
// unit reads zeros before the address and behind the length.
__device__ inline void SetRange(CUtensorMap* map, const void* data, uint32_t length) {
  asm volatile(
      "tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;\n"
      "tensormap.replace.tile.global_dim.global.b1024.b32 [%0], 0, %2;" ::"l"(
          __cvta_generic_to_global(map)),
      "l"(data), "r"(length)
      : "memory");
}

// Shows the changes of tensor maps by this thread to those that acquire them.
__device__ inline void ReleaseMaps() {
  asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
}

__device__ inline void AcquireMap(const CUtensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}

// --- registers and matrices ---

template <int kRegisters>
__device__ void GiveUpRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Stores four 8x8 matrices of 16-bit elements. Lane i has the address of row i % 8 of matrix i / 8.
__device__ inline void StoreMatrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

}  // namespace qshard::kernels::hopper

#endif  // QSHARD_KERNELS_CUDA_HOPPER_PTX_CUH_
