// Matrix products of quantized operands, with the contracted axis last in both, and the scale
// layout that tensor cores read.
#include "kernels/gemm.h"

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "kernels/gemm_groups.h"
#include "kernels/gemm_scales.h"
#include "schema/handler.h"

namespace qshard {
namespace {

using kernels::ElementId;
using kernels::GemmGroups;
using kernels::GemmOperand;
using kernels::GemmProblem;
using kernels::ScaleId;

// Returns the element that an attribute names.
template <class Platform>
ElementId ElementOf(const Call<Platform>& call, std::string_view attribute) {
#define QSHARD_NAME_AND_ID(Nothing, F) std::make_pair(std::string_view(F::kName), ElementId::k##F),
  constexpr std::pair<std::string_view, ElementId> kIds[] = {
      QSHARD_FOR_EACH_ELEMENT(QSHARD_NAME_AND_ID, )};
#undef QSHARD_NAME_AND_ID
  for (const auto& [name, id] : kIds)
    if (name == call.text(attribute)) return id;
  return ElementId::kE4M3;  // the row allows no other name
}

// Returns the type of a buffer of floats.
ElementId ValueOf(const Buffer& buffer) {
  return buffer.dtype == kDataTypeOf<float>      ? ElementId::kFloat32
         : buffer.dtype == kDataTypeOf<bfloat16> ? ElementId::kBFloat16
                                                 : ElementId::kFloat16;
}

// Checks what cuBLASLt needs for products of floats.
Error CheckValuesForCuda(const char* op, const Buffer& a, const Buffer& workspace,
                         const Buffer& out) {
  QSHARD_REQUIRE(out.dtype == a.dtype || out.dtype == kDataTypeOf<float>, op, ": a result of ",
                 NameOf(out.dtype), " is not supported by cuBLASLt for operands of ",
                 NameOf(a.dtype), "; pass that dtype, or float32");
  QSHARD_REQUIRE(reinterpret_cast<uintptr_t>(workspace.data) % kernels::kGemmAlignment == 0, op,
                 ": workspace is not aligned to ", kernels::kGemmAlignment, " bytes; copy it");
  return {};
}

// Checks what tensor cores need for products of codes. Front ends decide this before a call
// (qshard/gemm_dispatch.py), so an error here is for direct callers.
[[maybe_unused]] Error CheckForCuda(const char* op, const GemmProblem& gemm,
                                    const Buffer& workspace, const Buffer& out) {
  const int64_t m = gemm.a.rows, n = gemm.b.rows, k = gemm.k, alignment = kernels::kGemmAlignment;
  const int64_t k_alignment = kernels::KAlignmentOf(gemm.a.element);
  QSHARD_REQUIRE(m % alignment == 0 && n % alignment == 0 && k % k_alignment == 0 && k > 0, op,
                 ": a product of (", m, ", ", k, ") and (", n, ", ", k,
                 ") has sizes that are not positive multiples of ", alignment,
                 k_alignment == alignment ? "" : ", and K of 32",
                 ", which tensor cores need; pad the matrices, or multiply dequantized values");
  for (const void* data : {gemm.a.data, gemm.b.data, static_cast<const void*>(out.data),
                           static_cast<const void*>(workspace.data)})
    QSHARD_REQUIRE(reinterpret_cast<uintptr_t>(data) % kernels::kGemmAlignment == 0, op,
                   ": codes, result or workspace are not aligned to ", kernels::kGemmAlignment,
                   " bytes, which tensor cores need; copy them");
  const int64_t needed = kernels::ScaleBytes(gemm);
  QSHARD_REQUIRE(Elements(workspace) >= needed, op, ": workspace (", Elements(workspace),
                 " bytes) is less than the ", needed,
                 " that scales need; pass qshard.gemm_dispatch.workspace_size bytes");
  return {};
}

// Checks what cuBLASLt needs for grouped products, as CheckForCuda does. Group sizes are data,
// which the kernels make safe.
[[maybe_unused]] Error CheckGroupedForCuda(const char* op, const GemmProblem& gemm,
                                           const GemmGroups& groups, const Buffer& a,
                                           const Buffer& workspace, const Buffer& out) {
  const int64_t m = gemm.a.rows, n = gemm.b.rows, k = gemm.k;
  const bool values = IsValue(gemm.a.element);
  QSHARD_REQUIRE(!values || gemm.a.element != ElementId::kFloat32, op,
                 ": a and b are float32, which cuBLASLt does not multiply in groups; cast them to "
                 "bfloat16, or call a product for each expert");
  if (values) QSHARD_RETURN_IF_ERROR(CheckValuesForCuda(op, a, workspace, out));
  const int64_t alignment = values ? kernels::kGroupedValueAlignment : kernels::kGemmAlignment;
  const int64_t k_alignment = values ? alignment : kernels::KAlignmentOf(gemm.a.element);
  // Rows of a group need no alignment if they are not contracted, nor if they come first in memory.
  const bool any_m = !groups.by_k, any_k = groups.by_k && gemm.a.k_first;
  QSHARD_REQUIRE(
      (any_m || m % alignment == 0) && n % alignment == 0 && (any_k || k % k_alignment == 0), op,
      ": a product with M=", m, ", N=", n, ", K=", k, " has sizes that are not multiples of ",
      alignment, k_alignment == alignment ? "" : ", and K of 32",
      ", which tensor cores need; pad the matrices, or call a product for each expert");
  const int64_t most = groups.matrices == nullptr ? kernels::kMostGroups : kernels::kMostListed;
  QSHARD_REQUIRE(groups.number <= most, op, ": stops has ", groups.number, " experts, more than ",
                 most, "; call the op for a part of them");
  QSHARD_REQUIRE(std::max({m, n, k}) <= INT32_MAX, op, ": a product with M=", m, ", N=", n,
                 ", K=", k, " has a size of more than 2^31 - 1; divide it");
  std::vector<const void*> memory = {gemm.a.data, gemm.b.data, out.data, workspace.data};
  if (groups.matrices != nullptr)
    memory.insert(memory.end(), groups.matrices, groups.matrices + groups.number);
  for (const void* data : memory)
    QSHARD_REQUIRE(reinterpret_cast<uintptr_t>(data) % kernels::kGemmAlignment == 0, op,
                   ": operands, result or workspace are not aligned to ", kernels::kGemmAlignment,
                   " bytes, which tensor cores need; copy them");
  const int64_t needed = kernels::GroupedWorkspace(gemm, groups).bytes;
  QSHARD_REQUIRE(Elements(workspace) >= needed, op, ": workspace (", Elements(workspace),
                 " bytes) is less than the ", needed,
                 " that groups need; pass qshard.gemm_dispatch.grouped_workspace_size bytes");
  return {};
}

template <class Platform>
Error Run(const Call<Platform>& call, GemmProblem gemm, const Buffer& a, const Buffer& b) {
  const Buffer &out = call.ret(0), &workspace = call.ret(1);
  if (Elements(out) == 0) return {};
  gemm.a.data = a.data;
  gemm.b.data = b.data;
  gemm.a.rows = a.dims[gemm.a.k_first ? 1 : 0];
  gemm.b.rows = b.dims[gemm.b.k_first ? 1 : 0];
  gemm.k = call.binding.Length(gemm.a.k_first ? 0 : 1);
  if constexpr (std::is_same_v<Platform, Cuda>)
    QSHARD_RETURN_IF_ERROR(IsValue(gemm.a.element)
                               ? CheckValuesForCuda(call.op(), a, workspace, out)
                               : CheckForCuda(call.op(), gemm, workspace, out));
  return DispatchFloat(out, [&](auto type) {
    return call(kernels::Gemm(call.exec, gemm, {Mutable<uint8_t>(workspace), Elements(workspace)},
                              Mutable<decltype(type)>(out)));
  });
}

// Runs a grouped product. `b` has the matrices of all groups, or is null and `listed` has
// addresses. `ends` is null if the result has the rows of `a`.
template <class Platform>
Error RunGrouped(const Call<Platform>& call, GemmProblem gemm, const void* b, bool by_k,
                 const Buffer& stops, const Buffer* ends = nullptr,
                 const std::vector<const void*>* listed = nullptr) {
  const Buffer &a = call.arg(0), &out = call.ret(0), &workspace = call.ret(1);
  if (Elements(out) == 0) return {};
  gemm.a.data = a.data;
  gemm.b.data = b;
  gemm.a.rows = a.dims[gemm.a.k_first ? 1 : 0];
  gemm.b.rows = out.dims[out.rank - 1];
  gemm.k = call.binding.Length(gemm.a.k_first ? 0 : 1);
  const GemmGroups groups{Data<int32_t>(stops),   ends == nullptr ? nullptr : Data<int32_t>(*ends),
                          Elements(stops),        by_k,
                          out.dims[out.rank - 2], listed == nullptr ? nullptr : listed->data()};
  if constexpr (std::is_same_v<Platform, Cuda>)
    QSHARD_RETURN_IF_ERROR(CheckGroupedForCuda(call.op(), gemm, groups, a, workspace, out));
  return DispatchFloat(out, [&](auto type) {
    return call(kernels::GroupedGemm(call.exec, gemm, groups,
                                     {Mutable<uint8_t>(workspace), Elements(workspace)},
                                     Mutable<decltype(type)>(out)));
  });
}

// Floats as operands, where `k_first` ones are stored transposed, with k first.
template <class Platform>
GemmProblem ValueProblem(const Call<Platform>& call, bool a_k_first, bool b_k_first) {
  GemmProblem gemm{};
  gemm.a = {nullptr, ValueOf(call.arg(0)), 0, nullptr, 1, nullptr, a_k_first};
  gemm.b = {nullptr, ValueOf(call.arg(1)), 0, nullptr, 1, nullptr, b_k_first};
  return gemm;
}

// Returns the addresses of the tensors of a list.
template <class Platform>
std::vector<const void*> AddressesOf(const Call<Platform>& call, int operand) {
  std::vector<const void*> addresses(call.binding.list_length());
  for (size_t i = 0; i < addresses.size(); ++i) addresses[i] = call.arg(operand, i).data;
  return addresses;
}

// Codes with tensor scales as operands: one of each operand, or of each group.
template <class Platform>
GemmProblem TensorProblem(const Call<Platform>& call, int b_scale = 3) {
  const auto operand = [&](const char* element, int scale) {
    return GemmOperand{nullptr, ElementOf(call, element),     0,    nullptr,
                       1,       Data<float>(call.arg(scale)), false};
  };
  GemmProblem gemm{};
  gemm.a = operand("a_element", 1);
  gemm.b = operand("b_element", b_scale);
  gemm.fast = call.flag("fast");
  return gemm;
}

// Codes in blocks of a_rows x cols and b_rows x cols as operands.
template <class Platform>
GemmProblem BlockProblem(const Call<Platform>& call, int64_t a_rows, int64_t b_rows,
                         int b_scale = 3) {
  const auto operand = [&](const char* element, int scale, int64_t rows) {
    return GemmOperand{nullptr, ElementOf(call, element), 0, call.arg(scale).data, rows, nullptr,
                       false};
  };
  GemmProblem gemm{};
  gemm.a = operand("a_element", 1, a_rows);
  gemm.b = operand("b_element", b_scale, b_rows);
  gemm.scales = call.text("scale_dtype") == E8M0::kName ? ScaleId::kE8M0 : ScaleId::kFloat;
  gemm.cols = call.integer("cols");
  return gemm;
}

// E2M1 codes in blocks of a_rows x 16 and b_rows x 16 with E4M3 scales, and one global scale of
// each operand or group.
template <class Platform>
GemmProblem Nvfp4Problem(const Call<Platform>& call, int64_t a_rows, int64_t b_rows) {
  const auto operand = [&](int first, int64_t rows) {
    return GemmOperand{nullptr, ElementId::kE2M1,
                       0,       call.arg(first + 1).data,
                       rows,    Data<float>(call.arg(first + 2)),
                       false};
  };
  GemmProblem gemm{};
  gemm.a = operand(0, a_rows);
  gemm.b = operand(3, b_rows);
  gemm.scales = ScaleId::kE4M3;
  gemm.cols = kNvfp4Block;
  return gemm;
}

}  // namespace

// out = (a @ b.T) * a_scale_inv * b_scale_inv, for codes with one scale per operand.
QSHARD_DEFINE_OP(gemm) { return Run(call, TensorProblem(call), call.arg(0), call.arg(2)); }

// out = a @ b.T, for codes in blocks of a_rows x cols and b_rows x cols with fp32 or E8M0 scales.
QSHARD_DEFINE_OP(gemm_block) {
  return Run(call, BlockProblem(call, call.integer("a_rows"), call.integer("b_rows")), call.arg(0),
             call.arg(2));
}

// out = (a @ b.T) * a_global_scale_inv * b_global_scale_inv, for E2M1 codes in blocks of 1x16 or
// 16x16 with E4M3 scales.
QSHARD_DEFINE_OP(gemm_nvfp4) {
  return Run(call, Nvfp4Problem(call, call.integer("a_rows"), call.integer("b_rows")), call.arg(0),
             call.arg(3));
}

// out = a @ b.T of floats. The first letter tells how a is stored, `n` for [m, k] and `t` for [k,
// m]. The second tells how b is stored, `n` for [k, n] and `t` for [n, k].
QSHARD_DEFINE_OP(gemm_values_nt) {
  return Run(call, ValueProblem(call, false, false), call.arg(0), call.arg(1));
}
QSHARD_DEFINE_OP(gemm_values_nn) {
  return Run(call, ValueProblem(call, false, true), call.arg(0), call.arg(1));
}
QSHARD_DEFINE_OP(gemm_values_tn) {
  return Run(call, ValueProblem(call, true, true), call.arg(0), call.arg(1));
}
QSHARD_DEFINE_OP(gemm_values_tt) {
  return Run(call, ValueProblem(call, true, false), call.arg(0), call.arg(1));
}

// out[r] = (a[r] @ b[e].T) * a_scale_inv[e] * b_scale_inv[e] for each row r of expert e, the rows
// from stops[e - 1] to stops[e]. Stops are clamped to 0..m and to be at least the one before. The
// result is written without padding: the first rows of expert e are rows ends[e - 1] to ends[e] of
// out, and ends are clamped likewise to 0..tokens. Other rows of out are zeros.
QSHARD_DEFINE_OP(gemm_grouped) {
  return RunGrouped(call, TensorProblem(call), call.arg(2).data, false, call.arg(4), &call.arg(5));
}

// out[e] = (a[:, rows] @ b[:, rows].T) * a_scale_inv[e] * b_scale_inv[e], with the rows of expert
// e. An expert without rows gives zeros.
QSHARD_DEFINE_OP(gemm_grouped_k) {
  return RunGrouped(call, TensorProblem(call), call.arg(2).data, true, call.arg(4));
}

// out[r] = a[r] @ b[e].T as in gemm_grouped, for codes in blocks of 1 x cols and b_rows x cols.
QSHARD_DEFINE_OP(gemm_grouped_block) {
  return RunGrouped(call, BlockProblem(call, 1, call.integer("b_rows")), call.arg(2).data, false,
                    call.arg(4));
}

// out[e] = a[:, rows] @ b[:, rows].T as in gemm_grouped_k, for codes in blocks of 1 x cols. Stops
// are rounded down to a multiple of cols.
QSHARD_DEFINE_OP(gemm_grouped_block_k) {
  return RunGrouped(call, BlockProblem(call, 1, 1), call.arg(2).data, true, call.arg(4));
}

// out[e] = a[rows].T @ b[rows] for the rows of expert e, for FP8 codes in blocks of 32 rows of a
// column with E8M0 scales. Stops are rounded down to a multiple of 32.
QSHARD_DEFINE_OP(gemm_grouped_mxfp8_tn) {
  const auto operand = [&](const char* element, int scale) {
    return GemmOperand{nullptr, ElementOf(call, element), 0, call.arg(scale).data, 1, nullptr,
                       true};
  };
  GemmProblem gemm{};
  gemm.a = operand("a_element", 1);
  gemm.b = operand("b_element", 3);
  gemm.scales = ScaleId::kE8M0;
  gemm.cols = kernels::kE8M0Vector;
  return RunGrouped(call, gemm, call.arg(2).data, true, call.arg(4));
}

// out[r] = a[r] @ b[e].T * a_global_scale_inv[e] * b_global_scale_inv[e] as in gemm_grouped, for
// E2M1 codes in blocks of 1x16, and in b of 1x16 or 16x16, with E4M3 scales.
QSHARD_DEFINE_OP(gemm_grouped_nvfp4) {
  return RunGrouped(call, Nvfp4Problem(call, 1, call.integer("b_rows")), call.arg(3).data, false,
                    call.arg(6));
}

// out[e] = a[:, rows] @ b[:, rows].T * a_global_scale_inv[e] * b_global_scale_inv[e] as in
// gemm_grouped_k, for E2M1 codes in blocks of 1x16. Stops are rounded down to a multiple of 16.
QSHARD_DEFINE_OP(gemm_grouped_nvfp4_k) {
  return RunGrouped(call, Nvfp4Problem(call, 1, 1), call.arg(3).data, true, call.arg(6));
}

// gemm_grouped and gemm_grouped_block with the matrix of each expert in its own memory, b[e].
QSHARD_DEFINE_OP(gemm_grouped_list) {
  const std::vector<const void*> matrices = AddressesOf(call, 7);
  return RunGrouped(call, TensorProblem(call, 2), nullptr, false, call.arg(3), &call.arg(4),
                    &matrices);
}
QSHARD_DEFINE_OP(gemm_grouped_block_list) {
  const std::vector<const void*> matrices = AddressesOf(call, 6);
  return RunGrouped(call, BlockProblem(call, 1, call.integer("b_rows"), 2), nullptr, false,
                    call.arg(3), nullptr, &matrices);
}

// Grouped products of floats: out[r] = a[r] @ b[e].T, out[r] = a[r] @ b[e], and out[e] = a[rows].T
// @ b[rows]. The letters are as in gemm_values_nt.
QSHARD_DEFINE_OP(gemm_grouped_values_nt) {
  return RunGrouped(call, ValueProblem(call, false, false), call.arg(1).data, false, call.arg(2));
}
QSHARD_DEFINE_OP(gemm_grouped_values_nn) {
  return RunGrouped(call, ValueProblem(call, false, true), call.arg(1).data, false, call.arg(2));
}
QSHARD_DEFINE_OP(gemm_grouped_values_tn) {
  return RunGrouped(call, ValueProblem(call, true, true), call.arg(1).data, true, call.arg(2));
}

// Rearranges one-byte scales [*batch, rows, cols] into the tiles that block-scaled GEMMs read,
// padded with zeros. Scales are stored and gathered compact and row-major, and only this op
// produces another order. A tile has 128 rows. `rows` scales fill it, each repeated 128 / rows
// times: 128, or 8 for scales of 16x16 blocks. Source: cuBLAS documentation, "1D Block Scaling
// Factors Layout".
QSHARD_DEFINE_OP(swizzle_scale) {
  const Matrices m(call.binding);
  return call(kernels::SwizzleScale(call.exec, Data<uint8_t>(call.arg(0)), m.batch, m.rows, m.cols,
                                    kernels::kScaleTileRows / call.integer("rows"),
                                    Mutable<uint8_t>(call.ret(0))));
}

}  // namespace qshard
