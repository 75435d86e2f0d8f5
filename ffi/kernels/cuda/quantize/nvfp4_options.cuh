// NVFP4 quantization with a Hadamard transform along columns, stochastic rounding, or both. Writes
// blocks along rows or 2-D blocks in the order of x, blocks along columns stored transposed, or
// both planes, in one read of x.
//
// A thread block of 256 threads takes a tile of 128 x 128 elements through shared memory. First a
// thread takes whole blocks along rows. One Philox call serves 16 elements of a row, for both
// planes, because random bits belong to elements. Then it takes 16 rows of two neighbouring
// columns, which the transform mixes. So threads need not wait for each other within a block, and
// most instructions work on two columns. A thread writes eight bytes of codes, next to its
// neighbours' for 32 bytes or more. Codes of scales go through shared memory, to be stored eight at
// a time.
//
// The same kernel gathers the padded rows of experts. There each strip of 16 rows of the tile has
// the global scales, the Philox key and the first row of its expert.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_OPTIONS_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_OPTIONS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/cast/stochastic.cuh"
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/hadamard/hadamard.cuh"
#include "kernels/cuda/quantize/nvfp4_codes.cuh"
#include "kernels/cuda/quantize/strips.cuh"
#include "kernels/grouped.h"

namespace qshard::kernels {

// Rows, scales and random numbers of matrices.
struct OwnNvfp4Rows : OwnRows {
  Nvfp4Scales scales, second_scales;
  Divider matrices, second_matrices;  // matrices that share a global scale
  // For stochastic rounding.
  Regions regions;
  Divider cell_rows, cell_cols;  // block size of the grid that regions refer to
  bool one_region;
};

// Options for the padded rows of experts.
struct ExpertNvfp4Rows : GatheredRows {
  Nvfp4Experts experts;
  bool vectors;  // rows of x are aligned to 16 bytes, and codes to 8
};

template <class In, class Rows>
struct Nvfp4TileArguments : Rows {
  const In* x;
  TileGrid grid;
  bool hadamard;
  bool square;  // blocks in the order of x are 16 x 16, else 1 x 16
  // Null if not requested. A plane has both pointers.
  uint8_t* data;
  uint8_t* scale_inv;
  uint8_t* second_data;
  uint8_t* second_scale_inv;
};

constexpr int kTileBlocks = kTile / kBlock16;
// Bytes after 16 rows in shared memory, so that strips use different banks.
constexpr int kStripPad = 32;

// The experts of the strips of a tile.
struct StripExperts {
  uint64_t seed[kTileBlocks];
  int64_t first_row[kTileBlocks];  // of the expert
  int32_t rows[kTile];             // rows of x, -1 for padding
};
struct NoExperts {};

template <class In, bool kRandom, bool kGathered>
struct Nvfp4Memory {
  static constexpr int kRowBytes = kTile * sizeof(In), kRandomBytes = kTile;
  static __device__ __forceinline__ int Row(int row, int bytes) {
    return row * bytes + row / kBlock16 * kStripPad;
  }
  alignas(16) uint8_t x[kTile * kRowBytes + kTileBlocks * kStripPad];
  alignas(16) uint8_t random[kRandom ? kTile * kRandomBytes + kTileBlocks * kStripPad : 16];
  alignas(8) LineCodes row_codes, column_codes;
  // Of the plane along rows, and of the other. Strips of experts have no tables.
  float table[2][kGathered ? 1 : kScaleCodes];
  GlobalNvfp4 global[2][kGathered ? kTileBlocks : 1];
  std::conditional_t<kGathered, StripExperts, NoExperts> strips;
  int32_t square_amax[kTileBlocks][kTileBlocks];
};

// Finds the experts of the strips of a tile, one by each warp, and its rows of x.
template <bool kRandom, class Memory>
__device__ __forceinline__ void FindExperts(const ExpertNvfp4Rows& a, const Tile& t,
                                            Memory& memory) {
  static_assert(kTileThreads / kWarp == kTileBlocks);
  const Nvfp4Experts& experts = a.experts;
  const int lane = threadIdx.x % kWarp, strip = threadIdx.x / kWarp;
  const int64_t expert = ExpertOfWarp(experts.stops, t.row + strip * kBlock16);
  const bool none = expert == experts.stops.count;
  if (lane < 2) {
    const float* amaxes = lane == 0 ? experts.global_amax : experts.global_amax_t;
    memory.global[lane][strip] =
        GlobalOf(none ? 0.0f : __ldg(amaxes + expert), experts.scale_max, experts.nonfinite);
  }
  if (kRandom && lane == 2) {
    memory.strips.seed[strip] = none ? 0 : FromWords(experts.seeds + 2 * expert);
    memory.strips.first_row[strip] = none ? 0 : experts.stops.FirstRow(expert);
  }
  if (lane < kBlock16) {
    const int row = strip * kBlock16 + lane;
    memory.strips.rows[row] =
        none || row >= t.height ? -1 : static_cast<int32_t>(a.map.Of(t.row + row));
  }
  __syncthreads();
}

// Copies 16 bytes of x to shared memory, or zeros.
template <class In>
__device__ __forceinline__ void CopyVector(const uint8_t* from, uint8_t* to, bool exists,
                                           bool aligned) {
  if (aligned) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
    return;
  }
#pragma unroll
  for (int i = 0; i < 16 / static_cast<int>(sizeof(In)); ++i)
    reinterpret_cast<In*>(to)[i] = exists ? reinterpret_cast<const In*>(from)[i] : In{};
}

template <class In, bool kRandom, class Rows>
__global__ void __launch_bounds__(kTileThreads, sizeof(In) == 4 ? 2 : 3)
    QuantizeNvfp4Tiles(const Nvfp4TileArguments<In, Rows> a) {
  constexpr bool kGathered = Rows::kGathered;
  using Memory = Nvfp4Memory<In, kRandom, kGathered>;
  using Abs = Magnitudes<In>;
  extern __shared__ uint4 shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // Start at the end of x, which a preceding amax, which walks forwards, has left in L2.
  const Tile t = a.grid.At(gridDim.x - 1 - blockIdx.x);

  if constexpr (kGathered) FindExperts<kRandom>(a, t, memory);
  {  // load the part of the tile inside the matrix
    constexpr int kVector = 16, kVectors = Memory::kRowBytes / kVector;
    const auto* from = reinterpret_cast<const uint8_t*>(a.x) +
                       (kGathered ? t.col * static_cast<int64_t>(sizeof(In))
                                  : a.grid.Offset(t, 0, 0) * static_cast<int64_t>(sizeof(In)));
    const int64_t step = a.grid.cols * static_cast<int64_t>(sizeof(In));
    static_assert(kTileThreads % kVectors == 0);
    constexpr int kStep = kTileThreads / kVectors;  // rows
    const int at = threadIdx.x % kVectors * kVector;
    const int height = at < t.width * static_cast<int>(sizeof(In)) ? t.height : 0;
#pragma unroll
    for (int i = 0; i < kTile / kStep; ++i) {
      const int row = i * kStep + static_cast<int>(threadIdx.x) / kVectors;
      if (row >= height) continue;
      uint8_t* const to = memory.x + Memory::Row(row, Memory::kRowBytes) + at;
      if constexpr (kGathered) {
        const int32_t own = memory.strips.rows[row];
        CopyVector<In>(own < 0 ? from + at : from + own * step + at, to, own >= 0, a.vectors);
      } else {
        CopyVector<In>(from + row * step + at, to, /*exists=*/true, /*aligned=*/true);
      }
    }
  }
  if (a.square && threadIdx.x < kTileBlocks * kTileBlocks)
    memory.square_amax[threadIdx.x / kTileBlocks][threadIdx.x % kTileBlocks] = 0;
  if constexpr (!kGathered) {
    // Half of the threads work for each plane.
    static_assert(kTileThreads == 2 * kScaleCodes);
    const int plane = threadIdx.x / kScaleCodes, scale_code = threadIdx.x % kScaleCodes;
    const auto matrix = static_cast<uint32_t>(t.matrix);
    if (scale_code < kWarp) {
      const GlobalNvfp4 global = plane == 0
                                     ? GlobalAt(a.scales, a.matrices.Divide(matrix))
                                     : GlobalAt(a.second_scales, a.second_matrices.Divide(matrix));
      if (scale_code == 0) memory.global[plane][0] = global;
    }
    __syncthreads();
    memory.table[plane][scale_code] =
        MultiplierOf(static_cast<uint16_t>(scale_code), memory.global[plane][0]);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  const auto global_of = [&](int plane, int strip) -> const GlobalNvfp4& {
    return memory.global[plane][kGathered ? strip : 0];
  };
  const auto store = [&](uint8_t* to, const Words<8>& codes) {
    if constexpr (kGathered) {
      if (!a.vectors) {
        for (int i = 0; i < 8; ++i) to[i] = static_cast<uint8_t>(codes.w[i / 4] >> (i % 4 * 8));
        return;
      }
    }
    Store<Write::kStream>(to, codes);
  };
  const auto multiplier = [&](int plane, uint32_t code, const GlobalNvfp4& global) {
    if constexpr (kGathered)
      return MultiplierOf(static_cast<uint16_t>(code & (kScaleCodes - 1)), global);
    else
      return memory.table[plane][code & (kScaleCodes - 1)];
  };

  // --- blocks along rows: 8 in a row of the tile ---

  // A thread takes blocks below each other.
  constexpr int kRowsAtOnce = kTileThreads / kTileBlocks;
  constexpr int kBytes = kBlock16 * sizeof(In);  // of x in a block
  const int block = threadIdx.x % kTileBlocks, block_row = threadIdx.x / kTileBlocks;
  const int row_tasks = block * kBlock16 < t.width ? CeilDiv(t.height - block_row, kRowsAtOnce) : 0;
  const auto load = [&](int row, EightOf<In>(&x)[2]) {
    const uint8_t* from = memory.x + Memory::Row(row, Memory::kRowBytes) + block * kBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) x[h] = FromShared<kBytes / 2>(from + h * (kBytes / 2));
  };
  const auto amax_of = [&](const EightOf<In>(&x)[2]) {
    uint32_t m = x[0].w[0];
#pragma unroll
    for (int i = 1; i < 2 * EightOf<In>::kCount; ++i)
      m = Abs::MaxAbs(m, x[i / EightOf<In>::kCount].w[i % EightOf<In>::kCount]);
    m = Abs::Abs(m);
    return Abs::Value(Abs::kPerWord == 2 ? max(m & 0xFFFFu, m >> 16) : m);
  };
  if (a.square) {
#pragma unroll 1
    for (int task = 0; task < row_tasks; ++task) {
      const int row = block_row + task * kRowsAtOnce;
      EightOf<In> x[2];
      load(row, x);
      atomicMax(&memory.square_amax[row / kBlock16][block], __float_as_int(amax_of(x)));
    }
    __syncthreads();
  }
  if (kRandom || a.data != nullptr) {
    const int64_t col = t.col + block * kBlock16;
    int64_t in_all = t.matrix * a.grid.rows + t.row + block_row;
    [[maybe_unused]] uint64_t seed = 0, index = 0;
    if constexpr (kRandom && !kGathered) {
      if (a.one_region) {
        seed = FromWords(a.regions.philox.seed);
        index = FromWords(a.regions.philox.offset) + in_all * a.regions.philox.steps.row + col;
      }
    }
    uint8_t* to = a.data + (in_all * a.grid.cols + col) / 2;
    const int64_t step = kRowsAtOnce * a.grid.cols / 2;
#pragma unroll 1
    for (int row = block_row; row < block_row + row_tasks * kRowsAtOnce; row += kRowsAtOnce) {
      [[maybe_unused]] Words<16> random;
      if constexpr (kRandom) {
        if constexpr (kGathered) {
          const int64_t first = memory.strips.first_row[row / kBlock16];
          seed = memory.strips.seed[row / kBlock16];
          index = static_cast<uint64_t>(in_all - first) * a.grid.cols + col;
        } else if (!a.one_region) {
          const int64_t strip = t.matrix * a.regions.grid_rows +
                                a.cell_rows.Divide(static_cast<uint32_t>(t.row + row));
          const auto draw = a.regions.template Of<true>(
              {strip * a.regions.grid_cols + a.cell_cols.Divide(static_cast<uint32_t>(col)), in_all,
               col});
          index = draw.index, seed = draw.seed;
        }
        random = RandomBytes(index, seed);
        if constexpr (!kGathered) index += kRowsAtOnce * a.regions.philox.steps.row;
        if (a.second_data != nullptr)
          *reinterpret_cast<uint4*>(memory.random + Memory::Row(row, Memory::kRandomBytes) +
                                    block * kBlock16) =
              make_uint4(random.w[0], random.w[1], random.w[2], random.w[3]);
        in_all += kRowsAtOnce;
        if (a.data == nullptr) continue;
      }
      EightOf<In> x[2];
      load(row, x);
      const float amax =
          a.square ? __int_as_float(memory.square_amax[row / kBlock16][block]) : amax_of(x);
      const GlobalNvfp4& global = global_of(0, row / kBlock16);
      const uint16_t code = EncodePair<E4M3>(UnderSixth(amax, global), 0.0f);
      memory.row_codes[row][block] = static_cast<uint8_t>(code);
      const float scale = multiplier(0, code, global);
      Words<8> codes;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kRandom)
          codes.w[h] = EncodeAtRandom<In>(x[h], scale, random.w[2 * h], random.w[2 * h + 1]);
        else
          codes.w[h] = EncodeRow<In, E2M1>(x[h], scale).w[0];
      }
      store(to, codes);
      to += step;
      if (a.square && row % kBlock16 == 0)
        a.scale_inv[(t.matrix * (a.grid.rows / kBlock16) + (t.row + row) / kBlock16) *
                        (a.grid.cols / kBlock16) +
                    t.col / kBlock16 + block] = static_cast<uint8_t>(code);
    }
  }
  if (kRandom) __syncthreads();

  // --- blocks along columns: two columns of 16 rows ---

  if (a.second_data != nullptr) {
    constexpr int kAcross = 8, kDown = kWarp / kAcross;  // neighbouring lanes
    const int col = 2 * (warp * kAcross + lane % kAcross);
#pragma unroll 1
    for (int task = 0; task < kTileBlocks / kDown; ++task) {
      const int strip = task * kDown + lane / kAcross, row = strip * kBlock16;
      if (row >= t.height || col >= t.width) continue;
      const uint8_t* from = memory.x + Memory::Row(row, Memory::kRowBytes) + col * sizeof(In);
      const auto pair_at = [&](int k) {
        return PairOf<In>{FromShared<2 * sizeof(In)>(from + k * Memory::kRowBytes)};
      };
      const auto quantize = [&](const auto& x) {
        const GlobalNvfp4& global = global_of(1, strip);
        float amax[2], scale[2];
        AmaxOfTwo(x, amax);
        const uint16_t both =
            EncodePair<E4M3>(UnderSixth(amax[0], global), UnderSixth(amax[1], global));
        Words<8> codes[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          scale[c] = multiplier(1, both >> 8 * c, global);
          memory.column_codes[col + c][strip] = static_cast<uint8_t>(both >> 8 * c);
        }
        const uint8_t* bytes = memory.random + Memory::Row(row, Memory::kRandomBytes) + col;
        EncodeTwoColumns<kRandom>(
            x, scale,
            [&](int k) {
              return e2m1::SpreadBytes<0>(
                  *reinterpret_cast<const uint16_t*>(bytes + k * Memory::kRandomBytes));
            },
            codes);
        uint8_t* to = a.second_data + a.grid.OffsetT(t, row, col) / 2;
        store(to, codes[0]);
        store(to + a.grid.rows / 2, codes[1]);
      };
      if (a.hadamard) {
        const auto word = [&](int k) { return ToBfloat16<In, 2>(pair_at(k).words).w[0]; };
        uint32_t w[kBlock16];
#pragma unroll
        for (int k = 0; k < kBlock16; ++k) w[k] = word(k);
        hadamard::TransformTwo(w, word);
        PairOf<bfloat16> y[kBlock16];
#pragma unroll
        for (int k = 0; k < kBlock16; ++k) y[k].words.w[0] = w[k];
        quantize(y);
      } else {
        PairOf<In> x[kBlock16];
#pragma unroll
        for (int k = 0; k < kBlock16; ++k) x[k] = pair_at(k);
        quantize(x);
      }
    }
  }
  __syncthreads();

  // --- codes of scales: half of the threads store a row each, the others a column ---

  const int line = threadIdx.x % kTile;
  const bool column = threadIdx.x >= kTile;
  static_assert(kTileThreads == 2 * kTile);
  if (column && a.second_data != nullptr && line < t.width) {
    const int64_t count = a.grid.rows / kBlock16;
    StoreLineCodes(
        memory.column_codes[line],
        a.second_scale_inv + (t.matrix * a.grid.cols + t.col + line) * count + t.row / kBlock16,
        CeilDiv(t.height, kBlock16));
  }
  if (!column && a.data != nullptr && !a.square && line < t.height) {
    const int64_t count = a.grid.cols / kBlock16;
    StoreLineCodes(memory.row_codes[line],
                   a.scale_inv + (t.matrix * a.grid.rows + t.row + line) * count + t.col / kBlock16,
                   CeilDiv(t.width, kBlock16));
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_OPTIONS_CUH_
