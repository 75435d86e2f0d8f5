// Loads cuBLASLt: the copy already in the process (frameworks load one), else the one that the
// loader finds, else one of the files that Python found in packages.
#include <dlfcn.h>
#include <pthread.h>

#include <mutex>

#include "kernels/cuda/gemm/cublaslt.h"
#include "kernels/gemm_library.h"

namespace qshard::kernels {
namespace cublaslt {
namespace {

std::mutex mutex;

// Without this, a forked child could wait forever, when it reads the version, for a mutex that
// another thread of its parent had locked. GEMM plans need no such handler, because CUDA fails
// earlier in a child.
const bool registered [[maybe_unused]] =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); }) == 0;

std::vector<std::string>& Paths() {
  static auto& paths = *new std::vector<std::string>;
  return paths;
}

// Newest first.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

void* Open() {
  for (const int flags : {RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD, RTLD_NOW | RTLD_LOCAL})
    for (const char* name : kNames)
      if (void* library = dlopen(name, flags)) return library;
  for (const std::string& path : Paths())
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  return nullptr;
}

template <class Function>
bool Find(void* library, const char* name, Function** function) {
  *function = reinterpret_cast<Function*>(dlsym(library, name));
  return *function != nullptr;
}

constexpr Library kNotFound{
    "cuBLASLt is not found; install PyTorch or JAX for CUDA, or put libcublasLt.so on "
    "LD_LIBRARY_PATH"};
constexpr Library kIncomplete{"cuBLASLt lacks a function that it should have; update it"};

bool FindAll(void* library, Library* l) {
  return Find(library, "cublasLtGetVersion", &l->version) &&
         Find(library, "cublasLtCreate", &l->create) &&
         Find(library, "cublasLtMatmulDescCreate", &l->desc_create) &&
         Find(library, "cublasLtMatmulDescDestroy", &l->desc_destroy) &&
         Find(library, "cublasLtMatmulDescSetAttribute", &l->desc_set) &&
         Find(library, "cublasLtMatrixLayoutCreate", &l->layout_create) &&
         Find(library, "cublasLtMatrixLayoutDestroy", &l->layout_destroy) &&
         Find(library, "cublasLtMatmulPreferenceCreate", &l->preference_create) &&
         Find(library, "cublasLtMatmulPreferenceDestroy", &l->preference_destroy) &&
         Find(library, "cublasLtMatmulPreferenceSetAttribute", &l->preference_set) &&
         Find(library, "cublasLtMatmulAlgoGetHeuristic", &l->heuristic) &&
         Find(library, "cublasLtMatmulAlgoCheck", &l->check) &&
         Find(library, "cublasLtMatmul", &l->matmul);
}

}  // namespace

const Library& Load() {
  static const Library* loaded = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded != nullptr) return *loaded;
  void* const library = Open();
  if (library == nullptr) return kNotFound;
  Library found{};
  if (!FindAll(library, &found)) return kIncomplete;
  loaded = new Library(found);
  return *loaded;
}

}  // namespace cublaslt

void SetGemmLibraryPaths(std::vector<std::string> paths) {
  const std::lock_guard<std::mutex> lock(cublaslt::mutex);
  cublaslt::Paths() = std::move(paths);
}

int64_t GemmLibraryVersion() {
  const cublaslt::Library& library = cublaslt::Load();
  return library.error != nullptr ? 0 : static_cast<int64_t>(library.version());
}

}  // namespace qshard::kernels
