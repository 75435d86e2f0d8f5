// Declarations of the part of cuBLASLt that GEMMs use. The library is not linked but loaded on
// first use, from the framework's installation (cublaslt.cu), and its header need not be installed.
//
// Names, values and sizes are copied from cublasLt.h, cublas_api.h and library_types.h of CUDA 12.9
// and 13.0 (https://docs.nvidia.com/cuda/cublas, "Using the cuBLASLt API"). They are stable between
// releases. Names for grouped layouts are copied from cuBLAS 13.8, where they are experimental.
#ifndef QSHARD_KERNELS_CUDA_GEMM_CUBLASLT_H_
#define QSHARD_KERNELS_CUDA_GEMM_CUBLASLT_H_

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace qshard::kernels::cublaslt {

using Handle = struct OpaqueHandle*;          // cublasLtHandle_t
using Desc = struct OpaqueDesc*;              // cublasLtMatmulDesc_t
using Layout = struct OpaqueLayout*;          // cublasLtMatrixLayout_t
using Preference = struct OpaquePreference*;  // cublasLtMatmulPreference_t

enum Result : int { kSuccess = 0 };  // cublasStatus_t

enum Type : int {  // cudaDataType_t
  kFloat32 = 0,
  kFloat16 = 2,
  kBFloat16 = 14,
  kE4M3 = 28,
  kE5M2 = 29,
  kE2M1 = 33,
};

enum Compute : int { kCompute32F = 68 };  // cublasComputeType_t

enum DescAttribute : int {  // cublasLtMatmulDescAttributes_t
  kPointerMode = 2,
  kTransA = 3,
  kTransB = 4,
  kScalePointerA = 17,
  kScalePointerB = 18,
  kFastAccumulation = 25,
  kScaleModeA = 31,
  kScaleModeB = 32,
  kAlphaBatchStride = 39,  // int64_t, since cuBLAS 13.1; likewise the next. Groups on 10.x only:
  kBetaBatchStride = 40,   // 1 for a device array of pointers to a number for each group
};

constexpr int32_t kAsItIs = 0;         // CUBLAS_OP_N
constexpr int32_t kTransposed = 1;     // CUBLAS_OP_T
constexpr int32_t kDevicePointer = 1;  // CUBLASLT_POINTER_MODE_DEVICE, for alpha and beta

enum ScaleMode : int32_t {  // cublasLtMatmulMatrixScale_t
  kScalar = 0,
  kVectors16E4M3 = 1,  // this and the next: since cuBLAS 12.8
  kVectors32E8M0 = 2,
  kVectors128Float = 4,  // this and the next: since cuBLAS 12.9
  kSquares128Float = 5,
  kScalarPerGroup = 6,  // since cuBLAS 13.5
};

// Versions from which grouped products run: of values and blocks on Hopper, and of NVFP4 on
// Blackwell, where MXFP8 needs 13.3; and of tensor scales on Hopper.
constexpr size_t kGroupedSince = 130400, kGroupedScalarsSince = 130500;

enum LayoutAttribute : int {  // cublasLtMatrixLayoutAttribute_t
  kGroupedRows = 9,           // device pointer to int32 [groups]; likewise the next two
  kGroupedCols = 10,
  kGroupedLd = 11,
};

enum PreferenceAttribute : int {  // cublasLtMatmulPreferenceAttributes_t
  kMaxWorkspaceBytes = 1,         // uint64_t
  kReductionSchemes = 3,          // uint32_t, a mask
  kMinAlignmentA = 5,             // uint32_t, in bytes; likewise the next three
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
  kGroupedAverageK = 13,     // 8 bytes; likewise the next two
  kGroupedAverageRows = 14,  // of D
  kGroupedAverageCols = 15,
};

constexpr uint32_t kSumsInComputeType = 2;  // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE

struct Algorithm {  // cublasLtMatmulAlgo_t
  uint64_t data[8];
};

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  Algorithm algorithm;
  size_t workspace_bytes;
  Result state;
  float waves;
  int reserved[4];
};

// The loaded functions. `error` is null on success, else the reason.
struct Library {
  const char* error;
  size_t (*version)();  // 10000 * major + 100 * minor + patch
  Result (*create)(Handle*);
  Result (*desc_create)(Desc*, Compute, Type scale);
  Result (*desc_destroy)(Desc);
  Result (*desc_set)(Desc, DescAttribute, const void* value, size_t bytes);
  Result (*layout_create)(Layout*, Type, uint64_t rows, uint64_t cols, int64_t ld);
  Result (*layout_destroy)(Layout);
  Result (*preference_create)(Preference*);
  Result (*preference_destroy)(Preference);
  Result (*preference_set)(Preference, PreferenceAttribute, const void* value, size_t bytes);
  Result (*heuristic)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, Preference,
                      int requested, Heuristic* results, int* returned);
  // Checks that an algorithm supports these operands, and returns its workspace.
  Result (*check)(Handle, Desc, Layout a, Layout b, Layout c, Layout d, const Algorithm*,
                  Heuristic* result);
  Result (*matmul)(Handle, Desc, const void* alpha, const void* a, Layout, const void* b, Layout,
                   const void* beta, const void* c, Layout, void* d, Layout, const Algorithm*,
                   void* workspace, size_t workspace_bytes, CUstream_st* stream);

  // Null before kGroupedSince. The arrays are on the device.
  Result (*grouped_layout_create)(Layout*, Type, int groups, const void* rows, const void* cols,
                                  const void* ld);
  Result (*layout_set)(Layout, LayoutAttribute, const void* value, size_t bytes);

  bool HasGroups() const {
    return error == nullptr && grouped_layout_create != nullptr && layout_set != nullptr &&
           version() >= kGroupedSince;
  }
};

// Loads the library on the first call. Later calls retry until it is found.
const Library& Load();

// Loads the library for grouped products: the same as Load() if it is new enough, else a second one
// from the files that Python found. SetGroupedGemmLibrary has the order.
const Library& LoadGrouped();

// Returns the handle of a library on a device, or null if it does not start.
Handle HandleOf(const Library& library, int device);

}  // namespace qshard::kernels::cublaslt

#endif  // QSHARD_KERNELS_CUDA_GEMM_CUBLASLT_H_
