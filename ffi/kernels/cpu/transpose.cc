// cast_transpose, with an amax or without, and transpose on the CPU. Panels of 256 rows are made in
// L2 and turned there by tiles of 64 x 64, so x is read once and each output written once: 6 bytes
// an element for float32, 4 for 16 bits, 2 for bytes. What is read or written is at least 256 bytes
// long before it goes on in another row, where memory and TLB start anew.
//
// Tasks are whole panels: threads share no cache line of an output whose rows are whole lines.
#include "kernels/cast.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/raise_amax.h"
#include "kernels/cpu/stream.h"
#include "kernels/delayed.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kRows = 256, kCols = 256;  // of a panel
constexpr int64_t kRowsAhead = 2;            // what to prefetch while a row is read

// memcpy, which is a call unless its size is known, of a row that is often as long as it may be.
template <int64_t kMost>
void CopyRow(void* to, const void* from, int64_t bytes, bool stream) {
  if (stream)
    StreamCopy(to, from, bytes);
  else if (bytes == kMost)
    std::memcpy(to, from, kMost);
  else
    std::memcpy(to, from, bytes);
}

// Makes data_t the transpose, matrix by matrix, of what fill(start, end, row) writes: the bytes of
// elements start .. end, which lie in one row, to `row`. `bytes`: read and written for each
// element.
template <class Fill>
void TransposePanels(const Exec<Cpu>& exec, int64_t batch, int64_t rows, int64_t cols,
                     int64_t bytes, bool stream, uint8_t* data_t, const Fill& fill) {
  const int64_t down = (rows + kRows - 1) / kRows, across = (cols + kCols - 1) / kCols;
  const auto transpose = Simd().transpose;
  const auto turn_panel = [&](int64_t panel) {
    const int64_t base = panel / (down * across) * rows * cols;
    const int64_t row = panel / across % down * kRows, col = panel % across * kCols;
    const int64_t height = std::min(kRows, rows - row), width = std::min(kCols, cols - col);
    // The odd line keeps rows apart in the sets of a cache.
    alignas(kLineBytes) uint8_t codes[kRows][kCols + kLineBytes];
    alignas(kLineBytes) uint8_t turned[kTile][kRows];
    for (int64_t i = 0; i < height; ++i) {
      const int64_t start = base + (row + i) * cols + col;
      fill(start, start + width, codes[i]);
    }
    for (int64_t j = 0; j < width; j += kTile) {
      uint8_t* out = data_t + base + (col + j) * rows + row;
      const bool direct = !stream && j + kTile <= width && height == kRows;
      for (int64_t i = 0; i < height; i += kTile)
        transpose(codes[i] + j, sizeof(codes[0]), direct ? out + i : turned[0] + i,
                  direct ? rows : kRows);
      for (int64_t k = 0; k < std::min(kTile, width - j) && !direct; ++k)
        CopyRow<kRows>(out + k * rows, turned[k], height, stream);
    }
  };
  const int64_t panel_bytes = std::min(kRows, rows) * std::min(kCols, cols) * bytes;
  ParallelRanges(exec, batch * down * across, panel_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) turn_panel(panel);
    StreamFence();
  });
}

}  // namespace

Status Transpose(const Exec<Cpu>& exec, const uint8_t* data, int64_t batch, int64_t rows,
                 int64_t cols, uint8_t* data_t) {
  const bool stream = OutgrowsCache(batch * rows * cols);
  TransposePanels(
      exec, batch, rows, cols, 2, stream, data_t, [&](int64_t start, int64_t end, uint8_t* row) {
        const auto ahead = reinterpret_cast<uintptr_t>(data) + start + kRowsAhead * cols;
        for (int64_t i = 0; i < end - start; i += kLineBytes)
          __builtin_prefetch(reinterpret_cast<const void*>(ahead + i));
        CopyRow<kCols>(row, data + start, end - start, false);
      });
  return {};
}

template <class In, class Code>
Status CastTranspose(const Exec<Cpu>& exec, const In* x, const float* scale, int64_t length,
                     int64_t batch, int64_t rows, int64_t cols, uint8_t* data, uint8_t* data_t) {
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  const bool stream = OutgrowsCache(2 * batch * rows * cols);
  TransposePanels(exec, batch, rows, cols, sizeof(In) + 2, stream, data_t,
                  [&](int64_t start, int64_t end, uint8_t* row) {
                    cast(x + start, end - start, {scale, length, start}, kRowsAhead * cols, row);
                    CopyRow<kCols>(data + start, row, end - start, stream);
                  });
  return {};
}

template <class In, class Code>
Status CastTransposeAmax(const Exec<Cpu>& exec, const In* x, const float* scale,
                         int64_t scale_length, Nonfinite nonfinite, int64_t batch, int64_t rows,
                         int64_t cols, int64_t runs, int64_t amax_length, uint8_t* data,
                         uint8_t* data_t, float* amax) {
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  const bool stream = OutgrowsCache(2 * batch * rows * cols);
  std::fill_n(amax, runs, 0.0f);
  TransposePanels(exec, batch, rows, cols, sizeof(In) + 2, stream, data_t,
                  [&](int64_t start, int64_t end, uint8_t* row) {
                    cast(x + start, end - start, {scale, scale_length, start}, kRowsAhead * cols,
                         row);
                    const bool finite = RaiseAmaxes(x, start, end, amax_length, amax);
                    if (!finite && nonfinite == Nonfinite::kNan)
                      ShowInfinite<Code>(x + start, end - start, row);
                    CopyRow<kCols>(data + start, row, end - start, stream);
                  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cpu, CastTranspose)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cpu, CastTransposeAmax)

}  // namespace qshard::kernels
