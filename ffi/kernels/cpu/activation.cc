// SwiGLU and RMSNorm on the CPU. Amaxes are taken while outputs are still in cache.
#include "kernels/activation.h"

#include <algorithm>
#include <type_traits>

#include "core/ceil_div.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/raise_amax.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kChunk = int64_t{1} << 12;

// Splits [runs, length] into chunks that stay in cache. map(begin, end) writes a chunk, and
// raise(begin, end) takes its amaxes.
template <class Map, class Raise>
void InChunks(const Exec<Cpu>& exec, int64_t runs, int64_t length, int64_t bytes, const Map& map,
              const Raise& raise) {
  ParallelRanges(exec, runs * length, bytes, [&](int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      stop = std::min(end, begin + kChunk);
      map(begin, stop);
      raise(begin, stop);
    }
  });
}

template <class Weight>
constexpr bool kIsWide = std::is_same_v<Weight, float>;

// Returns weights in fp32. Widens them into `wide` unless they are fp32 already.
template <class Weight>
const float* WidenWeights(const Weight* weight, int64_t n, float* wide) {
  if constexpr (kIsWide<Weight>) {
    return weight;
  } else {
    for (int64_t i = 0; i < n; ++i) wide[i] = Widen(weight[i]);
    return wide;
  }
}

}  // namespace

template <class In>
Status SwiGluForward(const Exec<Cpu>& exec, const In* gate, const In* up, int64_t runs,
                     int64_t length, In* h, float* amax) {
  const auto map = Simd().swiglu[kInputIndex<In>];
  std::fill_n(amax, runs, 0.0f);
  InChunks(
      exec, runs, length, 3 * sizeof(In),
      [&](int64_t begin, int64_t end) { map(gate + begin, up + begin, end - begin, h + begin); },
      [&](int64_t begin, int64_t end) { RaiseAmaxes(h, begin, end, length, amax); });
  return {};
}

template <class In>
Status SwiGluBackward(const Exec<Cpu>& exec, const In* gate, const In* up, const In* grad,
                      int64_t runs, int64_t length, In* d_gate, In* d_up, float* amax_gate,
                      float* amax_up) {
  const auto map = Simd().swiglu_grad[kInputIndex<In>];
  std::fill_n(amax_gate, runs, 0.0f);
  std::fill_n(amax_up, runs, 0.0f);
  InChunks(
      exec, runs, length, 5 * sizeof(In),
      [&](int64_t begin, int64_t end) {
        map(gate + begin, up + begin, grad + begin, end - begin, d_gate + begin, d_up + begin);
      },
      [&](int64_t begin, int64_t end) {
        RaiseAmaxes(d_gate, begin, end, length, amax_gate);
        RaiseAmaxes(d_up, begin, end, length, amax_up);
      });
  return {};
}

template <class In>
Status SwiGluGateUp(const Exec<Cpu>& exec, const In* gate_up, int64_t rows, int64_t cols, In* h,
                    float* amax) {
  const auto map = Simd().swiglu[kInputIndex<In>];
  ParallelRanges(exec, rows, 3 * cols * int64_t{sizeof(In)} + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const In* gate = gate_up + 2 * row * cols;
      map(gate, gate + cols, cols, h + row * cols);
      amax[row] = CanonicalNan(AmaxOf(h + row * cols, cols));
    }
  });
  return {};
}

template <class In>
Status SwiGluGateUpGrad(const Exec<Cpu>& exec, const In* gate_up, const In* grad, int64_t rows,
                        int64_t cols, In* d_gate_up, float* amax) {
  const auto map = Simd().swiglu_grad[kInputIndex<In>];
  ParallelRanges(exec, rows, 5 * cols * int64_t{sizeof(In)} + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const In* gate = gate_up + 2 * row * cols;
      In* d_gate = d_gate_up + 2 * row * cols;
      map(gate, gate + cols, grad + row * cols, cols, d_gate, d_gate + cols);
      amax[row] = CanonicalNan(AmaxOf(d_gate, 2 * cols));
    }
  });
  return {};
}

template <class In, class Weight>
Status RmsNormForward(const Exec<Cpu>& exec, const In* x, const Weight* weight, int64_t runs,
                      int64_t rows, int64_t cols, float eps, In* y, float* rstd, float* amax) {
  const SimdKernels& simd = Simd();
  std::fill_n(amax, runs, 0.0f);
  ParallelRangesWithScratch<float>(
      exec, runs * rows, 2 * cols * int64_t{sizeof(In)} + 1, kIsWide<Weight> ? 0 : cols,
      [&](int64_t begin, int64_t end, float* scratch) {
        const float* wide = nullptr;
        for (int64_t m = begin; m < end; ++m) {
          const int64_t run = m / rows;
          if (m == begin || m % rows == 0) wide = WidenWeights(weight + run * cols, cols, scratch);
          const In* row = x + m * cols;
          const float squares = simd.squares[kInputIndex<In>](row, cols);
          rstd[m] = CanonicalNan(RmsInverse(squares, cols, eps));
          simd.rms_norm[kInputIndex<In>](row, wide, rstd[m], cols, y + m * cols);
          RaiseAmax(amax + run, AmaxOf(y + m * cols, cols));
        }
      });
  return {};
}

template <class In, class Weight>
Status RmsNormBackward(const Exec<Cpu>& exec, const In* x, const Weight* weight, const float* rstd,
                       const In* grad, int64_t runs, int64_t rows, int64_t cols, In* dx,
                       float* parts, float* dweight) {
  const SimdKernels& simd = Simd();
  const int64_t count = CeilDiv(rows, kSumRows);  // parts in a run
  const int64_t size = kIsWide<Weight> ? 0 : cols;
  ParallelForWithScratch<float>(exec, runs * count, size, [&](int64_t part, float* scratch) {
    const int64_t run = part / count;
    const float* wide = WidenWeights(weight + run * cols, cols, scratch);
    float* sums = parts + part * cols;
    std::fill_n(sums, cols, 0.0f);
    const int64_t begin = run * rows + (part - run * count) * kSumRows;
    const int64_t end = std::min((run + 1) * rows, begin + kSumRows);
    for (int64_t m = begin; m < end; ++m) {
      const In *row = x + m * cols, *dy = grad + m * cols;
      const float sum = simd.grad_along[kInputIndex<In>](row, dy, wide, rstd[m], cols);
      const float along = Divide(sum, static_cast<float>(cols));
      simd.rms_norm_grad[kInputIndex<In>](row, dy, wide, rstd[m], along, cols, dx + m * cols, sums);
    }
    for (int64_t i = 0; i < cols; ++i) sums[i] = CanonicalNan(sums[i]);
  });
  ParallelRanges(exec, runs * cols, count * int64_t{sizeof(float)} + 1,
                 [&](int64_t begin, int64_t end) {
                   for (int64_t i = begin; i < end; ++i) {
                     const float* first = parts + i / cols * count * cols + i % cols;
                     float lanes[kRowLanes] = {};
                     for (int64_t part = 0; part < count; ++part)
                       lanes[part % kRowLanes] = lanes[part % kRowLanes] + first[part * cols];
                     dweight[i] = CanonicalNan(SumHalves<kRowLanes>(lanes));
                   }
                 });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, SwiGluForward)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, SwiGluBackward)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, SwiGluGateUp)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, SwiGluGateUpGrad)
#define QSHARD_INSTANTIATE_NORM(In, Weight)               \
  QSHARD_INSTANTIATE_FOR(Cpu, RmsNormForward, In, Weight) \
  QSHARD_INSTANTIATE_FOR(Cpu, RmsNormBackward, In, Weight)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_NORM, float)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_NORM, bfloat16)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_NORM, float16)
#undef QSHARD_INSTANTIATE_NORM

}  // namespace qshard::kernels
