// Layout of scales that block-scaled GEMMs read on a GPU, and its size in bytes.
#ifndef QSHARD_KERNELS_GEMM_SCALES_H_
#define QSHARD_KERNELS_GEMM_SCALES_H_

#include "core/ceil_div.h"
#include "kernels/gemm.h"

namespace qshard::kernels {

// Sizes of a GEMM must be multiples of this, and operands aligned to as many bytes. Source: cuBLAS
// documentation, "8-bit and 4-bit floating point data types usage".
constexpr int64_t kGemmAlignment = 16;

// Multiple of the elements along k that are kGemmAlignment bytes.
constexpr int64_t KAlignmentOf(ElementId element) {
  return element == ElementId::kE2M1 ? 2 * kGemmAlignment : kGemmAlignment;
}

// Elements along k that share an E8M0 scale in MXFP8.
constexpr int64_t kE8M0Vector = 32;

// Scales are read in tiles of these rows and columns. Each row of fp32 scales of 2-D blocks is
// padded to whole tiles.
constexpr int64_t kScaleTileRows = 128, kScaleTileCols = 4;

// Rearranges scales [batch, rows, cols] into the tiles that block-scaled GEMMs read, [batch,
// tile_rows, tile_cols, 32, 4, 4], with tile_rows = ceil(rows * repeat / 128) and tile_cols =
// ceil(cols / 4). Row r of the repeated scales is row r / repeat, and its column c goes to
//   ((r / 128) * tile_cols + c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4
// The rest is zero. `repeat` must divide 128.
QSHARD_LAUNCHER(SwizzleScale, const uint8_t* scale_inv, int64_t batch, int64_t rows, int64_t cols,
                int64_t repeat, uint8_t* tiles);

// Alignment of each operand's scales in a workspace.
constexpr int64_t kScaleAlignment = 256;

// Number of blocks along k.
inline int64_t GridCols(const GemmProblem& gemm) { return CeilDiv(gemm.k, gemm.cols); }

// Bytes of an operand's scales as GEMMs read them. fp32 scales of 1-D blocks: stored by columns.
// fp32 scales of 2-D blocks: rows padded to whole tiles. One-byte scales: whole tiles, one scale
// per row of the operand. Tensor scale: one number.
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

// Returns whether GEMMs can read tensor scales in place. Since cuBLAS 12.9.1 a scale must be
// 16-byte aligned, and one of many scales in a tensor may not be. Source: TransformerEngine#1925.
inline bool ScalesStay(const GemmProblem& gemm) {
  const auto stays = [](const GemmOperand& operand) {
    return reinterpret_cast<uintptr_t>(operand.tensor_scale_inv) % kGemmAlignment == 0;
  };
  return gemm.scales == ScaleId::kNone && stays(gemm.a) && stays(gemm.b);
}

// Bytes for both operands, and for two numbers that NVFP4 needs in addition.
inline int64_t ScaleBytes(const GemmProblem& gemm) {
  if (ScalesStay(gemm)) return 0;
  return ScaleBytes(gemm, gemm.a) + ScaleBytes(gemm, gemm.b) + kScaleAlignment;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GEMM_SCALES_H_
