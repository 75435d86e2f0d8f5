#ifndef QSHARD_KERNELS_GEMM_H_
#define QSHARD_KERNELS_GEMM_H_

#include <cstdint>

#include "core/round.h"
#include "kernels/launcher.h"

// out[m, n] = sum over k of a[m, k] * b[n, k], over decoded values: codes times their scales.
namespace qshard::kernels {

// Elements as runtime values, because one kernel, or library call, serves all of them. Float types
// come last.
#define QSHARD_ELEMENT_ID(Nothing, F) k##F,
enum class ElementId { QSHARD_FOR_EACH_ELEMENT(QSHARD_ELEMENT_ID, ) kFloat32, kBFloat16, kFloat16 };
#undef QSHARD_ELEMENT_ID

constexpr bool IsValue(ElementId id) { return id >= ElementId::kFloat32; }

// Storage type of block scales; kNone for none.
enum class ScaleId { kNone, kFloat, kE8M0, kE4M3 };

struct GemmOperand {
  const void* data;  // codes [rows, k], packed if 4-bit, or floats
  ElementId element;
  int64_t rows;
  const void* scale_inv;  // for blocks of block_rows x `cols`, or null
  int64_t block_rows;
  const float* tensor_scale_inv;  // for the whole operand, or one per group, or null
  bool k_first;  // stored as [k, rows], with scales [blocks along k, rows]; not for 4-bit codes
};

struct GemmProblem {
  GemmOperand a, b;
  int64_t k;
  ScaleId scales;
  int64_t cols;  // block length along k, in both operands
  bool fast;     // whether tensor cores may keep fewer bits of sums
};

// Scratch memory of a call, 16-byte aligned on CUDA.
struct Workspace {
  uint8_t* data;
  int64_t bytes;
};

// Computes a product. The CPU adds in fp32, in this order: products along k within a block, which
// are exact except for fp32 inputs. Then that sum, times the scale of a, times the scale of b, is
// added to the sum over blocks. The total, times the tensor scale of a, then of b, is rounded once
// to Out. Tensor cores have their own order and may keep fewer bits.
QSHARD_LAUNCHER_TEMPLATE((class Out), Gemm, const GemmProblem& gemm, const Workspace& workspace,
                         Out* out);

// Groups of rows of `a`, each with its own matrix in `b` [number, b.rows, k], or groups of the
// contracted axis, each with its own result in out [number, a.rows, b.rows].
struct GemmGroups {
  const int32_t* stops;  // [number], where each group ends; device memory on CUDA
  const int32_t* ends;   // where the rows of each group end in out, or null if at its stop
  int64_t number;
  bool by_k;
  int64_t out_rows;                       // rows of out, or of each matrix of it
  const void* const* matrices = nullptr;  // [number] addresses, in host memory, instead of b.data

  // Length of the axis that is divided into groups.
  int64_t Rows(const GemmProblem& gemm) const { return by_k ? gemm.k : gemm.a.rows; }
};

// Returns a stop as an op uses it: not before `start`, where the group begins, nor after `rows`,
// and a multiple of `stop_alignment`. So any data are safe.
QSHARD_INLINE int64_t ClampStop(int32_t stop, int64_t start, int64_t rows, int64_t stop_alignment) {
  const int64_t most = stop < rows ? stop : rows;
  const int64_t whole = most > 0 ? most - most % stop_alignment : 0;
  return whole > start ? whole : start;
}

// Computes the product of each group, in the order of Gemm. Rows of out without a row of `a`, and
// results of groups by k without rows, are zeros.
QSHARD_LAUNCHER_TEMPLATE((class Out), GroupedGemm, const GemmProblem& gemm,
                         const GemmGroups& groups, const Workspace& workspace, Out* out);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GEMM_H_
