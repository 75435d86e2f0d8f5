// Allocator for tests, preloaded before libstdc++: fails a chosen allocation of the extension, on
// any thread. tests/cpu/test_memory_limits.py compiles it.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<long> left{0};  // allocations until the one that fails; 0 for never

bool IsOfExtension(const void* caller) {
  Dl_info info;
  if (dladdr(caller, &info) == 0 || info.dli_fname == nullptr) return false;
  return std::strstr(info.dli_fname, "/_ffi.") != nullptr ||
         std::strstr(info.dli_fname, "libstdc++") != nullptr;  // strings and streams
}

void* Allocate(size_t size, const void* caller) {
  if (left.load() > 0 && IsOfExtension(caller) && left.fetch_sub(1) == 1) throw std::bad_alloc();
  void* const memory = std::malloc(size > 0 ? size : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

extern "C" void fail_allocation(long number) { left.store(number); }
extern "C" long allocations_left() { return left.load(); }

void* operator new(size_t size) { return Allocate(size, __builtin_return_address(0)); }
void* operator new[](size_t size) { return Allocate(size, __builtin_return_address(0)); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
