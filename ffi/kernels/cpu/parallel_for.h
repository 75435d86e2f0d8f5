// Loops over blocks of work on the caller's thread and the framework's pool.
#ifndef QSHARD_KERNELS_CPU_PARALLEL_FOR_H_
#define QSHARD_KERNELS_CPU_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
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

// Calls body(i) for every i in [0, blocks), each once, in any order, and returns when all are done.
// At most exec.num_threads threads work, the caller's among them, and no more than there are
// blocks.
//
// The caller works too and waits only for blocks that some thread has started, so a pool that is
// busy, or that runs tasks in the caller's thread, cannot deadlock it. The state is shared: a task
// that starts late finds nothing to do.
template <class Body>
void ParallelFor(const Exec<Cpu>& exec, int64_t blocks, const Body& body) {
  const int64_t helpers = std::min(exec.num_threads, blocks) - 1;
  if (helpers <= 0) {
    ScopedFloatEnvironment environment;
    for (int64_t i = 0; i < blocks; ++i) body(i);
    return;
  }
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    int64_t blocks;
    const Body* body;
    std::mutex mutex;
    std::condition_variable all_done;

    void Work() {
      ScopedFloatEnvironment environment;
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks;) {
        (*body)(i);
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == blocks) {
          std::lock_guard<std::mutex> lock(mutex);
          all_done.notify_all();
        }
      }
    }
  };
  auto state = std::make_shared<State>();
  state->blocks = blocks;
  state->body = &body;
  for (int64_t i = 0; i < helpers; ++i) {
    exec.schedule(
        exec,
        [](void* data) {
          std::unique_ptr<std::shared_ptr<State>> own(static_cast<std::shared_ptr<State>*>(data));
          (*own)->Work();
        },
        new std::shared_ptr<State>(state));
  }
  state->Work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done.load(std::memory_order_acquire) == blocks; });
}

// Bytes read and written that are worth a task: some 20 us, against a few to wake a thread. Smaller
// work stays on the caller's thread.
constexpr int64_t kTaskBytes = int64_t{1} << 18;

// Splits [0, n) into ranges and calls body(begin, end) on each. `bytes`: read and written for each
// element. Ranges of 64 or more start at multiples of 64, so that two threads share no cache line
// of an aligned output.
template <class Body>
void ParallelRanges(const Exec<Cpu>& exec, int64_t n, int64_t bytes, const Body& body) {
  if (n == 0) return;
  int64_t grain = std::max<int64_t>(1, kTaskBytes / bytes);
  if (grain > 64) grain -= grain % 64;
  const int64_t tasks = std::max<int64_t>(1, n / grain);
  ParallelFor(exec, tasks,
              [&](int64_t i) { body(i * grain, i + 1 == tasks ? n : (i + 1) * grain); });
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_PARALLEL_FOR_H_
