// Transposes of matrices of codes, panel by panel, on all threads.
#ifndef QSHARD_KERNELS_CPU_TRANSPOSE_PANELS_H_
#define QSHARD_KERNELS_CPU_TRANSPOSE_PANELS_H_

#include <algorithm>

#include "core/ceil_div.h"
#include "kernels/cpu/panel.h"
#include "kernels/cpu/parallel_for.h"

namespace qshard::kernels {

// Stores in data_t the transpose of each matrix of codes. fill(start, end, row) must write the
// bytes of elements [start, end), within one row, to `row`. With two elements a byte it is called
// for every other row, and must write, column by column, the codes of that row and the next as one
// byte. `bytes`: bytes read and written per element.
template <int64_t kPerByte = 1, class Fill>
void TransposePanels(const Exec<Cpu>& exec, int64_t batch, int64_t rows, int64_t cols,
                     int64_t bytes, bool stream, uint8_t* data_t, const Fill& fill) {
  const int64_t down = CeilDiv(rows, kPanelRows);
  const int64_t across = CeilDiv(cols, kPanelCols);
  const int64_t panel_bytes = std::min(kPanelRows, rows) * std::min(kPanelCols, cols) * bytes;
  ParallelRanges(exec, batch * down * across, panel_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t base = i / (down * across) * rows * cols;
      const int64_t row = i / across % down * kPanelRows, col = i % across * kPanelCols;
      const int64_t height = std::min(kPanelRows, rows - row);
      const int64_t width = std::min(kPanelCols, cols - col);
      Panel panel;
      for (int64_t r = 0; r < height; r += kPerByte) {
        const int64_t start = base + (row + r) * cols + col;
        fill(start, start + width, panel.codes[r / kPerByte]);
      }
      panel.Transpose(height / kPerByte, width, data_t + (base + col * rows + row) / kPerByte,
                      rows / kPerByte, stream);
    }
    StreamFence();
  });
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_TRANSPOSE_PANELS_H_
