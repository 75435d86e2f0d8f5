// Thread pool for CPU handlers that are called without XLA.
#ifndef QSHARD_HOST_THREAD_POOL_H_
#define QSHARD_HOST_THREAD_POOL_H_

#include <cstdint>

namespace qshard::host {

// Returns the number of threads a kernel may use, including the caller's. The default is
// OMP_NUM_THREADS. Without it, it is the cores left by CPU affinity and container quota, divided by
// LOCAL_WORLD_SIZE.
int64_t NumThreads();

// Sets the number of threads, n > 0, from the next call on. Threads already started stay.
void SetNumThreads(int64_t n);

// Sets the number of threads to the framework's, unless SetNumThreads was called.
void FollowNumThreads(int64_t n);

// Runs task(data) soon on a thread of the pool, or at once on this thread if no thread can start or
// an allocation fails. The task must not throw. A forked child starts its own threads.
void Schedule(void (*task)(void*), void* data) noexcept;

}  // namespace qshard::host

#endif  // QSHARD_HOST_THREAD_POOL_H_
