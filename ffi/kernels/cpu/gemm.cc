// Reference GEMMs on the CPU: an oracle for tests, not meant for training. A task computes a tile
// of the result. It widens each operand's codes to fp32 once per tile and stores b by rows, so that
// the inner loop adds to a row of sums, and each sum keeps its order.
#include "kernels/gemm.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "core/ceil_div.h"
#include "core/round.h"
#include "kernels/cpu/parallel_for.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kTileRows = 64, kTileCols = 32, kDepth = 128;

using Values = std::array<float, 256>;

template <class F>
Values ValuesOf() {
  Values values;
  for (int i = 0; i < 256; ++i)
    values[i] = Decode<F>(static_cast<uint8_t>(i & ((1 << F::kBits) - 1)));
  return values;
}

struct ElementTraits {
  Values values;
  int64_t per_byte;
};

// Filled at load. A function-local static has a guard, which is not safe if another thread forks.
#define QSHARD_TRAITS(Nothing, F) {ValuesOf<F>(), kCodesPerByte<F>},
const ElementTraits kTraits[] = {QSHARD_FOR_EACH_ELEMENT(QSHARD_TRAITS, )};
#undef QSHARD_TRAITS

// Reads elements and scales of one operand.
class Reader {
 public:
  Reader(const GemmOperand& operand, int64_t k)
      : operand_(operand),
        traits_(IsValue(operand.element) ? nullptr : &kTraits[static_cast<int>(operand.element)]),
        k_(k) {}

  float Value(int64_t row, int64_t col) const {
    const int64_t i = operand_.k_first ? col * operand_.rows + row : row * k_ + col;
    switch (operand_.element) {
      case ElementId::kFloat32:
        return static_cast<const float*>(operand_.data)[i];
      case ElementId::kBFloat16:
        return Widen(static_cast<const bfloat16*>(operand_.data)[i]);
      case ElementId::kFloat16:
        return Widen(static_cast<const float16*>(operand_.data)[i]);
      default:
        break;
    }
    const auto* const codes = static_cast<const uint8_t*>(operand_.data);
    if (traits_->per_byte == 1) return traits_->values[codes[i]];
    return traits_->values[codes[i / 2] >> i % 2 * 4 & 0xF];
  }

  float Scale(ScaleId kind, int64_t row, int64_t block, int64_t blocks) const {
    const int64_t i = row / operand_.block_rows * blocks + block;
    const auto byte = [&] { return static_cast<const uint8_t*>(operand_.scale_inv)[i]; };
    switch (kind) {
      case ScaleId::kFloat:
        return static_cast<const float*>(operand_.scale_inv)[i];
      case ScaleId::kE8M0:
        return Decode<E8M0>(byte());
      case ScaleId::kE4M3:
        return Decode<E4M3>(byte());
      case ScaleId::kNone:
        break;
    }
    return 1.0f;
  }

  float TensorScale() const {
    return operand_.tensor_scale_inv == nullptr ? 1.0f : *operand_.tensor_scale_inv;
  }

 private:
  const GemmOperand& operand_;
  const ElementTraits* const traits_;
  const int64_t k_;
};

// Scratch memory of a task.
struct Scratch {
  float a[kTileRows][kDepth], b[kDepth][kTileCols];
  float block[kTileRows][kTileCols], sum[kTileRows][kTileCols];
};

}  // namespace

template <class Out>
Status Gemm(const Exec<Cpu>& exec, const GemmProblem& gemm, const Workspace&, Out* out) {
  const Reader a(gemm.a, gemm.k), b(gemm.b, gemm.k);
  const int64_t rows = gemm.a.rows, cols = gemm.b.rows, k = gemm.k;
  const int64_t length = gemm.scales == ScaleId::kNone ? std::max<int64_t>(k, 1) : gemm.cols;
  const int64_t blocks = CeilDiv(k, length);
  const int64_t down = CeilDiv(rows, kTileRows);
  const int64_t across = CeilDiv(cols, kTileCols);
  ParallelForWithScratch<Scratch>(exec, down * across, 1, [&](int64_t task, Scratch* scratch) {
    std::memset(scratch, 0, sizeof(*scratch));
    const int64_t top = task / across * kTileRows, left = task % across * kTileCols;
    const int64_t height = std::min(kTileRows, rows - top);
    const int64_t width = std::min(kTileCols, cols - left);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = block * length, end = length < k - begin ? begin + length : k;
      for (int64_t from = begin; from < end; from += kDepth) {
        const int64_t depth = std::min(kDepth, end - from);
        for (int64_t i = 0; i < height; ++i)
          for (int64_t d = 0; d < depth; ++d) scratch->a[i][d] = a.Value(top + i, from + d);
        for (int64_t j = 0; j < width; ++j)
          for (int64_t d = 0; d < depth; ++d) scratch->b[d][j] = b.Value(left + j, from + d);
        for (int64_t i = 0; i < height; ++i) {
          float* sums = scratch->block[i];
          for (int64_t d = 0; d < depth; ++d) {
            const float value = scratch->a[i][d];
            for (int64_t j = 0; j < kTileCols; ++j) sums[j] += value * scratch->b[d][j];
          }
        }
      }
      for (int64_t i = 0; i < height; ++i) {
        const float a_scale = a.Scale(gemm.scales, top + i, block, blocks);
        for (int64_t j = 0; j < width; ++j) {
          const float b_scale = b.Scale(gemm.scales, left + j, block, blocks);
          scratch->sum[i][j] += scratch->block[i][j] * a_scale * b_scale;
          scratch->block[i][j] = 0;
        }
      }
    }
    const float a_scale = a.TensorScale(), b_scale = b.TensorScale();
    for (int64_t i = 0; i < height; ++i)
      for (int64_t j = 0; j < width; ++j)
        out[(top + i) * cols + left + j] = Narrow<Out>(scratch->sum[i][j] * a_scale * b_scale);
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, Gemm)

}  // namespace qshard::kernels
