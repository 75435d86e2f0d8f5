// CastSlices: codes of flat slices of many weights, in place, in one launch.
//
// Reads each slice once and writes its codes: 5 bytes per element from float32 to FP8, 4.5 to E2M1,
// and 4 per scale, loaded together with the elements. slices.cuh maps work to threads. A lane has
// the four elements of 4 bytes, or of 2, so no other lane writes them. It writes them together if
// the slice has all, else byte by byte. If the slice has half of a byte, the other half keeps its
// value. Equals the loop over core/slices.h, with __fmul_rn for multiplication, and EncodePair and
// FourE2M1 for Encode.
#include <type_traits>

#include "core/stochastic.h"
#include "kernels/cuda/slices/slices.cuh"
#include "kernels/slices.h"

namespace qshard::kernels {
namespace {

// encode(v, i) returns the codes of v, which start at element i of the weight, from the low bits
// up. kResident: thread blocks per multiprocessor, tuned on an H200.
template <class Code>
struct Nearest {
  using Format = Code;
  static constexpr int kResident = kPacked<Code> ? 4 : 3;

  __device__ __forceinline__ void Begin(int) {}
  __device__ __forceinline__ uint32_t operator()(const float (&v)[kSliceLane], int64_t) const {
    if constexpr (kPacked<Code>) {
      return FourE2M1(v);
    } else {
      return EncodeWords<Code>(v).w[0];
    }
  }
};

struct Stochastic {
  using Format = E2M1;
  static constexpr int kResident = 3;

  __device__ __forceinline__ void Begin(int index) { seed = FromWords(seeds + 2 * index); }
  __device__ __forceinline__ uint32_t operator()(const float (&v)[kSliceLane], int64_t i) const {
    // Four neighbours from an even index on are in one or two Philox calls.
    PhiloxWords words = Philox4x32(i >> 4, seed);
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < kSliceLane; ++j) {
      if (j > 0 && ((i + j) & 15) == 0) words = Philox4x32((i + j) >> 4, seed);
      codes |= EncodeStochasticE2M1(v[j], RandomByte(words, i + j)) << (4 * j);
    }
    return codes;
  }

  const uint32_t* seeds;
  uint64_t seed;
};

// Position of blocks in tiles. InRows: a lane's elements in a row are in one block of one row.
// InColumns: a lane's elements in a column are in one block. Otherwise tiles are kPartial.
__device__ __forceinline__ bool InRows(const SliceTable& table) {
  return table.rule.block_rows == 1 && table.rule.block_cols % kSliceLane == 0;
}
__device__ __forceinline__ bool InColumns(const SliceTable& table) {
  return table.rule.block_rows % kSliceRows == 0 || table.rule.block_rows > INT32_MAX;
}

template <class In, TileKind kKind, class Encoder>
__device__ __forceinline__ void CastTile(const SliceTable& table, const SliceTile& tile,
                                         const Encoder& encode, const float* scale, uint8_t* data) {
  using Code = typename Encoder::Format;
  constexpr int kPerByte = 8 / kStoredBits<Code>;
  constexpr bool kWhole = kKind != TileKind::kPartial;
  const SliceEntry& slice = table.entries[tile.index];
  const int64_t width = CeilDiv(tile.cols, table.rule.block_cols);
  const bool in_rows = InRows(table), in_columns = InColumns(table);
  const bool vectors =
      kKind == TileKind::kVectors || LanesAligned(tile, data, kSliceLane / kPerByte);
  // Returns the scale of element j of the lane in row r. Rows after the slice may be outside the
  // weight.
  const auto scale_of = [&](int r, int j) {
    if (!kWhole && (tile.col + j >= tile.cols || tile.Index(r) >= tile.end)) return 0.0f;
    return __ldg(scale + slice.grid + (tile.row + r) / table.rule.block_rows * width +
                 (tile.col + j) / table.rule.block_cols);
  };
  float of_tile[kSliceLane];
#pragma unroll
  for (int j = 0; j < kSliceLane; ++j)
    of_tile[j] = !in_columns                                        ? 0.0f
                 : j > 0 && table.rule.block_cols % kSliceLane == 0 ? of_tile[0]
                                                                    : scale_of(0, j);
  const float* of_row = scale + slice.grid + tile.row * width + tile.col / table.rule.block_cols;
  uint8_t* codes_at = data + tile.Index(0) / kPerByte;
  ForEachTileRows<In, kKind>(
      tile, static_cast<const In*>(slice.x), table.rule.rounded_to,
      [&](int r) {
        const bool has = kWhole || (tile.col < tile.cols && tile.Index(r) < tile.end);
        return in_rows && has ? __ldg(of_row + r * width) : 0.0f;
      },
      [&](int first, auto& rows, const auto& fetched) {
#pragma unroll
        for (int k = 0; k < static_cast<int>(sizeof(rows) / sizeof(rows[0])); ++k) {
          const int r = first + k;
          const int64_t i = tile.Index(r);
          float (&v)[kSliceLane] = rows[k];
          const SliceTile::Part part = tile.PartOf<kWhole>(r);
          if (part.first >= part.last) continue;
#pragma unroll
          for (int j = 0; j < kSliceLane; ++j) {
            float s = in_rows ? fetched[k] : of_tile[j];
            if (!kWhole && !in_rows && !in_columns && part.Has(j)) s = scale_of(r, j);
            v[j] =
                table.rule.nonfinite == Nonfinite::kNan ? ScaledOrNan(v[j], s) : __fmul_rn(v[j], s);
          }
          const uint32_t codes = encode(v, i);
          uint8_t* out = codes_at + r * (tile.cols / kPerByte);
          if (kWhole && vectors) {
            if constexpr (kPerByte == 1)
              Store<Write::kStream>(out, Words<4>{{codes}});
            else
              Store<Write::kStream>(out, Words<2>{static_cast<uint16_t>(codes)});
          } else {
#pragma unroll
            for (int j = 0; j < kSliceLane; j += kPerByte) {
              const uint32_t byte = codes >> (j * kStoredBits<Code>)&0xFF;
              if constexpr (kPerByte == 1) {
                if (part.Has(j)) out[j] = static_cast<uint8_t>(byte);
              } else if (part.Has(j) && part.Has(j + 1)) {
                out[j / 2] = static_cast<uint8_t>(byte);
              } else if (part.Has(j) || part.Has(j + 1)) {
                const uint32_t mine = part.Has(j) ? 0x0F : 0xF0;
                out[j / 2] = static_cast<uint8_t>((out[j / 2] & ~mine) | (byte & mine));
              }
            }
          }
        }
      });
}

template <class In, class Encoder>
__global__ void __launch_bounds__(kSliceThreads, Encoder::kResident)
    CastSlicesKernel(const __grid_constant__ SliceTable table, Encoder encode, const float* scale) {
  SliceTile tile(table);
  const SliceEntry& slice = table.entries[tile.index];
  constexpr int kPerByte = 8 / kStoredBits<typename Encoder::Format>;
  uint8_t* data = slice.data - (table.rule.pieces ? tile.begin / kPerByte : 0);
  encode.Begin(tile.index);
  const TileKind least = !InRows(table) && !InColumns(table)               ? TileKind::kPartial
                         : LanesAligned(tile, data, kSliceLane / kPerByte) ? TileKind::kVectors
                                                                           : TileKind::kScalars;
  ForEachTile<In>(table, tile, least,
                  [&](auto kind) { CastTile<In, kind>(table, tile, encode, scale, data); });
}

}  // namespace

template <class In, class Code>
Status CastSlices(const Exec<Cuda>& exec, const Slice* slices, int64_t n, const uint32_t* starts,
                  const uint32_t* seeds, const SliceRule& rule, const float* scale) {
  return ForEachSliceTable(slices, n, starts, rule, [&](const SliceTable& table, int64_t begin) {
    const auto launch = [&](auto encode) {
      return Launch(exec, CastSlicesKernel<In, decltype(encode)>, table.parts, kSliceThreads, table,
                    encode, scale);
    };
    if constexpr (kPacked<Code>)
      if (seeds != nullptr) return launch(Stochastic{seeds + 2 * begin, 0});
    return launch(Nearest<Code>{});
  });
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_ELEMENT, QSHARD_INSTANTIATE_FOR, Cuda, CastSlices)

}  // namespace qshard::kernels
