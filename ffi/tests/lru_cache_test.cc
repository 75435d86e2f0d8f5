// Tests of LruCache.
#include "kernels/cuda/gemm/lru_cache.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK(condition)                                                 \
  do {                                                                   \
    if (condition) break;                                                \
    std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
    std::abort();                                                        \
  } while (false)

using Cache = qshard::LruCache<int, std::string>;

// Returns whether `key` was a hit. Inserts it on a miss.
bool Use(Cache* cache, int key) {
  if (const std::string* found = cache->Find(key)) {
    CHECK(*found == std::to_string(key));
    return true;
  }
  cache->Insert(key, std::to_string(key));
  return false;
}

int main() {
  Cache cache(1024);
  CHECK(!Use(&cache, -1));
  for (int cold = 0; cold < 2000; ++cold) {  // a hot key survives cold ones
    CHECK(!Use(&cache, cold));
    CHECK(Use(&cache, -1));
  }
  CHECK(cache.counts().misses == 2001 && cache.counts().hits == 2000);
  for (int recent = 1999; recent > 1999 - 1023; --recent) CHECK(Use(&cache, recent));
  CHECK(!Use(&cache, 1999 - 1023));
  CHECK(!Use(&cache, -1));  // the oldest by now
  std::puts("passed");
}
