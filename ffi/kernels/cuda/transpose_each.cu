// transpose_each: transposes of many matrices, of bytes, nibbles or 32-bit words, in one launch.
//
// Reads and writes each byte once. A block of threads takes a tile of 64 rows of 64 bytes: rows
// come in, 16 bytes a thread, and columns go out, 16 bytes a thread, through shared memory whose
// rows are 68 bytes apart. Any shape and alignment will do; vectors move where rows are multiples
// of 16 bytes and start so aligned, else bytes do. What the host knows travels as kernel
// parameters, 600 matrices a launch.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/slices.h"

namespace qshard::kernels {
namespace {

constexpr int kSide = 64, kPitch = kSide + 4, kThreads = 256, kVector = 16;
constexpr int kTableMatrices = 600;

struct MatrixTable {
  int count;
  struct Matrix {
    const uint8_t* data;
    uint8_t* data_t;
    int64_t rows, cols;  // codes
    uint32_t first;      // block of threads
  } matrices[kTableMatrices];
};
static_assert(sizeof(MatrixTable) < 32000, "kernel parameters end at 32764 bytes");

// Up to kVector bytes between registers and a row of `width` bytes, from byte `at` on.
__device__ __forceinline__ Words<kVector> LoadPart(const uint8_t* row, int64_t at, int64_t width,
                                                   bool vectors) {
  if (vectors && at + kVector <= width) return Load<kVector>(row + at);
  Words<kVector> w = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (at + i < width) w.w[i / 4] |= static_cast<uint32_t>(row[at + i]) << (i % 4 * 8);
  return w;
}

__device__ __forceinline__ void StorePart(uint8_t* row, int64_t at, int64_t width, bool vectors,
                                          const Words<kVector>& w) {
  if (vectors && at + kVector <= width) {
    Store<Write::kStream>(row + at, w);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (at + i < width) row[at + i] = static_cast<uint8_t>(w.w[i / 4] >> (i % 4 * 8));
}

// The last matrix whose first block is not after this one.
__device__ __forceinline__ const MatrixTable::Matrix& MatrixOfBlock(const MatrixTable& table) {
  int low = 0, high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.matrices[middle].first <= blockIdx.x)
      low = middle;
    else
      high = middle - 1;
  }
  return table.matrices[low];
}

constexpr int kWordSide = 32;

__global__ void __launch_bounds__(kThreads)
    TransposeWordsKernel(const __grid_constant__ MatrixTable table) {
  __shared__ uint32_t tile[kWordSide][kWordSide + 1];
  const MatrixTable::Matrix& m = MatrixOfBlock(table);
  const auto* in = reinterpret_cast<const uint32_t*>(m.data);
  auto* out = reinterpret_cast<uint32_t*>(m.data_t);
  const uint32_t across = static_cast<uint32_t>((m.cols + kWordSide - 1) / kWordSide);
  const uint32_t index = blockIdx.x - m.first;
  const int64_t row = int64_t{index / across} * kWordSide;
  const int64_t col = int64_t{index % across} * kWordSide;
  const int x = threadIdx.x % kWordSide, y = threadIdx.x / kWordSide;
#pragma unroll
  for (int i = y; i < kWordSide; i += kThreads / kWordSide)
    if (row + i < m.rows && col + x < m.cols) tile[i][x] = in[(row + i) * m.cols + col + x];
  __syncthreads();
#pragma unroll
  for (int i = y; i < kWordSide; i += kThreads / kWordSide)
    if (row + x < m.rows && col + i < m.cols) out[(col + i) * m.rows + row + x] = tile[x][i];
}

template <bool kPacked>
__global__ void __launch_bounds__(kThreads)
    TransposeEachKernel(const __grid_constant__ MatrixTable table) {
  constexpr int kPerByte = kPacked ? 2 : 1;
  __shared__ uint32_t words[kSide * kPitch / 4];
  const auto* tile = reinterpret_cast<const uint8_t*>(words);
  const MatrixTable::Matrix& m = MatrixOfBlock(table);
  const int64_t width = m.cols / kPerByte, width_t = m.rows / kPerByte;  // bytes of a row
  const uint32_t across = static_cast<uint32_t>((width + kSide - 1) / kSide);
  const uint32_t index = blockIdx.x - m.first;
  const int64_t row = int64_t{index / across} * kSide, byte = int64_t{index % across} * kSide;

  const int r = threadIdx.x / 4, part = threadIdx.x % 4 * kVector;
  if (row + r < m.rows) {
    const bool vectors = width % kVector == 0 && reinterpret_cast<uintptr_t>(m.data) % kVector == 0;
    const Words<kVector> w = LoadPart(m.data + (row + r) * width, byte + part, width, vectors);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[(r * kPitch + part) / 4 + i] = w.w[i];
  }
  __syncthreads();

  // Columns of codes: 64 of 64 bytes, or 128 of 32.
  constexpr int kParts = kSide / kPerByte / kVector;
  const int c = threadIdx.x / kParts, top = threadIdx.x % kParts * kVector * kPerByte;
  if (byte * kPerByte + c >= m.cols) return;
  Words<kVector> w = {};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint8_t* from = tile + (top + i * kPerByte) * kPitch + c / kPerByte;
    uint32_t code = *from;
    if constexpr (kPacked) {
      const int shift = c % 2 * 4;
      code = (code >> shift & 0xF) | (static_cast<uint32_t>(from[kPitch]) >> shift & 0xF) << 4;
    }
    w.w[i / 4] |= code << (i % 4 * 8);
  }
  const bool vectors =
      width_t % kVector == 0 && reinterpret_cast<uintptr_t>(m.data_t) % kVector == 0;
  StorePart(m.data_t + (byte * kPerByte + c) * width_t, (row + top) / kPerByte, width_t, vectors,
            w);
}

}  // namespace

Status TransposeEach(const Exec<Cuda>& exec, const TransposePair* pairs, int64_t n, int64_t bits) {
  MatrixTable table;
  for (int64_t begin = 0; begin < n; begin += kTableMatrices) {
    table.count = static_cast<int>(std::min<int64_t>(kTableMatrices, n - begin));
    int64_t blocks = 0;
    for (int i = 0; i < table.count; ++i) {
      const TransposePair& p = pairs[begin + i];
      table.matrices[i] = {p.data, p.data_t, p.rows, p.cols, static_cast<uint32_t>(blocks)};
      const int side = bits == 32 ? kWordSide : kSide;
      blocks += CeilDiv(p.rows, side) * CeilDiv(bits == 4 ? p.cols / 2 : p.cols, side);
    }
    if (blocks == 0) continue;
    if (bits == 32)
      TransposeWordsKernel<<<GridSize(blocks), kThreads, 0, exec.stream>>>(table);
    else if (bits == 4)
      TransposeEachKernel<true><<<GridSize(blocks), kThreads, 0, exec.stream>>>(table);
    else
      TransposeEachKernel<false><<<GridSize(blocks), kThreads, 0, exec.stream>>>(table);
    const Status status = LaunchStatus();
    if (status.error != nullptr) return status;
  }
  return {};
}

}  // namespace qshard::kernels
