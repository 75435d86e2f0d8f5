// Flat slices of many weights on the CPU. A task takes the part of a slice in an aligned window of
// its weight, so that no two tasks write the same byte. Amaxes of blocks split by windows are
// raised atomically.
#include "kernels/slices.h"

#include <vector>

#include "core/stochastic.h"
#include "kernels/cpu/block_spans.h"
#include "kernels/cpu/coded_rows.h"
#include "kernels/cpu/raise_amax.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kWindow = 1 << 16;  // elements

// Block layout of a weight, for a walk over its elements.
struct SliceBlocks {
  SliceBlocks(const Slice& slice, const SliceRule& rule) {
    const bool one = rule.block_rows == 0;  // one row, so that no row ends before the weight does
    cols = one ? slice.rows * slice.cols : slice.cols;
    block_rows = one ? 1 : rule.block_rows;
    block_cols = one ? std::max<int64_t>(1, cols) : rule.block_cols;
    width = one ? 1 : CeilDiv(cols, block_cols);
  }
  int64_t cols, block_rows, block_cols, width;
};

// Elements [begin, end) of weight `index`. The slice of the weight starts at `start`.
struct SlicePart {
  int64_t index, start, begin, end;
};

template <class Body>
void ParallelParts(const Exec<Cpu>& exec, const Slice* slices, int64_t n, const uint32_t* starts,
                   const Body& body) {
  std::vector<int64_t> first(n + 1, 0);  // windows before each weight
  const auto start_of = [&](int64_t i) {
    return StartOf(starts + 2 * i, slices[i].rows * slices[i].cols);
  };
  const auto end_of = [&](int64_t i) {
    return std::min(start_of(i) + slices[i].length, slices[i].rows * slices[i].cols);
  };
  for (int64_t i = 0; i < n; ++i) {
    const int64_t start = start_of(i), end = end_of(i);
    first[i + 1] = first[i] + (start == end ? 0 : (end - 1) / kWindow - start / kWindow + 1);
  }
  ParallelRanges(exec, first[n], kWindow * 4, [&](int64_t task, int64_t last) {
    for (; task < last; ++task) {
      const int64_t i = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
      const int64_t start = start_of(i);
      const int64_t window = (start / kWindow + task - first[i]) * kWindow;
      body(SlicePart{i, start, std::max(start, window), std::min(end_of(i), window + kWindow)});
    }
  });
}

// Calls body(i, n, row, block) for runs [i, i + n) of elements within one row. A run is a part of
// one block, or whole blocks and possibly the beginning of one more. `block` is the grid index of
// the first block.
template <class Body>
void ForEachRun(const SlicePart& part, const SliceBlocks& grid, const Body& body) {
  for (int64_t i = part.begin; i < part.end;) {
    const int64_t row = i / grid.cols, col = i % grid.cols;
    const int64_t left = std::min(part.end - i, grid.cols - col);
    const int64_t into = col % grid.block_cols;
    const int64_t blocks = into > 0 ? 0 : std::min(kSpanCols / grid.block_cols, kSpanBlocks);
    const int64_t most =
        blocks > 0 ? blocks * grid.block_cols : std::min(kSpanCols, grid.block_cols - into);
    const int64_t n = std::min(left, most);
    body(i, n, row, row / grid.block_rows * grid.width + col / grid.block_cols);
    i += n;
  }
}

// Calls body(values) with elements [0, n) of x rounded to `to`, for n <= kSpanCols.
template <class In, class Body>
void WithRounded(RoundedTo to, const In* x, int64_t n, const Body& body) {
  if (to == RoundedTo::kFloat32) {
    body(x);
    return;
  }
  float values[kSpanCols];
  if (to == RoundedTo::kBFloat16)
    for (int64_t i = 0; i < n; ++i) values[i] = Widen(Narrow<bfloat16>(Widen(x[i])));
  else
    for (int64_t i = 0; i < n; ++i) values[i] = Widen(Narrow<float16>(Widen(x[i])));
  body(values);
}

}  // namespace

template <class In>
Status AmaxSlices(const Exec<Cpu>& exec, const Slice* slices, int64_t n, const uint32_t* starts,
                  const SliceRule& rule, float* amax) {
  ParallelParts(exec, slices, n, starts, [&](const SlicePart& part) {
    const Slice& slice = slices[part.index];
    const SliceBlocks grid(slice, rule);
    const In* x = static_cast<const In*>(slice.x) - part.start;
    float* whole = amax + slice.whole;
    float largest = 0.0f;
    ForEachRun(part, grid, [&](int64_t i, int64_t count, int64_t row, int64_t block) {
      float found[kSpanBlocks];
      const int64_t blocks = CeilDiv(count, grid.block_cols);
      WithRounded(rule.rounded_to, x + i, count,
                  [&](const auto* values) { AmaxRow(values, count, grid.block_cols, found); });
      float* out = amax + slice.grid + block;
      float run = 0.0f;
      for (int64_t b = 0; b < blocks; ++b) {
        RaiseAmax(out + b, found[b]);
        if (FloatBits(found[b]) > FloatBits(run)) run = found[b];
      }
      if (rule.whole == WholeAmax::kRow) RaiseAmax(whole + row, run);
      if (FloatBits(run) > FloatBits(largest)) largest = run;
    });
    if (rule.whole == WholeAmax::kTensor) RaiseAmax(whole, largest);
  });
  return {};
}

namespace {

// Writes codes of a slice. cast_run(x, i, n, scales, codes) writes a run that shares no byte, and
// encode(v, i) returns a single code.
template <class In, class Code, class CastRun, class EncodeOne>
void CastPart(const SlicePart& part, const Slice& slice, const SliceRule& rule, const float* scale,
              const CastRun& cast_run, const EncodeOne& encode) {
  const SliceBlocks grid(slice, rule);
  const In* x = static_cast<const In*>(slice.x) - part.start;
  uint8_t* data = slice.data - (rule.pieces ? part.start / kCodesPerByte<Code> : 0);
  const auto cast_one = [&](int64_t i, float s) {
    const float v = RoundTo(rule.rounded_to, Widen(x[i]));
    const bool to_nan = rule.nonfinite == Nonfinite::kNan;
    StoreCode<Code>(data, i, encode(to_nan ? ScaledOrNan(v, s) : v * s, i));
  };
  ForEachRun(part, grid, [&](int64_t i, int64_t n, int64_t, int64_t block) {
    const float* s = scale + slice.grid + block;
    // If the run starts within a byte, its first element is stored alone.
    if (n > 0 && i % kCodesPerByte<Code> != 0) {
      if (n > grid.block_cols || grid.block_cols % kCodesPerByte<Code> != 0) {
        for (int64_t j = 0; j < n; ++j) cast_one(i + j, s[j / grid.block_cols]);
        return;
      }
      cast_one(i, *s);
      ++i, --n;
    }
    const int64_t own = n - n % kCodesPerByte<Code>;
    if (own > 0)
      WithRounded(rule.rounded_to, x + i, own, [&](const auto* values) {
        cast_run(values, i, own, RowScales{s, grid.block_cols}, data + i / kCodesPerByte<Code>);
      });
    if (own < n) cast_one(i + own, s[own / grid.block_cols]);
  });
}

}  // namespace

template <class In, class Code>
Status CastSlices(const Exec<Cpu>& exec, const Slice* slices, int64_t n, const uint32_t* starts,
                  const uint32_t* seeds, const SliceRule& rule, const float* scale) {
  ParallelParts(exec, slices, n, starts, [&](const SlicePart& part) {
    const auto cast = [&](const auto& cast_run, const auto& encode) {
      CastPart<In, Code>(part, slices[part.index], rule, scale, cast_run, encode);
    };
    if constexpr (kCodesPerByte<Code> == 2) {
      if (seeds != nullptr) {
        const uint64_t seed = FromWords(seeds + 2 * part.index);
        cast(
            [&](const auto* x, int64_t i, int64_t count, const RowScales& scales, uint8_t* codes) {
              uint8_t random[kSpanCols];
              Simd().random(seed, i, 1, count, random);
              CastRowStochastic<E2M1>(x, count, scales, random, codes);
            },
            [&](float v, int64_t i) {
              return EncodeStochastic(v, RandomByte(Philox4x32(i >> 4, seed), i));
            });
        return;
      }
    }
    cast(
        [&](const auto* x, int64_t, int64_t count, const RowScales& scales, uint8_t* codes) {
          CastRow<Code>(x, count, scales, codes);
          if (rule.nonfinite == Nonfinite::kNan &&
              FloatBits(AmaxOf(x, count)) >= kFloatInfinityBits)
            ReplaceInfinityByNan<Code>(rule.nonfinite, x, count, codes);
        },
        [](float v, int64_t) { return Encode<Code>(v); });
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, AmaxSlices)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_ELEMENT, QSHARD_INSTANTIATE_FOR, Cpu, CastSlices)

}  // namespace qshard::kernels
