// fp32 block scales in the layout of cuBLASLt. Source: cuBLAS documentation, "Scaling factors
// layouts".
#ifndef QSHARD_KERNELS_CUDA_GEMM_FLOAT_SCALES_CUH_
#define QSHARD_KERNELS_CUDA_GEMM_FLOAT_SCALES_CUH_

#include "core/ceil_div.h"
#include "kernels/gemm.h"
#include "kernels/gemm_scales.h"

namespace qshard::kernels {

// Scales of `matrices` operands [rows, cols], one after the other: transposed for 1-D blocks,
// padded to rows of `stride` for 2-D blocks.
struct FloatScalesOf {
  const float* from;
  float* to;
  int64_t rows, cols, stride;  // stride 0: transposed
  int64_t matrices;

  // Number of scales of a matrix, with padding.
  __host__ __device__ int64_t Each() const { return rows * (stride == 0 ? cols : stride); }
  __host__ __device__ int64_t Size() const { return matrices * Each(); }
  __device__ void Move(int64_t i) const {
    const int64_t matrix = matrices == 1 ? 0 : i / Each(), at = i - matrix * Each();
    const float* const scales = from + matrix * rows * cols;
    if (stride == 0) {
      const int64_t col = at / rows;
      to[i] = __ldg(scales + (at - col * rows) * cols + col);
    } else {
      const int64_t row = at / stride, col = at - row * stride;
      to[i] = col < cols ? __ldg(scales + row * cols + col) : 0.0f;
    }
  }
};

inline FloatScalesOf FloatScales(const GemmProblem& gemm, const GemmOperand& operand, uint8_t* to,
                                 int64_t matrices = 1) {
  const bool vectors = operand.block_rows == 1;
  return {static_cast<const float*>(operand.scale_inv),
          reinterpret_cast<float*>(to),
          CeilDiv(operand.rows, operand.block_rows),
          GridCols(gemm),
          vectors ? 0 : RoundUp(GridCols(gemm), kScaleTileCols),
          matrices};
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_GEMM_FLOAT_SCALES_CUH_
