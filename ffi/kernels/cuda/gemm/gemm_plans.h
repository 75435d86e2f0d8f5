// GEMM plans: descriptors and an algorithm for a shape, chosen once and cached.
#ifndef QSHARD_KERNELS_CUDA_GEMM_GEMM_PLANS_H_
#define QSHARD_KERNELS_CUDA_GEMM_GEMM_PLANS_H_

#include <array>
#include <memory>
#include <mutex>

#include "kernels/cuda/gemm/cublaslt.h"
#include "kernels/cuda/gemm/plan_parts.h"
#include "kernels/gemm.h"

namespace qshard::kernels {

// Everything that the choice of an algorithm may depend on.
struct GemmKey {
  int device;
  int64_t m, n, k;
  cublaslt::Type a, b, out;
  cublaslt::ScaleMode a_mode, b_mode;
  bool a_k_first, b_k_first;
  bool fast, device_alpha;
  int64_t alignment;        // in bytes, of operands and result
  int64_t workspace_bytes;  // left for the library

  // Returns whether operands are floats, which have no scales.
  bool OfValues() const { return IsFloat(a); }

  std::array<int64_t, 15> Values() const {
    return {device,
            m,
            n,
            k,
            a,
            b,
            out,
            a_mode,
            b_mode,
            a_k_first,
            b_k_first,
            fast,
            device_alpha,
            alignment,
            workspace_bytes};
  }
};

struct GemmPlan {
  GemmPlan() = default;
  GemmPlan(const GemmPlan&) = delete;
  ~GemmPlan();

  const char* error = nullptr;  // why the plan failed, or null; static storage
  cublaslt::Handle handle = nullptr;
  cublaslt::Desc desc = nullptr;
  cublaslt::Layout a = nullptr, b = nullptr, out = nullptr;
  cublaslt::Algorithm algorithm{};
  std::mutex mutex;  // guards `desc`, into which calls write pointers
};

// Returns the plan of a key. Caches the 1,024 plans used last.
std::shared_ptr<GemmPlan> PlanOf(const GemmKey& key);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_GEMM_GEMM_PLANS_H_
