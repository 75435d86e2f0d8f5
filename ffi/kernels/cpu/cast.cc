// cast and dequantize on the CPU, and encode and decode, which are these with scale 1: x and data
// are read and written once, in order, by ranges.
#include "kernels/cast.h"

#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/stream.h"
#include "kernels/element.h"

namespace qshard::kernels {
namespace {

// Hardware prefetching of a long read starts anew at each page; this does not.
constexpr int64_t kAheadBytes = 4096;

// Calls map(begin, end, to) on ranges of [0, n), which writes elements begin .. end of the result
// to `to`: the result itself or, where that outgrows the caches, a buffer on its way there.
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

}  // namespace

template <class In, class Code>
Status Cast(const Exec<Cpu>& exec, const In* x, const float* scale, int64_t runs, int64_t length,
            uint8_t* data) {
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  ParallelMap(exec, runs * length, sizeof(In), data, [&](int64_t begin, int64_t end, uint8_t* to) {
    cast(x + begin, end - begin, {scale, length, begin}, kAheadBytes / sizeof(In), to);
  });
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
  if constexpr (!std::is_same_v<Code, E8M0>) return Cast<In, Code>(exec, x, &kOne, 1, n, codes);
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

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_CODE, QSHARD_INSTANTIATE_FOR, Cpu, EncodeElements)
QSHARD_FOR_EACH_CODE(QSHARD_INSTANTIATE_FOR, Cpu, DecodeElements)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cpu, Cast)
QSHARD_FOR_EACH_FP8(QSHARD_FOR_EACH_INPUT, QSHARD_INSTANTIATE_FOR, Cpu, Dequantize)

}  // namespace qshard::kernels
