// Loops over blocks of work on the caller's thread and the framework's pool.
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

// XLA and torch may run us with subnormals flushed to zero; the formulas assume IEEE arithmetic.
// Round to nearest even, no flushing, exceptions masked; the old state comes back at the end of the
// scope.
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

// How many threads a loop over `blocks` blocks uses at most, the caller's among them.
inline int64_t WorkersOf(const Exec<Cpu>& exec, int64_t blocks) {
  return std::max<int64_t>(1, std::min(exec.num_threads, blocks));
}

// A loop that several threads work on. Each scheduled task holds a reference, and so does the
// caller: a task that starts late finds nothing to do, in memory that is still there.
template <class Body>
class SharedLoop {
 public:
  SharedLoop(int64_t blocks, const Body& body) : blocks_(blocks), body_(body) {}

  void AddReference() noexcept { references_.fetch_add(1, std::memory_order_relaxed); }
  void Release() noexcept {
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // Takes blocks until there are none left. A block that throws counts as done, and those that
  // start after it are skipped: nothing leaves a thread of a pool, and nobody waits for ever.
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

  // Returns what the first block that threw has thrown, if any, once no thread uses the body.
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
  const Body& body_;  // used by those alone who have a block
  std::mutex mutex_;
  std::condition_variable all_done_;
  std::exception_ptr error_;
};

// Calls body(i, worker) for every i in [0, blocks), each once, in any order, and returns when all
// are done. A worker has a number below WorkersOf(exec, blocks) and does one block at a time.
//
// The caller works too and waits only for blocks that some thread has started, so a pool that is
// busy, or that runs tasks in the caller's thread, cannot deadlock it.
//
// Throws what a body throws, and std::bad_alloc before any body is called. Either way no thread
// uses the body any more, nor what it writes to.
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
    const Scheduled scheduled = exec.schedule(exec, task, loop);
    if (scheduled == Scheduled::kNo) loop->Release();
    if (scheduled != Scheduled::kYes) break;  // The caller does what is left.
  }
  loop->Work();
  const std::exception_ptr error = loop->Wait();
  loop->Release();
  if (error != nullptr) std::rethrow_exception(error);
}

// Calls body(i), likewise.
template <class Body>
void ParallelFor(const Exec<Cpu>& exec, int64_t blocks, const Body& body) {
  ParallelForWorkers(exec, blocks, [&](int64_t i, int64_t) { body(i); });
}

// Calls body(i, scratch), likewise, where a worker has `count` elements of scratch. They are
// allocated before the loop, because a body that allocates may fail halfway; they hold anything.
template <class T, class Body>
void ParallelForWithScratch(const Exec<Cpu>& exec, int64_t blocks, int64_t count,
                            const Body& body) {
  if (blocks == 0) return;
  constexpr int64_t kLine = 64;  // of a cache: two workers share none
  const int64_t stride = count + kLine / static_cast<int64_t>(sizeof(T));
  const std::unique_ptr<T[]> all(new T[WorkersOf(exec, blocks) * stride]);
  ParallelForWorkers(exec, blocks,
                     [&](int64_t i, int64_t worker) { body(i, all.get() + worker * stride); });
}

// Bytes read and written that are worth a task: some 20 us, against a few to wake a thread. Smaller
// work stays on the caller's thread.
constexpr int64_t kTaskBytes = int64_t{1} << 18;

// [0, n) in ranges of kTaskBytes or more, each of which is a block of a loop. Ranges of 64 or more
// start at multiples of 64, so that two threads share no cache line of an aligned output.
class Ranges {
 public:
  // `bytes`: read and written for each element.
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

// Calls body(begin, end, scratch), likewise.
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
