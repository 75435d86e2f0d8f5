#include <cuda_runtime_api.h>

#include <deque>
#include <map>

#include "kernels/cuda/gemm_plans.h"

namespace qshard::kernels {
namespace {

using cublaslt::kAsItIs;
using cublaslt::kSuccess;
using cublaslt::kTransposed;

// One for each device. What creates it may allocate, which a stream that is captured elsewhere in
// this thread would not survive in its default mode.
cublaslt::Handle HandleOf(const cublaslt::Library& lt, int device) {
  static auto& handles = *new std::map<int, cublaslt::Handle>;
  cublaslt::Handle& handle = handles[device];
  if (handle != nullptr) return handle;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (lt.create(&handle) != kSuccess) handle = nullptr;
  cudaThreadExchangeStreamCaptureMode(&mode);
  return handle;
}

template <class T>
bool Set(const cublaslt::Library& lt, cublaslt::Desc desc, cublaslt::DescAttribute attribute,
         T value) {
  return lt.desc_set(desc, attribute, &value, sizeof(value)) == kSuccess;
}

template <class T>
bool Set(const cublaslt::Library& lt, cublaslt::Preference preference,
         cublaslt::PreferenceAttribute attribute, T value) {
  return lt.preference_set(preference, attribute, &value, sizeof(value)) == kSuccess;
}

bool LayOut(const cublaslt::Library& lt, cublaslt::Type type, int64_t rows, int64_t k, bool k_first,
            cublaslt::Layout* layout) {
  return (k_first ? lt.layout_create(layout, type, rows, k, rows)
                  : lt.layout_create(layout, type, k, rows, k)) == kSuccess;
}

// The library counts columns first: its A is our b, its result [n, m].
bool Describe(const cublaslt::Library& lt, const GemmKey& key, GemmPlan* plan) {
  return lt.desc_create(&plan->desc, cublaslt::kCompute32F, cublaslt::kFloat32) == kSuccess &&
         Set(lt, plan->desc, cublaslt::kTransA, key.b_k_first ? kAsItIs : kTransposed) &&
         Set(lt, plan->desc, cublaslt::kTransB, key.a_k_first ? kTransposed : kAsItIs) &&
         Set(lt, plan->desc, cublaslt::kFastAccumulation, static_cast<int8_t>(key.fast)) &&
         (key.b_mode == cublaslt::kScalar ||
          Set(lt, plan->desc, cublaslt::kScaleModeA, key.b_mode)) &&
         (key.a_mode == cublaslt::kScalar ||
          Set(lt, plan->desc, cublaslt::kScaleModeB, key.a_mode)) &&
         (!key.device_alpha ||
          Set(lt, plan->desc, cublaslt::kPointerMode, cublaslt::kDevicePointer)) &&
         LayOut(lt, key.b, key.n, key.k, key.b_k_first, &plan->b) &&
         LayOut(lt, key.a, key.m, key.k, key.a_k_first, &plan->a) &&
         lt.layout_create(&plan->out, key.out, key.n, key.m, key.n) == kSuccess;
}

// Where operands have scales, a pointer must be there for the library to choose, as it tells so; it
// is not read. A sum of values that is split is put together in fp32: by default the library may do
// that in the dtype of the result.
bool Choose(const cublaslt::Library& lt, const GemmKey& key, GemmPlan* plan) {
  const void* const some = plan;
  if (!key.OfValues()) {
    Set(lt, plan->desc, cublaslt::kScalePointerA, some);
    Set(lt, plan->desc, cublaslt::kScalePointerB, some);
  }
  cublaslt::Preference preference = nullptr;
  if (lt.preference_create(&preference) != kSuccess) return false;
  const auto alignment = static_cast<uint32_t>(key.alignment);
  cublaslt::Heuristic found{};
  int count = 0;
  const bool chosen = Set(lt, preference, cublaslt::kMaxWorkspaceBytes,
                          static_cast<uint64_t>(key.workspace_bytes)) &&
                      (!key.OfValues() || Set(lt, preference, cublaslt::kReductionSchemes,
                                              cublaslt::kSumsInComputeType)) &&
                      Set(lt, preference, cublaslt::kMinAlignmentA, alignment) &&
                      Set(lt, preference, cublaslt::kMinAlignmentB, alignment) &&
                      Set(lt, preference, cublaslt::kMinAlignmentC, alignment) &&
                      Set(lt, preference, cublaslt::kMinAlignmentD, alignment) &&
                      lt.heuristic(plan->handle, plan->desc, plan->b, plan->a, plan->out, plan->out,
                                   preference, 1, &found, &count) == kSuccess &&
                      count > 0 && found.state == kSuccess;
  lt.preference_destroy(preference);
  plan->algorithm = found.algorithm;
  return chosen;
}

std::shared_ptr<GemmPlan> Made(const GemmKey& key) {
  auto plan = std::make_shared<GemmPlan>();
  const cublaslt::Library& lt = cublaslt::Load();
  plan->error = lt.error;
  if (plan->error != nullptr) return plan;
  plan->handle = HandleOf(lt, key.device);
  if (plan->handle == nullptr) {
    plan->error = "cuBLASLt does not start on this device; look for errors of CUDA before this one";
  } else if (!Describe(lt, key, plan.get()) || !Choose(lt, key, plan.get())) {
    plan->error =
        "cuBLASLt has no algorithm for these operands on this device; "
        "multiply dequantized values in place of codes";
  }
  return plan;
}

}  // namespace

GemmPlan::~GemmPlan() {
  if (handle == nullptr) return;
  const cublaslt::Library& lt = cublaslt::Load();
  if (desc != nullptr) lt.desc_destroy(desc);
  for (const cublaslt::Layout layout : {a, b, out})
    if (layout != nullptr) lt.layout_destroy(layout);
}

std::shared_ptr<GemmPlan> PlanOf(const GemmKey& key) {
  using Values = std::array<int64_t, 15>;
  constexpr size_t kMost = 1024;
  static auto& mutex = *new std::mutex;
  static auto& plans = *new std::map<Values, std::shared_ptr<GemmPlan>>;
  static auto& order = *new std::deque<Values>;
  const Values values = key.Values();
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = plans.find(values); found != plans.end()) return found->second;
  std::shared_ptr<GemmPlan> plan = Made(key);
  if (plan->handle == nullptr) return plan;  // What is missing may come.
  if (plans.size() >= kMost) {
    plans.erase(order.front());
    order.pop_front();
  }
  plans.emplace(values, plan);
  order.push_back(values);
  return plan;
}

}  // namespace qshard::kernels
