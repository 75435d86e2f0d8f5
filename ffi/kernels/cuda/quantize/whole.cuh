// Quantization of one block that covers a whole matrix: one scale, from the amax of all elements.
//
// A small matrix takes one cooperative launch, because launches cost the host more than the work
// costs the GPU. Each thread block keeps a tile of 128 x 128 elements in registers (tiles.cuh). The
// thread blocks exchange their amaxes, each computes the scale from all of them, encodes its tile
// and writes it. A thread block with several tiles loads all but the last again, from L2.
//
// The amaxes go through the memory of the result, because kernels may not allocate. They are in
// tile 0 of `data`, which only thread block 0 writes. It waits until all other thread blocks have
// read the amaxes, before it writes its codes there. No other thread block waits for that, so there
// is one synchronization of the grid. The maximum is over bit patterns, exact in any order.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_WHOLE_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_WHOLE_CUH_

#include <cooperative_groups.h>

#include <algorithm>
#include <cstdint>

#include "kernels/cast.h"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/quantize/square.cuh"

namespace qshard::kernels {

// A matrix of more tiles takes separate launches. In whole tiles these are 2^22 elements: x and the
// codes of both planes fit in L2. `MOST_TILES` in qshard/_core/quantize_steps.py is the same
// number.
constexpr int64_t kMostWholeTiles = 256;

// The launch has at most one thread block per multiprocessor, but two fit. So all fit beside the
// kernels of collectives on other streams. A cooperative launch waits until all fit.
constexpr int kWholeBlocksThatFit = 2;

// Words in tile 0 of `data`: the number of thread blocks that have read all amaxes, and the amax of
// each thread block as FloatBits.
struct WholeSlots {
  WholeSlots(const TileGrid& grid, uint8_t* codes)
      : data(codes),
        cols(grid.cols),
        per_row(static_cast<int>(std::min<int64_t>(grid.cols, kTile)) / 4),
        amaxes(per_row * static_cast<int>(std::min<int64_t>(grid.rows, kTile)) - 1) {}

  // Rows have a multiple of 8 codes, and `data` is aligned to 8 bytes.
  __device__ __forceinline__ int32_t* At(int i) const {
    return reinterpret_cast<int32_t*>(data + i / per_row * cols) + i % per_row;
  }
  __device__ __forceinline__ int32_t* Readers() const { return At(0); }
  __device__ __forceinline__ int32_t* Amax(int block) const { return At(1 + block); }

  uint8_t* data;
  int64_t cols;
  int per_row, amaxes;
};

__device__ __forceinline__ int32_t LoadSlot(const int32_t* slot) {
  return *static_cast<const volatile int32_t*>(slot);
}

// The grid is cooperative, and has at most as many thread blocks as tiles and as slots.
template <class In, class Code, bool kTransposed>
__global__ void __launch_bounds__(kTileThreads, kWholeBlocksThatFit)
    QuantizeWholeTiles(const TileArguments<In, FloatScales> a, const WholeSlots slots) {
  __shared__ alignas(16)
      uint8_t tile[kTransposed ? sizeof(typename TransposedTile<Code>::Bytes) : 16];
  const PatchPlace p;
  const auto tiles = static_cast<uint32_t>(a.grid.tiles);
  const int blocks = static_cast<int>(gridDim.x);
  Tile t;
  int height;
  EightOf<In> rows[kPatch];
  const auto load = [&](uint32_t index) {
    t = a.grid.At(index);
    height = t.PatchHeight(p.down * kPatch, p.across * kPatch);
    LoadRows<Read::kCached>(a.x + a.grid.Offset(t, p.down * kPatch, p.across * kPatch), a.grid.cols,
                            height, rows);
  };

  Magnitude<In> largest;
  uint32_t index = blockIdx.x;
  for (;; index += blocks) {
    load(index);
#pragma unroll
    for (int k = 0; k < kPatch; ++k) largest.Add(rows[k]);
    if (index + blocks >= tiles) break;
  }
  const int32_t own = TeamMax<kTileThreads>(largest.AsFloatBits());
  if (threadIdx.x == 0) {
    *slots.Amax(static_cast<int>(blockIdx.x)) = own;
    if (blockIdx.x == 0) *slots.Readers() = 0;
  }
  cooperative_groups::this_grid().sync();

  int32_t bits = 0;
  for (int b = static_cast<int>(threadIdx.x); b < blocks; b += kTileThreads)
    bits = max(bits, LoadSlot(slots.Amax(b)));
  bits = TeamMax<kTileThreads>(bits);  // after it, all threads have read
  if (threadIdx.x == 0 && blockIdx.x > 0) {
    __threadfence();
    atomicAdd(slots.Readers(), 1);
  }
  const BlockScale<float> s = a.scales.Of(FloatFromBits(bits), Code::kMax);
  if (threadIdx.x == 0 && blockIdx.x == 0) {
    *a.scale_inv = s.scale_inv;
    if (a.second_scale_inv != nullptr) *a.second_scale_inv = s.scale_inv;
  }

  for (;;) {
    if (index == 0) {
      if (threadIdx.x == 0) {
        while (LoadSlot(slots.Readers()) != blocks - 1) {
        }
        __threadfence();
      }
      __syncthreads();
    }
    StoreSquareTile<In, Code, kTransposed, Write::kCached>(a, t, p, height, rows, s.scale,
                                                           height >= kPatch, tile);
    if (index < static_cast<uint32_t>(blocks)) break;
    index -= blocks;
    load(index);
    if constexpr (kTransposed) __syncthreads();  // before the next tile replaces this one
  }
}

// Launches the kernel if the matrix is small and the device can, and sets *status. Else returns
// false. `a` must have passed TakesTiles.
template <class Code, class In>
bool LaunchWholeTiles(const Exec<Cuda>& exec, const TileArguments<In, FloatScales>& a,
                      Status* status) {
  if (a.grid.tiles > kMostWholeTiles || DeviceAttribute(cudaDevAttrCooperativeLaunch) == 0)
    return false;
  const WholeSlots slots(a.grid, a.data);
  const int64_t blocks =
      std::min({a.grid.tiles, int64_t{Multiprocessors()}, int64_t{slots.amaxes}});
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kTileThreads);
  config.stream = exec.stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  auto* const kernel = a.second_data == nullptr ? QuantizeWholeTiles<In, Code, false>
                                                : QuantizeWholeTiles<In, Code, true>;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, a, slots);
  (void)cudaGetLastError();  // the next CUDA call must not report it
  *status = ToStatus(error);
  return error != cudaErrorCooperativeLaunchTooLarge;  // a context with fewer multiprocessors
}

// Quantizes in separate launches, of any size and alignment. The word of scale_inv has the amax,
// then the scale, which the cast reads, and at last the inverse scale.
template <class Code, class In>
Status QuantizeWholeInSteps(const Exec<Cuda>& exec, const In* x, const FloatScales& scales,
                            const Blocks& blocks, const BlockPlane<float>& out) {
  const int64_t n = blocks.rows * blocks.cols;
  float *const word = out.scale_inv, *const second = out.scale_inv_t;
  QSHARD_RETURN_IF_ERROR(Amax(exec, x, 1, n, word));
  QSHARD_RETURN_IF_ERROR(
      ForEach(exec, 1, [=] __device__(int64_t) { *word = scales.Of(*word, Code::kMax).scale; }));
  const Scaled<In> scaled{x, word, n};
  QSHARD_RETURN_IF_ERROR(out.data_t == nullptr
                             ? Cast<In, Code>(exec, scaled, n, out.data)
                             : CastTranspose<In, Code>(exec, scaled, 1, blocks.rows, blocks.cols,
                                                       out.data, out.data_t));
  return ForEach(exec, 1, [=] __device__(int64_t) {
    *word = ScaleInverse(*word);
    if (second != nullptr) *second = *word;
  });
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_WHOLE_CUH_
