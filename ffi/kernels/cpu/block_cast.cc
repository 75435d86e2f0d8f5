// Amax, cast and dequantization in blocks on the CPU. A task takes a few neighbouring blocks, row
// by row.
#include "kernels/block_cast.h"

#include "kernels/cpu/block_spans.h"
#include "kernels/cpu/coded_rows.h"
#include "kernels/cpu/random_rows.h"

namespace qshard::kernels {

template <class In>
Status AmaxBlock(const Exec<Cpu>& exec, const In* x, const Blocks& blocks, float* amax) {
  ParallelSpans(exec, blocks, [&](const BlockSpan& span) {
    float* out = amax + span.grid;
    Simd().amax[kInputIndex<In>](x + span.start, blocks.cols, span.rows, span.cols,
                                 blocks.block_cols, out);
    for (int64_t b = 0; b < span.num_blocks; ++b) out[b] = CanonicalNan(out[b]);
  });
  return {};
}

template <class In, class Code>
Status CastBlock(const Exec<Cpu>& exec, const In* x, const float* scale, const Blocks& blocks,
                 uint8_t* data) {
  ParallelSpans(exec, blocks, [&](const BlockSpan& span) {
    ForEachRow(span, blocks, [&](int64_t i) {
      CastRow<Code>(x + i, span.cols, {scale + span.grid, blocks.block_cols},
                    data + i / kCodesPerByte<Code>);
    });
  });
  return {};
}

template <class In>
Status CastBlockStochastic(const Exec<Cpu>& exec, const In* x, const float* scale,
                           const Philox& philox, const Blocks& blocks, uint8_t* data) {
  ParallelSpans(exec, blocks, [&](const BlockSpan& span) {
    uint8_t random[kSpanCols];
    for (int64_t r = 0; r < span.rows; ++r) {
      RandomRow(philox, blocks, span.batch, span.grid_row * blocks.block_rows + r,
                span.first_block * blocks.block_cols, span.cols, random);
      const int64_t start = span.start + r * blocks.cols;
      CastRowStochastic<E2M1>(x + start, span.cols, {scale + span.grid, blocks.block_cols}, random,
                              data + start / 2);
    }
  });
  return {};
}

namespace {

// x = decode(data) * value(block). Computes the values of a span once for all its rows.
template <class Code, class Out, class Value>
void Dequantize(const Exec<Cpu>& exec, const uint8_t* data, const Blocks& blocks, Out* x,
                const Value& value) {
  ParallelSpans(exec, blocks, [&](const BlockSpan& span) {
    float scale_inv[kSpanBlocks];
    for (int64_t b = 0; b < span.num_blocks; ++b) scale_inv[b] = value(span.grid + b);
    ForEachRow(span, blocks, [&](int64_t i) {
      DequantizeRow<Code>(data + i / kCodesPerByte<Code>, span.cols, {scale_inv, blocks.block_cols},
                          x + i);
    });
  });
}

}  // namespace

template <class Code, class Scale, class Out>
Status DequantizeBlock(const Exec<Cpu>& exec, const uint8_t* data,
                       const typename StoredScale<Scale>::Type* scale_inv, const Blocks& blocks,
                       Out* x) {
  Dequantize<Code>(exec, data, blocks, x,
                   [&](int64_t b) { return StoredScale<Scale>::Value(scale_inv[b]); });
  return {};
}

template <class Out>
Status DequantizeNvfp4(const Exec<Cpu>& exec, const uint8_t* data, const uint8_t* scale_inv,
                       const float* global_scale_inv, int64_t run, const Blocks& blocks, Out* x) {
  Dequantize<E2M1>(exec, data, blocks, x, [&](int64_t b) {
    return ScaleInverseNvfp4(scale_inv[b], global_scale_inv[b / run]);
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, AmaxBlock)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_ELEMENT, QSHARD_INSTANTIATE_FOR, Cpu, CastBlock)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, CastBlockStochastic)
QSHARD_FOR_EACH_BLOCK_FORMAT(float, E8M0, QSHARD_FOR_EACH_INPUT, QSHARD_INSTANTIATE_FOR, Cpu,
                             DequantizeBlock)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, DequantizeNvfp4)

}  // namespace qshard::kernels
