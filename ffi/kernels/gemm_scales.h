// How block-scaled GEMMs read scales on a GPU, and the memory that takes.
#ifndef QSHARD_KERNELS_GEMM_SCALES_H_
#define QSHARD_KERNELS_GEMM_SCALES_H_

#include "core/ceil_div.h"
#include "kernels/gemm.h"

namespace qshard::kernels {

// What every size of a GEMM is a multiple of, and the alignment in bytes of its operands. Source:
// cuBLAS documentation, "8-bit and 4-bit floating point data types usage".
constexpr int64_t kGemmUnit = 16;

// Scales are in tiles of so many rows and columns; fp32 scales of squares in rows of whole tiles.
constexpr int64_t kScaleTileRows = 128, kScaleTileCols = 4;

// Scales [batch, rows, cols] in the tiles that block-scaled GEMMs read, [batch, tile_rows,
// tile_cols, 32, 4, 4]: row r of the repeated scales is row r / repeat, and its column c goes to
//   ((r / 128) * tile_cols + c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4
// tile_rows = ceil(rows * repeat / 128), tile_cols = ceil(cols / 4). What is left is zero. `repeat`
// divides 128.
QSHARD_LAUNCHER(SwizzleScale, const uint8_t* scale_inv, int64_t batch, int64_t rows, int64_t cols,
                int64_t repeat, uint8_t* tiles);

// Of what each begins at in a workspace.
constexpr int64_t kScaleAlignment = 256;

// Blocks along k.
inline int64_t GridCols(const GemmProblem& gemm) { return CeilDiv(gemm.k, gemm.cols); }

// Bytes of the scales of an operand as GEMMs read them: fp32 ones of vectors as they are, though by
// columns; of squares, in rows of whole tiles; of one byte, in whole tiles with a scale for every
// row; that of a tensor alone.
inline int64_t ScaleBytes(const GemmProblem& gemm, const GemmOperand& operand) {
  if (gemm.scales == ScaleId::kNone) return kScaleAlignment;
  const int64_t cols = RoundUp(GridCols(gemm), kScaleTileCols);
  const int64_t bytes =
      gemm.scales != ScaleId::kFloat ? RoundUp(operand.rows, kScaleTileRows) * cols
      : operand.block_rows == 1
          ? operand.rows * GridCols(gemm) * int64_t{sizeof(float)}
          : CeilDiv(operand.rows, operand.block_rows) * cols * int64_t{sizeof(float)};
  return RoundUp(bytes, kScaleAlignment);
}

// Whether GEMMs read the scales of tensors where they are. Since cuBLAS 12.9.1 they need an address
// of their unit; one of many scales in a tensor may have another. Source: TransformerEngine#1925.
inline bool ScalesStay(const GemmProblem& gemm) {
  const auto stays = [](const GemmOperand& operand) {
    return reinterpret_cast<uintptr_t>(operand.tensor_scale_inv) % kGemmUnit == 0;
  };
  return gemm.scales == ScaleId::kNone && stays(gemm.a) && stays(gemm.b);
}

// Of both, and of two numbers that NVFP4 needs beside them.
inline int64_t ScaleBytes(const GemmProblem& gemm) {
  if (ScalesStay(gemm)) return 0;
  return ScaleBytes(gemm, gemm.a) + ScaleBytes(gemm, gemm.b) + kScaleAlignment;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GEMM_SCALES_H_
