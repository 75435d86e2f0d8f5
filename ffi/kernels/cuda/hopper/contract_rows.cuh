// Weight gradients of experts on Hopper: out[e] = a[:, rows of e] @ b[:, rows of e].T, of FP8
// codes, with one scale for each expert or 1x128 blocks.
//
// A persistent grid: pairs of thread blocks, clusters, take tiles of 256 x 256 of all results in
// turn. Block r of a pair computes columns 128 * r to 128 * r + 128. One thread of a block copies
// tiles of operands into a ring of buffers. The half of `a` that it copies goes to both blocks. Two
// warpgroups multiply, 128 rows each. Tensor cores keep few bits of a sum, so it is moved to fp32
// registers every 128 codes; meanwhile they work for the other warpgroup.
//
// Rows of an expert begin and end at multiples of 16 codes. Copies of its first and last codes use
// tensor maps that begin and end with the expert, so that zeros come before and after it.
//
// Sources: github.com/deepseek-ai/DeepGEMM deep_gemm/impls/sm90_fp8_gemm_1d1d.cuh (sums in two
// stages, tensor maps of groups); github.com/NVIDIA/cutlass
// include/cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp (roles of warpgroups).
#ifndef QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_ROWS_CUH_
#define QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_ROWS_CUH_

#include <type_traits>

#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/hopper/contract_plan.cuh"
#include "kernels/cuda/hopper/wgmma.cuh"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels::hopper {

constexpr int kTileM = 256, kTileN = 128, kTileK = kSwizzle;
constexpr int kBoxRows = 128;  // of a copy
constexpr int kPair = 2;       // blocks of a cluster
constexpr int kInstructionM = 64, kInstructionK = 32;
constexpr int kWarpgroup = 128, kMultipliers = 2;  // warpgroups that multiply
constexpr int kWaves = kTileM / kMultipliers / kInstructionM;
constexpr int kContractThreads = (kMultipliers + 1) * kWarpgroup;
constexpr int kCopyRegisters = 24, kMultiplyRegisters = 240;  // of a thread; 64 K in all
constexpr int kBoxBytes = kBoxRows * kSwizzle;
constexpr int kStageBytes = (kTileM + kTileN) * kTileK;
constexpr int kStripRows = kInstructionM / (kWarpgroup / kWarp);  // of a result, in one warp
constexpr int kStripBytes = kStripRows * kSwizzle;
constexpr int kStageScales = kTileM + kTileN;
constexpr uint32_t kBand = 8;  // rows of tiles computed together; their operands fit in L2

static_assert(kTileM == kPair * kBoxRows && kTileN == kBoxRows);

// Experts of at least as many rows are multiplied from a multiple of 128 codes on. Each copy of 128
// codes then reads one line of L2 for each row, not two. Fewer rows do not pay for the zeros.
constexpr int32_t kAlignedRows = 1024;

struct ContractParams {
  int32_t experts, m, n;
  const int32_t* stops;  // clamped
  const ExpertMaps* maps;
  // One for each expert; or of blocks, [blocks of k, m] and [blocks of k, n].
  const float *a_scales, *b_scales;
  // Tiles of clusters: of all results, of a result, and of a band of rows of one.
  uint32_t tiles;
  Divider tiles_each, tiles_band;
  uint32_t last_band;
  Divider last_rows;  // rows of tiles in the last band
};

// The tiles of one cluster, in order.
template <bool kBlocks>
class Tiles {
 public:
  __device__ explicit Tiles(const ContractParams& params)
      : params_(params), at_(blockIdx.x / kPair) {
    Load();
  }

  // Moves to the next tile. Returns false if there is none.
  __device__ bool Next() {
    if (at_ >= params_.tiles) return false;
    expert = loaded_expert_;
    origin = loaded_begin_;
    end = loaded_end_;
    begin = end - origin < kAlignedRows ? origin : origin & ~(kTileK - 1);
    a_scale = loaded_a_scale_;
    b_scale = loaded_b_scale_;
    const uint32_t in_expert = at_ - expert * params_.tiles_each.divisor();
    const uint32_t band = params_.tiles_band.Divide(in_expert);
    const uint32_t in_band = in_expert - band * params_.tiles_band.divisor();
    const bool last = band == params_.last_band;
    col = last ? params_.last_rows.Divide(in_band) : in_band / kBand;
    row = band * kBand + in_band - col * (last ? params_.last_rows.divisor() : kBand);
    at_ += gridDim.x / kPair;
    Load();
    return true;
  }

  uint32_t expert;
  int32_t origin, end;     // the rows of the expert
  int32_t begin;           // the first row to multiply
  float a_scale, b_scale;  // of the expert, if it has one of each operand
  uint32_t row, col;       // in tiles of a cluster

 private:
  // Loads the stops and scales of the next tile early.
  __device__ void Load() {
    if (at_ >= params_.tiles) return;
    loaded_expert_ = params_.tiles_each.Divide(at_);
    loaded_begin_ = loaded_expert_ == 0 ? 0 : __ldg(params_.stops + loaded_expert_ - 1);
    loaded_end_ = __ldg(params_.stops + loaded_expert_);
    if constexpr (!kBlocks) {
      loaded_a_scale_ = __ldg(params_.a_scales + loaded_expert_);
      loaded_b_scale_ = __ldg(params_.b_scales + loaded_expert_);
    }
  }

  const ContractParams& params_;
  uint32_t at_, loaded_expert_ = 0;
  int32_t loaded_begin_ = 0, loaded_end_ = 0;
  float loaded_a_scale_ = 0.0f, loaded_b_scale_ = 0.0f;
};

// A place in the ring of buffers.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t parity = 0;
  __device__ void Next() {
    if (++index == kStages) index = 0, parity ^= 1;
  }
};

template <int kStages_, int kStrips_, bool kBlocks_>
struct Tuning {
  static constexpr int kStages = kStages_;
  static constexpr int kStrips = kStrips_;  // of each warp
  static constexpr bool kBlocks = kBlocks_;
};

using TensorTuning = Tuning<4, 2, false>;
using BlockTuning = Tuning<4, 1, true>;  // scales take the memory of a strip

template <class Tuning>
struct alignas(kSwizzle* kSwizzleRows) Shared {
  uint8_t a[Tuning::kStages][kTileM * kTileK];
  uint8_t b[Tuning::kStages][kTileN * kTileK];
  uint8_t strips[kMultipliers * kWarpgroup / kWarp][Tuning::kStrips][kStripBytes];
  float scales[Tuning::kStages][Tuning::kBlocks ? kStageScales : 1];
  uint64_t full[Tuning::kStages], empty[Tuning::kStages];
};

// Copies operands. One thread of a block runs it.
template <class Tuning>
__device__ void Produce(const ContractParams& params, const CUtensorMap& a, const CUtensorMap& b,
                        Shared<Tuning>& shared) {
  const uint32_t rank = ClusterRank();
  constexpr uint16_t kAll = (1 << kPair) - 1;
  Stage<Tuning::kStages> stage;
  for (Tiles<Tuning::kBlocks> tile(params); tile.Next();) {
    const auto m = static_cast<int32_t>(tile.row * kTileM);
    const auto n = static_cast<int32_t>((tile.col * kPair + rank) * kTileN);
    const ExpertMaps& own = params.maps[tile.expert];
    Prefetch(&own.a);
    Prefetch(&own.b);
    const int32_t a_scales = max(0, min(kTileM, params.m - m));
    const int32_t b_scales = max(0, min(kTileN, params.n - n));
#pragma unroll 1
    for (int32_t k = tile.begin; k < tile.end; k += kTileK, stage.Next()) {
      const int s = stage.index;
      uint64_t* const full = &shared.full[s];
      Wait(&shared.empty[s], stage.parity ^ 1);
      const bool whole = k >= tile.origin && k + kTileK <= tile.end;
      const int32_t x = whole ? k : k - tile.origin;
      uint32_t bytes = kStageBytes;
      if constexpr (Tuning::kBlocks) bytes += (a_scales + b_scales) * sizeof(float);
      ArriveAndExpect(full, bytes);
      LoadTileToAll(whole ? &a : &own.a, full, shared.a[s] + rank * kBoxBytes, x,
                    m + static_cast<int32_t>(rank) * kBoxRows, kAll);
      LoadTile(whole ? &b : &own.b, full, shared.b[s], x, n);
      if constexpr (Tuning::kBlocks) {
        const int64_t block = k / kTileK;
        LoadBytes(params.a_scales + block * params.m + m, full, shared.scales[s],
                  a_scales * sizeof(float));
        if (b_scales > 0)
          LoadBytes(params.b_scales + block * params.n + n, full, shared.scales[s] + kTileM,
                    b_scales * sizeof(float));
      }
    }
  }
}

// Returns two fp32 numbers as 16-bit floats, the first in the low half.
template <class Out>
__device__ uint32_t Pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<Out, bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Where sums belong: the first column and row of a warpgroup's part of a result, and their scale.
struct Destination {
  uint32_t expert;
  int32_t x, y;
  float scale;
};

// Writes a wave's sums, 16 rows of each warp and 128 columns, in strips of 128 bytes a row.
template <class Out, class Tuning>
__device__ void Store(const float (&sums)[kSums], int wave, const Destination& to,
                      const CUtensorMap& out, uint8_t (&strips)[Tuning::kStrips][kStripBytes]) {
  constexpr int kVector = 16, kColumns = kSwizzle / int{sizeof(Out)}, kEach = kTileN / kColumns;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpgroup / kWarp;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float* const d = sums + 4 * (i * kColumns / 8);
    const auto number = [&](int index) { return d[index] * to.scale; };
    uint8_t* const strip = strips[(wave * kEach + i) % Tuning::kStrips];
    if (lane == 0) WaitForReads<Tuning::kStrips - 1>();
    __syncwarp();
    if constexpr (sizeof(Out) == 2) {
      const int row = lane % kStripRows, half = lane / kStripRows;
      const uint32_t at =
          SharedAddress(strip) + row * kSwizzle + (half ^ (row % kSwizzleRows)) * kVector;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        const auto pair = [&](int index) {
          return Pack<Out>(number(4 * j + index), number(4 * j + index + 1));
        };
        StoreMatrices(at ^ (j * kVector), pair(0), pair(2), pair(4), pair(6));
      }
    } else {
      const int row = lane / 4, column = lane % 4;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        uint8_t* const at =
            strip + row * kSwizzle + ((2 * j + column / 2) ^ row) * kVector + column % 2 * 8;
        *reinterpret_cast<float2*>(at) = {number(4 * j), number(4 * j + 1)};
        *reinterpret_cast<float2*>(at + 8 * kSwizzle) = {number(4 * j + 2), number(4 * j + 3)};
      }
    }
    FenceToTma();
    __syncwarp();
    if (lane == 0) {
      StoreTile(&out, strip, to.x + i * kColumns, to.y + wave * kInstructionM + warp * kStripRows,
                static_cast<int>(to.expert));
      CommitStores();
    }
  }
}

// Adds the products of 128 codes, times the scales of their blocks, to the sums; or replaces them,
// for the first codes. Adding 0 keeps the compiler from moving products before a wait for them.
template <bool kBlocks, bool kFirst>
__device__ void Promote(float (&sums)[kSums], const float (&products)[kSums], const float* a_scales,
                        const float* b_scales) {
  if constexpr (!kBlocks) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = (kFirst ? 0.0f : sums[i]) + products[i];
  } else {
    const int lane = threadIdx.x % kWarp;
    const float a[2] = {a_scales[lane / 4], a_scales[lane / 4 + 8]};
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      const float2 b = reinterpret_cast<const float2*>(b_scales)[j * 4 + lane % 4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float product = products[4 * j + i] * a[i / 2], scale = i % 2 == 0 ? b.x : b.y;
        sums[4 * j + i] = kFirst ? product * scale : fmaf(product, scale, sums[4 * j + i]);
      }
    }
  }
}

// Multiplies 64 rows of `a` by 128 of b, 32 * kSteps codes of each, and calls `meanwhile`.
template <class A, class B, int kSteps, class Meanwhile>
__device__ void MultiplySteps(float (&products)[kSums], uint64_t a, uint64_t b,
                              const Meanwhile& meanwhile) {
  Pin(products);
  BeginProducts();
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    Multiply<A, B>(products, a + i * kDescriptorStep, b + i * kDescriptorStep, i > 0);
  CommitProducts();
  Pin(products);
  meanwhile();
  Pin(products);
  WaitForProducts();
}

// Multiplies and stores. A warpgroup runs it. The sums of a tile are stored while tensor cores
// multiply the first codes of the next.
template <class A, class B, class Out, class Tuning>
__device__ void Consume(const ContractParams& params, const CUtensorMap& out,
                        Shared<Tuning>& shared) {
  const int warpgroup = __shfl_sync(kAllLanes, threadIdx.x / kWarpgroup, 0);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x % kWarpgroup / kWarp;
  const uint32_t rank = ClusterRank();
  constexpr int kRows = kTileM / kMultipliers, kSteps = kTileK / kInstructionK;
  uint8_t (&strips)[Tuning::kStrips][kStripBytes] = shared.strips[threadIdx.x / kWarp];
  Stage<Tuning::kStages> stage;
  float sums[kWaves][kSums] = {};
  Destination to{0, 0, params.m, 0.0f};  // below the result, so that nothing is written
  // Multiplies 128 codes from k. The first ones of a tile replace the sums, once these are stored.
  const auto multiply = [&](int32_t k, int32_t end, auto first) {
    const int s = stage.index;
    const int steps = min(kTileK, end - k + kInstructionK - 1) / kInstructionK;
    const uint64_t b = DescriptorOf(shared.b[s]);
    Wait(&shared.full[s], stage.parity);
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      float products[kSums];
      const int row = warpgroup * kRows + wave * kInstructionM;
      const uint64_t a = DescriptorOf(shared.a[s] + row * kTileK);
      const auto nothing = [] {};
      const auto store = [&] { Store<Out, Tuning>(sums[wave], wave, to, out, strips); };
      // The first codes take all steps, with zeros: after a branch the compiler would wait for the
      // products before it stores.
      if constexpr (first)
        MultiplySteps<A, B, kSteps>(products, a, b, store);
      else if (steps == kSteps)
        MultiplySteps<A, B, kSteps>(products, a, b, nothing);
      else if (steps == 3)
        MultiplySteps<A, B, 3>(products, a, b, nothing);
      else if (steps == 2)
        MultiplySteps<A, B, 2>(products, a, b, nothing);
      else
        MultiplySteps<A, B, 1>(products, a, b, nothing);
      const auto release = [&] {
        if (wave == kWaves - 1 && lane < kPair) ArriveAt(&shared.empty[s], lane);
      };
      if (!Tuning::kBlocks) release();
      Promote<Tuning::kBlocks, first>(sums[wave], products,
                                      shared.scales[s] + row + warp * kStripRows,
                                      shared.scales[s] + kTileM);
      if (Tuning::kBlocks) {
        __syncwarp();
        release();
      }
    }
    stage.Next();
  };
  for (Tiles<Tuning::kBlocks> tile(params); tile.Next();) {
    if (tile.begin == tile.end) {
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
        Store<Out, Tuning>(sums[wave], wave, to, out, strips);
#pragma unroll
        for (int i = 0; i < kSums; ++i) sums[wave][i] = 0.0f;
      }
    } else {
      multiply(tile.begin, tile.end, std::true_type{});
#pragma unroll 1
      for (int32_t k = tile.begin + kTileK; k < tile.end; k += kTileK)
        multiply(k, tile.end, std::false_type{});
    }
    // Sums without a row are zeros, also if their scale is NaN.
    const bool scaled = !Tuning::kBlocks && tile.begin < tile.end;
    to = {tile.expert, static_cast<int32_t>((tile.col * kPair + rank) * kTileN),
          static_cast<int32_t>(tile.row * kTileM) + warpgroup * kRows,
          scaled ? tile.a_scale * tile.b_scale : 1.0f};
  }
#pragma unroll
  for (int wave = 0; wave < kWaves; ++wave) Store<Out, Tuning>(sums[wave], wave, to, out, strips);
  if (lane == 0) WaitForReads<0>();
}

template <class A, class B, class Out, class Tuning>
__global__ void __cluster_dims__(kPair, 1, 1) __launch_bounds__(kContractThreads, 1)
    ContractKernel(const __grid_constant__ ContractParams params,
                   const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                   const __grid_constant__ CUtensorMap out) {
  extern __shared__ __align__(kSwizzle * kSwizzleRows) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared<Tuning>*>(memory);
  if (SharedAddress(memory) % alignof(Shared<Tuning>) != 0) __trap();  // tiles would be torn
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kMultipliers * kWarpgroup / kWarp;
    for (int s = 0; s < Tuning::kStages; ++s) {
      InitBarrier(&shared.full[s], 1);
      InitBarrier(&shared.empty[s], kPair * kWarps);
    }
    FenceBarrierInit();
  }
  SyncCluster();
  if (warp >= kMultipliers * kWarpgroup / kWarp) {
    GiveUpRegisters<kCopyRegisters>();
    if (warp == kMultipliers * kWarpgroup / kWarp) {
#pragma unroll 1
      for (int32_t e = threadIdx.x % kWarp; e < params.experts; e += kWarp) {
        AcquireMap(&params.maps[e].a);
        AcquireMap(&params.maps[e].b);
      }
      __syncwarp();
      if (threadIdx.x % kWarp == 0) Produce<Tuning>(params, a, b, shared);
      __syncwarp();
    }
  } else {
    TakeRegisters<kMultiplyRegisters>();
    Consume<A, B, Out, Tuning>(params, out, shared);
  }
  SyncCluster();  // the other block may still use this one's shared memory
}

}  // namespace qshard::kernels::hopper

#endif  // QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_ROWS_CUH_
