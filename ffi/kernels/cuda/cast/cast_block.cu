// CastBlock: data[i] = Encode<Code>(x[i] * scale[block of i]).
//
// Reads x and writes data once: 3 bytes per element for a 16-bit x, 2.5 for E2M1, plus 4 per scale.
// block_map.cuh maps work to threads, from the END of x, because after an amax, which walks
// forwards, L2 has the end of x. Needs compute capability 8.9. Equals core/round.h bit for bit.
#include <type_traits>

#include "kernels/block_cast.h"
#include "kernels/cuda/cast/block_map.cuh"
#include "kernels/cuda/convert.cuh"

namespace qshard::kernels {
namespace {

template <class In, class Code, bool kBlockColumns>
struct CastBlockOp {
  static constexpr bool kBackward = true, kColumns = kBlockColumns;
  static constexpr int kWidth = kColumns ? 8 : 32 / sizeof(In), kRows = kColumns ? 8 : 4;
  static constexpr int kPair = 8 / kStoredBits<Code>;
  static constexpr int kInBytes = kWidth * sizeof(In), kOutBytes = kWidth / kPair;
  using Output = uint8_t;
  struct Value {
    float scale[kColumns ? kWidth : 1];
  };

  __device__ __forceinline__ Value Get(const BlockPlace& place) const {
    Value v;
    if constexpr (kColumns)
      WidenWords<float>(Load<kWidth * 4, Read::kCached>(scale + place.block), v.scale);
    else
      v.scale[0] = __ldg(scale + place.block);
    return v;
  }

  __device__ __forceinline__ Words<kOutBytes> Apply(const Words<kInBytes>& x,
                                                    const Value& value) const {
    float v[kWidth];
    WidenWords<In>(x, v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) v[i] = __fmul_rn(v[i], value.scale[kColumns ? i : 0]);
    return EncodeWords<Code>(v);
  }

  __device__ __forceinline__ uint32_t Element(int64_t i, const BlockPlace& place) const {
    return EncodeOne<Code>(__fmul_rn(Widen(x[i]), __ldg(scale + place.block)));
  }

  const In* x;
  const float* scale;
};

}  // namespace

template <class In, class Code>
Status CastBlock(const Exec<Cuda>& exec, const In* x, const float* scale, const Blocks& blocks,
                 uint8_t* data) {
  if (blocks.GridSize() == 0) return {};
  const Blocks b = Simplify(blocks);
  using Rows = CastBlockOp<In, Code, false>;
  using Columns = CastBlockOp<In, Code, true>;
  if (TakesVectors<Rows>(b, x, data)) return LaunchBlockMap(exec, Rows{x, scale}, x, data, b);
  if (TakesVectors<Columns>(b, x, data) && IsAligned(scale, 16))
    return LaunchBlockMap(exec, Columns{x, scale}, x, data, b);
  return LaunchBlockElements(exec, Rows{x, scale}, data, b);
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_ELEMENT, QSHARD_INSTANTIATE_FOR, Cuda, CastBlock)

}  // namespace qshard::kernels
