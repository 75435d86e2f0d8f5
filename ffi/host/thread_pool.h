// The pool that handlers run on when there is no XLA to lend one.
#ifndef QSHARD_HOST_THREAD_POOL_H_
#define QSHARD_HOST_THREAD_POOL_H_

#include <cstdint>

namespace qshard::host {

// Threads a kernel may use, the caller's included. At first: those this process may run on.
int64_t NumThreads();

// Takes effect for the next call; threads already started are kept.
void SetNumThreads(int64_t n);

// Runs task(data) on some thread of the pool, soon. After a fork the child starts threads of its
// own.
void Schedule(void (*task)(void*), void* data);

}  // namespace qshard::host

#endif  // QSHARD_HOST_THREAD_POOL_H_
