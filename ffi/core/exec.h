// Where a kernel runs. The handlers receive one of these from the framework; kernels take it and
// nothing else. No XLA header here: .cu files include this.
#ifndef QSHARD_CORE_EXEC_H_
#define QSHARD_CORE_EXEC_H_

#include <cstdint>

struct CUstream_st;

namespace qshard {

struct Cpu {};
struct Cuda {};

template <class Platform>
struct Exec;

// kRuns: the task runs soon, or has run. kUnknown: the pool threw, and may still run the task.
enum class ScheduleResult { kRuns, kRefused, kUnknown };

// The caller's thread and the framework's thread pool.
template <>
struct Exec<Cpu> {
  void* context = nullptr;  // what `schedule` needs
  // `schedule` does not throw, and tasks must not throw.
  ScheduleResult (*schedule)(const Exec& exec, void (*task)(void*), void* data) noexcept = nullptr;
  const void* api = nullptr;
  int64_t num_threads = 1;
};

// The framework's current stream. Kernels only enqueue: they never allocate or synchronize.
template <>
struct Exec<Cuda> {
  CUstream_st* stream = nullptr;
};

// What a launcher returns: null, or the text of what went wrong (static storage).
struct [[nodiscard]] Status {
  explicit operator bool() const { return error != nullptr; }
  const char* error = nullptr;
};

// Of a Status, or of an Error.
#define QSHARD_RETURN_IF_ERROR(...) \
  if (auto error = (__VA_ARGS__)) return error

}  // namespace qshard

#endif  // QSHARD_CORE_EXEC_H_
