// GEMMs of cuBLASLt. The only kernels launched here bring scales into its layout: a few bytes per
// row of codes, for both operands in one launch.
//
// Sources: cuBLAS documentation, "8-bit and 4-bit floating point data types usage" (operands) and
// "Scaling factors layouts"; pytorch/pytorch#158037 and #166752 (blocks of 128).
#include <cstdio>

#include "kernels/cuda/gemm/float_scales.cuh"
#include "kernels/cuda/gemm/gemm_plans.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_scales.h"

namespace qshard::kernels {
namespace {

using cublaslt::ScaleMode;

// Sets the scale mode of an operand. Returns false for block sizes that the library does not
// support.
bool ModeOf(const GemmProblem& gemm, const GemmOperand& operand, ScaleMode* mode) {
  switch (gemm.scales) {
    case ScaleId::kNone:
      *mode = cublaslt::kScalar;
      return true;
    case ScaleId::kFloat:
      *mode = operand.block_rows == 1 ? cublaslt::kVectors128Float : cublaslt::kSquares128Float;
      return gemm.cols == kVector && (operand.block_rows == 1 || operand.block_rows == kVector);
    case ScaleId::kE8M0:
      *mode = cublaslt::kVectors32E8M0;
      return gemm.cols == kE8M0Vector && kScaleTileRows % operand.block_rows == 0;
    case ScaleId::kE4M3:
      *mode = cublaslt::kVectors16E4M3;
      return gemm.cols == kNvfp4Block && kScaleTileRows % operand.block_rows == 0;
  }
  return false;
}

// Writes scales in the library's layout to a_scales and b_scales. For operands that also have a
// tensor scale, writes alpha and beta to `alpha`.
Status MoveScales(const Exec<Cuda>& exec, const GemmProblem& gemm, uint8_t* a_scales,
                  uint8_t* b_scales, float* alpha) {
  const float *a_scale = gemm.a.tensor_scale_inv, *b_scale = gemm.b.tensor_scale_inv;
  if (gemm.scales == ScaleId::kNone) {
    auto* const a = reinterpret_cast<float*>(a_scales);
    auto* const b = reinterpret_cast<float*>(b_scales);
    return ForEach(exec, 2, [=] __device__(int64_t i) {
      if (i == 0)
        *a = *a_scale;
      else
        *b = *b_scale;
    });
  }
  if (gemm.scales == ScaleId::kFloat) {
    const FloatScalesOf a = FloatScales(gemm, gemm.a, a_scales);
    const FloatScalesOf b = FloatScales(gemm, gemm.b, b_scales);
    const int64_t first = a.Size();
    return ForEach(exec, first + b.Size(), [=] __device__(int64_t i) {
      if (i < first)
        a.Move(i);
      else
        b.Move(i - first);
    });
  }
  const auto swizzle = [&](const GemmOperand& operand, uint8_t* to) {
    return SwizzleScale(exec, static_cast<const uint8_t*>(operand.scale_inv), 1,
                        CeilDiv(operand.rows, operand.block_rows), GridCols(gemm),
                        operand.block_rows, to);
  };
  QSHARD_RETURN_IF_ERROR(swizzle(gemm.a, a_scales));
  QSHARD_RETURN_IF_ERROR(swizzle(gemm.b, b_scales));
  if (gemm.scales != ScaleId::kE4M3) return {};
  return ForEach(exec, 2,
                 [=] __device__(int64_t i) { alpha[i] = i == 0 ? *a_scale * *b_scale : 0.0f; });
}

// Returns the text for a failed call. It is valid until the thread's next failure.
const char* Refusal(const GemmKey& key, cublaslt::Result result) {
  thread_local char text[160];
  std::snprintf(text, sizeof(text),
                "cuBLASLt gave status %d for a product of (%lld, %lld) and (%lld, %lld); look for "
                "errors of CUDA before this one",
                static_cast<int>(result), static_cast<long long>(key.m),
                static_cast<long long>(key.k), static_cast<long long>(key.n),
                static_cast<long long>(key.k));
  return text;
}

}  // namespace

template <class Out>
Status Gemm(const Exec<Cuda>& exec, const GemmProblem& gemm, const Workspace& workspace, Out* out) {
  if (gemm.k == 0)
    return ToStatus(cudaMemsetAsync(out, 0, gemm.a.rows * gemm.b.rows * sizeof(Out), exec.stream));
  GemmKey key{};
  if (cudaGetDevice(&key.device) != cudaSuccess) return LaunchStatus();
  if (!ModeOf(gemm, gemm.a, &key.a_mode) || !ModeOf(gemm, gemm.b, &key.b_mode))
    return {
        "blocks are not of a size that cuBLASLt has scales of; multiply dequantized values in "
        "place of codes"};
  const int64_t scale_bytes = ScaleBytes(gemm);
  key.m = gemm.a.rows;
  key.n = gemm.b.rows;
  key.k = gemm.k;
  key.a = TypeOf(gemm.a.element);
  key.b = TypeOf(gemm.b.element);
  key.out = kTypeOf<Out>;
  key.a_k_first = gemm.a.k_first;
  key.b_k_first = gemm.b.k_first;
  key.fast = gemm.fast;
  key.device_alpha = gemm.scales == ScaleId::kE4M3;
  key.alignment = AlignmentOf({Address(gemm.a.data), Address(gemm.b.data), Address(out)});
  key.workspace_bytes = workspace.bytes - scale_bytes;
  const std::shared_ptr<GemmPlan> plan = PlanOf(key);
  if (plan->error != nullptr) return {plan->error};

  // Scales come first because they need the largest alignment.
  uint8_t* const a_scales = workspace.data;
  const void *a_scale = gemm.a.tensor_scale_inv, *b_scale = gemm.b.tensor_scale_inv;
  constexpr float kOne = 1.0f, kZero = 0.0f;
  const float *alpha = &kOne, *beta = &kZero;
  if (scale_bytes > 0) {
    uint8_t* const b_scales = a_scales + ScaleBytes(gemm, gemm.a);
    auto* const numbers = reinterpret_cast<float*>(b_scales + ScaleBytes(gemm, gemm.b));
    QSHARD_RETURN_IF_ERROR(MoveScales(exec, gemm, a_scales, b_scales, numbers));
    a_scale = a_scales;
    b_scale = b_scales;
    if (key.device_alpha) {
      alpha = numbers;
      beta = numbers + 1;
    }
  }
  const cublaslt::Library& lt = cublaslt::Load();
  const std::lock_guard<std::mutex> lock(plan->mutex);
  cublaslt::Result result = cublaslt::kSuccess;
  const auto run = [&](auto function, auto... arguments) {
    if (result == cublaslt::kSuccess) result = function(arguments...);
  };
  if (!IsValue(gemm.a.element)) {
    run(lt.desc_set, plan->desc, cublaslt::kScalePointerA, &b_scale, sizeof(b_scale));
    run(lt.desc_set, plan->desc, cublaslt::kScalePointerB, &a_scale, sizeof(a_scale));
  }
  run(lt.matmul, plan->handle, plan->desc, alpha, gemm.b.data, plan->b, gemm.a.data, plan->a, beta,
      out, plan->out, out, plan->out, &plan->algorithm, workspace.data + scale_bytes,
      key.workspace_bytes, exec.stream);
  if (result != cublaslt::kSuccess) return {Refusal(key, result)};
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, Gemm)

}  // namespace qshard::kernels
