// The cuBLASLt library that GEMMs use. In CUDA builds only.
#ifndef QSHARD_KERNELS_GEMM_LIBRARY_H_
#define QSHARD_KERNELS_GEMM_LIBRARY_H_

#include <cstdint>
#include <string>
#include <vector>

namespace qshard::kernels {

// Sets cuBLASLt files to try, best first, if neither the process nor the loader has the library.
void SetGemmLibraryPaths(std::vector<std::string> paths);

// Returns the version of cuBLASLt, such as 130400 for 13.4.0, or 0 if it is missing.
int64_t GemmLibraryVersion();

// Sets cuBLASLt files for grouped products, best first. If `required`, the first one is used, and
// no other. Otherwise they are used only if the library of other products is too old. No effect
// once the library is loaded.
void SetGroupedGemmLibrary(std::vector<std::string> paths, bool required);

// Returns the version of the cuBLASLt that grouped products use, or 0 if none is new enough. Throws
// std::runtime_error if a required file cannot be used.
int64_t GroupedGemmLibraryVersion();

// Returns the file of that library, or an empty string.
std::string GroupedGemmLibraryPath();

// Hits and misses of the plan cache, and heuristic searches for algorithms.
struct GemmCounts {
  int64_t hits, misses, searches;
};
GemmCounts CountGemms();

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GEMM_LIBRARY_H_
