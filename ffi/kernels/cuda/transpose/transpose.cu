// TransposeEach: transposes of matrices of bytes, nibbles or 32-bit words, all in one launch.
//
// Reads and writes each byte once. A tile has 256 rows of 128 bytes, so whole lines move on both
// sides. A thread block walks over tiles. While it writes one, the next two are copied to shared
// memory. ldmatrix transposes pairs of bytes as it reads shared memory. A thread gets 16 bytes of a
// column and permutes them. Any shape and alignment works. Vectors need rows of a multiple of 16
// bytes, aligned to 16, on both sides. Otherwise, and for words, which are small grids of scales,
// elements move one by one.
#include <type_traits>

#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/tensor_table.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/transpose.h"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256, kBlocksPerSm = 2, kStages = 3;
constexpr int kRows = 256, kBytes = 128, kTileBytes = kRows * kBytes;
constexpr int kChunk = 16, kChunks = kBytes / kChunk;  // bytes of a chunk, chunks of a row
constexpr int kFewMatrices = 4, kManyMatrices = 448;

struct Matrix {  // or a batch of matrices, back to back
  const uint8_t* data;
  uint8_t* data_t;
  int64_t width, width_t;        // bytes of a row
  Divider tiles_of_one, across;  // tiles in a matrix, and in a row of tiles
  unsigned first;
  uint8_t bits;
  bool vectors;
};

template <int kMatrices>
using MatrixTable = TensorTable<Matrix, kMatrices>;

// A matrix in registers, because a thread block mostly stays in one and then needs no loads.
struct Cursor {
  Matrix m;
  int end;  // the first tile after it
};

template <int kMatrices>
__device__ __forceinline__ Cursor CursorAt(const MatrixTable<kMatrices>& table, int tile) {
  const int i = table.Find(tile);
  const unsigned end = i + 1 < table.count ? table.entries[i + 1].first : table.parts;
  return {table.entries[i], static_cast<int>(end)};
}

struct ByteTile {
  const uint8_t* data;  // its first element
  uint8_t* data_t;
  int64_t width, width_t;
  int rows, bytes;  // that exist
};

__device__ __forceinline__ ByteTile ByteTileAt(const Matrix& m, int index) {
  uint32_t in_one = static_cast<uint32_t>(index) - m.first;
  const uint32_t one = m.tiles_of_one.Divide(in_one);
  in_one -= one * m.tiles_of_one.divisor();
  const uint32_t down = m.across.Divide(in_one);
  const int64_t row = int64_t{down} * kRows;
  const int64_t byte = int64_t{in_one - down * m.across.divisor()} * kBytes;
  const auto elements = [&](int64_t bytes) { return bytes * 8 >> (__ffs(m.bits) - 1); };
  const auto bytes = [&](int64_t elements) { return elements * m.bits >> 3; };
  const int64_t rows = elements(m.width_t), others = one * m.width * rows;
  return {m.data + others + row * m.width + byte,
          m.data_t + others + elements(byte) * m.width_t + bytes(row),
          m.width,
          m.width_t,
          static_cast<int>(min(int64_t{kRows}, rows - row)),
          static_cast<int>(min(int64_t{kBytes}, m.width - byte))};
}

// --- shared memory ---

// Loads four matrices of 8 rows of 8 pairs of bytes, transposed. Lane l passes the address of row l
// % 8 of matrix l / 8. For each matrix it gets column l / 4, rows l % 4 * 2 (low) and l % 4 * 2 + 1
// (high).
__device__ __forceinline__ void LoadColumns(uint32_t at, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}

// A thread gets kRun consecutive rows, 16 bytes of a column of the transpose. So rows 0 and 1, kRun
// and kRun + 1, and so on form a matrix of ldmatrix. They are at 8 different positions.
template <int kBits>
constexpr int kRun = 16 * 8 / kBits;

// Returns the offset of chunk `chunk` of row `row` of a tile.
template <int kBits>
__device__ __forceinline__ int ChunkOffset(int row, int chunk) {
  return row * kBytes + (chunk ^ (row / kRun<kBits> % 4 * 2 + row % 2)) * kChunk;
}

// --- device memory to shared memory ---

template <int kBits>
__device__ __forceinline__ void Fetch(const ByteTile& t, uint32_t tile) {
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  if (chunk * kChunk >= t.bytes) return;
  const uint8_t* from = t.data + first * t.width + chunk * kChunk;
  constexpr int kStep = kThreads / kChunks;
#pragma unroll
  for (int i = 0; i < kRows; i += kStep, from += kStep * t.width)
    if (first + i < t.rows) CopyAsync(tile + ChunkOffset<kBits>(first + i, chunk), from);
}

// --- shared memory to device memory ---

// Computes word i of 16 bytes of 2 columns of bytes, or 4 columns of nibbles, from 4 or 8 rows of
// them, two rows a word.
__device__ __forceinline__ void TransposeWord(const uint32_t (&r)[8], int i,
                                              Words<kChunk> (&out)[2]) {
  out[0].w[i] = __byte_perm(r[2 * i], r[2 * i + 1], 0x6420);
  out[1].w[i] = __byte_perm(r[2 * i], r[2 * i + 1], 0x7531);
}
__device__ __forceinline__ void TransposeWord(const uint32_t (&r)[16], int i,
                                              Words<kChunk> (&out)[4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    // Bytes k of even rows, then of odd rows; then all even rows, and all odd rows.
    const uint32_t select = k == 0 ? 0x6240 : 0x7351;
    const uint32_t upper = __byte_perm(r[4 * i], r[4 * i + 1], select);
    const uint32_t lower = __byte_perm(r[4 * i + 2], r[4 * i + 3], select);
    const uint32_t even = __byte_perm(upper, lower, 0x5410);
    const uint32_t odd = __byte_perm(upper, lower, 0x7632);
    out[2 * k].w[i] = (even & 0x0F0F0F0Fu) | (odd << 4 & 0xF0F0F0F0u);
    out[2 * k + 1].w[i] = (even >> 4 & 0x0F0F0F0Fu) | (odd & 0xF0F0F0F0u);
  }
}

template <int kBits>
__device__ __forceinline__ void WriteTile(const ByteTile& t, uint32_t tile) {
  constexpr int kPerByte = 8 / kBits, kColumns = 2 * kPerByte;  // in a pair of bytes
  constexpr int kUnitRows = 4 * kRun<kBits>, kUnits = kRows / kUnitRows;
  const int64_t width_t = t.width_t;
  const int lane = threadIdx.x % 32;
  const int given = lane % 8 / 2 * kRun<kBits> + lane / 8 * 2 + lane % 2;
#pragma unroll
  for (int unit = threadIdx.x / 32; unit < kUnits * kChunks; unit += kThreads / 32) {
    const int chunk = unit / kUnits, top = unit % kUnits * kUnitRows;
    if (chunk * kChunk >= t.bytes) break;
    uint32_t r[kRun<kBits> / 2];
#pragma unroll
    for (int i = 0; i < kRun<kBits>; i += 8) {
      uint32_t part[4];
      LoadColumns(tile + ChunkOffset<kBits>(top + given + i, chunk), part);
#pragma unroll
      for (int k = 0; k < 4; ++k) r[i / 2 + k] = part[k];
    }
    Words<kChunk> out[kColumns];
#pragma unroll
    for (int i = 0; i < kChunk / 4; ++i) TransposeWord(r, i, out);
    const int at = top / kPerByte + lane % 4 * kChunk;
    const int column = chunk * kChunk * kPerByte + lane / 4 * kColumns;
    uint8_t* to = t.data_t + column * width_t + at;
#pragma unroll
    for (int c = 0; c < kColumns; ++c, to += width_t)
      if (at * kPerByte < t.rows) Store<Write::kCached>(to, out[c]);
  }
}

// --- elements one by one ---

// A warp reads along a row and writes along a column. A thread takes one element of each row of the
// transpose, or two that share a byte. `tile` is in shared memory, where words of consecutive rows
// are in 32 different banks.
template <int kBits>
__device__ __forceinline__ void MoveElements(const ByteTile& t, uint8_t* tile) {
  using T = std::conditional_t<kBits == 32, uint32_t, uint8_t>;
  constexpr int kPerT = kBits == 4 ? 2 : 1, kSize = sizeof(T), kAcross = kBytes / kSize;
  const auto at = [&](int row, int byte) -> T& {
    return *reinterpret_cast<T*>(tile + row * kBytes + (byte ^ row % 32 * 4));
  };
  const int byte = threadIdx.x % kAcross * kSize;
  if (byte < t.bytes) {
#pragma unroll 8
    for (int row = threadIdx.x / kAcross; row < t.rows; row += kThreads / kAcross)
      at(row, byte) = __ldg(reinterpret_cast<const T*>(t.data + row * t.width + byte));
  }
  __syncthreads();
  const int row = threadIdx.x * kPerT;
  if (row >= t.rows) return;
  const int64_t width_t = t.width_t / kSize;  // in units of T
  T* to = reinterpret_cast<T*>(t.data_t) + threadIdx.x;
#pragma unroll 8
  for (int i = 0; i < t.bytes; i += kSize, to += kPerT * width_t) {
    const T upper = at(row, i);
    if constexpr (kBits == 4) {
      const T lower = at(row + 1, i);
      to[0] = static_cast<T>((upper & 0xF) | lower << 4);
      to[width_t] = static_cast<T>(upper >> 4 | (lower & 0xF0));
    } else {
      *to = upper;
    }
  }
}

template <int kMatrices>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    TransposeKernel(const __grid_constant__ MatrixTable<kMatrices> table) {
  static_assert(kThreads == kRows);
  extern __shared__ __align__(128) uint8_t stages[];
  const auto stage_at = [&](int stage) { return SharedAddress(stages) + stage * kTileBytes; };
  const int step = gridDim.x, ahead = (kStages - 1) * step;
  Cursor fetching = CursorAt(table, blockIdx.x), writing = fetching;
  const int tiles = static_cast<int>(table.parts);
  int stage = 0, free = 0;
  for (int index = static_cast<int>(blockIdx.x) - ahead; index < tiles; index += step) {
    if (index + ahead < tiles) {
      if (index + ahead >= fetching.end) fetching = CursorAt(table, index + ahead);
      const ByteTile t = ByteTileAt(fetching.m, index + ahead);
      if (fetching.m.vectors)
        fetching.m.bits == 8 ? Fetch<8>(t, stage_at(free)) : Fetch<4>(t, stage_at(free));
    }
    EndCopies();
    free = free + 1 == kStages ? 0 : free + 1;
    if (index < 0) continue;
    WaitForCopies<kStages - 1>();
    __syncthreads();
    if (index >= writing.end) writing = CursorAt(table, index);
    const Matrix& m = writing.m;
    const ByteTile t = ByteTileAt(m, index);
    uint8_t* elements = stages + stage * kTileBytes;
    if (m.vectors)
      m.bits == 8 ? WriteTile<8>(t, stage_at(stage)) : WriteTile<4>(t, stage_at(stage));
    else if (m.bits == 4)
      MoveElements<4>(t, elements);
    else
      m.bits == 8 ? MoveElements<8>(t, elements) : MoveElements<32>(t, elements);
    __syncthreads();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

template <int kMatrices>
Status TransposeTables(const Exec<Cuda>& exec, const TransposePair* pairs, int64_t n) {
  constexpr auto kKernel = TransposeKernel<kMatrices>;
  constexpr int kShared = kStages * kTileBytes;
  QSHARD_RETURN_IF_ERROR(AllowSharedMemory(kKernel, kShared));
  MatrixTable<kMatrices> table;
  const auto enter = [&](int64_t i, Matrix& m) -> int64_t {
    const TransposePair& p = pairs[i];
    if (p.batch * p.rows * p.cols == 0) return 0;
    const int64_t width = p.cols * p.bits / 8, width_t = p.rows * p.bits / 8;
    const int64_t across = CeilDiv(width, kBytes), tiles_of_one = across * CeilDiv(p.rows, kRows);
    const bool vectors = p.bits != 32 && width % kChunk == 0 && width_t % kChunk == 0 &&
                         IsAligned(p.data, kChunk) && IsAligned(p.data_t, kChunk);
    m = {p.data,
         p.data_t,
         width,
         width_t,
         Divider(tiles_of_one),
         Divider(across),
         0,
         static_cast<uint8_t>(p.bits),
         vectors};
    return p.batch * tiles_of_one;
  };
  return ForEachTable(table, n, enter, [&](int64_t) {
    const int64_t blocks = std::min<int64_t>(table.parts, kBlocksPerSm * Multiprocessors());
    if (blocks > 0)
      kKernel<<<static_cast<unsigned>(blocks), kThreads, kShared, exec.stream>>>(table);
    return LaunchStatus();
  });
}

}  // namespace

Status TransposeEach(const Exec<Cuda>& exec, const TransposePair* pairs, int64_t n) {
  const int64_t bytes = n == 1 ? pairs->batch * pairs->rows * pairs->cols * pairs->bits / 8 : 0;
  if (bytes > 0 && std::min(pairs->rows, pairs->cols) == 1)  // the memory is the same
    return ToStatus(
        cudaMemcpyAsync(pairs->data_t, pairs->data, bytes, cudaMemcpyDeviceToDevice, exec.stream));
  return n <= kFewMatrices ? TransposeTables<kFewMatrices>(exec, pairs, n)
                           : TransposeTables<kManyMatrices>(exec, pairs, n);
}

}  // namespace qshard::kernels
