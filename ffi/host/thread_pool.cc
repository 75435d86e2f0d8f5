#include "host/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace qshard::host {
namespace {

int64_t UsableCores() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

struct Task {
  void (*run)(void*);
  void* data;
};

class Pool {
 public:
  void Push(Task task, int64_t threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; started_ < threads; ++started_) std::thread([this] { Loop(); }).detach();
      tasks_.push_back(task);
    }
    ready_.notify_one();
  }

 private:
  void Loop() {
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [this] { return !tasks_.empty(); });
        task = tasks_.front();
        tasks_.pop_front();
      }
      task.run(task.data);
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Task> tasks_;
  int64_t started_ = 0;
};

// Never destroyed: its threads may outlive main. A forked child has the pool's memory but none of
// its threads, maybe with the lock held, so it takes a new one.
std::atomic<Pool*> pool{nullptr};
std::atomic<int64_t> num_threads{0};

Pool& GetPool() {
  static const bool registered [[maybe_unused]] = [] {
    pool.store(new Pool);
    pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });
    return true;
  }();
  return *pool.load(std::memory_order_acquire);
}

}  // namespace

int64_t NumThreads() {
  int64_t n = num_threads.load(std::memory_order_relaxed);
  if (n == 0) {
    n = UsableCores();
    num_threads.store(n, std::memory_order_relaxed);
  }
  return n;
}

void SetNumThreads(int64_t n) { num_threads.store(std::max<int64_t>(1, n)); }

void Schedule(void (*task)(void*), void* data) { GetPool().Push({task, data}, NumThreads() - 1); }

}  // namespace qshard::host
