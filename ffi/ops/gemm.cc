// Matrix products of quantized operands, with the contracted axis last in both, and the scale
// layout that tensor cores read.
#include "kernels/gemm.h"

#include <type_traits>

#include "kernels/gemm_scales.h"
#include "schema/handler.h"

namespace qshard {
namespace {

using kernels::ElementId;
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
  QSHARD_REQUIRE(reinterpret_cast<uintptr_t>(workspace.data) % kernels::kGemmUnit == 0, op,
                 ": workspace is not aligned to ", kernels::kGemmUnit, " bytes; copy it");
  return {};
}

// Checks what tensor cores need for products of codes. Front ends decide this before a call
// (qshard/gemm_dispatch.py), so an error here is for direct callers.
Error CheckForCuda(const char* op, const GemmProblem& gemm, const Buffer& workspace,
                   const Buffer& out) {
  const int64_t m = gemm.a.rows, n = gemm.b.rows, k = gemm.k, unit = kernels::kGemmUnit;
  const int64_t k_unit = gemm.a.element == ElementId::kE2M1 ? 2 * unit : unit;  // also in bytes
  QSHARD_REQUIRE(m % unit == 0 && n % unit == 0 && k % k_unit == 0 && k > 0, op, ": a product of (",
                 m, ", ", k, ") and (", n, ", ", k,
                 ") has sizes that are not positive multiples of ", unit,
                 k_unit == unit ? "" : ", and K of 32",
                 ", which tensor cores need; pad the matrices, or multiply dequantized values");
  for (const void* data : {gemm.a.data, gemm.b.data, static_cast<const void*>(out.data),
                           static_cast<const void*>(workspace.data)})
    QSHARD_REQUIRE(reinterpret_cast<uintptr_t>(data) % kernels::kGemmUnit == 0, op,
                   ": codes, result or workspace are not aligned to ", kernels::kGemmUnit,
                   " bytes, which tensor cores need; copy them");
  const int64_t needed = kernels::ScaleBytes(gemm);
  QSHARD_REQUIRE(Elements(workspace) >= needed, op, ": workspace (", Elements(workspace),
                 " bytes) is less than the ", needed,
                 " that scales need; pass qshard.gemm_dispatch.workspace_size bytes");
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

// out = a @ b.T of floats, where `k_first` operands are stored transposed, with k first.
template <class Platform>
Error RunValues(const Call<Platform>& call, bool a_k_first, bool b_k_first) {
  GemmProblem gemm{};
  gemm.a = {nullptr, ValueOf(call.arg(0)), 0, nullptr, 1, nullptr, a_k_first};
  gemm.b = {nullptr, ValueOf(call.arg(1)), 0, nullptr, 1, nullptr, b_k_first};
  return Run(call, gemm, call.arg(0), call.arg(1));
}

}  // namespace

// out = (a @ b.T) * a_scale_inv * b_scale_inv, for codes with one scale per operand.
QSHARD_DEFINE_OP(gemm) {
  GemmProblem gemm{};
  gemm.a = {nullptr, ElementOf(call, "a_element"), 0, nullptr, 1, Data<float>(call.arg(1)), false};
  gemm.b = {nullptr, ElementOf(call, "b_element"), 0, nullptr, 1, Data<float>(call.arg(3)), false};
  gemm.fast = call.flag("fast");
  return Run(call, gemm, call.arg(0), call.arg(2));
}

// out = a @ b.T, for codes in blocks of a_rows x cols and b_rows x cols with fp32 or E8M0 scales.
QSHARD_DEFINE_OP(gemm_block) {
  GemmProblem gemm{};
  const auto operand = [&](int first, const char* element, const char* rows) {
    return GemmOperand{
        nullptr, ElementOf(call, element), 0, call.arg(first + 1).data, call.integer(rows), nullptr,
        false};
  };
  gemm.a = operand(0, "a_element", "a_rows");
  gemm.b = operand(2, "b_element", "b_rows");
  gemm.scales = call.text("scale_dtype") == E8M0::kName ? ScaleId::kE8M0 : ScaleId::kFloat;
  gemm.cols = call.integer("cols");
  return Run(call, gemm, call.arg(0), call.arg(2));
}

// out = (a @ b.T) * a_global_scale_inv * b_global_scale_inv, for E2M1 codes in blocks of 1x16 or
// 16x16 with E4M3 scales.
QSHARD_DEFINE_OP(gemm_nvfp4) {
  GemmProblem gemm{};
  const auto operand = [&](int first, const char* rows) {
    return GemmOperand{nullptr,
                       ElementId::kE2M1,
                       0,
                       call.arg(first + 1).data,
                       call.integer(rows),
                       Data<float>(call.arg(first + 2)),
                       false};
  };
  gemm.a = operand(0, "a_rows");
  gemm.b = operand(3, "b_rows");
  gemm.scales = ScaleId::kE4M3;
  gemm.cols = kNvfp4Block;
  return Run(call, gemm, call.arg(0), call.arg(3));
}

// out = a @ b.T of floats. The first letter tells how a is stored, `n` for [m, k] and `t` for [k,
// m]. The second tells how b is stored, `n` for [k, n] and `t` for [n, k].
QSHARD_DEFINE_OP(gemm_values_nt) { return RunValues(call, false, false); }
QSHARD_DEFINE_OP(gemm_values_nn) { return RunValues(call, false, true); }
QSHARD_DEFINE_OP(gemm_values_tn) { return RunValues(call, true, true); }
QSHARD_DEFINE_OP(gemm_values_tt) { return RunValues(call, true, false); }

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
