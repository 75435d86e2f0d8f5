// Which library GEMMs on a GPU come from. In CUDA builds alone.
#ifndef QSHARD_KERNELS_GEMM_LIBRARY_H_
#define QSHARD_KERNELS_GEMM_LIBRARY_H_

#include <cstdint>
#include <string>
#include <vector>

namespace qshard::kernels {

// Where to look for cuBLASLt if neither the process nor the loader has it: files, the best first.
void SetGemmLibraryPaths(std::vector<std::string> paths);

// Of cuBLASLt, 130400 being 13.4.0; 0 where there is none.
int64_t GemmLibraryVersion();

// Lookups of plans, and of algorithms that no bucket had.
struct GemmCounts {
  int64_t hits, misses, searches;
};
GemmCounts CountGemms();

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GEMM_LIBRARY_H_
