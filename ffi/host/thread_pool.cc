#include "host/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <mutex>
#include <system_error>
#include <thread>

namespace qshard::host {
namespace {

// A positive number from the environment, or 0.
int64_t FromEnvironment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::max<int64_t>(0, std::strtoll(text, nullptr, 10));
}

// The cores that the quota of a container amounts to, or 0 for no quota.
int64_t QuotaCores() {
  double quota = 0, period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> quota >> period) {  // else "max", or none
    return quota > 0 && period > 0 ? static_cast<int64_t>(std::ceil(quota / period)) : 0;
  }
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return 0;
  return static_cast<int64_t>(std::ceil(quota / period));
}

// OMP_NUM_THREADS; or the cores that this process may use, which the ranks of a host share.
int64_t DefaultThreads() {
  if (const int64_t n = FromEnvironment("OMP_NUM_THREADS"); n > 0) return n;
  int64_t cores = std::max(1u, std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) cores = std::max(1, CPU_COUNT(&set));
#endif
  if (const int64_t quota = QuotaCores(); quota > 0) cores = std::min(cores, quota);
  const int64_t ranks = std::max<int64_t>(1, FromEnvironment("LOCAL_WORLD_SIZE"));
  return std::max<int64_t>(1, cores / ranks);
}

struct Task {
  void (*run)(void*);
  void* data;
};

class Pool {
 public:
  // Returns false if there is no thread to run the task: none could be started.
  bool Push(Task task, int64_t threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      try {
        for (; started_ < threads; ++started_) std::thread([this] { Loop(); }).detach();
      } catch (const std::system_error&) {  // no more of them are to be had
      }
      if (started_ == 0) return false;
      tasks_.push_back(task);
    }
    ready_.notify_one();
    return true;
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
std::atomic<bool> is_set{false};

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
    n = DefaultThreads();
    num_threads.store(n, std::memory_order_relaxed);
  }
  return n;
}

void SetNumThreads(int64_t n) {
  is_set.store(true);
  num_threads.store(n);
}

void FollowNumThreads(int64_t n) {
  if (!is_set.load(std::memory_order_relaxed)) num_threads.store(n, std::memory_order_relaxed);
}

void Schedule(void (*task)(void*), void* data) {
  if (!GetPool().Push({task, data}, NumThreads() - 1)) task(data);
}

}  // namespace qshard::host
