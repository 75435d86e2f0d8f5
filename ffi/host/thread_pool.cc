#include "host/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <fstream>
#include <mutex>
#include <new>
#include <thread>

namespace qshard::host {
namespace {

// Returns a positive number from the environment, or 0.
int64_t FromEnvironment(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::max<int64_t>(0, std::strtoll(text, nullptr, 10));
}

// Returns the cores that the container's CPU quota allows, or 0 without a quota.
int64_t QuotaCores() {
  double quota = 0, period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2 >> quota >> period) {  // fails for "max"
    return quota > 0 && period > 0 ? static_cast<int64_t>(std::ceil(quota / period)) : 0;
  }
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return 0;
  return static_cast<int64_t>(std::ceil(quota / period));
}

// Returns OMP_NUM_THREADS, or the cores available to this process divided by the ranks on the host.
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
  // Returns false if no thread could start or the task could not be stored.
  bool Push(Task task, int64_t threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      try {
        if (started_ < threads && idle_ <= static_cast<int64_t>(tasks_.size())) {
          std::thread([this] { Loop(); }).detach();
          ++started_;
        }
      } catch (const std::exception&) {  // threads that did start do the work
      }
      if (started_ == 0) return false;
      try {
        tasks_.push_back(task);
      } catch (const std::bad_alloc&) {
        return false;
      }
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
        ++idle_;
        ready_.wait(lock, [this] { return !tasks_.empty(); });
        --idle_;
        task = tasks_.front();
        tasks_.pop_front();
      }
      task.run(task.data);
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Task> tasks_;
  int64_t started_ = 0, idle_ = 0;
};

// Never destroyed, because its threads may outlive main. After a fork the child has the pool's
// memory but none of its threads, and the lock may be taken, so the child allocates a new pool.
// Null if that allocation failed.
std::atomic<Pool*> pool{nullptr};
std::atomic<int64_t> num_threads{0};
std::atomic<bool> is_set{false};

void RenewPool() {
  try {
    pool.store(new Pool);
  } catch (const std::bad_alloc&) {
    pool.store(nullptr);
  }
}

// Runs at load time. A function-local static has a guard, which stays locked in a child if the
// parent forks while another thread holds it.
const bool registered [[maybe_unused]] = [] {
  RenewPool();
  return pthread_atfork(nullptr, nullptr, RenewPool) == 0;
}();

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

void Schedule(void (*task)(void*), void* data) noexcept {
  Pool* const threads = pool.load(std::memory_order_acquire);
  if (threads == nullptr || !threads->Push({task, data}, NumThreads() - 1)) task(data);
}

}  // namespace qshard::host
