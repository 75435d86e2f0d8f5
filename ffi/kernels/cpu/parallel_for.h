// Parallel loops over blocks of work, on the caller's thread and the framework's pool.
#ifndef QSHARD_KERNELS_CPU_PARALLEL_FOR_H_
#define QSHARD_KERNELS_CPU_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/exec.h"

namespace qshard::kernels {

// Sets the floating-point state for a scope: round to nearest even, no flushing of subnormals,
// exceptions masked. XLA and torch may call with flushing on, but the formulas assume IEEE
// arithmetic.
class ScopedFloatEnvironment {
 public:
  ScopedFloatEnvironment(const ScopedFloatEnvironment&) = delete;
  ScopedFloatEnvironment& operator=(const ScopedFloatEnvironment&) = delete;

#if defined(__x86_64__)
  ScopedFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~ScopedFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefaultMxcsr = 0x1F80;
  unsigned saved_;
#elif defined(__aarch64__)
  ScopedFloatEnvironment() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~ScopedFloatEnvironment() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  ScopedFloatEnvironment() {}
#endif
};

// Returns the largest number of threads, including the caller's, that a loop over `blocks` blocks
// uses.
inline int64_t WorkersOf(const Exec<Cpu>& exec, int64_t blocks) {
  return std::max<int64_t>(1, std::min(exec.num_threads, blocks));
}

// State of a loop that several threads share. Each scheduled task and the caller own a reference,
// so the state outlives a task that starts late.
template <class Body>
class SharedLoop {
 public:
  SharedLoop(int64_t blocks, const Body& body) : blocks_(blocks), body_(body) {}

  void AddReference() noexcept { references_.fetch_add(1, std::memory_order_relaxed); }
  void Release() noexcept {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // Takes blocks until none are left. A block that throws counts as done, and later blocks are
  // skipped: no exception may leave a pool thread, and Wait() must return.
  void Work() noexcept {
    const ScopedFloatEnvironment environment;
    const int64_t worker = workers_.fetch_add(1, std::memory_order_relaxed);
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < blocks_;) {
      if (!failed_.load(std::memory_order_relaxed)) {
        try {
          body_(i, worker);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(mutex_);
          if (error_ == nullptr) error_ = std::current_exception();
          failed_.store(true, std::memory_order_relaxed);
        }
      }
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == blocks_) {
        const std::lock_guard<std::mutex> lock(mutex_);
        all_done_.notify_all();
      }
    }
  }

  // Waits until all blocks are done. No thread uses the body after that. Returns the first
  // exception, or null.
  std::exception_ptr Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [&] { return done_.load(std::memory_order_acquire) == blocks_; });
    return std::move(error_);
  }

 private:
  ~SharedLoop() = default;

  std::atomic<int64_t> references_{1}, workers_{0}, next_{0}, done_{0};
  std::atomic<bool> failed_{false};
  const int64_t blocks_;
  const Body& body_;  // valid while blocks are left
  std::mutex mutex_;
  std::condition_variable all_done_;
  std::exception_ptr error_;
};

// Calls body(i, worker) once for every i in [0, blocks), in any order, and returns when all are
// done. `worker` is less than WorkersOf(exec, blocks), and a worker runs one block at a time.
//
// The caller works too, and waits only for blocks that some thread has started. So a busy pool, or
// a pool that runs tasks in the caller's thread, cannot deadlock it.
//
// Rethrows the first exception of a body after all workers have stopped. Throws std::bad_alloc only
// before the first call of a body.
template <class Body>
void ParallelForWorkers(const Exec<Cpu>& exec, int64_t blocks, const Body& body) {
  const int64_t helpers = WorkersOf(exec, blocks) - 1;
  if (helpers == 0) {
    const ScopedFloatEnvironment environment;
    for (int64_t i = 0; i < blocks; ++i) body(i, 0);
    return;
  }
  using Loop = SharedLoop<Body>;
  auto* const loop = new Loop(blocks, body);
  const auto task = [](void* data) {
    auto* const own = static_cast<Loop*>(data);
    own->Work();
    own->Release();
  };
  for (int64_t i = 0; i < helpers; ++i) {
    loop->AddReference();
    const ScheduleResult result = exec.schedule(exec, task, loop);
    // After kUnknown the task may still run and needs its reference. A leak is the lesser evil.
    if (result == ScheduleResult::kRefused) loop->Release();
    if (result != ScheduleResult::kRuns) break;
  }
  loop->Work();
  const std::exception_ptr error = loop->Wait();
  loop->Release();
  if (error != nullptr) std::rethrow_exception(error);
}

// ParallelForWorkers for a body(i) that does not need the worker.
template <class Body>
void ParallelFor(const Exec<Cpu>& exec, int64_t blocks, const Body& body) {
  ParallelForWorkers(exec, blocks, [&](int64_t i, int64_t) { body(i); });
}

// ParallelForWorkers for a body(i, scratch). Each worker has `count` uninitialized elements of
// scratch, allocated before the loop, so bodies allocate nothing.
template <class T, class Body>
void ParallelForWithScratch(const Exec<Cpu>& exec, int64_t blocks, int64_t count,
                            const Body& body) {
  if (blocks == 0) return;
  constexpr int64_t kLine = 64;  // bytes; workers must not share a cache line
  const int64_t stride = count + kLine / static_cast<int64_t>(sizeof(T));
  const std::unique_ptr<T[]> all(new T[WorkersOf(exec, blocks) * stride]);
  ParallelForWorkers(exec, blocks,
                     [&](int64_t i, int64_t worker) { body(i, all.get() + worker * stride); });
}

// Bytes read and written that are worth a task: about 20 us, compared with a few to wake a thread.
// Smaller work stays on the caller's thread.
constexpr int64_t kTaskBytes = int64_t{1} << 18;

// Splits [0, n) into ranges of kTaskBytes or more. Ranges of 64 or more elements start at multiples
// of 64, so that threads share no cache line of an aligned output.
class Ranges {
 public:
  // `bytes`: bytes read and written per element.
  Ranges(int64_t n, int64_t bytes)
      : n_(n), grain_(n == 0 ? 1 : std::max<int64_t>(1, kTaskBytes / bytes)) {
    if (grain_ > 64) grain_ -= grain_ % 64;
  }
  int64_t count() const { return n_ == 0 ? 0 : std::max<int64_t>(1, n_ / grain_); }
  int64_t Begin(int64_t i) const { return i * grain_; }
  int64_t End(int64_t i) const { return i + 1 == count() ? n_ : (i + 1) * grain_; }

 private:
  int64_t n_, grain_;
};

// Splits [0, n) into ranges and calls body(begin, end) on each.
template <class Body>
void ParallelRanges(const Exec<Cpu>& exec, int64_t n, int64_t bytes, const Body& body) {
  const Ranges ranges(n, bytes);
  ParallelFor(exec, ranges.count(), [&](int64_t i) { body(ranges.Begin(i), ranges.End(i)); });
}

// ParallelRanges with scratch per worker, as in ParallelForWithScratch.
template <class T, class Body>
void ParallelRangesWithScratch(const Exec<Cpu>& exec, int64_t n, int64_t bytes, int64_t count,
                               const Body& body) {
  const Ranges ranges(n, bytes);
  ParallelForWithScratch<T>(exec, ranges.count(), count, [&](int64_t i, T* scratch) {
    body(ranges.Begin(i), ranges.End(i), scratch);
  });
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_PARALLEL_FOR_H_
