// Adam on the CPU: a block at a time through buffers in L1, threads on stretches of blocks of all
// tensors.
#include "kernels/adam.h"

#include <cstring>
#include <vector>

#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kStretch = 64;  // blocks that a thread takes at once

template <class Pointer>
Pointer At(Pointer data, int64_t i, AdamType type) {
  using Byte = std::conditional_t<std::is_same_v<Pointer, void*>, char, const char>;
  return static_cast<Byte*>(data) + i * SizeOf(type);
}

// Elements [begin, begin + n) of a tensor, which have scale `block`.
void StepBlock(const SimdKernels& simd, const AdamKinds& kinds, const AdamConstants& constants,
               const AdamTensor& t, int64_t begin, int64_t n, int64_t block) {
  const auto scale_of = [&](const AdamTensor::State& state, AdamType type) {
    return IsScaled(type) ? state.scale_inv[block] : 1.0f;
  };
  const auto new_scale_of = [&](const AdamTensor::NewState& state, AdamType type) {
    return IsScaled(type) ? state.scale_inv + block : nullptr;
  };
  const bool has_param = !kinds.update || kinds.decay != Decay::kNone;
  float p[kAdamBlock] = {}, g[kAdamBlock], m[kAdamBlock], v[kAdamBlock], update[kAdamBlock];
  if (kinds.low == AdamLow::kMaster)
    simd.adam_decode[kAdamFloat32](At(t.low, begin, kAdamFloat32), n, 1.0f, p);
  else if (kinds.low == AdamLow::kRemainder)
    simd.adam_join(At(t.param, begin, kAdamBFloat16), At(t.low, begin, kAdamBFloat16), n, p);
  else if (has_param)
    simd.adam_decode[kinds.param](At(t.param, begin, kinds.param), n, 1.0f, p);
  simd.adam_decode[kinds.grad](At(t.grad, begin, kinds.grad), n, 1.0f, g);
  simd.adam_decode[kinds.exp_avg](At(t.exp_avg.data, begin, kinds.exp_avg), n,
                                  scale_of(t.exp_avg, kinds.exp_avg), m);
  simd.adam_decode[kinds.exp_avg_sq](At(t.exp_avg_sq.data, begin, kinds.exp_avg_sq), n,
                                     scale_of(t.exp_avg_sq, kinds.exp_avg_sq), v);

  simd.adam_step[static_cast<int>(kinds.decay)](constants, g, n, p, m, v, update);

  simd.adam_encode[kinds.exp_avg](m, n, /*positive=*/false,
                                  At(t.new_exp_avg.data, begin, kinds.exp_avg),
                                  new_scale_of(t.new_exp_avg, kinds.exp_avg));
  simd.adam_encode[kinds.exp_avg_sq](v, n, /*positive=*/true,
                                     At(t.new_exp_avg_sq.data, begin, kinds.exp_avg_sq),
                                     new_scale_of(t.new_exp_avg_sq, kinds.exp_avg_sq));
  if (kinds.update) {
    if (kinds.low == AdamLow::kMaster) {
      float old[kAdamBlock];
      simd.adam_decode[kinds.param](At(t.param, begin, kinds.param), n, 1.0f, old);
      uint32_t rounded[kAdamBlock];
      simd.adam_narrow[kinds.param](p, n, rounded);
      simd.adam_decode[kinds.param](rounded, n, 1.0f, update);
      for (int64_t i = 0; i < n; ++i) update[i] = update[i] - old[i];
    } else {
      for (int64_t i = 0; i < n; ++i) update[i] = -update[i];
    }
    simd.adam_narrow[kAdamFloat32](update, n, At(t.new_param, begin, kAdamFloat32));
  } else if (kinds.low == AdamLow::kRemainder) {
    simd.adam_halve(p, n, At(t.new_param, begin, kAdamBFloat16),
                    At(t.new_low, begin, kAdamBFloat16));
    return;
  } else {
    simd.adam_narrow[kinds.param](p, n, At(t.new_param, begin, kinds.param));
  }
  if (kinds.low == AdamLow::kMaster)
    simd.adam_narrow[kAdamFloat32](p, n, At(t.new_low, begin, kAdamFloat32));
}

}  // namespace

Status AdamConstantsOf(const Exec<Cpu>& exec, const float* step, int64_t n, const float* hyper,
                       int64_t run, float* constants) {
  constexpr int64_t kBytes = 512;  // as slow as moving that many
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
  const auto blocks_in_row = [](const AdamTensor& t) {
    return (t.cols + kAdamBlock - 1) / kAdamBlock;
  };
  std::vector<int64_t> first_stretch(count + 1, 0);  // of each tensor
  for (int64_t i = 0; i < count; ++i) {
    const int64_t blocks = tensors[i].rows * blocks_in_row(tensors[i]);
    first_stretch[i + 1] = first_stretch[i] + (blocks + kStretch - 1) / kStretch;
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
      StepBlock(simd, kinds, c, t, block / in_row * t.cols + col, n, block);
    }
  });
  return {};
}

}  // namespace qshard::kernels
