// Grouped products of experts by cuBLASLt, and on Hopper by a kernel of this project. One kernel
// runs before a product (group_setup.cuh). Sizes stay on the device, and the number of launches
// does not depend on the number of groups.
//
// On Hopper groups have tensor scales, blocks of 128, or 16-bit values. On Blackwell (10.x) they
// have one-byte scales, of MXFP8 and NVFP4; that path has been compiled and has never run. There
// 8-bit operands may be stored with k first, and 4-bit ones may not.
//
// Sources: cublasLt.h of cuBLAS 13.10, "grouped matrix layout"; cuBLAS documentation:
// "cublasLtMatmul" (requirements of FP8, FP4 and grouped matrices, by compute capability),
// "cublasLtMatmulDescAttributes_t" (alphas of groups) and "1D Block Scaling Factors Layout".
#include <algorithm>
#include <cstdio>

#include "core/ceil_div.h"
#include "kernels/cuda/gemm/float_scales.cuh"
#include "kernels/cuda/gemm/group_setup.cuh"
#include "kernels/cuda/gemm/grouped_plans.h"
#include "kernels/cuda/gemm/plan_parts.h"
#include "kernels/cuda/hopper/contract_rows.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_table.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_groups.h"
#include "kernels/gemm_scales.h"

namespace qshard::kernels {
namespace {

using namespace group_setup;

// Sets the scale mode of an operand. Returns false for scales that the library does not support in
// groups.
bool ModeOf(const GemmProblem& gemm, const GemmOperand& operand, cublaslt::ScaleMode* mode) {
  if (gemm.scales == ScaleId::kNone) {
    *mode = IsValue(operand.element) ? cublaslt::kScalar : cublaslt::kScalarPerGroup;
    return true;
  }
  if (HasTiles(gemm)) {
    const bool mx = gemm.scales == ScaleId::kE8M0;
    *mode = mx ? cublaslt::kVectors32E8M0 : cublaslt::kVectors16E4M3;
    return gemm.cols == (mx ? kE8M0Vector : kNvfp4Block) &&
           kScaleTileRows % operand.block_rows == 0;
  }
  *mode = operand.block_rows == 1 ? cublaslt::kVectors128Float : cublaslt::kSquares128Float;
  return gemm.cols == kVector && (operand.block_rows == 1 || operand.block_rows == kVector);
}

int64_t BytesOf(ElementId element, int64_t number) {
  if (element == ElementId::kFloat32) return number * int64_t{sizeof(float)};
  if (element == ElementId::kE2M1) return number / 2;
  return IsValue(element) ? number * int64_t{sizeof(bfloat16)} : number;
}

// Multiple to which stops are rounded down, so that the matrices of groups are aligned.
int64_t StopAlignmentOf(const GemmProblem& gemm, const GemmGroups& groups) {
  if (IsValue(gemm.a.element)) return 1;
  if (groups.by_k)
    return std::max(gemm.scales == ScaleId::kNone ? 0 : gemm.cols, KAlignmentOf(gemm.a.element));
  return gemm.scales == ScaleId::kNone ? 1 : kGemmAlignment;  // K is a multiple of 16 bytes
}

// Returns the matrices of an operand's groups. If `divided`, the groups divide its rows, or k.
GroupAddresses GroupAddressesOf(const GemmProblem& gemm, const GemmOperand& operand, bool divided,
                                bool by_k, int64_t stop_alignment) {
  if (!divided) return {operand.data, BytesOf(operand.element, operand.rows * gemm.k), 0};
  const int64_t step = !by_k ? gemm.k : operand.k_first ? operand.rows : 1;
  return {operand.data, 0, BytesOf(operand.element, stop_alignment * step)};
}

SetUp SetUpOf(const GemmProblem& gemm, const GemmGroups& groups, const GroupedWorkspace& layout,
              uint8_t* workspace, void* out, int64_t out_size) {
  const bool by_k = groups.by_k;
  SetUp s{};
  s.stops = groups.stops;
  s.ends = groups.ends;
  s.out_rows = groups.out_rows;
  s.groups = static_cast<int>(groups.number);
  s.rows = groups.Rows(gemm);
  s.stop_alignment = StopAlignmentOf(gemm, groups);
  s.m = static_cast<int32_t>(gemm.a.rows);
  s.n = static_cast<int32_t>(gemm.b.rows);
  s.k = static_cast<int32_t>(gemm.k);
  s.stride = layout.extent_stride;
  s.extents = reinterpret_cast<int32_t*>(workspace);
  s.pointers = reinterpret_cast<void**>(workspace + layout.pointers);
  s.scalars = reinterpret_cast<float*>(workspace + layout.scalars);
  const int64_t row_bytes = gemm.b.rows * out_size, matrix_bytes = gemm.a.rows * row_bytes;
  s.addresses[kA] = GroupAddressesOf(gemm, gemm.a, true, by_k, s.stop_alignment);
  s.addresses[kB] = GroupAddressesOf(gemm, gemm.b, by_k, by_k, s.stop_alignment);
  s.addresses[kOut] = by_k ? GroupAddresses{out, matrix_bytes, 0}
                           : GroupAddresses{out, 0, s.stop_alignment * row_bytes};
  s.out = static_cast<uint4*>(out);
  s.row_words = row_bytes / int64_t{sizeof(uint4)};
  s.matrix_words = by_k ? matrix_bytes / int64_t{sizeof(uint4)} : 0;
  if (IsValue(gemm.a.element)) return s;

  uint8_t* const to[] = {workspace + layout.a_scales, workspace + layout.b_scales};
  const GemmOperand* const operands[] = {&gemm.a, &gemm.b};
  if (gemm.scales == ScaleId::kNone) {
    for (int i = 0; i < 2; ++i) {
      s.tensor_scales[i] = operands[i]->tensor_scale_inv;
      s.tensor_scales_to[i] = reinterpret_cast<float*>(to[i]);
      s.addresses[kScales + i] = {to[i], kGemmAlignment, 0};
    }
  } else if (HasTiles(gemm)) {
    return s;  // WithTiles
  } else if (by_k) {
    // A column of scales after the other, so a block along k is contiguous.
    s.block_scales = FloatScales(gemm, gemm.a, to[0]);
    s.more_scales = FloatScales(gemm, gemm.b, to[1]);
    for (int i = 0; i < 2; ++i)
      s.addresses[kScales + i] = {to[i], 0, operands[i]->rows * int64_t{sizeof(float)}};
  } else {
    const int64_t cols = GridCols(gemm);
    s.row_scales = {static_cast<const float*>(gemm.a.scale_inv), reinterpret_cast<float*>(to[0]),
                    gemm.a.rows, cols};
    s.block_scales = FloatScales(gemm, gemm.b, to[1], groups.number);
    s.addresses[kScales] = {to[0], 0, s.stop_alignment * cols * int64_t{sizeof(float)}};
    s.addresses[kScales + 1] = {to[1], s.block_scales.Each() * int64_t{sizeof(float)}, 0};
  }
  return s;
}

// Adds one-byte scales to `s`.
TileSetUp WithTiles(const SetUp& s, const GemmProblem& gemm, const GemmGroups& groups,
                    const GroupedWorkspace& layout, uint8_t* workspace) {
  TileSetUp made{s};
  made.tiles[0] = TilesOf(gemm, groups, true, workspace + layout.a_scales);
  made.tiles[1] = TilesOf(gemm, groups, false, workspace + layout.b_scales);
  if (gemm.scales != ScaleId::kE4M3) return made;
  made.global_scales[0] = gemm.a.tensor_scale_inv;
  made.global_scales[1] = gemm.b.tensor_scale_inv;
  uint8_t* const alphas = workspace + layout.alphas;
  made.alphas = reinterpret_cast<float*>(alphas);
  made.alpha_pointers =
      reinterpret_cast<const float**>(alphas + GroupedWorkspace::AlphaPointers(groups.number));
  return made;
}

// Returns the arrays that describe an operand to the column-major library. `rows` and `k` are the
// extents of the operand's axes.
GroupedExtents ExtentsOf(const SetUp& s, const GemmOperand& operand, Extent rows, Extent k) {
  const auto array = [&](Extent extent) { return s.extents + extent * s.stride; };
  if (operand.k_first) return {array(rows), array(k), array(rows)};
  return {array(k), array(rows), array(kK)};
}

GroupedArrays ArraysOf(const SetUp& s, const GemmProblem& gemm, bool by_k) {
  const Extent a_rows = by_k ? kM : kLength, k = by_k ? kLength : kK;
  const auto array = [&](Extent extent) { return s.extents + extent * s.stride; };
  GroupedArrays arrays{};
  arrays.a = ExtentsOf(s, gemm.a, a_rows, k);
  arrays.b = ExtentsOf(s, gemm.b, kN, k);
  arrays.out = {array(kN), array(a_rows), array(kN)};
  if (IsValue(gemm.a.element)) return arrays;
  arrays.a_scales = s.pointers + kScales * s.stride;
  arrays.b_scales = s.pointers + (kScales + 1) * s.stride;
  return arrays;
}

template <int kListed, class S>
Status LaunchSetUp(const Exec<Cuda>& exec, const S& s, const void* const* matrices,
                   unsigned blocks) {
  static_assert(sizeof(S) + sizeof(Addresses<kListed>) <= kParameterBytes);
  Addresses<kListed> listed{};
  if constexpr (kListed > 0) std::copy_n(matrices, s.groups, listed.at);
  const size_t shared = s.groups * sizeof(int32_t) * (s.ends == nullptr ? 1 : 2);
  SetUpKernel<kListed, S><<<blocks, kThreads, shared, exec.stream>>>(s, listed);
  return LaunchStatus();
}

// Launches enough blocks for the scales, and for zeros in an eighth of the result. `matrices` has
// the addresses of the groups' matrices in b, or is null.
template <class S>
Status SetUpGroups(const Exec<Cuda>& exec, const S& s, const void* const* matrices,
                   int64_t out_words) {
  int64_t scales = std::max({s.row_scales.rows * s.row_scales.cols, s.block_scales.Size(),
                             s.more_scales.Size(), out_words / 8});
  if constexpr (S::kHasTiles) scales = std::max({scales, s.tiles[0].Words(), s.tiles[1].Words()});
  const int64_t most = int64_t{Multiprocessors()} * kBlocksPerMultiprocessor;
  const auto blocks =
      static_cast<unsigned>(std::clamp<int64_t>(CeilDiv(scales, kThreads), 1, most));
  if (matrices == nullptr) return LaunchSetUp<0>(exec, s, matrices, blocks);
  return s.groups <= kFewAddresses ? LaunchSetUp<kFewAddresses>(exec, s, matrices, blocks)
                                   : LaunchSetUp<kMostListed>(exec, s, matrices, blocks);
}

// Returns the text for a failed call. It is valid until the thread's next failure.
const char* Refusal(const SetUp& s, cublaslt::Result result) {
  thread_local char text[160];
  std::snprintf(text, sizeof(text),
                "cuBLASLt gave status %d for %d groups with M=%d, N=%d, K=%d; look for errors of "
                "CUDA before this one",
                static_cast<int>(result), s.groups, s.m, s.n, s.k);
  return text;
}

}  // namespace

template <class Out>
Status GroupedGemm(const Exec<Cuda>& exec, const GemmProblem& gemm, const GemmGroups& groups,
                   const Workspace& workspace, Out* out) {
  const int64_t elements = (groups.by_k ? groups.number : 1) * groups.out_rows * gemm.b.rows;
  if (gemm.k == 0 || gemm.a.rows == 0 || groups.number == 0)
    return ToStatus(cudaMemsetAsync(out, 0, elements * sizeof(Out), exec.stream));
  if (ContractsRows(gemm, groups, workspace))
    return ContractRows(exec, gemm, groups, workspace, out);
  GroupedKey key{};
  if (cudaGetDevice(&key.device) != cudaSuccess) return LaunchStatus();
  if (!ModeOf(gemm, gemm.a, &key.a_mode) || !ModeOf(gemm, gemm.b, &key.b_mode))
    return {
        "blocks are not of a size or scale that cuBLASLt multiplies in groups; call a product for "
        "each expert"};
  const GroupedWorkspace layout(gemm, groups);
  const SetUp s = SetUpOf(gemm, groups, layout, workspace.data, out, sizeof(Out));
  const GroupedArrays arrays = ArraysOf(s, gemm, groups.by_k);
  key.groups = groups.number;
  key.m = gemm.a.rows;
  key.n = gemm.b.rows;
  key.k = gemm.k;
  key.by_k = groups.by_k;
  key.a = TypeOf(gemm.a.element);
  key.b = TypeOf(gemm.b.element);
  key.out = kTypeOf<Out>;
  key.a_k_first = gemm.a.k_first;
  key.b_k_first = gemm.b.k_first;
  key.fast = gemm.fast;
  const auto low_bits = [](const GroupAddresses& addresses) {
    return static_cast<uint64_t>(addresses.per_group | addresses.per_step);
  };
  uint64_t matrices = Address(gemm.b.data);  // with the low bits of any of them
  for (int64_t i = 0; groups.matrices != nullptr && i < groups.number; ++i)
    matrices |= Address(groups.matrices[i]);
  key.alignment =
      AlignmentOf({Address(gemm.a.data), matrices, Address(out), low_bits(s.addresses[kA]),
                   low_bits(s.addresses[kB]), low_bits(s.addresses[kOut])});
  key.workspace_bytes = workspace.bytes - layout.bytes;
  const std::shared_ptr<GroupedPlan> plan = GroupedPlanOf(ClassOf(key), arrays);
  if (plan->error != nullptr) return {plan->error};

  const int64_t out_words = elements * int64_t{sizeof(Out)} / int64_t{sizeof(uint4)};
  const void *alpha = s.scalars, *beta = s.scalars + 1;
  if (HasTiles(gemm)) {
    const TileSetUp tiled = WithTiles(s, gemm, groups, layout, workspace.data);
    QSHARD_RETURN_IF_ERROR(SetUpGroups(exec, tiled, groups.matrices, out_words));
    if (tiled.alphas != nullptr) {
      alpha = tiled.alpha_pointers;
      beta = tiled.alpha_pointers + s.stride;
    }
  } else {
    QSHARD_RETURN_IF_ERROR(SetUpGroups(exec, s, groups.matrices, out_words));
  }
  const std::lock_guard<std::mutex> lock(plan->mutex);
  const auto multiply = [&](const cublaslt::Algorithm& algorithm) {
    void* const* const d = s.pointers + kOut * s.stride;
    return plan->library->matmul(plan->handle, plan->desc, alpha, s.pointers + kB * s.stride,
                                 plan->b, s.pointers + kA * s.stride, plan->a, beta, d, plan->out,
                                 const_cast<void**>(d), plan->out, &algorithm,
                                 workspace.data + layout.bytes, key.workspace_bytes, exec.stream);
  };
  cublaslt::Result result = SetArrays(*plan, arrays);
  if (result == cublaslt::kSuccess) {
    if (plan->algorithms.size() > 1) TryAlgorithms(plan.get(), exec.stream, multiply);
    result = multiply(plan->algorithms.front());
  }
  if (result != cublaslt::kSuccess) return {Refusal(s, result)};
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, GroupedGemm)

}  // namespace qshard::kernels
