// CastBlockStochastic: data[i] = EncodeStochastic(x[i] * scale[block of i], random byte of i).
//
// Reads x and writes data once: 2.5 bytes per element for a 16-bit x, plus 4 per scale. Most of the
// time goes into random numbers. One Philox call serves 16 elements with consecutive indices. If
// the index grows by 1 per column, those are 16 columns: a thread takes vectors of them
// (block_map.cuh), with one call each, or two if the indices start within a call. If the index
// grows by 1 per row, because x is a transpose, a thread takes 16 rows of 4 columns. Otherwise each
// element takes a call. Equals core/stochastic.h bit for bit.
#include "kernels/block_cast.h"
#include "kernels/cuda/cast/block_map.cuh"
#include "kernels/cuda/cast/stochastic.cuh"
#include "kernels/cuda/convert.cuh"

namespace qshard::kernels {
namespace {

// --- indices that grow by 1 per column ---

template <class In, bool kScaleColumns>
struct CastStochasticOp {
  // With kScaleColumns each column of a vector has its own scale, read when needed.
  static constexpr bool kBackward = true, kColumns = false;
  static constexpr int kWidth = 16, kRows = sizeof(In) == 4 ? 1 : 2;
  static constexpr int kPair = 2;
  static constexpr int kInBytes = kWidth * sizeof(In), kOutBytes = kWidth / kPair;
  using Output = uint8_t;
  struct Value {
    Regions::Draw draw;
    const float* scales;
    float scale;
  };

  __device__ __forceinline__ Value Get(const BlockPlace& place) const {
    const float* s = scale + place.block;
    return {regions.template Of<true>(place), s, kScaleColumns ? 0.0f : __ldg(s)};
  }

  __device__ __forceinline__ Words<kOutBytes> Apply(const Words<kInBytes>& x,
                                                    const Value& value) const {
    float v[kWidth];
    WidenWords<In>(x, v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      v[i] = __fmul_rn(v[i], kScaleColumns ? __ldg(value.scales + i) : value.scale);
    const Words<16> random = RandomBytes(value.draw.index, value.draw.seed);
    Words<kOutBytes> codes = {};
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      codes.w[i / 8] |= EncodeStochasticE2M1(v[i], ByteOf(random, i)) << (i % 8 * 4);
    return codes;
  }

  __device__ __forceinline__ uint32_t Element(int64_t i, const BlockPlace& place) const {
    const Regions::Draw draw = regions.template Of<false>(place);
    return EncodeStochasticE2M1(__fmul_rn(Widen(x[i]), __ldg(scale + place.block)),
                                RandomByte(Philox4x32(draw.index >> 4, draw.seed), draw.index));
  }

  const In* x;
  const float* scale;
  Regions regions;
};

// --- indices that grow by 1 per row: one region, or regions in step; blocks of a multiple of 4
// columns ---

constexpr int kStripCols = 4, kStripRows = 16;

template <class In>
__global__ void __launch_bounds__(kBlockMapThreads)
    CastStochasticStrips(const In* x, const float* scale, const Regions regions, const MapTiles g,
                         uint8_t* data) {
  ThreadRows at = g.At<kStripCols, kStripRows>(blockIdx.x);
  if (at.height <= 0) return;
  const In* from = x + at.first;
  Words<kStripCols * sizeof(In)> w[kStripRows];
#pragma unroll
  for (int k = 0; k < kStripRows; ++k, from += g.cols) {
    w[k] = {};
    if (k < at.height) w[k] = Load<kStripCols * sizeof(In)>(from);
  }
  Words<16> random[kStripCols];
  Regions::Draw draw = regions.template Of<true>(at.place);
#pragma unroll
  for (int j = 0; j < kStripCols; ++j, draw.index += regions.philox.steps.col)
    random[j] = RandomBytes(draw.index, draw.seed);

  uint8_t* to = data + at.first / 2;
#pragma unroll
  for (int k = 0; k < kStripRows; ++k, at.Next(), to += g.cols / 2) {
    if (k >= at.height) break;
    float v[kStripCols];
    WidenWords<In>(w[k], v);
    const float block_scale = __ldg(scale + at.place.block);
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < kStripCols; ++j)
      codes |= EncodeStochasticE2M1(__fmul_rn(v[j], block_scale), ByteOf(random[j], k)) << 4 * j;
    Store<Write::kCached>(to, Words<2>{static_cast<uint16_t>(codes)});
  }
}

template <class In>
bool TakesStrips(const In* x, const Philox& philox, const Blocks& b, const uint8_t* data) {
  return philox.steps.row == 1 && (philox.run >= b.GridSize() || philox.in_step) &&
         b.cols % kStripCols == 0 && (b.block_cols % kStripCols == 0 || b.block_cols == b.cols) &&
         HasSmallIndices(b) && IsAligned(x, kStripCols * sizeof(In)) &&
         IsAligned(data, kStripCols / 2);
}

}  // namespace

template <class In>
Status CastBlockStochastic(const Exec<Cuda>& exec, const In* x, const float* scale,
                           const Philox& philox, const Blocks& blocks, uint8_t* data) {
  if (blocks.GridSize() == 0) return {};
  const Blocks b = Simplify(blocks);
  using Rows = CastStochasticOp<In, false>;
  using Columns = CastStochasticOp<In, true>;
  const Regions regions = RegionsOf(philox, b);
  const Rows rows{x, scale, regions};
  if (philox.steps.col == 1 && TakesVectors<Rows>(b, x, data))
    return LaunchBlockMap(exec, rows, x, data, b);
  // Blocks of one column, but one region per vector.
  const bool whole_rows = philox.run >= b.GridSize() || philox.run % b.GridCols() == 0;
  if (philox.steps.col == 1 && b.block_cols == 1 && whole_rows) {
    Blocks wide = b;  // block width as far as vectors are concerned
    wide.block_cols = b.cols;
    if (HasSmallIndices(b) && TakesVectors<Columns>(wide, x, data))
      return LaunchBlockMap(exec, Columns{x, scale, regions}, x, data, b);
  }
  if (TakesStrips(x, philox, b, data)) {
    const MapTiles tiles(b, kStripCols, kStripRows);
    return Launch(exec, CastStochasticStrips<In>, tiles.tiles, kBlockMapThreads, x, scale, regions,
                  tiles, data);
  }
  return LaunchBlockElements(exec, rows, data, b);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, CastBlockStochastic)

}  // namespace qshard::kernels
