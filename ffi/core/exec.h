// Exec: the platform and queue that a kernel runs on, filled from the framework's context. Includes
// no XLA header, so .cu files can include it.
#ifndef QSHARD_CORE_EXEC_H_
#define QSHARD_CORE_EXEC_H_

#include <cstdint>

struct CUstream_st;

namespace qshard {

struct Cpu {};
struct Cuda {};

template <class Platform>
struct Exec;

// kRuns: the task will run, or has run. kUnknown: the pool threw, and the task may still run.
enum class ScheduleResult { kRuns, kRefused, kUnknown };

// The caller's thread and the framework's thread pool.
template <>
struct Exec<Cpu> {
  void* context = nullptr;  // argument of `schedule`
  // `schedule` does not throw, and tasks must not throw either.
  ScheduleResult (*schedule)(const Exec& exec, void (*task)(void*), void* data) noexcept = nullptr;
  const void* api = nullptr;
  int64_t num_threads = 1;
};

// The framework's current stream. Kernels only enqueue work: they neither allocate nor synchronize.
template <>
struct Exec<Cuda> {
  CUstream_st* stream = nullptr;
};

// Result of a launcher: null, or an error text in static storage.
struct [[nodiscard]] Status {
  explicit operator bool() const { return error != nullptr; }
  const char* error = nullptr;
};

// Returns from the function if a Status or an Error is set.
#define QSHARD_RETURN_IF_ERROR(...) \
  if (auto error = (__VA_ARGS__)) return error

}  // namespace qshard

#endif  // QSHARD_CORE_EXEC_H_
