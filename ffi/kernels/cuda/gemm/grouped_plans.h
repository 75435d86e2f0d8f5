// Plans of grouped GEMMs: descriptors and an algorithm for a shape class, chosen once and cached.
//
// The sizes of groups are on the device, so one plan serves all of them. The heuristic sees a
// shape class: the average size of a group, and the sizes that all groups share.
//
// The heuristic's first algorithm may be 15 % slower than the best of its list. So the first call
// of a class that is not captured in a graph runs each of them on its operands, and keeps the
// fastest: it waits for the stream, once. The environment variable QSHARD_GROUPED_TRIALS=0 turns
// this off.
#ifndef QSHARD_KERNELS_CUDA_GEMM_GROUPED_PLANS_H_
#define QSHARD_KERNELS_CUDA_GEMM_GROUPED_PLANS_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/cuda/gemm/cublaslt.h"

namespace qshard::kernels {

// Everything that the choice of an algorithm may depend on.
struct GroupedKey {
  int device;
  int64_t groups;
  int64_t m, n, k;  // the divided axis is rounded up
  bool by_k;
  cublaslt::Type a, b, out;
  cublaslt::ScaleMode a_mode, b_mode;
  bool a_k_first, b_k_first;
  bool fast;
  int64_t alignment;        // in bytes, of all matrices of operands and result
  int64_t workspace_bytes;  // left for the library, rounded down

  // Whether each group has an alpha and a beta: the product of its global scales, and 0.
  bool HasAlphas() const { return a_mode == cublaslt::kVectors16E4M3; }

  std::array<int64_t, 16> Values() const {
    return {device, groups, m,      n,         k,         by_k, a,         b,
            out,    a_mode, b_mode, a_k_first, b_k_first, fast, alignment, workspace_bytes};
  }
};

// Returns the key of a shape class, from exact sizes. Up to a sixteenth more rows share a plan.
GroupedKey ClassOf(GroupedKey key);

struct GroupedPlan {
  GroupedPlan() = default;
  GroupedPlan(const GroupedPlan&) = delete;
  ~GroupedPlan();

  const char* error = nullptr;  // why the plan failed, or null; static storage
  const cublaslt::Library* library = nullptr;
  cublaslt::Handle handle = nullptr;
  cublaslt::Desc desc = nullptr;
  cublaslt::Layout a = nullptr, b = nullptr, out = nullptr;
  std::vector<cublaslt::Algorithm> algorithms;  // the heuristic's, best first; one after a trial
  std::mutex mutex;  // guards all, since calls write pointers into descriptors
};

// int32 arrays on the device that describe the matrices of an operand or result to the library.
struct GroupedExtents {
  const int32_t *rows, *cols, *ld;
};
struct GroupedArrays {
  GroupedExtents a, b, out;
  const void *a_scales, *b_scales;  // arrays of pointers, or null for floats
};

// Returns the plan of a shape class. A new plan has the arrays of this call; SetArrays replaces
// them. Caches the 1,024 plans used last.
std::shared_ptr<GroupedPlan> GroupedPlanOf(const GroupedKey& key, const GroupedArrays& arrays);

// Writes the arrays of a call into the plan's descriptors. The caller has the plan's mutex.
cublaslt::Result SetArrays(const GroupedPlan& plan, const GroupedArrays& arrays);

// Keeps the fastest of the plan's algorithms, unless the stream is being captured. `run` enqueues
// the product with an algorithm. The caller has the plan's mutex.
void TryAlgorithms(GroupedPlan* plan, CUstream_st* stream,
                   const std::function<cublaslt::Result(const cublaslt::Algorithm&)>& run);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_GEMM_GROUPED_PLANS_H_
