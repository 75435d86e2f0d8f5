// DequantizeBlock: x[i] = Narrow<Out>(Decode<Code>(data[i]) * value of scale_inv[block of i]). Also
// Dequantize, where runs are such blocks, and DequantizeNvfp4, where values are products with a
// global scale.
//
// Reads data and writes x once: 3 bytes per element for a 16-bit x, 2.5 from E2M1, plus the scales.
// block_map.cuh maps work to threads. Needs compute capability 8.9. Equals core/round.h and
// core/block_scale.h bit for bit, NaNs included.
#include <numeric>
#include <type_traits>

#include "kernels/block_cast.h"
#include "kernels/cast.h"
#include "kernels/cuda/cast/block_map.cuh"
#include "kernels/cuda/convert.cuh"

namespace qshard::kernels {
namespace {

// Values of blocks from stored scales: Value(scale, Shared(block)). Blocks of a row of the grid
// share the second argument. Loads have no branches, so that loads of all rows of a thread are in
// flight together. Slow is for indices that Divider cannot divide.
template <class Scale>
struct StoredValues {
  using Type = typename StoredScale<Scale>::Type;

  __device__ __forceinline__ float Shared(int64_t) const { return 1.0f; }
  static __device__ __forceinline__ float Value(Type stored, float) {
    return StoredScale<Scale>::Value(stored);
  }
  __device__ __forceinline__ float Slow(int64_t block) const {
    return Value(__ldg(scale_inv + block), 1.0f);
  }
  bool RowsShare(int64_t) const { return true; }

  const Type* scale_inv;
};

struct ValuesNvfp4 {
  using Type = uint8_t;

  __device__ __forceinline__ float Shared(int64_t block) const {
    return __ldg(global_scale_inv + run.Divide(static_cast<uint32_t>(block)));
  }
  // ScaleInverseNvfp4, except for the bits of a NaN.
  static __device__ __forceinline__ float Value(Type code, float global) {
    float d, zero;
    DecodePair<E4M3>(code, d, zero);
    return __fmul_rn(d, global);
  }
  __device__ __forceinline__ float Slow(int64_t block) const {
    return ScaleInverseNvfp4(__ldg(scale_inv + block), __ldg(global_scale_inv + block / length));
  }
  bool RowsShare(int64_t grid_cols) const { return one_global || length % grid_cols == 0; }

  const uint8_t* scale_inv;
  const float* global_scale_inv;
  int64_t length;  // of a run
  Divider run;     // the whole grid is one run if `length` is as long
  bool one_global;
};

template <class Code, class Values, class Out, bool kBlockColumns>
struct DequantizeBlockOp {
  static constexpr bool kBackward = false, kColumns = kBlockColumns;
  static constexpr int kWidth = kPacked<Code> || kColumns ? 8 : 16 / sizeof(Out);
  static constexpr int kRows = 8;
  static constexpr int kInBytes = kWidth * kStoredBits<Code> / 8, kOutBytes = kWidth * sizeof(Out);
  static constexpr int kPair = 1;
  using Output = Out;
  struct Value {
    float scale_inv[kColumns ? kWidth : 1];
  };

  __device__ __forceinline__ Value Get(const BlockPlace& place) const {
    using Stored = typename Values::Type;
    Value v;
    const Stored* from = values.scale_inv + place.block;
    if constexpr (kColumns) {
      const auto stored = Load<kWidth * sizeof(Stored), Read::kCached>(from);
      const float shared = values.Shared(place.block);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if constexpr (sizeof(Stored) == 4)
          v.scale_inv[i] = Values::Value(__uint_as_float(stored.w[i]), shared);
        else
          v.scale_inv[i] =
              Values::Value(static_cast<Stored>(stored.w[i / 4] >> (i % 4 * 8)), shared);
      }
    } else {
      v.scale_inv[0] = Values::Value(__ldg(from), values.Shared(place.block));
    }
    return v;
  }

  __device__ __forceinline__ Words<kOutBytes> Apply(const Words<kInBytes>& codes,
                                                    const Value& value) const {
    float v[kWidth];
    bool any_nan = false;
    DecodeWords<Code>(codes, v);
    if constexpr (kPacked<Code>) {  // only a scale can give NaN
#pragma unroll
      for (float s : value.scale_inv) any_nan |= !isfinite(s);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      v[i] = __fmul_rn(v[i], value.scale_inv[kColumns ? i : 0]);
      if (!kPacked<Code>) any_nan |= isnan(v[i]);
    }
    return NarrowExactly<Out>(v, any_nan);
  }

  __device__ __forceinline__ Out Element(int64_t i, const BlockPlace& place) const {
    uint8_t code = __ldg(data + (kPacked<Code> ? i / 2 : i));
    if (kPacked<Code>) code = i % 2 == 0 ? code & 0xF : code >> 4;
    return Narrow<Out>(__fmul_rn(Decode<Code>(code), values.Slow(place.block)));
  }

  const uint8_t* data;
  Values values;
};

template <class Code, class Out, class Values>
Status Map(const Exec<Cuda>& exec, const uint8_t* data, const Values& values, const Blocks& b,
           Out* x) {
  using Rows = DequantizeBlockOp<Code, Values, Out, false>;
  using Columns = DequantizeBlockOp<Code, Values, Out, true>;
  if (TakesVectors<Rows>(b, data, x)) return LaunchBlockMap(exec, Rows{data, values}, data, x, b);
  if (TakesVectors<Columns>(b, data, x) && values.RowsShare(b.GridCols()) &&
      IsAligned(values.scale_inv, std::min<int64_t>(16, 8 * sizeof(*values.scale_inv))))
    return LaunchBlockMap(exec, Columns{data, values}, data, x, b);
  return LaunchBlockElements(exec, Rows{data, values}, x, b);
}

}  // namespace

template <class Code, class Scale, class Out>
Status DequantizeBlock(const Exec<Cuda>& exec, const uint8_t* data,
                       const typename StoredScale<Scale>::Type* scale_inv, const Blocks& blocks,
                       Out* x) {
  if (blocks.GridSize() == 0) return {};
  return Map<Code>(exec, data, StoredValues<Scale>{scale_inv}, Simplify(blocks), x);
}

template <class Code, class Out>
Status Dequantize(const Exec<Cuda>& exec, const uint8_t* data, const float* scale_inv, int64_t runs,
                  int64_t length, Out* x) {
  if (runs * length == 0) return {};
  const int64_t cols = std::gcd(length, int64_t{4096}), rows = length / cols;  // of a run
  return DequantizeBlock<Code, float>(exec, data, scale_inv, {runs, rows, cols, rows, cols}, x);
}

template <class Out>
Status DequantizeNvfp4(const Exec<Cuda>& exec, const uint8_t* data, const uint8_t* scale_inv,
                       const float* global_scale_inv, int64_t run, const Blocks& blocks, Out* x) {
  const int64_t grid = blocks.GridSize();
  if (grid == 0) return {};
  const ValuesNvfp4 values{scale_inv, global_scale_inv, run,
                           Divider(std::min(run, kMaxDivided - 1)), run >= grid};
  return Map<E2M1>(exec, data, values, Simplify(blocks), x);
}

QSHARD_FOR_EACH_BLOCK_FORMAT(float, E8M0, QSHARD_FOR_EACH_INPUT, QSHARD_INSTANTIATE_FOR, Cuda,
                             DequantizeBlock)
QSHARD_FOR_EACH_FP8(QSHARD_FOR_EACH_INPUT, QSHARD_INSTANTIATE_FOR, Cuda, Dequantize)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, DequantizeNvfp4)

}  // namespace qshard::kernels
