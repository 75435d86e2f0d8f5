// Amax, cast and dequantization on the CPU, and encode and decode, which are the same with scale 1.
// x and data are each read or written once, in order, by ranges.
#include "kernels/cast.h"

#include "kernels/cpu/coded_rows.h"
#include "kernels/cpu/delayed_runs.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/stream.h"

namespace qshard::kernels {
namespace {

// Distance of software prefetches. Hardware prefetching of a long read restarts at each page.
constexpr int64_t kAheadBytes = 4096;

// Calls map(begin, end, to) on ranges of [0, n), which must write elements [begin, end) of the
// result to `to`. `to` is the result itself, or a buffer that is then streamed if the result is
// larger than the caches.
template <class Out, class Map>
void ParallelMap(const Exec<Cpu>& exec, int64_t n, int64_t in_bytes, Out* out, const Map& map) {
  const bool stream = OutgrowsCache(n * int64_t{sizeof(Out)});
  ParallelRanges(exec, n, in_bytes + int64_t{sizeof(Out)}, [&](int64_t begin, int64_t end) {
    if (!stream) {
      map(begin, end, out + begin);
      return;
    }
    constexpr int64_t kBuffer = 4096 / sizeof(Out);
    alignas(kLineBytes) Out buffer[kBuffer];
    for (int64_t stop; begin < end; begin = stop) {
      stop = std::min(end, begin + kBuffer);
      map(begin, stop, buffer);
      StreamCopy(out + begin, buffer, (stop - begin) * int64_t{sizeof(Out)});
    }
    StreamFence();
  });
}

template <class Code, class In>
void MapCast(const Exec<Cpu>& exec, const In* x, const float* scale, int64_t length, int64_t n,
             uint8_t* data) {
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  ParallelMap(exec, n, sizeof(In), data, [&](int64_t begin, int64_t end, uint8_t* to) {
    cast(x + begin, end - begin, {scale, length, begin}, kAheadBytes / sizeof(In), to);
  });
}

}  // namespace

// Splits a long run over threads, which raise its amax together. Distributes short runs whole.
template <class In>
Status Amax(const Exec<Cpu>& exec, const In* x, int64_t runs, int64_t length, float* amax) {
  const int64_t run_bytes = length * int64_t{sizeof(In)};
  if (run_bytes <= kTaskBytes) {
    ParallelRanges(exec, runs, run_bytes + int64_t{sizeof(float)}, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) amax[r] = CanonicalNan(AmaxOf(x + r * length, length));
    });
    return {};
  }
  std::fill_n(amax, runs, 0.0f);
  ParallelRanges(exec, runs * length, sizeof(In),
                 [&](int64_t begin, int64_t end) { RaiseAmaxes(x, begin, end, length, amax); });
  return {};
}

template <class In, class Code>
Status Cast(const Exec<Cpu>& exec, const Scaled<In>& x, int64_t n, uint8_t* data) {
  const DelayedRuns<In> delayed(exec, x);
  if (x.runs == 0 && x.nonfinite == Nonfinite::kSaturate) {
    MapCast<Code>(exec, x.x, x.scale, x.length, n, data);
    return {};
  }
  // Chunks stay in cache between their amax and their encoding.
  constexpr int64_t kChunk = 1 << 12;
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  ParallelRanges(exec, n, sizeof(In) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      stop = std::min(end, begin + kChunk);
      const bool finite = delayed.Raise(begin, stop);
      cast(x.x + begin, stop - begin, {delayed.scale(), x.length, begin}, /*ahead=*/0,
           data + begin);
      if (!finite) ReplaceInfinityByNan<Code>(x.nonfinite, x.x + begin, stop - begin, data + begin);
    }
  });
  delayed.Finish();
  return {};
}

template <class Code, class Out>
Status Dequantize(const Exec<Cpu>& exec, const uint8_t* data, const float* scale_inv, int64_t runs,
                  int64_t length, Out* x) {
  const auto dequantize = Simd().dequantize[kElementIndex<Code>][kInputIndex<Out>];
  ParallelMap(exec, runs * length, 1, x, [&](int64_t begin, int64_t end, Out* to) {
    dequantize(data + begin, end - begin, {scale_inv, length, begin}, kAheadBytes, to);
  });
  return {};
}

namespace {
constexpr float kOne = 1.0f;
}

template <class In, class Code>
Status EncodeElements(const Exec<Cpu>& exec, const In* x, int64_t n, uint8_t* codes) {
  if constexpr (!std::is_same_v<Code, E8M0>)
    MapCast<Code>(exec, x, &kOne, n, n, codes);
  else
    ParallelMap(exec, n, sizeof(In), codes, [&](int64_t begin, int64_t end, uint8_t* to) {
      Simd().encode_e8m0[kInputIndex<In>](x + begin, end - begin, to);
    });
  return {};
}

template <class Code>
Status DecodeElements(const Exec<Cpu>& exec, const uint8_t* codes, int64_t n, float* x) {
  if constexpr (!std::is_same_v<Code, E8M0>) return Dequantize<Code>(exec, codes, &kOne, 1, n, x);
  ParallelMap(exec, n, 1, x, [&](int64_t begin, int64_t end, float* to) {
    Simd().decode_e8m0(codes + begin, end - begin, to);
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, Amax)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_CODE, QSHARD_INSTANTIATE_FOR, Cpu, EncodeElements)
QSHARD_FOR_EACH_CODE(QSHARD_INSTANTIATE_FOR, Cpu, DecodeElements)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cpu, Cast)
QSHARD_FOR_EACH_FP8(QSHARD_FOR_EACH_INPUT, QSHARD_INSTANTIATE_FOR, Cpu, Dequantize)

}  // namespace qshard::kernels
