// Loads cuBLASLt: the copy already in the process (frameworks load one), else the one that the
// loader finds, else one of the files that Python found in packages.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

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

// Files for grouped products.
struct GroupedFiles {
  std::vector<std::string> paths;
  bool required = false;
  std::string error;  // of a required file
};

GroupedFiles& TheGroupedFiles() {
  static auto& files = *new GroupedFiles;
  return files;
}

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

constexpr Library kNoGroups{
    "grouped products need cuBLASLt 13.5 or newer; install nvidia-cublas>=13.5, or set "
    "QSHARD_CUBLASLT to its libcublasLt.so.13"};

bool FindAll(void* library, Library* l) {
  Find(library, "cublasLtGroupedMatrixLayoutCreate", &l->grouped_layout_create);
  Find(library, "cublasLtMatrixLayoutSetAttribute", &l->layout_set);
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

// The caller has the mutex.
const Library& LoadLocked() {
  static const Library* loaded = nullptr;
  if (loaded != nullptr) return *loaded;
  void* const library = Open();
  if (library == nullptr) return kNotFound;
  Library found{};
  if (!FindAll(library, &found)) return kIncomplete;
  loaded = new Library(found);
  return *loaded;
}

// Returns whether the driver runs CUDA 13, as the libraries with groups need.
bool DriverIsNewEnough() {
  constexpr int kCuda13 = 13000;
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess && version >= kCuda13;
}

// Returns a file's library, or null. It is a copy of its own, beside the one of the framework: the
// library binds its symbols to itself, and RTLD_LOCAL keeps them from others.
const Library* OpenGrouped(const std::string& path, std::string* error) {
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  Library found{};
  if (library == nullptr)
    *error = dlerror();
  else if (!FindAll(library, &found) || !found.HasGroups())
    *error = path + " has no grouped products; pass cuBLASLt 13.5 or newer";
  else
    return new Library(found);
  if (library != nullptr) dlclose(library);
  return nullptr;
}

// The caller has the mutex.
const Library* FindGrouped() {
  GroupedFiles& files = TheGroupedFiles();
  files.error.clear();
  // Before any file, so that a framework which loads the library later by its name gets its own.
  const Library& common = LoadLocked();
  if (!DriverIsNewEnough()) {
    files.error = "the driver does not run CUDA 13; update it";
    return nullptr;
  }
  if (files.required) return OpenGrouped(files.paths.at(0), &files.error);
  if (common.HasGroups() && common.version() >= kGroupedScalarsSince) return &common;
  const Library* oldest = common.HasGroups() ? &common : nullptr;
  for (const std::string& path : files.paths) {
    std::string error;
    const Library* const found = OpenGrouped(path, &error);
    if (found == nullptr) continue;
    if (found->version() >= kGroupedScalarsSince) return found;
    if (oldest == nullptr) oldest = found;
  }
  return oldest;
}

}  // namespace

const Library& Load() {
  const std::lock_guard<std::mutex> lock(mutex);
  return LoadLocked();
}

const Library& LoadGrouped() {
  static const Library* loaded = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) loaded = FindGrouped();
  return loaded == nullptr ? kNoGroups : *loaded;
}

// Creating a handle may allocate, which would invalidate a stream capture elsewhere in this thread
// in the default capture mode.
Handle HandleOf(const Library& library, int device) {
  static std::mutex guard;
  static auto& handles = *new std::map<std::pair<const Library*, int>, Handle>;
  const std::lock_guard<std::mutex> lock(guard);
  Handle& handle = handles[{&library, device}];
  if (handle != nullptr) return handle;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (library.create(&handle) != kSuccess) handle = nullptr;
  cudaThreadExchangeStreamCaptureMode(&mode);
  return handle;
}

}  // namespace cublaslt

void SetGemmLibraryPaths(std::vector<std::string> paths) {
  const std::lock_guard<std::mutex> lock(cublaslt::mutex);
  cublaslt::Paths() = std::move(paths);
}

void SetGroupedGemmLibrary(std::vector<std::string> paths, bool required) {
  const std::lock_guard<std::mutex> lock(cublaslt::mutex);
  cublaslt::GroupedFiles& files = cublaslt::TheGroupedFiles();
  files.required = required && !paths.empty();
  files.paths = std::move(paths);
}

int64_t GroupedGemmLibraryVersion() {
  const cublaslt::Library& library = cublaslt::LoadGrouped();
  if (library.error == nullptr) return static_cast<int64_t>(library.version());
  const std::lock_guard<std::mutex> lock(cublaslt::mutex);
  const cublaslt::GroupedFiles& files = cublaslt::TheGroupedFiles();
  if (files.required && !files.error.empty())
    throw std::runtime_error("QSHARD_CUBLASLT cannot be used: " + files.error);
  return 0;
}

std::string GroupedGemmLibraryPath() {
  const cublaslt::Library& library = cublaslt::LoadGrouped();
  Dl_info info{};
  if (library.error != nullptr || dladdr(reinterpret_cast<void*>(library.version), &info) == 0)
    return "";
  return info.dli_fname;
}

int64_t GemmLibraryVersion() {
  const cublaslt::Library& library = cublaslt::Load();
  return library.error != nullptr ? 0 : static_cast<int64_t>(library.version());
}

}  // namespace qshard::kernels
