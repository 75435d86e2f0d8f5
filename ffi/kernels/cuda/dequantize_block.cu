// dequantize_block: x[i] = Narrow<Out>(Decode<Code>(data[i]) * value of scale_inv[block of i]), and
// dequantize_nvfp4, whose values are products with a global scale.
//
// Reads data and writes x once: 3 bytes an element for a 16-bit x, 2.5 from E2M1, plus those of the
// scales. Work is mapped to threads as block_map.cuh says. Needs compute capability 8.9. Equals
// core/round.h and core/block_scale.h bit for bit, NaNs included.
#include <type_traits>

#include "kernels/block_cast.h"
#include "kernels/cuda/block_map.cuh"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/e2m1.cuh"
#include "kernels/cuda/instantiate.cuh"

namespace qshard::kernels {
namespace {

// Values of blocks from stored scales: of a block below kMaxDivided, or of any.
template <class Scale>
struct StoredValues {
  using Type = typename StoredScale<Scale>::Type;

  __device__ __forceinline__ float Get(int64_t block) const {
    return StoredScale<Scale>::Value(__ldg(scale_inv + block));
  }
  __device__ __forceinline__ float GetAny(int64_t block) const { return Get(block); }
  // Those of kCount blocks in a row of the grid, the first at a multiple of kCount.
  template <int kCount>
  __device__ __forceinline__ void GetRow(int64_t block, float (&v)[kCount]) const {
    const auto stored = Load<kCount * sizeof(Type), Read::kCached>(scale_inv + block);
    if constexpr (sizeof(Type) == 4) {
      WidenWords<float>(stored, v);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        v[i] = StoredScale<Scale>::Value(static_cast<uint8_t>(stored.w[i / 4] >> (i % 4 * 8)));
    }
  }
  bool HasRows(int64_t) const {
    return IsAligned(scale_inv, std::min<int64_t>(16, 8 * sizeof(Type)));
  }

  const Type* scale_inv;
};

// Loads come without a branch, so that those of all rows of a thread are under way together.
struct ValuesNvfp4 {
  __device__ __forceinline__ float Get(int64_t block) const {
    return Value(__ldg(scale_inv + block), GlobalOf(block));
  }
  __device__ __forceinline__ float GetAny(int64_t block) const {
    return ScaleInverseNvfp4(__ldg(scale_inv + block), __ldg(global_scale_inv + block / length));
  }
  template <int kCount>
  __device__ __forceinline__ void GetRow(int64_t block, float (&v)[kCount]) const {
    const auto stored = Load<kCount, Read::kCached>(scale_inv + block);
    const float global = GlobalOf(block);
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = Value(stored.w[i / 4] >> (i % 4 * 8) & 0xFF, global);
  }
  bool HasRows(int64_t grid_cols) const {
    return IsAligned(scale_inv, 8) && (one_global || length % grid_cols == 0);
  }
  __device__ __forceinline__ float GlobalOf(int64_t block) const {
    return __ldg(global_scale_inv + run.Divide(static_cast<uint32_t>(block)));
  }
  // ScaleInverseNvfp4, but for the bits of a NaN.
  static __device__ __forceinline__ float Value(uint32_t code, float global) {
    float d, zero;
    DecodePair<E4M3>(static_cast<uint16_t>(code), d, zero);
    return __fmul_rn(d, global);
  }

  const uint8_t* scale_inv;
  const float* global_scale_inv;
  int64_t length;  // of a run
  Divider run;     // all of the grid is one run if it is so long
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
    Value v;
    if constexpr (kColumns)
      values.GetRow(place.block, v.scale_inv);
    else
      v.scale_inv[0] = values.Get(place.block);
    return v;
  }

  __device__ __forceinline__ Words<kOutBytes> Apply(const Words<kInBytes>& codes,
                                                    const Value& value) const {
    float v[kWidth];
    bool any_nan = false;
    if constexpr (kPacked<Code>) {
      UnpackE2M1(codes, v);
      // Only a scale can make a NaN.
#pragma unroll
      for (float s : value.scale_inv) any_nan |= !isfinite(s);
    } else {
      DecodeWords<Code>(codes, v);
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
    return Narrow<Out>(__fmul_rn(Decode<Code>(code), values.GetAny(place.block)));
  }

  const uint8_t* data;
  Values values;
};

template <class Code, class Out, class Values>
Status Launch(const Exec<Cuda>& exec, const uint8_t* data, const Values& values, const Blocks& b,
              Out* x) {
  using Rows = DequantizeBlockOp<Code, Values, Out, false>;
  using Columns = DequantizeBlockOp<Code, Values, Out, true>;
  if (TakesVectors<Rows>(b, data, x))
    return LaunchBlockMap(exec.stream, Rows{data, values}, data, x, b);
  if (TakesVectors<Columns>(b, data, x) && values.HasRows(b.GridCols()))
    return LaunchBlockMap(exec.stream, Columns{data, values}, data, x, b);
  return LaunchBlockElements(exec.stream, Rows{data, values}, x, b);
}

}  // namespace

template <class Code, class Scale, class Out>
Status DequantizeBlock(const Exec<Cuda>& exec, const uint8_t* data,
                       const typename StoredScale<Scale>::Type* scale_inv, const Blocks& blocks,
                       Out* x) {
  if (blocks.GridSize() == 0) return {};
  return Launch<Code>(exec, data, StoredValues<Scale>{scale_inv}, Simplified(blocks), x);
}

template <class Out>
Status DequantizeNvfp4(const Exec<Cuda>& exec, const uint8_t* data, const uint8_t* scale_inv,
                       const float* global_scale_inv, int64_t run, const Blocks& blocks, Out* x) {
  const int64_t grid = blocks.GridSize();
  if (grid == 0) return {};
  const ValuesNvfp4 values{scale_inv, global_scale_inv, run,
                           Divider(std::min(run, kMaxDivided - 1)), run >= grid};
  return Launch<E2M1>(exec, data, values, Simplified(blocks), x);
}

#define QSHARD_DEQUANTIZE_BLOCK(Out, Code, Scale)    \
  template Status DequantizeBlock<Code, Scale, Out>( \
      const Exec<Cuda>&, const uint8_t*, const StoredScale<Scale>::Type*, const Blocks&, Out*);
#define QSHARD_DEQUANTIZE_BLOCK_FLOAT(Out, Code) QSHARD_DEQUANTIZE_BLOCK(Out, Code, float)
#define QSHARD_DEQUANTIZE_BLOCK_E8M0(Out, Code) QSHARD_DEQUANTIZE_BLOCK(Out, Code, E8M0)
#define QSHARD_DEQUANTIZE_NVFP4(Out)                                                               \
  template Status DequantizeNvfp4(const Exec<Cuda>&, const uint8_t*, const uint8_t*, const float*, \
                                  int64_t, const Blocks&, Out*);
QSHARD_FLOATS_FP8(QSHARD_DEQUANTIZE_BLOCK_FLOAT)
QSHARD_FLOATS_ELEMENTS(QSHARD_DEQUANTIZE_BLOCK_E8M0)
QSHARD_FLOATS(QSHARD_DEQUANTIZE_NVFP4)

}  // namespace qshard::kernels
