#include <cudaTypedefs.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "core/ceil_div.h"
#include "kernels/cuda/hopper/contract_rows.cuh"
#include "kernels/cuda/hopper/contract_rows.h"
#include "kernels/gemm_groups.h"
#include "kernels/gemm_scales.h"

namespace qshard::kernels {
namespace {

using hopper::ContractKernel;
using hopper::ContractParams;
using hopper::ExpertMaps;
using hopper::kPair;
using hopper::kTileM;
using hopper::kTileN;

// Offsets in bytes from an aligned address of the workspace.
struct Layout {
  static constexpr int64_t kAlignment = kScaleAlignment;  // more than maps and copies need

  Layout(const GemmProblem& gemm, const GemmGroups& groups)
      : maps(RoundUp(groups.number * int64_t{sizeof(int32_t)}, kAlignment)),
        a_scales(maps + RoundUp(groups.number * int64_t{sizeof(ExpertMaps)}, kAlignment)),
        b_scales(a_scales + (HasBlocks(gemm) ? ScaleBytes(gemm, gemm.a) : 0)),
        bytes(kAlignment + b_scales + (HasBlocks(gemm) ? ScaleBytes(gemm, gemm.b) : 0)) {}

  static bool HasBlocks(const GemmProblem& gemm) { return gemm.scales == ScaleId::kFloat; }

  int64_t maps, a_scales, b_scales, bytes;
};

// Returns the number of tiles of clusters along m and along n.
int64_t TileRows(int64_t m) { return CeilDiv(m, kTileM); }
int64_t TileCols(int64_t n) { return CeilDiv(n, kPair * kTileN); }

bool IsHopper() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
         major == 9 && minor == 0;
}

// Returns whether the environment allows the kernel. Read once.
bool IsAllowed() {
  static const bool allowed = [] {
    const char* const setting = std::getenv("QSHARD_CONTRACT_ROWS");
    return setting == nullptr || std::strcmp(setting, "0") != 0;
  }();
  return allowed;
}

// Returns the driver's function that encodes tensor maps, or null. The driver is not linked.
PFN_cuTensorMapEncodeTiled_v12000 Encoder() {
  static const auto encoder = [] {
    constexpr unsigned kSince = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince,
                                         cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
      function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// Encodes the map of a contiguous tensor. Its tiles are swizzled in shared memory. Sizes are in
// elements, innermost first.
bool Encode(CUtensorMapDataType type, int64_t element_bytes, const void* data,
            std::initializer_list<int64_t> sizes, std::initializer_list<uint32_t> box,
            CUtensorMap* map) {
  constexpr int kMostAxes = 3;
  uint64_t lengths[kMostAxes], strides[kMostAxes];
  const uint32_t steps[kMostAxes] = {1, 1, 1};
  int axes = 0;
  int64_t stride = element_bytes;
  for (const int64_t size : sizes) {
    lengths[axes] = size;
    stride *= size;
    strides[axes++] = stride;  // of the next axis
  }
  return Encoder()(map, type, axes, const_cast<void*>(data), lengths, strides, box.begin(), steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <class Out>
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
constexpr CUtensorMapDataType kMapType<bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
constexpr CUtensorMapDataType kMapType<float16> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// Blocks of the kernel before the product.
constexpr int kPlannersPerMultiprocessor = 8;

struct Maps {
  CUtensorMap a, b, out;
};

template <class A, class B, class Out, class Tuning>
Status Launch(const Exec<Cuda>& exec, const ContractParams& params, const Maps& maps) {
  constexpr auto kKernel = ContractKernel<A, B, Out, Tuning>;
  constexpr int kBytes = sizeof(hopper::Shared<Tuning>);
  QSHARD_RETURN_IF_ERROR(AllowSharedMemory(kKernel, kBytes));
  const uint32_t clusters =
      std::min<uint32_t>(params.tiles, std::max(Multiprocessors() / kPair, 1));
  kKernel<<<clusters * kPair, hopper::kContractThreads, kBytes, exec.stream>>>(params, maps.a,
                                                                               maps.b, maps.out);
  return LaunchStatus();
}

template <class Out, class Tuning>
Status LaunchFor(const Exec<Cuda>& exec, const GemmProblem& gemm, const ContractParams& params,
                 const Maps& maps) {
  if (gemm.a.element == ElementId::kE5M2)
    return Launch<E5M2, E4M3, Out, Tuning>(exec, params, maps);
  if (gemm.b.element == ElementId::kE5M2)
    return Launch<E4M3, E5M2, Out, Tuning>(exec, params, maps);
  return Launch<E4M3, E4M3, Out, Tuning>(exec, params, maps);
}

}  // namespace

bool ContractsRows(const GemmProblem& gemm, const GemmGroups& groups, const Workspace& workspace) {
  const auto is_fp8 = [](const GemmOperand& operand) {
    return operand.element == ElementId::kE4M3 || operand.element == ElementId::kE5M2;
  };
  const bool scales = gemm.scales == ScaleId::kNone ||
                      (gemm.scales == ScaleId::kFloat && gemm.cols == hopper::kTileK &&
                       gemm.a.block_rows == 1 && gemm.b.block_rows == 1);
  const int64_t m = gemm.a.rows, n = gemm.b.rows;
  const int64_t rows = TileRows(m), cols = TileCols(n);
  // Tiles that are mostly padding are left to smaller ones.
  const bool filled = 4 * m * n >= rows * kTileM * cols * kPair * kTileN;
  return groups.by_k && is_fp8(gemm.a) && is_fp8(gemm.b) &&
         (gemm.a.element == ElementId::kE4M3 || gemm.b.element == ElementId::kE4M3) && scales &&
         filled && groups.number <= kMostGroups && groups.number * rows * cols < kMaxDivided &&
         workspace.bytes >= Layout(gemm, groups).bytes && IsAllowed() && IsHopper() &&
         Encoder() != nullptr;
}

template <class Out>
Status ContractRows(const Exec<Cuda>& exec, const GemmProblem& gemm, const GemmGroups& groups,
                    const Workspace& workspace, Out* out) {
  const int64_t m = gemm.a.rows, n = gemm.b.rows;
  constexpr auto kCodes = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  constexpr uint32_t kColumns = hopper::kSwizzle / sizeof(Out);
  Maps maps;
  if (!Encode(kCodes, 1, gemm.a.data, {gemm.k, m}, {hopper::kTileK, hopper::kBoxRows}, &maps.a) ||
      !Encode(kCodes, 1, gemm.b.data, {gemm.k, n}, {hopper::kTileK, hopper::kBoxRows}, &maps.b) ||
      !Encode(kMapType<Out>, sizeof(Out), out, {n, m, groups.number},
              {kColumns, hopper::kStripRows, 1}, &maps.out))
    return {"the driver cannot describe these operands; look for errors of CUDA before this one"};

  const Layout layout(gemm, groups);
  const auto address = reinterpret_cast<uintptr_t>(workspace.data);
  uint8_t* const start =
      workspace.data + (RoundUp(static_cast<int64_t>(address), Layout::kAlignment) - address);
  auto* const stops = reinterpret_cast<int32_t*>(start);
  auto* const expert_maps = reinterpret_cast<ExpertMaps*>(start + layout.maps);
  const bool blocks = Layout::HasBlocks(gemm);
  hopper::Scales a_scales{}, b_scales{};
  if (blocks) {
    const auto scales = [&](const GemmOperand& operand, int64_t offset) -> hopper::Scales {
      return {static_cast<const float*>(operand.scale_inv),
              reinterpret_cast<float*>(start + offset), operand.rows, GridCols(gemm)};
    };
    a_scales = scales(gemm.a, layout.a_scales);
    b_scales = scales(gemm.b, layout.b_scales);
  }

  const int64_t rows = TileRows(m), cols = TileCols(n), last_band = (rows - 1) / hopper::kBand;
  const ContractParams params{static_cast<int32_t>(groups.number),
                              static_cast<int32_t>(m),
                              static_cast<int32_t>(n),
                              stops,
                              expert_maps,
                              blocks ? a_scales.to : gemm.a.tensor_scale_inv,
                              blocks ? b_scales.to : gemm.b.tensor_scale_inv,
                              static_cast<uint32_t>(groups.number * rows * cols),
                              Divider(rows * cols),
                              Divider(hopper::kBand * cols),
                              static_cast<uint32_t>(last_band),
                              Divider(rows - last_band * hopper::kBand)};

  const int64_t planners =
      std::clamp<int64_t>(std::max(a_scales.Tiles(), b_scales.Tiles()), 1,
                          int64_t{Multiprocessors()} * kPlannersPerMultiprocessor);
  const hopper::Groups plan{static_cast<const uint8_t*>(gemm.a.data),
                            static_cast<const uint8_t*>(gemm.b.data),
                            groups.stops,
                            params.experts,
                            gemm.k,
                            blocks ? gemm.cols : kGemmAlignment,
                            stops,
                            expert_maps};
  hopper::PlanKernel<<<static_cast<unsigned>(planners), hopper::kPlanThreads, 0, exec.stream>>>(
      maps.a, maps.b, plan, a_scales, b_scales);
  QSHARD_RETURN_IF_ERROR(LaunchStatus());
  return blocks ? LaunchFor<Out, hopper::BlockTuning>(exec, gemm, params, maps)
                : LaunchFor<Out, hopper::TensorTuning>(exec, gemm, params, maps);
}

#define QSHARD_INSTANTIATE(Out)                                                               \
  template Status ContractRows<Out>(const Exec<Cuda>&, const GemmProblem&, const GemmGroups&, \
                                    const Workspace&, Out*);
QSHARD_INSTANTIATE(float)
QSHARD_INSTANTIATE(bfloat16)
QSHARD_INSTANTIATE(float16)
#undef QSHARD_INSTANTIATE

}  // namespace qshard::kernels
