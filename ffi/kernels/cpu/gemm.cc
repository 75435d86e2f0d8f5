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

// A matrix within an operand. The rest of an operand's fields describe the whole.
struct Part {
  int64_t first, stride;              // element (0, 0), and elements between rows, or along k
  int64_t first_scale, scale_stride;  // likewise for block scales, in rows or along k
  const float* tensor_scale_inv;      // or null
};

// Reads elements and scales of one operand.
class Reader {
 public:
  Reader(const GemmOperand& operand, const Part& part)
      : operand_(operand),
        traits_(IsValue(operand.element) ? nullptr : &kTraits[static_cast<int>(operand.element)]),
        part_(part) {}

  float Value(int64_t row, int64_t col) const {
    const int64_t i =
        part_.first + (operand_.k_first ? col * part_.stride + row : row * part_.stride + col);
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

  float Scale(ScaleId kind, int64_t row, int64_t block) const {
    const int64_t along = operand_.k_first ? block : row / operand_.block_rows;
    const int64_t i =
        part_.first_scale + along * part_.scale_stride + (operand_.k_first ? row : block);
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
    return part_.tensor_scale_inv == nullptr ? 1.0f : *part_.tensor_scale_inv;
  }

 private:
  const GemmOperand& operand_;
  const ElementTraits* const traits_;
  const Part& part_;
};

// Scratch memory of a task.
struct Scratch {
  float a[kTileRows][kDepth], b[kDepth][kTileCols];
  float block[kTileRows][kTileCols], sum[kTileRows][kTileCols];
};

// Number of blocks along k.
int64_t BlocksAlongK(const GemmProblem& gemm) {
  return gemm.scales == ScaleId::kNone ? 0 : CeilDiv(gemm.k, gemm.cols);
}

// Returns all of an operand.
Part Whole(const GemmProblem& gemm, const GemmOperand& operand) {
  return {0, operand.k_first ? operand.rows : gemm.k, 0,
          operand.k_first ? operand.rows : BlocksAlongK(gemm), operand.tensor_scale_inv};
}

// Computes out [rows, cols], a product of parts of the operands.
template <class Out>
void Multiply(const Exec<Cpu>& exec, const GemmProblem& gemm, const Part& a_part,
              const Part& b_part, int64_t rows, int64_t cols, int64_t k, Out* out) {
  const Reader a(gemm.a, a_part), b(gemm.b, b_part);
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
        const float a_scale = a.Scale(gemm.scales, top + i, block);
        for (int64_t j = 0; j < width; ++j) {
          const float b_scale = b.Scale(gemm.scales, left + j, block);
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
}

// Multiplies `rows` rows of `a` from `start` by the matrix of `group`: `matrix`, or if that is null
// the one at its place in `b`.
template <class Out>
void MultiplyRows(const Exec<Cpu>& exec, GemmProblem gemm, const void* matrix, int64_t group,
                  int64_t start, int64_t rows, Out* out) {
  const int64_t k = gemm.k, n = gemm.b.rows;
  Part a = Whole(gemm, gemm.a), b = Whole(gemm, gemm.b);
  a.first = start * k;
  a.first_scale = start * a.scale_stride;
  if (matrix != nullptr)
    gemm.b.data = matrix;
  else
    b.first = group * n * k;
  if (gemm.scales != ScaleId::kNone)
    b.first_scale = group * CeilDiv(n, gemm.b.block_rows) * b.scale_stride;
  for (Part* part : {&a, &b})
    if (part->tensor_scale_inv != nullptr) part->tensor_scale_inv += group;
  Multiply(exec, gemm, a, b, rows, n, k, out);
}

// Contracts the part of k from `start` to `stop`.
template <class Out>
void ContractRows(const Exec<Cpu>& exec, const GemmProblem& gemm, int64_t group, int64_t start,
                  int64_t stop, Out* out) {
  const int64_t m = gemm.a.rows, n = gemm.b.rows;
  const auto part = [&](const GemmOperand& operand) {
    Part whole = Whole(gemm, operand);
    whole.first = operand.k_first ? start * operand.rows : start;
    if (gemm.scales != ScaleId::kNone)
      whole.first_scale = start / gemm.cols * (operand.k_first ? operand.rows : 1);
    if (whole.tensor_scale_inv != nullptr) whole.tensor_scale_inv += group;
    return whole;
  };
  Multiply(exec, gemm, part(gemm.a), part(gemm.b), m, n, stop - start, out + group * m * n);
}

}  // namespace

template <class Out>
Status Gemm(const Exec<Cpu>& exec, const GemmProblem& gemm, const Workspace&, Out* out) {
  Multiply(exec, gemm, Whole(gemm, gemm.a), Whole(gemm, gemm.b), gemm.a.rows, gemm.b.rows, gemm.k,
           out);
  return {};
}

template <class Out>
Status GroupedGemm(const Exec<Cpu>& exec, const GemmProblem& gemm, const GemmGroups& groups,
                   const Workspace&, Out* out) {
  const int64_t rows = groups.Rows(gemm), n = gemm.b.rows;
  const int64_t stop_alignment = groups.by_k && gemm.scales != ScaleId::kNone ? gemm.cols : 1;
  int64_t start = 0, first = 0;  // of the group, in `a` and in out
  for (int64_t group = 0; group < groups.number; ++group) {
    const int64_t stop = ClampStop(groups.stops[group], start, rows, stop_alignment);
    if (!groups.by_k) {
      const int64_t end =
          groups.ends == nullptr ? stop : ClampStop(groups.ends[group], first, groups.out_rows, 1);
      const int64_t number = std::min(stop - start, end - first);
      const void* const matrix = groups.matrices == nullptr ? nullptr : groups.matrices[group];
      if (number > 0) MultiplyRows(exec, gemm, matrix, group, start, number, out + first * n);
      std::fill_n(out + (first + number) * n, (end - first - number) * n, Out{});
      first = end;
    } else if (start < stop) {
      ContractRows(exec, gemm, group, start, stop, out);
    } else {
      std::fill_n(out + group * gemm.a.rows * n, gemm.a.rows * n, Out{});
    }
    start = stop;
  }
  if (!groups.by_k) std::fill_n(out + first * n, (groups.out_rows - first) * n, Out{});
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, Gemm)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, GroupedGemm)

}  // namespace qshard::kernels
