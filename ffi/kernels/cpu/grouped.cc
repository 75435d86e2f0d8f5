// Amax and casts of the rows of experts on the CPU: a row of x at a time, gathered as it is read.
#include "kernels/grouped.h"

#include <cstring>

#include "kernels/cpu/coded_rows.h"
#include "kernels/cpu/raise_amax.h"
#include "kernels/cpu/transpose_panels.h"

namespace qshard::kernels {
namespace {

// Stores codes of columns [col, col + n) of a padded row.
template <class In, class Code>
void CastPart(const In* x, int64_t cols, const RowMap& map, const ExpertScales& scales, int64_t row,
              int64_t col, int64_t n, uint8_t* codes) {
  const int64_t expert = scales.experts.ExpertOf(row), own = map.Of(row);
  if (expert == scales.experts.count) {
    std::memset(codes, 0, n);
    return;
  }
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  const RowScales of_row{scales.scale + expert, n};
  if (own < 0) {
    const In zero{};  // times a scale that may be NaN or negative
    cast(&zero, 1, of_row, /*ahead=*/0, codes);
    std::memset(codes, codes[0], n);
    return;
  }
  const In* from = x + own * cols + col;
  cast(from, n, of_row, /*ahead=*/0, codes);
  ReplaceInfinityByNan<Code>(scales.nonfinite, from, n, codes);
}

}  // namespace

template <class In>
Status AmaxGrouped(const Exec<Cpu>& exec, const In* x, int64_t cols, const RowMap& map,
                   const ExpertStops& experts, float* amax) {
  std::fill_n(amax, experts.count, 0.0f);
  if (cols == 0) return {};
  ParallelRanges(exec, map.count, cols * sizeof(In), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t expert = experts.ExpertOf(row), own = map.Of(row);
      if (expert < experts.count && own >= 0)
        RaiseAmax(amax + expert, AmaxOf(x + own * cols, cols));
    }
  });
  return {};
}

template <class In, class Code>
Status CastGrouped(const Exec<Cpu>& exec, const In* x, int64_t cols, const RowMap& map,
                   const ExpertScales& scales, uint8_t* data, uint8_t* data_t) {
  if (cols == 0) return {};
  if (data_t == nullptr) {
    ParallelRanges(exec, map.count, cols * (sizeof(In) + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        CastPart<In, Code>(x, cols, map, scales, row, 0, cols, data + row * cols);
    });
    return {};
  }
  const bool stream = OutgrowsCache(2 * map.count * cols);
  TransposePanels(exec, 1, map.count, cols, sizeof(In) + 2, stream, data_t,
                  [&](int64_t start, int64_t end, uint8_t* codes) {
                    const int64_t row = start / cols;
                    CastPart<In, Code>(x, cols, map, scales, row, start - row * cols, end - start,
                                       codes);
                    CopyRow<kPanelCols>(data + start, codes, end - start, stream);
                  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, AmaxGrouped)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cpu, CastGrouped)

}  // namespace qshard::kernels
