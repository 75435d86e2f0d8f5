#include "kernels/cuda/gemm/gemm_plans.h"
#include "kernels/cuda/gemm/lru_cache.h"
#include "kernels/gemm_library.h"

namespace qshard::kernels {
namespace {

using cublaslt::kAsItIs;
using cublaslt::kSuccess;
using cublaslt::kTransposed;

bool LayOut(const cublaslt::Library& lt, cublaslt::Type type, int64_t rows, int64_t k, bool k_first,
            cublaslt::Layout* layout) {
  return (k_first ? lt.layout_create(layout, type, rows, k, rows)
                  : lt.layout_create(layout, type, k, rows, k)) == kSuccess;
}

// Creates descriptor and layouts. The library is column-major: its A is our b, and its result is
// [n, m].
bool Describe(const cublaslt::Library& lt, const GemmKey& key, GemmPlan* plan) {
  const bool described =
      lt.desc_create(&plan->desc, cublaslt::kCompute32F, cublaslt::kFloat32) == kSuccess &&
      Set(lt, plan->desc, cublaslt::kTransA, key.b_k_first ? kAsItIs : kTransposed) &&
      Set(lt, plan->desc, cublaslt::kTransB, key.a_k_first ? kTransposed : kAsItIs) &&
      Set(lt, plan->desc, cublaslt::kFastAccumulation, static_cast<int8_t>(key.fast)) &&
      (key.b_mode == cublaslt::kScalar || Set(lt, plan->desc, cublaslt::kScaleModeA, key.b_mode)) &&
      (key.a_mode == cublaslt::kScalar || Set(lt, plan->desc, cublaslt::kScaleModeB, key.a_mode)) &&
      (!key.device_alpha ||
       Set(lt, plan->desc, cublaslt::kPointerMode, cublaslt::kDevicePointer)) &&
      LayOut(lt, key.b, key.n, key.k, key.b_k_first, &plan->b) &&
      LayOut(lt, key.a, key.m, key.k, key.a_k_first, &plan->a) &&
      lt.layout_create(&plan->out, key.out, key.n, key.m, key.n) == kSuccess;
  // The heuristic needs a non-null scale pointer to know that scales are used; it does not
  // dereference it.
  const void* const some = plan;
  if (described && !key.OfValues()) {
    Set(lt, plan->desc, cublaslt::kScalePointerA, some);
    Set(lt, plan->desc, cublaslt::kScalePointerB, some);
  }
  return described;
}

// Asks the heuristic for an algorithm. Partial sums of floats are added in fp32: by default the
// library may add them in the dtype of the result.
bool Choose(const cublaslt::Library& lt, const GemmKey& key, GemmPlan* plan) {
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

// Returns the key that the heuristic sees. Experts have new numbers of tokens in each step, and the
// heuristic takes much longer than a launch, so up to a sixteenth more tokens share an algorithm.
// Floats are exempt: their sizes need not be multiples of 16, so rounding would change alignments.
GemmKey BucketOf(GemmKey key) {
  if (key.OfValues()) return key;
  constexpr int64_t kUnit = int64_t{1} << 20;  // scales take a little of the workspace
  key.m = RoundUpBits(key.m);
  key.k = RoundUpBits(key.k);
  if (key.workspace_bytes > kUnit)
    key.workspace_bytes = (key.workspace_bytes + kUnit / 2) / kUnit * kUnit;
  return key;
}

using Values = std::array<int64_t, 15>;

constexpr size_t kMostPlans = 1024;

// Guarded by the mutex of Plans.
LruCache<Values, cublaslt::Algorithm>& Algorithms() {
  static auto& algorithms = *new LruCache<Values, cublaslt::Algorithm>(kMostPlans);
  return algorithms;
}

bool CanRun(const cublaslt::Library& lt, const GemmKey& key, const GemmPlan& plan) {
  cublaslt::Heuristic found{};
  return lt.check(plan.handle, plan.desc, plan.b, plan.a, plan.out, plan.out, &plan.algorithm,
                  &found) == kSuccess &&
         found.workspace_bytes <= static_cast<size_t>(key.workspace_bytes);
}

// Takes the bucket's algorithm, or one for this key if the bucket's does not support it. The choice
// does not depend on earlier products.
bool ChooseForBucket(const cublaslt::Library& lt, const GemmKey& key, GemmPlan* plan) {
  const GemmKey bucket = BucketOf(key);
  const Values values = bucket.Values();
  if (const cublaslt::Algorithm* known = Algorithms().Find(values)) {
    plan->algorithm = *known;
  } else {
    GemmPlan other;
    other.handle = plan->handle;
    if (!Describe(lt, bucket, &other) || !Choose(lt, bucket, &other)) return Choose(lt, key, plan);
    Algorithms().Insert(values, other.algorithm);
    plan->algorithm = other.algorithm;
  }
  return values == key.Values() || CanRun(lt, key, *plan) || Choose(lt, key, plan);
}

std::shared_ptr<GemmPlan> MakePlan(const GemmKey& key) {
  auto plan = std::make_shared<GemmPlan>();
  const cublaslt::Library& lt = cublaslt::Load();
  plan->error = lt.error;
  if (plan->error != nullptr) return plan;
  plan->handle = cublaslt::HandleOf(lt, key.device);
  if (plan->handle == nullptr) {
    plan->error = "cuBLASLt does not start on this device; look for errors of CUDA before this one";
  } else if (!Describe(lt, key, plan.get()) || !ChooseForBucket(lt, key, plan.get())) {
    plan->error =
        "cuBLASLt has no algorithm for these operands on this device; "
        "multiply dequantized values in place of codes";
  }
  return plan;
}

struct Plans {
  std::mutex mutex;
  LruCache<Values, std::shared_ptr<GemmPlan>> known{kMostPlans};
};

Plans& ThePlans() {
  static auto& plans = *new Plans;
  return plans;
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
  Plans& plans = ThePlans();
  const Values values = key.Values();
  const std::lock_guard<std::mutex> lock(plans.mutex);
  if (const auto* found = plans.known.Find(values)) return *found;
  std::shared_ptr<GemmPlan> plan = MakePlan(key);
  // A plan without a handle is not kept, because the library may be found later.
  if (plan->handle != nullptr) plans.known.Insert(values, plan);
  return plan;
}

GemmCounts CountGemms() {
  Plans& plans = ThePlans();
  const std::lock_guard<std::mutex> lock(plans.mutex);
  const CacheCounts &known = plans.known.counts(), &algorithms = Algorithms().counts();
  return {known.hits, known.misses, algorithms.misses};
}

}  // namespace qshard::kernels
