#include "kernels/cpu/stream.h"

#include <unistd.h>

namespace qshard::kernels {

bool OutgrowsCache(int64_t bytes) {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const int64_t cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  static const int64_t cache = 0;
#endif
  return bytes > (cache > 0 ? cache : int64_t{32} << 20);
}

}  // namespace qshard::kernels
