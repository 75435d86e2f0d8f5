#ifndef QSHARD_KERNELS_GEMM_H_
#define QSHARD_KERNELS_GEMM_H_

#include <cstdint>

#include "kernels/launcher.h"

// out[m, n] = sum over k of a[m, k] * b[n, k], of values: codes times their scales.
namespace qshard::kernels {

// Elements by name, so that they are data: one kernel, or one of a library's, serves all of them.
// Values come last.
#define QSHARD_ELEMENT_ID(Nothing, F) k##F,
enum class ElementId { QSHARD_FOR_EACH_ELEMENT(QSHARD_ELEMENT_ID, ) kFloat32, kBFloat16, kFloat16 };
#undef QSHARD_ELEMENT_ID

constexpr bool IsValue(ElementId id) { return id >= ElementId::kFloat32; }

// What scales of blocks are stored as; kNone: there are none.
enum class ScaleId { kNone, kFloat, kE8M0, kE4M3 };

struct GemmOperand {
  const void* data;  // codes [rows, k], of 4 bits two a byte; or values
  ElementId element;
  int64_t rows;
  const void* scale_inv;  // of blocks of block_rows x `cols`, or null
  int64_t block_rows;
  const float* tensor_scale_inv;  // of the whole, or null
  bool k_first;                   // values alone: [k, rows]
};

struct GemmProblem {
  GemmOperand a, b;
  int64_t k;
  ScaleId scales;
  int64_t cols;  // of blocks, in both operands
  bool fast;     // whether tensor cores may keep fewer bits of sums
};

// Memory for a call, 16-byte aligned on CUDA.
struct Workspace {
  uint8_t* data;
  int64_t bytes;
};

// The CPU adds in fp32, in this order: products, which are exact but for those of fp32 values,
// along k within a block; that sum, times the scale of a, times that of b, to the sum of blocks.
// That sum times the scale of all of a, then of b, is rounded once more to Out. Tensor cores have
// an order of their own, and may keep fewer bits.
QSHARD_LAUNCHER_TEMPLATE((class Out), Gemm, const GemmProblem& gemm, const Workspace& workspace,
                         Out* out);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GEMM_H_
