// The pool that handlers run on when there is no XLA to lend one.
#ifndef QSHARD_HOST_THREAD_POOL_H_
#define QSHARD_HOST_THREAD_POOL_H_

#include <cstdint>

namespace qshard::host {

// Threads a kernel may use, the caller's included. At first OMP_NUM_THREADS; without it the cores
// that affinity and the quota of the container leave, shared by the LOCAL_WORLD_SIZE ranks of a
// host.
int64_t NumThreads();

// n > 0. Takes effect for the next call; threads already started are kept.
void SetNumThreads(int64_t n);

// The same, unless SetNumThreads was called: the number that the framework of the tensors uses.
void FollowNumThreads(int64_t n);

// Runs task(data), which must not throw, on some thread of the pool, soon; or at once on this
// thread, if no thread can start or an allocation fails. After a fork the child starts threads of
// its own.
void Schedule(void (*task)(void*), void* data) noexcept;

}  // namespace qshard::host

#endif  // QSHARD_HOST_THREAD_POOL_H_
