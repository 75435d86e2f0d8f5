// Transposes of bytes and packed codes, and CastTranspose, on the CPU. x is read once and each
// output written once, by panels: 6 bytes per element for float32, 4 for 16-bit inputs, 2 for
// bytes. Reads and writes cover at least 256 codes before they move to another row, where memory
// and TLB accesses start anew.
//
// Tasks are whole panels, so threads share no cache line of an output with rows of whole lines.
#include "kernels/transpose.h"

#include "kernels/activation.h"
#include "kernels/cast.h"
#include "kernels/cpu/coded_rows.h"
#include "kernels/cpu/delayed_runs.h"
#include "kernels/cpu/transpose_panels.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kRowsAhead = 2;  // rows to prefetch ahead

// Prefetches the row that is read kRowsAhead rows later.
void PrefetchRow(const uint8_t* row, int64_t stride, int64_t bytes) {
  const auto ahead = reinterpret_cast<uintptr_t>(row) + kRowsAhead * stride;
  for (int64_t i = 0; i < bytes; i += kLineBytes)
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + i));
}

}  // namespace

Status TransposeEach(const Exec<Cpu>& exec, const TransposePair* pairs, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const TransposePair& p = pairs[i];
    const bool stream = OutgrowsCache(p.batch * p.rows * p.cols * p.bits / 8);
    if (p.bits == 8) {
      TransposePanels(exec, p.batch, p.rows, p.cols, 2, stream, p.data_t,
                      [&](int64_t start, int64_t end, uint8_t* row) {
                        PrefetchRow(p.data + start, p.cols, end - start);
                        CopyRow<kPanelCols>(row, p.data + start, end - start);
                      });
    } else if (p.bits == 4) {
      TransposePanels<2>(exec, p.batch, p.rows, p.cols, 1, stream, p.data_t,
                         [&](int64_t start, int64_t end, uint8_t* row) {
                           const uint8_t* even = p.data + start / 2;
                           Simd().transpose_pairs(even, even + p.cols / 2, (end - start) / 2, row);
                         });
    } else {  // grids of scales, which are small
      const auto* in = reinterpret_cast<const uint32_t*>(p.data);
      auto* out = reinterpret_cast<uint32_t*>(p.data_t);
      for (int64_t b = 0; b < p.batch; ++b, in += p.rows * p.cols, out += p.rows * p.cols)
        for (int64_t r = 0; r < p.rows; ++r)
          for (int64_t c = 0; c < p.cols; ++c) out[c * p.rows + r] = in[r * p.cols + c];
    }
  }
  return {};
}

template <class In, class Code>
Status CastTranspose(const Exec<Cpu>& exec, const Scaled<In>& x, int64_t batch, int64_t rows,
                     int64_t cols, uint8_t* data, uint8_t* data_t) {
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  const bool stream = OutgrowsCache(2 * batch * rows * cols);
  const DelayedRuns<In> delayed(exec, x);
  TransposePanels(exec, batch, rows, cols, sizeof(In) + 2, stream, data_t,
                  [&](int64_t start, int64_t end, uint8_t* row) {
                    const In* from = x.x + start;
                    cast(from, end - start, {delayed.scale(), x.length, start}, kRowsAhead * cols,
                         row);
                    if (!delayed.Raise(start, end))
                      ReplaceInfinityByNan<Code>(x.nonfinite, from, end - start, row);
                    CopyRow<kPanelCols>(data + start, row, end - start, stream);
                  });
  delayed.Finish();
  return {};
}

template <class In, class Code>
Status SwiGluCastTransposed(const Exec<Cpu>& exec, const In* gate, const In* up, const float* scale,
                            int64_t rows, int64_t cols, uint8_t* data_t) {
  const auto map = Simd().swiglu[kInputIndex<In>];
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  TransposePanels(exec, 1, rows, cols, 2 * sizeof(In) + 1, OutgrowsCache(rows * cols), data_t,
                  [&](int64_t start, int64_t end, uint8_t* row) {
                    alignas(kLineBytes) In h[kPanelCols];
                    map(gate + start, up + start, end - start, h);
                    cast(h, end - start, {scale, end - start}, /*ahead=*/0, row);
                  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cpu, CastTranspose)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cpu, SwiGluCastTransposed)

}  // namespace qshard::kernels
