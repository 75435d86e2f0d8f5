// Grouped products of experts by cuBLASLt, and on Hopper by a kernel of this project. One kernel
// runs before a product: it clamps the stops, writes the arrays that describe the groups, brings
// scales into the library's layout, and writes the zeros that the library leaves out. Sizes stay on
// the device, and the number of launches does not depend on the number of groups.
//
// Sources: cublasLt.h of cuBLAS 13.8, "grouped matrix layout"; TransformerEngine
// common/gemm/cublaslt_grouped_gemm.cu (the kernel before the product).
#include <algorithm>
#include <cstdio>

#include "core/ceil_div.h"
#include "kernels/cuda/gemm/float_scales.cuh"
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

// The arrays of extents in a workspace, in order.
enum Extent { kLength, kM, kN, kK };

// The matrices in a workspace's arrays of pointers, in order. Scales of a and b follow.
enum Matrix { kA, kB, kOut };

// Address of a matrix of each group, in bytes: base + group * per_group + start / unit * per_unit,
// where the rows of the group begin at `start`.
struct Places {
  const void* base;
  int64_t per_group, per_unit;

  __device__ void* At(int64_t group, int64_t units) const {
    return const_cast<char*>(static_cast<const char*>(base)) + group * per_group + units * per_unit;
  }
};

// Scales of 1-D blocks of the rows of all groups, [rows, cols], transposed within each group.
struct RowScales {
  const float* from;
  float* to;
  int64_t rows, cols;
};

struct SetUp {
  const int32_t *stops, *ends;  // ends: of the rows in out, or null
  int groups;
  int64_t rows, unit;  // of the axis that is divided
  int64_t out_rows;
  int32_t m, n, k;
  int64_t stride;  // of the arrays
  int32_t* extents;
  void** pointers;
  float* scalars;
  Places places[GroupedWorkspace::kPointers];
  const float* tensor_scales[2];  // one per group, or null
  float* tensor_scales_to[2];
  RowScales row_scales;        // rows 0: none
  FloatScalesOf block_scales;  // matrices 0: none; likewise the next
  FloatScalesOf more_scales;
  uint4* out;
  int64_t row_words, matrix_words;  // of 16 bytes; matrix_words 0: rows of out are divided
};

// Addresses of the matrices of b, as parameters of a launch. With kMax 0 they follow from `places`.
template <int kMax>
struct Addresses {
  const void* at[std::max(kMax, 1)];
};

// Where the rows of each group end, in shared memory: in the operands, and in out.
struct Bounds {
  int32_t *stops, *ends;  // one array, or two
};

constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4;
constexpr int kFewAddresses = 448;  // parameters of less than 4 KB, the limit of older drivers

// Clamps `stops`, and writes them to `ends` in shared memory. All threads of a block call it.
__device__ void ClampStops(const int32_t* stops, int groups, int64_t rows, int64_t unit,
                           int32_t* ends) {
  __shared__ int32_t most[kThreads / kWarp];
  const int each = (groups + kThreads - 1) / kThreads;
  const int first = min(groups, static_cast<int>(threadIdx.x) * each);
  const int last = min(groups, first + each);
  int32_t running = 0;
  for (int i = first; i < last; ++i) {
    running = static_cast<int32_t>(ClampStop(stops[i], running, rows, unit));
    ends[i] = running;
  }
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int32_t before = __shfl_up_sync(kAllLanes, running, distance);
    if (lane >= distance) running = max(running, before);
  }
  if (lane == kWarp - 1) most[warp] = running;
  int32_t least = __shfl_up_sync(kAllLanes, running, 1);
  if (lane == 0) least = 0;
  __syncthreads();
  for (int w = 0; w < warp; ++w) least = max(least, most[w]);
  for (int i = first; i < last; ++i) ends[i] = max(ends[i], least);
  __syncthreads();
}

// Returns the group of a row, the first that ends after it, or `groups` if there is none.
__device__ int GroupOf(const int32_t* ends, int groups, int64_t row) {
  int low = 0, high = groups;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

__device__ int32_t StartOf(const int32_t* ends, int group) {
  return group == 0 ? 0 : ends[group - 1];
}

// Returns the number of rows of a group that are multiplied.
__device__ int32_t LengthOf(const Bounds& bounds, int group) {
  return min(bounds.stops[group] - StartOf(bounds.stops, group),
             bounds.ends[group] - StartOf(bounds.ends, group));
}

template <int kListed>
__device__ void WriteArrays(const SetUp& s, const Bounds& bounds,
                            const Addresses<kListed>& listed) {
  for (int group = threadIdx.x; group < s.groups; group += kThreads) {
    const int64_t start = StartOf(bounds.stops, group) / s.unit;
    const int64_t first = StartOf(bounds.ends, group) / s.unit;
    const int32_t extents[] = {LengthOf(bounds, group), s.m, s.n, s.k};
    for (int i = 0; i < GroupedWorkspace::kExtents; ++i)
      s.extents[i * s.stride + group] = extents[i];
    for (int i = 0; i < GroupedWorkspace::kPointers; ++i)
      s.pointers[i * s.stride + group] = s.places[i].At(group, i == kOut ? first : start);
    if constexpr (kListed > 0)
      s.pointers[kB * s.stride + group] = const_cast<void*>(listed.at[group]);
    // The library scales the empty sum of a group without rows too, and its scale may be NaN.
    for (int i = 0; i < 2; ++i)
      if (s.tensor_scales[i] != nullptr)
        s.tensor_scales_to[i][group * (kGemmUnit / sizeof(float))] =
            extents[0] > 0 ? s.tensor_scales[i][group] : 0.0f;
  }
  if (threadIdx.x == 0) {
    s.scalars[0] = 1.0f;  // alpha
    s.scalars[1] = 0.0f;  // beta
  }
}

// Writes zeros to words `begin` to `end` of out. All threads of the grid call it.
__device__ void Clear(const SetUp& s, int64_t begin, int64_t end) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end; i += step)
    s.out[i] = uint4{0, 0, 0, 0};
}

__device__ void MoveRowScales(const SetUp& s, const int32_t* ends) {
  const RowScales& scales = s.row_scales;
  const int64_t step = int64_t{gridDim.x} * kThreads, size = scales.rows * scales.cols;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += step) {
    const int64_t col = i / scales.rows, row = i - col * scales.rows;
    const int group = GroupOf(ends, s.groups, row);
    if (group == s.groups) continue;
    const int64_t start = StartOf(ends, group), length = ends[group] - start;
    scales.to[start * scales.cols + col * length + row - start] =
        __ldg(scales.from + row * scales.cols + col);
  }
}

__device__ void MoveBlockScales(const FloatScalesOf& scales) {
  const int64_t step = int64_t{gridDim.x} * kThreads, size = scales.Size();
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += step)
    scales.Move(i);
}

// Writes zeros to the rows of out that no product writes. All threads of the grid call it. Groups
// have more rows in out than in `a` only if the data are wrong.
__device__ void ClearRows(const SetUp& s, const Bounds& bounds) {
  Clear(s, bounds.ends[s.groups - 1] * s.row_words, s.out_rows * s.row_words);
  const auto written = [&](int group) {
    return StartOf(bounds.ends, group) + LengthOf(bounds, group);
  };
  bool any = false;
  for (int group = threadIdx.x; group < s.groups; group += kThreads)
    any |= written(group) < bounds.ends[group];
  if (!__syncthreads_or(any)) return;
  for (int group = 0; group < s.groups; ++group)
    Clear(s, written(group) * s.row_words, bounds.ends[group] * s.row_words);
}

template <int kListed>
__global__ void __launch_bounds__(kThreads)
    SetUpKernel(const SetUp s, const __grid_constant__ Addresses<kListed> listed) {
  extern __shared__ int32_t shared[];
  const Bounds bounds{shared, s.ends == nullptr ? shared : shared + s.groups};
  ClampStops(s.stops, s.groups, s.rows, s.unit, bounds.stops);
  if (s.ends != nullptr) ClampStops(s.ends, s.groups, s.out_rows, 1, bounds.ends);
  if (blockIdx.x == 0) WriteArrays(s, bounds, listed);
  if (s.matrix_words == 0) {
    ClearRows(s, bounds);
  } else {
    for (int group = 0; group < s.groups; ++group)
      if (LengthOf(bounds, group) == 0)
        Clear(s, group * s.matrix_words, (group + 1) * s.matrix_words);
  }
  if (s.row_scales.rows > 0) MoveRowScales(s, bounds.stops);
  if (s.block_scales.matrices > 0) MoveBlockScales(s.block_scales);
  if (s.more_scales.matrices > 0) MoveBlockScales(s.more_scales);
}

// Sets the scale mode of an operand. Returns false for scales that the library does not support in
// groups.
bool ModeOf(const GemmProblem& gemm, const GemmOperand& operand, cublaslt::ScaleMode* mode) {
  if (gemm.scales == ScaleId::kNone) {
    *mode = IsValue(operand.element) ? cublaslt::kScalar : cublaslt::kScalarPerGroup;
    return true;
  }
  *mode = operand.block_rows == 1 ? cublaslt::kVectors128Float : cublaslt::kSquares128Float;
  return gemm.scales == ScaleId::kFloat && gemm.cols == kVector &&
         (operand.block_rows == 1 || operand.block_rows == kVector);
}

int64_t SizeOf(ElementId element) {
  if (element == ElementId::kFloat32) return sizeof(float);
  return IsValue(element) ? sizeof(bfloat16) : 1;
}

// Multiple to which stops are rounded down, so that the matrices of groups are aligned.
int64_t UnitOf(const GemmProblem& gemm, const GemmGroups& groups) {
  if (IsValue(gemm.a.element)) return 1;
  if (groups.by_k) return gemm.scales == ScaleId::kNone ? kGemmUnit : gemm.cols;
  return gemm.scales == ScaleId::kNone ? 1 : kGemmUnit;  // K is a multiple of 16 bytes
}

// Returns the matrices of an operand's groups. If `divided`, the groups divide its rows, or k.
Places PlacesOf(const GemmProblem& gemm, const GemmOperand& operand, bool divided, bool by_k,
                int64_t unit) {
  const int64_t size = SizeOf(operand.element);
  if (!divided) return {operand.data, operand.rows * gemm.k * size, 0};
  const int64_t step = !by_k ? gemm.k : operand.k_first ? operand.rows : 1;
  return {operand.data, 0, unit * step * size};
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
  s.unit = UnitOf(gemm, groups);
  s.m = static_cast<int32_t>(gemm.a.rows);
  s.n = static_cast<int32_t>(gemm.b.rows);
  s.k = static_cast<int32_t>(gemm.k);
  s.stride = layout.extent_stride;
  s.extents = reinterpret_cast<int32_t*>(workspace);
  s.pointers = reinterpret_cast<void**>(workspace + layout.pointers);
  s.scalars = reinterpret_cast<float*>(workspace + layout.scalars);
  const int64_t row_bytes = gemm.b.rows * out_size, matrix_bytes = gemm.a.rows * row_bytes;
  s.places[kA] = PlacesOf(gemm, gemm.a, true, by_k, s.unit);
  s.places[kB] = PlacesOf(gemm, gemm.b, by_k, by_k, s.unit);
  s.places[kOut] = by_k ? Places{out, matrix_bytes, 0} : Places{out, 0, s.unit * row_bytes};
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
      s.places[3 + i] = {to[i], kGemmUnit, 0};
    }
  } else if (by_k) {
    // A column of scales after the other, so a block along k is contiguous.
    s.block_scales = FloatScales(gemm, gemm.a, to[0]);
    s.more_scales = FloatScales(gemm, gemm.b, to[1]);
    for (int i = 0; i < 2; ++i)
      s.places[3 + i] = {to[i], 0, operands[i]->rows * int64_t{sizeof(float)}};
  } else {
    const int64_t cols = GridCols(gemm);
    s.row_scales = {static_cast<const float*>(gemm.a.scale_inv), reinterpret_cast<float*>(to[0]),
                    gemm.a.rows, cols};
    s.block_scales = FloatScales(gemm, gemm.b, to[1], groups.number);
    s.places[3] = {to[0], 0, s.unit * cols * int64_t{sizeof(float)}};
    s.places[4] = {to[1], s.block_scales.Each() * int64_t{sizeof(float)}, 0};
  }
  return s;
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
  arrays.a_scales = s.pointers + 3 * s.stride;
  arrays.b_scales = s.pointers + 4 * s.stride;
  return arrays;
}

template <int kListed>
Status LaunchSetUp(const Exec<Cuda>& exec, const SetUp& s, const void* const* matrices,
                   unsigned blocks) {
  static_assert(sizeof(SetUp) + sizeof(Addresses<kListed>) <= kParameterBytes);
  Addresses<kListed> listed{};
  if constexpr (kListed > 0) std::copy_n(matrices, s.groups, listed.at);
  const size_t shared = s.groups * sizeof(int32_t) * (s.ends == nullptr ? 1 : 2);
  SetUpKernel<kListed><<<blocks, kThreads, shared, exec.stream>>>(s, listed);
  return LaunchStatus();
}

// Launches enough blocks for the scales, and for zeros in an eighth of the result. `matrices` has
// the addresses of the groups' matrices in b, or is null.
Status SetUpGroups(const Exec<Cuda>& exec, const SetUp& s, const void* const* matrices,
                   int64_t out_words) {
  const int64_t scales = std::max({s.row_scales.rows * s.row_scales.cols, s.block_scales.Size(),
                                   s.more_scales.Size(), out_words / 8});
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
  const auto steps = [](const Places& places) {
    return static_cast<uint64_t>(places.per_group | places.per_unit);
  };
  uint64_t matrices = Address(gemm.b.data);  // with the low bits of any of them
  for (int64_t i = 0; groups.matrices != nullptr && i < groups.number; ++i)
    matrices |= Address(groups.matrices[i]);
  key.alignment = AlignmentOf({Address(gemm.a.data), matrices, Address(out), steps(s.places[kA]),
                               steps(s.places[kB]), steps(s.places[kOut])});
  key.workspace_bytes = workspace.bytes - layout.bytes;
  const std::shared_ptr<GroupedPlan> plan = GroupedPlanOf(ClassOf(key), arrays);
  if (plan->error != nullptr) return {plan->error};

  QSHARD_RETURN_IF_ERROR(
      SetUpGroups(exec, s, groups.matrices, elements * sizeof(Out) / sizeof(uint4)));
  const std::lock_guard<std::mutex> lock(plan->mutex);
  const auto multiply = [&](const cublaslt::Algorithm& algorithm) {
    void* const* const d = s.pointers + kOut * s.stride;
    return plan->library->matmul(plan->handle, plan->desc, s.scalars, s.pointers + kB * s.stride,
                                 plan->b, s.pointers + kA * s.stride, plan->a, s.scalars + 1, d,
                                 plan->out, const_cast<void**>(d), plan->out, &algorithm,
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
