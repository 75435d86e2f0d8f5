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
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_OPTIONS_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_OPTIONS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/cast/stochastic.cuh"
#include "kernels/cuda/hadamard/hadamard.cuh"
#include "kernels/cuda/quantize/strips.cuh"

namespace qshard::kernels {

template <class In>
struct Nvfp4TileArguments {
  const In* x;
  Nvfp4Scales scales, second_scales;
  Divider matrices, second_matrices;  // matrices that share a global scale
  TileGrid grid;
  bool hadamard;
  bool square;  // blocks in the order of x are 16 x 16, else 1 x 16
  // For stochastic rounding.
  Regions regions;
  Divider cell_rows, cell_cols;  // block size of the grid that regions refer to
  bool one_region;
  // Null if not requested. A plane has both pointers.
  uint8_t* data;
  uint8_t* scale_inv;
  uint8_t* second_data;
  uint8_t* second_scale_inv;
};

constexpr int kBlock16 = kNvfp4Block;
constexpr int kTileBlocks = kTile / kBlock16;
// Bytes after 16 rows in shared memory, so that strips use different banks.
constexpr int kStripPad = 32;

template <class In, bool kRandom>
struct Nvfp4Memory {
  static constexpr int kRowBytes = kTile * sizeof(In), kRandomBytes = kTile;
  static __device__ __forceinline__ int Row(int row, int bytes) {
    return row * bytes + row / kBlock16 * kStripPad;
  }
  alignas(16) uint8_t x[kTile * kRowBytes + kTileBlocks * kStripPad];
  alignas(16) uint8_t random[kRandom ? kTile * kRandomBytes + kTileBlocks * kStripPad : 16];
  alignas(8) LineCodes row_codes, column_codes;
  float table[2][kScaleCodes];  // of the plane along rows, and of the other
  GlobalNvfp4 global[2];
  int32_t square_amax[kTileBlocks][kTileBlocks];
};

// Reads from shared memory, aligned to kBytes or to 16 if that is less.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> FromShared(const uint8_t* p) {
  constexpr int kOne = kBytes < 16 ? kBytes : 16;
  Words<kBytes> v;
#pragma unroll
  for (int i = 0; i < kBytes / kOne; ++i) {
    const auto one = reinterpret_cast<const MovedAs<kOne>*>(p)[i];
    memcpy(v.w + i * (kOne / 4), &one, kOne);
  }
  return v;
}

// Two neighbours of a row of x, and access to their values and signs.
template <class T>
struct PairOf {
  __device__ __forceinline__ float Value(int i) const {
    float v[2];
    WidenWords<T>(words, v);
    return v[i];
  }
  // Returns the signs in the highest bits of halves.
  __device__ __forceinline__ uint32_t Signs() const {
    return sizeof(T) == 4 ? __byte_perm(words.w[0], words.w[sizeof(T) / 4], 0x7632) : words.w[0];
  }
  Words<2 * sizeof(T)> words;
};

// Encodes eight elements of a row with stochastic rounding under one scale.
template <class In>
__device__ __forceinline__ uint32_t EncodeAtRandom(const EightOf<In>& x, float scale,
                                                   uint32_t random0, uint32_t random1) {
  uint32_t t[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    PairOf<In> pair;
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(In)) / 2; ++k)
      pair.words.w[k] = x.w[i * static_cast<int>(sizeof(In)) / 2 + k];
    const uint32_t random = i < 2 ? random0 : random1;
    t[i] = e2m1::RoundedHalves(
        __fmul_rn(fabsf(pair.Value(0)), scale), __fmul_rn(fabsf(pair.Value(1)), scale),
        i % 2 == 0 ? e2m1::SpreadBytes<0>(random) : e2m1::SpreadBytes<2>(random), pair.Signs());
  }
  const uint32_t a = __byte_perm(t[0], t[1], 0x7351), b = __byte_perm(t[2], t[3], 0x7351);
  const uint32_t codes = e2m1::PackHalves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  return isnan(scale) ? codes & 0x77777777u : codes;
}

// Encodes 16 rows of two columns, each column with its own scale. random(k) returns the random
// bytes of row k, one per half.
template <bool kRandom, class T, class Random>
__device__ __forceinline__ void EncodeTwoColumns(const PairOf<T> (&x)[kBlock16],
                                                 const float (&scale)[2], const Random& random,
                                                 Words<8> (&codes)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (kRandom) {
      uint32_t t[kEight];
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        const PairOf<T>& pair = x[h * kEight + k];
        t[k] = e2m1::RoundedHalves(__fmul_rn(fabsf(pair.Value(0)), scale[0]),
                                   __fmul_rn(fabsf(pair.Value(1)), scale[1]),
                                   random(h * kEight + k), pair.Signs());
      }
      // Rows 0, 2, 4, 6 and rows 1, 3, 5, 7 of both columns: the upper bytes of their halves.
      uint32_t even[2], odd[2];
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const uint32_t a = __byte_perm(t[parity], t[parity + 2], 0x7351);
        const uint32_t b = __byte_perm(t[parity + 4], t[parity + 6], 0x7351);
        (parity == 0 ? even : odd)[0] = __byte_perm(a, b, 0x5410);
        (parity == 0 ? even : odd)[1] = __byte_perm(a, b, 0x7632);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t word = e2m1::PackHalves(even[c], odd[c]);
        codes[c].w[h] = isnan(scale[c]) ? word & 0x77777777u : word;
      }
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float v[kEight];
#pragma unroll
        for (int k = 0; k < kEight; ++k) v[k] = x[h * kEight + k].Value(c);
        codes[c].w[h] = EncodeEight<E2M1, false>(v, scale[c]).w[0];
      }
    }
  }
}

// Finds the largest magnitudes of two columns.
template <class T>
__device__ __forceinline__ void AmaxOfTwo(const PairOf<T> (&x)[kBlock16], float (&amax)[2]) {
  using Abs = Magnitudes<T>;
  uint32_t m[sizeof(T) / 2];
#pragma unroll
  for (int k = 0; k < kBlock16; ++k) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
      m[i] = k == 0 ? x[k].words.w[i] : Abs::MaxAbs(m[i], x[k].words.w[i]);
  }
  const uint32_t lo = Abs::Abs(m[0]), hi = Abs::Abs(m[sizeof(T) / 2 - 1]);
  amax[0] = Abs::Value(Abs::kPerWord == 2 ? lo & 0xFFFFu : lo);
  amax[1] = Abs::Value(Abs::kPerWord == 2 ? hi >> 16 : hi);
}

template <class In, bool kRandom>
__global__ void __launch_bounds__(kTileThreads, sizeof(In) == 4 ? 2 : 3)
    QuantizeNvfp4Tiles(const Nvfp4TileArguments<In> a) {
  using Memory = Nvfp4Memory<In, kRandom>;
  using Abs = Magnitudes<In>;
  extern __shared__ uint4 shared[];
  Memory& memory = *reinterpret_cast<Memory*>(shared);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  // Start at the end of x, which a preceding amax, which walks forwards, has left in L2.
  const Tile t = a.grid.At(gridDim.x - 1 - blockIdx.x);

  {  // load the part of the tile inside the matrix
    constexpr int kVector = 16, kVectors = Memory::kRowBytes / kVector;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(a.x + a.grid.Offset(t, 0, 0));
    const int64_t step = a.grid.cols * static_cast<int64_t>(sizeof(In));
    static_assert(kTileThreads % kVectors == 0);
    constexpr int kStep = kTileThreads / kVectors;  // rows
    const int at = threadIdx.x % kVectors * kVector;
    const int height = at < t.width * static_cast<int>(sizeof(In)) ? t.height : 0;
#pragma unroll
    for (int i = 0; i < kTile / kStep; ++i) {
      const int row = i * kStep + static_cast<int>(threadIdx.x) / kVectors;
      if (row >= height) continue;
      const auto to = static_cast<uint32_t>(
          __cvta_generic_to_shared(memory.x + Memory::Row(row, Memory::kRowBytes) + at));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                   :
                   : "r"(to), "l"(from + row * step + at)
                   : "memory");
    }
  }
  // Half of the threads work for each plane.
  static_assert(kTileThreads == 2 * kScaleCodes);
  const int plane = threadIdx.x / kScaleCodes, scale_code = threadIdx.x % kScaleCodes;
  const auto matrix = static_cast<uint32_t>(t.matrix);
  if (scale_code < kWarp) {
    const GlobalNvfp4 global = plane == 0
                                   ? GlobalAt(a.scales, a.matrices.Divide(matrix))
                                   : GlobalAt(a.second_scales, a.second_matrices.Divide(matrix));
    if (scale_code == 0) memory.global[plane] = global;
  }
  if (a.square && threadIdx.x < kTileBlocks * kTileBlocks)
    memory.square_amax[threadIdx.x / kTileBlocks][threadIdx.x % kTileBlocks] = 0;
  __syncthreads();
  memory.table[plane][scale_code] =
      MultiplierOf(static_cast<uint16_t>(scale_code), memory.global[plane]);
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();

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
    const GlobalNvfp4 global = memory.global[0];
    const int64_t col = t.col + block * kBlock16;
    int64_t in_all = t.matrix * a.grid.rows + t.row + block_row;
    [[maybe_unused]] uint64_t seed = 0, index = 0;
    if (kRandom && a.one_region) {
      seed = FromWords(a.regions.places.seed);
      index = FromWords(a.regions.places.first) + in_all * a.regions.places.steps.row + col;
    }
    uint8_t* to = a.data + (in_all * a.grid.cols + col) / 2;
    const int64_t step = kRowsAtOnce * a.grid.cols / 2;
#pragma unroll 1
    for (int row = block_row; row < block_row + row_tasks * kRowsAtOnce; row += kRowsAtOnce) {
      [[maybe_unused]] Words<16> random;
      if constexpr (kRandom) {
        if (!a.one_region) {
          const int64_t strip = t.matrix * a.regions.grid_rows +
                                a.cell_rows.Divide(static_cast<uint32_t>(t.row + row));
          const auto draw = a.regions.template Of<true>(
              {strip * a.regions.grid_cols + a.cell_cols.Divide(static_cast<uint32_t>(col)), in_all,
               col});
          index = draw.index, seed = draw.seed;
        }
        random = RandomBytes(index, seed);
        index += kRowsAtOnce * a.regions.places.steps.row;
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
      const uint16_t code = EncodePair<E4M3>(UnderSixth(amax, global), 0.0f);
      memory.row_codes[row][block] = static_cast<uint8_t>(code);
      const float scale = memory.table[0][code & (kScaleCodes - 1)];
      Words<8> codes;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kRandom)
          codes.w[h] = EncodeAtRandom<In>(x[h], scale, random.w[2 * h], random.w[2 * h + 1]);
        else
          codes.w[h] = EncodeRow<In, E2M1>(x[h], scale).w[0];
      }
      Store<Write::kStream>(to, codes);
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
        const GlobalNvfp4 global = memory.global[1];
        float amax[2], scale[2];
        AmaxOfTwo(x, amax);
        const uint16_t both =
            EncodePair<E4M3>(UnderSixth(amax[0], global), UnderSixth(amax[1], global));
        Words<8> codes[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          scale[c] = memory.table[1][both >> 8 * c & (kScaleCodes - 1)];
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
        Store<Write::kStream>(to, codes[0]);
        Store<Write::kStream>(to + a.grid.rows / 2, codes[1]);
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

// --- other cases: one thread per block, correct but slow ---

struct Nvfp4BlockArguments {
  Nvfp4Scales scales;
  Blocks blocks;
  bool hadamard, random;
  Regions regions;
  Blocks cells;  // grid that regions refer to
  BlockPlane<uint8_t> out;
};

template <class In>
Status LaunchNvfp4Blocks(const Exec<Cuda>& exec, const In* x, const Nvfp4BlockArguments& a) {
  const int64_t grid_rows = a.blocks.GridRows(), grid_cols = a.blocks.GridCols();
  return ForEach(exec, a.blocks.GridSize(), [=] __device__(int64_t block) {
    const Blocks& b = a.blocks;
    const int height = static_cast<int>(b.block_rows), width = static_cast<int>(b.block_cols);
    const int64_t strip = block / grid_cols, matrix = strip / grid_rows;
    const int64_t i = strip - matrix * grid_rows, j = block - strip * grid_cols;
    const int64_t row0 = i * height, col0 = j * width;
    const In* from = x + (matrix * b.rows + row0) * b.cols + col0;
    bfloat16 rotated[kHadamardSize];
    if (a.hadamard) {
      bfloat16 in[kHadamardSize];
      for (int r = 0; r < kHadamardSize; ++r) in[r] = Narrow<bfloat16>(Widen(from[r * b.cols]));
      HadamardTransform(in, rotated);
    }
    const auto element = [&](int r, int c) {
      return a.hadamard ? Widen(rotated[r]) : Widen(from[r * b.cols + c]);
    };
    int32_t bits = 0;
    for (int r = 0; r < height; ++r)
      for (int c = 0; c < width; ++c)
        bits = max(bits, FloatBits(element(r, c)) & kFloatMagnitudeMask);
    const auto s = a.scales.Of(FloatFromBits(bits), a.scales.template Shared<E2M1>(block));
    const auto code = [&](int r, int c) {
      const float v = __fmul_rn(element(r, c), s.scale);
      if (!a.random) return EncodeE2M1(v);
      const int64_t row = row0 + r, col = col0 + c;
      const int64_t cell =
          (matrix * a.cells.GridRows() + row / a.cells.block_rows) * a.cells.GridCols() +
          col / a.cells.block_cols;
      const Regions::Draw draw = a.regions.template Of<false>({cell, matrix * b.rows + row, col});
      return EncodeStochasticE2M1(v,
                                  RandomByte(Philox4x32(draw.index >> 4, draw.seed), draw.index));
    };
    if (a.out.data != nullptr) {
      a.out.scale_inv[block] = s.scale_inv;
      for (int r = 0; r < height; ++r)
        for (int c = 0; c < width; c += 2)
          a.out.data[((matrix * b.rows + row0 + r) * b.cols + col0 + c) / 2] =
              static_cast<uint8_t>(code(r, c) | code(r, c + 1) << 4);
    } else {
      a.out.scale_inv_t[(matrix * grid_cols + j) * grid_rows + i] = s.scale_inv;
      for (int c = 0; c < width; ++c)
        for (int r = 0; r < height; r += 2)
          a.out.data_t[((matrix * b.cols + col0 + c) * b.rows + row0 + r) / 2] =
              static_cast<uint8_t>(code(r, c) | code(r + 1, c) << 4);
    }
  });
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_OPTIONS_CUH_
