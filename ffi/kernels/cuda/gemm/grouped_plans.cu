#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "kernels/cuda/gemm/grouped_plans.h"
#include "kernels/cuda/gemm/lru_cache.h"
#include "kernels/cuda/gemm/plan_parts.h"

namespace qshard::kernels {
namespace {

using cublaslt::kAsItIs;
using cublaslt::kSuccess;
using cublaslt::kTransposed;

constexpr int64_t kOfEachGroup = 1;  // batch stride

constexpr int kNotAsked = -1;  // status of the heuristic, if a descriptor failed before
constexpr int kMostAlgorithms = 8;
constexpr size_t kMostPlans = 1024;

// An algorithm replaces the heuristic's first if it needs less than this part of its time. Smaller
// differences are noise, and would make the choice vary.
constexpr float kFaster = 0.98f;
constexpr int kTrialRuns = 3;

// Creates descriptor and layouts. The library is column-major: its A is our b, and its result is
// [n, m].
bool Describe(const cublaslt::Library& lt, const GroupedKey& key, const GroupedArrays& arrays,
              GroupedPlan* plan) {
  const auto lay_out = [&](cublaslt::Layout* layout, cublaslt::Type type,
                           const GroupedExtents& extents) {
    return lt.grouped_layout_create(layout, type, static_cast<int>(key.groups), extents.rows,
                                    extents.cols, extents.ld) == kSuccess;
  };
  const bool codes = !IsFloat(key.a);
  return lt.desc_create(&plan->desc, cublaslt::kCompute32F, cublaslt::kFloat32) == kSuccess &&
         Set(lt, plan->desc, cublaslt::kTransA, key.b_k_first ? kAsItIs : kTransposed) &&
         Set(lt, plan->desc, cublaslt::kTransB, key.a_k_first ? kTransposed : kAsItIs) &&
         Set(lt, plan->desc, cublaslt::kPointerMode, cublaslt::kDevicePointer) &&
         (!codes ||
          (Set(lt, plan->desc, cublaslt::kFastAccumulation, static_cast<int8_t>(key.fast)) &&
           Set(lt, plan->desc, cublaslt::kScaleModeA, key.b_mode) &&
           Set(lt, plan->desc, cublaslt::kScaleModeB, key.a_mode) &&
           Set(lt, plan->desc, cublaslt::kScalePointerA, arrays.b_scales) &&
           Set(lt, plan->desc, cublaslt::kScalePointerB, arrays.a_scales))) &&
         (!key.HasAlphas() || (Set(lt, plan->desc, cublaslt::kAlphaBatchStride, kOfEachGroup) &&
                               Set(lt, plan->desc, cublaslt::kBetaBatchStride, kOfEachGroup))) &&
         lay_out(&plan->b, key.b, arrays.b) && lay_out(&plan->a, key.a, arrays.a) &&
         lay_out(&plan->out, key.out, arrays.out);
}

// Tells the heuristic the average of a size. The header says uint32_t, but cuBLAS 13.8 takes 8
// bytes.
bool SetAverage(const cublaslt::Library& lt, cublaslt::Preference preference,
                cublaslt::PreferenceAttribute attribute, int64_t size, int64_t groups) {
  const int64_t average = std::max<int64_t>(1, size / groups);
  return Set(lt, preference, attribute, static_cast<uint64_t>(average)) ||
         Set(lt, preference, attribute, static_cast<uint32_t>(average));
}

// Asks the heuristic for algorithms. Sets `status` to its result.
bool Choose(const cublaslt::Library& lt, const GroupedKey& key, GroupedPlan* plan, int* status) {
  cublaslt::Preference preference = nullptr;
  if (lt.preference_create(&preference) != kSuccess) return false;
  const auto alignment = static_cast<uint32_t>(key.alignment);
  cublaslt::Heuristic found[kMostAlgorithms] = {};
  int count = 0;
  const bool chosen =
      Set(lt, preference, cublaslt::kMaxWorkspaceBytes,
          static_cast<uint64_t>(key.workspace_bytes)) &&
      (!IsFloat(key.a) ||
       Set(lt, preference, cublaslt::kReductionSchemes, cublaslt::kSumsInComputeType)) &&
      Set(lt, preference, cublaslt::kMinAlignmentA, alignment) &&
      Set(lt, preference, cublaslt::kMinAlignmentB, alignment) &&
      Set(lt, preference, cublaslt::kMinAlignmentC, alignment) &&
      Set(lt, preference, cublaslt::kMinAlignmentD, alignment) &&
      SetAverage(lt, preference, cublaslt::kGroupedAverageK, key.k, key.by_k ? key.groups : 1) &&
      SetAverage(lt, preference, cublaslt::kGroupedAverageRows, key.n, 1) &&
      SetAverage(lt, preference, cublaslt::kGroupedAverageCols, key.m, key.by_k ? 1 : key.groups) &&
      (*status = lt.heuristic(plan->handle, plan->desc, plan->b, plan->a, plan->out, plan->out,
                              preference, kMostAlgorithms, found, &count)) == kSuccess;
  lt.preference_destroy(preference);
  for (int i = 0; chosen && i < count; ++i)
    if (found[i].state == kSuccess) plan->algorithms.push_back(found[i].algorithm);
  return !plan->algorithms.empty();
}

// Returns the text for a failed search, in static storage. The caller has the mutex of Plans.
const char* NoAlgorithm(int status) {
  static auto& texts = *new std::map<int, std::string>;
  std::string& text = texts[status];
  if (text.empty())
    text = "cuBLASLt has no algorithm for these groups on this device (status " +
           std::to_string(status) + "); call a product for each expert";
  return text.c_str();
}

std::shared_ptr<GroupedPlan> MakePlan(const GroupedKey& key, const GroupedArrays& arrays) {
  auto plan = std::make_shared<GroupedPlan>();
  const cublaslt::Library& lt = cublaslt::LoadGrouped();
  plan->library = &lt;
  plan->error = lt.error;
  if (plan->error != nullptr) return plan;
  plan->handle = cublaslt::HandleOf(lt, key.device);
  const bool scalars = key.a_mode == cublaslt::kScalarPerGroup;
  int status = kNotAsked;
  if (plan->handle == nullptr)
    plan->error = "cuBLASLt does not start on this device; look for errors of CUDA before this one";
  else if (scalars && lt.version() < cublaslt::kGroupedScalarsSince)
    plan->error =
        "one scale for each expert needs cuBLASLt 13.5 or newer; install nvidia-cublas>=13.5, or "
        "set QSHARD_CUBLASLT to its libcublasLt.so.13";
  else if (!Describe(lt, key, arrays, plan.get()) || !Choose(lt, key, plan.get(), &status))
    plan->error = NoAlgorithm(status);
  return plan;
}

// Returns whether plans try algorithms. Read once.
bool TriesAlgorithms() {
  static const bool tries = [] {
    const char* const setting = std::getenv("QSHARD_GROUPED_TRIALS");
    return setting == nullptr || std::strcmp(setting, "0") != 0;
  }();
  return tries;
}

// Times functions that enqueue work on a stream.
class Timer {
 public:
  explicit Timer(CUstream_st* stream) : stream_(stream) {
    valid_ = cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess;
  }
  Timer(const Timer&) = delete;
  ~Timer() {
    for (const cudaEvent_t event : {begin_, end_})
      if (event != nullptr) cudaEventDestroy(event);
  }

  // Returns milliseconds of `kTrialRuns` runs after a first one, or a negative number if one fails.
  template <class Run>
  float operator()(const Run& run) const {
    constexpr float kFailed = -1.0f;
    if (!valid_ || run() != kSuccess || cudaEventRecord(begin_, stream_) != cudaSuccess)
      return kFailed;
    for (int i = 0; i < kTrialRuns; ++i)
      if (run() != kSuccess) return kFailed;
    float time = kFailed;
    if (cudaEventRecord(end_, stream_) != cudaSuccess ||
        cudaEventSynchronize(end_) != cudaSuccess ||
        cudaEventElapsedTime(&time, begin_, end_) != cudaSuccess)
      return kFailed;
    return time;
  }

 private:
  CUstream_st* stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  bool valid_ = false;
};

using Values = decltype(GroupedKey{}.Values());

struct Plans {
  std::mutex mutex;
  LruCache<Values, std::shared_ptr<GroupedPlan>> known{kMostPlans};
};

}  // namespace

GroupedKey ClassOf(GroupedKey key) {
  constexpr int64_t kUnit = int64_t{1} << 20;  // arrays and scales take a little of the workspace
  int64_t& divided = key.by_k ? key.k : key.m;
  divided = RoundUpBits(divided);
  if (key.workspace_bytes > kUnit) key.workspace_bytes -= key.workspace_bytes % kUnit;
  return key;
}

GroupedPlan::~GroupedPlan() {
  if (handle == nullptr) return;
  if (desc != nullptr) library->desc_destroy(desc);
  for (const cublaslt::Layout layout : {a, b, out})
    if (layout != nullptr) library->layout_destroy(layout);
}

std::shared_ptr<GroupedPlan> GroupedPlanOf(const GroupedKey& key, const GroupedArrays& arrays) {
  static auto& plans = *new Plans;
  const Values values = key.Values();
  const std::lock_guard<std::mutex> lock(plans.mutex);
  if (const auto* found = plans.known.Find(values)) return *found;
  std::shared_ptr<GroupedPlan> plan = MakePlan(key, arrays);
  // A plan without a handle is not kept, because the library may be found later.
  if (plan->handle != nullptr) plans.known.Insert(values, plan);
  return plan;
}

cublaslt::Result SetArrays(const GroupedPlan& plan, const GroupedArrays& arrays) {
  const cublaslt::Library& lt = *plan.library;
  cublaslt::Result result = kSuccess;
  const auto set = [&](auto function, auto object, auto attribute, const void* pointer) {
    if (result == kSuccess) result = function(object, attribute, &pointer, sizeof(pointer));
  };
  const auto lay_out = [&](cublaslt::Layout layout, const GroupedExtents& extents) {
    set(lt.layout_set, layout, cublaslt::kGroupedRows, extents.rows);
    set(lt.layout_set, layout, cublaslt::kGroupedCols, extents.cols);
    set(lt.layout_set, layout, cublaslt::kGroupedLd, extents.ld);
  };
  lay_out(plan.a, arrays.a);
  lay_out(plan.b, arrays.b);
  lay_out(plan.out, arrays.out);
  if (arrays.a_scales == nullptr) return result;
  set(lt.desc_set, plan.desc, cublaslt::kScalePointerA, arrays.b_scales);
  set(lt.desc_set, plan.desc, cublaslt::kScalePointerB, arrays.a_scales);
  return result;
}

void TryAlgorithms(GroupedPlan* plan, CUstream_st* stream,
                   const std::function<cublaslt::Result(const cublaslt::Algorithm&)>& run) {
  if (!TriesAlgorithms()) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    (void)cudaGetLastError();  // a capture elsewhere; the next launch must not report it
    return;
  }
  if (status != cudaStreamCaptureStatusNone) return;
  // Waiting for an event would invalidate a capture elsewhere in the default capture mode.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cublaslt::Algorithm* best = nullptr;
  float least = 0;
  {
    const Timer timer(stream);
    for (const cublaslt::Algorithm& algorithm : plan->algorithms) {
      const float time = timer([&] { return run(algorithm); });
      if (time < 0) (void)cudaGetLastError();  // the next launch must not report it
      if (time < 0 || (best != nullptr && time >= least * kFaster)) continue;
      best = &algorithm;
      least = time;
    }
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  plan->algorithms = {best != nullptr ? *best : plan->algorithms.front()};
}

}  // namespace qshard::kernels
