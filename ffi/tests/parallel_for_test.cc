// Tests of ParallelFor and the thread pool: bodies that throw, pools that refuse tasks, allocations
// that fail. tests/null/test_cpp.py compiles this file with AddressSanitizer and ThreadSanitizer,
// which report leaks and threads that use freed memory.
#include "kernels/cpu/parallel_for.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "host/thread_pool.h"

namespace {

// The allocation of this thread that fails: 1 for the next one, 0 for none.
thread_local int failing_allocation = 0;

}  // namespace

__attribute__((noinline)) void* operator new(size_t size) {
  if (failing_allocation > 0 && --failing_allocation == 0) throw std::bad_alloc();
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t size) { return operator new(size); }
__attribute__((noinline)) void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete[](void* memory, size_t) noexcept { operator delete(memory); }

namespace qshard::kernels {
namespace {

#define CHECK(condition)                                                 \
  do {                                                                   \
    if (condition) break;                                                \
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    std::abort();                                                        \
  } while (false)

struct Task {
  void (*run)(void*);
  void* data;
};

// A pool with a chosen behaviour per task. The destructor runs late tasks.
class FakePool {
 public:
  enum Way { kThread, kHere, kLate, kRefuse, kThrow };

  // `ways`: one per task; the last one repeats.
  explicit FakePool(std::vector<Way> ways) : ways_(std::move(ways)) {}
  ~FakePool() {
    for (std::thread& thread : threads_) thread.join();
    for (const Task& task : late_) task.run(task.data);
  }

  Exec<Cpu> Get(int64_t num_threads) {
    Exec<Cpu> exec;
    exec.context = this;
    exec.num_threads = num_threads;
    exec.schedule = [](const Exec<Cpu>& e, void (*run)(void*), void* data) noexcept {
      return static_cast<FakePool*>(e.context)->Schedule({run, data});
    };
    return exec;
  }

  size_t asked() const { return asked_; }

 private:
  ScheduleResult Schedule(Task task) {
    switch (ways_[std::min(asked_++, ways_.size() - 1)]) {
      case kThread:
        threads_.emplace_back([task] { task.run(task.data); });
        return ScheduleResult::kRuns;
      case kHere:
        task.run(task.data);
        return ScheduleResult::kRuns;
      case kLate:
        late_.push_back(task);
        return ScheduleResult::kRuns;
      case kRefuse:
        return ScheduleResult::kRefused;
      case kThrow:  // the pool throws after it stored the task
        late_.push_back(task);
        return ScheduleResult::kUnknown;
    }
    return ScheduleResult::kRefused;
  }

  std::vector<Way> ways_;
  size_t asked_ = 0;
  std::vector<std::thread> threads_;
  std::vector<Task> late_;
};

Exec<Cpu> RealPool(int64_t num_threads) {
  host::SetNumThreads(num_threads);
  Exec<Cpu> exec;
  exec.num_threads = num_threads;
  exec.schedule = [](const Exec<Cpu>&, void (*task)(void*), void* data) noexcept {
    host::Schedule(task, data);
    return ScheduleResult::kRuns;
  };
  return exec;
}

using Body = std::function<void(int64_t, int64_t)>;

// Runs a loop and returns the text of its exception, or "". Destroys the body and its results right
// after the loop returns.
std::string ErrorOf(const Exec<Cpu>& exec, int64_t blocks, const Body& body) {
  const auto results = std::make_unique<std::vector<std::atomic<int>>>(blocks);
  const auto loop = std::make_unique<Body>([&](int64_t i, int64_t worker) {
    CHECK(worker >= 0 && worker < WorkersOf(exec, blocks));
    body(i, worker);
    CHECK((*results)[i].fetch_add(1) == 0);
  });
  try {
    ParallelForWorkers(exec, blocks, *loop);
  } catch (const std::exception& e) {
    return e.what();
  }
  for (const auto& result : *results) CHECK(result.load() == 1);
  return "";
}

void Sleep() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// A slow body that throws on the chosen workers.
Body Throwing(const std::function<bool(int64_t)>& of_worker) {
  return [of_worker](int64_t, int64_t worker) {
    Sleep();
    if (of_worker(worker)) throw std::runtime_error("block");
  };
}

const std::vector<std::vector<FakePool::Way>> kWays = {
    {FakePool::kThread},
    {FakePool::kHere},
    {FakePool::kLate},
    {FakePool::kRefuse},
    {FakePool::kThrow},
    {FakePool::kThread, FakePool::kRefuse},
    {FakePool::kThread, FakePool::kLate, FakePool::kThrow}};

void EveryBlockRunsOnce() {
  for (const auto& ways : kWays)
    for (const int64_t threads : {1, 2, 4})
      for (const int64_t blocks : {0, 1, 2, 3, 100}) {
        FakePool pool(ways);
        CHECK(ErrorOf(pool.Get(threads), blocks, [](int64_t, int64_t) {}).empty());
      }
}

void ExceptionsLeaveTheLoopAfterAllWorkersStop() {
  const auto always = [](int64_t) { return true; };
  const auto caller = [](int64_t worker) { return worker == 0; };
  const auto helper = [](int64_t worker) { return worker > 0; };
  for (const auto& ways : kWays) {
    FakePool pool(ways);
    CHECK(ErrorOf(pool.Get(4), 40, Throwing(always)) == "block");
  }
  for (const int64_t threads : {1, 2, 4}) {
    FakePool pool({FakePool::kThread});
    CHECK(ErrorOf(pool.Get(threads), 40, Throwing(caller)) == "block" || threads > 1);
    CHECK(ErrorOf(pool.Get(threads), 40, Throwing(helper)) == (threads > 1 ? "block" : ""));
    for (int repeat = 0; repeat < 10; ++repeat) {
      const Exec<Cpu> exec = RealPool(threads);
      CHECK(ErrorOf(exec, 40, Throwing(always)) == "block");
      CHECK(ErrorOf(exec, 40, [](int64_t i, int64_t) {
              if (i == 39) throw std::bad_alloc();
            }) == std::bad_alloc().what());
      CHECK(ErrorOf(exec, 40, [](int64_t, int64_t) {}).empty());
    }
  }
}

// A loop that cannot allocate its state or scratch schedules nothing.
void FailedAllocationsPrecedeAllBodies() {
  for (int failing = 1; failing < 4; ++failing) {
    FakePool pool({FakePool::kHere});  // this pool allocates nothing
    std::atomic<int> called{0};
    bool threw = false;
    const auto body = [&](int64_t, double* scratch) { ++called, scratch[3] = 1.0; };
    failing_allocation = failing;
    try {
      ParallelForWithScratch<double>(pool.Get(2), 8, 4, body);
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    failing_allocation = 0;
    CHECK(threw == (failing <= 2));
    CHECK(called == (threw ? 0 : 8));
    CHECK(pool.asked() == (threw ? 0 : 1));
  }
}

void EachWorkerHasItsOwnScratch() {
  FakePool pool({FakePool::kThread});
  std::atomic<int64_t> sum{0};
  const Exec<Cpu> exec = pool.Get(4);
  ParallelRangesWithScratch<int64_t>(exec, 1000, kTaskBytes / 10, 5,
                                     [&](int64_t begin, int64_t end, int64_t* scratch) {
                                       for (int64_t k = 0; k < 5; ++k) scratch[k] = begin;
                                       Sleep();
                                       for (int64_t k = 0; k < 5; ++k) CHECK(scratch[k] == begin);
                                       sum += end - begin;
                                     });
  CHECK(sum == 1000);
  ParallelRangesWithScratch<int64_t>(exec, 0, 0, 5,
                                     [](int64_t, int64_t, int64_t*) { CHECK(false); });
}

void ThePoolStartsOneThreadATaskAtMost() {
  const Exec<Cpu> exec = RealPool(1 << 30);
  std::atomic<int64_t> most{0};
  ParallelForWorkers(exec, 6, [&](int64_t, int64_t worker) {
    int64_t before = most;
    while (before < worker && !most.compare_exchange_weak(before, worker)) {
    }
  });
  CHECK(most < 6);
}

}  // namespace
}  // namespace qshard::kernels

int main() {
  using namespace qshard::kernels;
  EveryBlockRunsOnce();
  ExceptionsLeaveTheLoopAfterAllWorkersStop();
  FailedAllocationsPrecedeAllBodies();
  EachWorkerHasItsOwnScratch();
  ThePoolStartsOneThreadATaskAtMost();
  std::puts("passed");
}
