// Adam on the CPU. A block at a time goes through buffers in L1. Threads take stretches of blocks
// of all tensors.
#include "kernels/adam.h"

#include <cstring>
#include <vector>

#include "core/ceil_div.h"
#include "kernels/adam_step.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kStretch = 64;  // blocks per task

template <class Pointer>
Pointer At(Pointer data, int64_t i, AdamType type) {
  using Byte = std::conditional_t<std::is_same_v<Pointer, void*>, char, const char>;
  return static_cast<Byte*>(data) + i * SizeOf(type);
}

// Elements [begin, begin + n) of a tensor.
struct BlockElements {
  static constexpr int kCount = kAdamBlock;
  int64_t Count() const { return n; }

  void Widen(const void* x, AdamType type, float* values) const { Decode(x, type, 1.0f, values); }
  void Decode(const void* x, AdamType type, float scale_inv, float* values) const {
    simd.adam_decode[type](At(x, begin, type), n, scale_inv, values);
  }
  void Join(const void* upper, const void* lower, float* values) const {
    simd.adam_join(At(upper, begin, kAdamBFloat16), At(lower, begin, kAdamBFloat16), n, values);
  }
  void Step(Decay decay, const AdamConstants& c, const float* g, float* p, float* m, float* v,
            float* u) const {
    simd.adam_step[static_cast<int>(decay)](c, g, n, p, m, v, u);
  }
  void Encode(const float* values, AdamType type, bool positive, void* to, float& scale_inv) const {
    simd.adam_encode[type](values, n, positive, At(to, begin, type), &scale_inv);
  }
  void Store(const float* values, AdamType type, void* to) const {
    simd.adam_narrow[type](values, n, At(to, begin, type));
  }
  void StoreHalves(const float* values, void* upper, void* lower) const {
    simd.adam_halve(values, n, At(upper, begin, kAdamBFloat16), At(lower, begin, kAdamBFloat16));
  }
  void Narrow(const float* values, AdamType type, float* narrow) const {
    uint32_t stored[kCount];
    simd.adam_narrow[type](values, n, stored);
    simd.adam_decode[type](stored, n, 1.0f, narrow);
  }

  const SimdKernels& simd;
  int64_t begin, n;
};

}  // namespace

Status AdamConstantsOf(const Exec<Cpu>& exec, const float* step, int64_t n, const float* hyper,
                       int64_t run, float* constants) {
  constexpr int64_t kBytes = 512;  // as slow as moving this many bytes
  ParallelRanges(exec, n, kBytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const AdamConstants c = MakeAdamConstants(hyper + i / run * kHyperSize, step[i]);
      std::memcpy(constants + i * kAdamConstants, &c, sizeof(c));
    }
  });
  return {};
}

Status Adam(const Exec<Cpu>& exec, const AdamTensor* tensors, int64_t count, const AdamKinds& kinds,
            const float* constants) {
  const SimdKernels& simd = Simd();
  const auto blocks_in_row = [](const AdamTensor& t) { return CeilDiv(t.cols, kAdamBlock); };
  std::vector<int64_t> first_stretch(count + 1, 0);  // of each tensor
  for (int64_t i = 0; i < count; ++i) {
    const int64_t blocks = tensors[i].rows * blocks_in_row(tensors[i]);
    first_stretch[i + 1] = first_stretch[i] + CeilDiv(blocks, kStretch);
  }
  ParallelFor(exec, first_stretch[count], [&](int64_t stretch) {
    const int64_t i = std::upper_bound(first_stretch.begin(), first_stretch.end(), stretch) - 1 -
                      first_stretch.begin();
    const AdamTensor& t = tensors[i];
    AdamConstants c;
    std::memcpy(&c, constants + i * kAdamConstants, sizeof(c));
    const int64_t in_row = blocks_in_row(t), begin = (stretch - first_stretch[i]) * kStretch;
    const int64_t end = std::min(begin + kStretch, t.rows * in_row);
    for (int64_t block = begin; block < end; ++block) {
      const int64_t col = block % in_row * kAdamBlock;
      const int64_t n = std::min<int64_t>(kAdamBlock, t.cols - col);
      AdamScales scales = LoadScales(t, kinds, block);
      const BlockElements elements{simd, block / in_row * t.cols + col, n};
      StepElements(
          elements, kinds, c, t,
          AdamStored<const void*>{t.param, t.low, t.grad, t.exp_avg.data, t.exp_avg_sq.data},
          scales);
      StoreScales(t, kinds, block, scales);
    }
  });
  return {};
}

}  // namespace qshard::kernels
