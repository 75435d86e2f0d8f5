// CastTranspose: data[b, i, j] = Encode<Code>(x[b, i, j] * scale), and data_t[b, j, i] is the same
// code. For delayed scaling it also records amaxes of x.
//
// If a scale, and an amax, covers whole matrices, the tile kernel for 2-D blocks runs with a passed
// scale (quantize/square.cuh). It reads x once and writes both planes once: 4 bytes per element for
// a 16-bit x, 6 for float32. It needs rows of a multiple of 8 elements, aligned to vectors.
// Otherwise a cast and a transpose run. Needs compute capability 8.9. Equals core/round.h bit for
// bit.
#include "kernels/cast.h"
#include "kernels/cuda/quantize/quantize_block.cuh"
#include "kernels/transpose.h"

namespace qshard::kernels {
namespace {

// Returns whether runs of `length` elements are whole matrices. Sets *each to matrices per run, or
// 0 if one run has all.
bool AreMatrices(const Blocks& m, int64_t length, int64_t* each) {
  const int64_t matrix = m.rows * m.cols;
  const bool all = m.batch * matrix <= length;
  *each = all ? 0 : length / matrix;
  return all || length % matrix == 0;
}

}  // namespace

template <class In, class Code>
Status CastTranspose(const Exec<Cuda>& exec, const Scaled<In>& x, int64_t batch, int64_t rows,
                     int64_t cols, uint8_t* data, uint8_t* data_t) {
  const Blocks m{batch, rows, cols, 1, 1};
  int64_t matrices;
  if (m.GridSize() > 0 && rows > 1 && AreMatrices(m, x.length, &matrices)) {
    const auto tiles = [&](auto with_amax) {
      const GivenScales<with_amax> scales{x.scale, matrices, x.amax, x.target, x.nonfinite};
      return ArgumentsOfTiles<Code>(x.x, scales, m, data, nullptr, data_t, nullptr);
    };
    const auto a = tiles(std::false_type{});
    if (TakesTiles<Code>(a)) {
      if (x.runs == 0 && x.nonfinite == Nonfinite::kSaturate)
        return LaunchTiles<In, Code, GivenScales<false>, Work::kSquareBoth>(exec, a);
      if (x.runs > 0) QSHARD_RETURN_IF_ERROR(BeginDelayed(exec, x));
      return LaunchTiles<In, Code, GivenScales<true>, Work::kSquareBoth>(exec,
                                                                         tiles(std::true_type{}));
    }
  }
  QSHARD_RETURN_IF_ERROR(Cast<In, Code>(exec, x, m.GridSize(), data));
  if (m.GridSize() == 0) return {};
  const TransposePair pair{data, data_t, batch, rows, cols, 8};
  return TransposeEach(exec, &pair, 1);
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cuda, CastTranspose)

}  // namespace qshard::kernels
