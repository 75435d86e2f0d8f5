// Workspace of a grouped GEMM on a GPU: the arrays that describe the groups to the library, and
// the scales in its layout.
#ifndef QSHARD_KERNELS_GEMM_GROUPS_H_
#define QSHARD_KERNELS_GEMM_GROUPS_H_

#include "core/ceil_div.h"
#include "kernels/gemm.h"
#include "kernels/gemm_scales.h"
#include "kernels/group_tiles.h"

namespace qshard::kernels {

// A thread block has the stops and ends of all groups in shared memory.
constexpr int64_t kMostGroups = 4096;

// Matrices with an address each, which are parameters of a launch.
constexpr int64_t kMostListed = 3968;

// Values of 16 bits: their axes are multiples of this many elements, 16 bytes.
constexpr int64_t kGroupedValueAlignment = 8;

// Offsets in bytes, each aligned.
struct GroupedWorkspace {
  // Arrays with one entry per group. Extents are int32: length of the group, m, n and k. Pointers:
  // a, b, out, and the scales of a and b. Scalars: alpha and beta.
  static constexpr int64_t kExtents = 4, kPointers = 5, kEntries = 64;

  GroupedWorkspace(const GemmProblem& gemm, const GemmGroups& groups)
      : extent_stride(RoundUp(groups.number, kEntries)),
        pointers(kExtents * extent_stride * int64_t{sizeof(int32_t)}),
        scalars(pointers + kPointers * extent_stride * int64_t{sizeof(void*)}),
        a_scales(scalars + kScaleAlignment),
        b_scales(a_scales + ScaleBytesOf(gemm, groups, true)),
        alphas(b_scales + ScaleBytesOf(gemm, groups, false)),
        bytes(alphas + AlphaBytes(gemm, groups)) {}

  // Offset from `alphas` of two arrays of pointers, to the alpha and beta of each group.
  static int64_t AlphaPointers(int64_t groups) {
    return RoundUp(groups * int64_t{sizeof(float)}, kScaleAlignment);
  }

  int64_t extent_stride;  // entries from one array to the next
  int64_t pointers, scalars, a_scales, b_scales, alphas, bytes;

 private:
  // fp32 block scales have a grid for each matrix. A tensor scale of each group takes 16 bytes, the
  // alignment that the library needs.
  static int64_t ScaleBytesOf(const GemmProblem& gemm, const GemmGroups& groups, bool first) {
    const GemmOperand& operand = first ? gemm.a : gemm.b;
    if (IsValue(operand.element)) return 0;
    if (gemm.scales == ScaleId::kNone)
      return RoundUp(groups.number * kGemmAlignment, kScaleAlignment);
    if (HasTiles(gemm))
      return RoundUp(TilesOf(gemm, groups, first, nullptr).Tiles() * GroupTiles::kBytes,
                     kScaleAlignment);
    return (first || groups.by_k ? 1 : groups.number) * ScaleBytes(gemm, operand);
  }

  // NVFP4: the product of the global scales of each group.
  static int64_t AlphaBytes(const GemmProblem& gemm, const GemmGroups& groups) {
    if (gemm.scales != ScaleId::kE4M3) return 0;
    return AlphaPointers(groups.number) +
           2 * RoundUp(groups.number, kEntries) * int64_t{sizeof(void*)};
  }
};

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GEMM_GROUPS_H_
