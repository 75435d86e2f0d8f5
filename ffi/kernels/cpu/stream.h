// Non-temporal stores for results that are too large for any cache.
#ifndef QSHARD_KERNELS_CPU_STREAM_H_
#define QSHARD_KERNELS_CPU_STREAM_H_

#include <unistd.h>

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace qshard::kernels {

constexpr int64_t kLineBytes = 64;

#if defined(_SC_LEVEL3_CACHE_SIZE)
inline const int64_t kLastCacheBytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
inline const int64_t kLastCacheBytes = 0;
#endif

// Returns true for outputs larger than the last-level cache. A plain store first reads the line
// that it writes and evicts another line. That is wasted if the start of the output is evicted
// before its end is written.
inline bool OutgrowsCache(int64_t bytes) {
  return bytes > (kLastCacheBytes > 0 ? kLastCacheBytes : int64_t{32} << 20);
}

// memcpy of whole cache lines that bypasses the caches. `to` must be aligned to kLineBytes.
// StreamFence is needed to order these stores between threads.
inline void StreamLines(void* to, const void* from, int64_t bytes) {
#if defined(__x86_64__)
  auto* out = static_cast<__m128i*>(to);
  auto* in = static_cast<const __m128i*>(from);
  for (int64_t i = 0; i < bytes / 16; i += 4)
    for (int64_t j = i; j < i + 4; ++j) _mm_stream_si128(out + j, _mm_loadu_si128(in + j));
#else
  std::memcpy(to, from, bytes);
#endif
}

// memcpy of any bytes, which bypasses the caches for whole lines.
inline void StreamCopy(void* to, const void* from, int64_t bytes) {
  auto* out = static_cast<uint8_t*>(to);
  auto* in = static_cast<const uint8_t*>(from);
  const int64_t past_line = reinterpret_cast<uintptr_t>(out) % kLineBytes;
  const int64_t head = past_line == 0 ? 0 : kLineBytes - past_line;
  if (bytes < head + kLineBytes) {
    std::memcpy(out, in, bytes);
    return;
  }
  const int64_t lines = (bytes - head) / kLineBytes * kLineBytes;
  const int64_t done = head + lines;
  std::memcpy(out, in, head);
  StreamLines(out + head, in + head, lines);
  std::memcpy(out + done, in + done, bytes - done);
}

// memcpy of a row that often has the maximal length. A memcpy of unknown size is a call.
template <int64_t kMost>
void CopyRow(void* to, const void* from, int64_t bytes, bool stream = false) {
  if (stream)
    StreamCopy(to, from, bytes);
  else if (bytes == kMost)
    std::memcpy(to, from, kMost);
  else
    std::memcpy(to, from, bytes);
}

// Makes streamed stores visible before later stores. Each thread that streams must call it.
inline void StreamFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_STREAM_H_
