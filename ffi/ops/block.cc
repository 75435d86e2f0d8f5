// The separate steps of block quantization, and dequantization. 4-bit codes are packed two to a
// byte along the last axis.
#include "kernels/block_cast.h"
#include "ops/philox.h"
#include "schema/handler.h"

namespace qshard {

// amax[m, k] = max |x| over one block_rows x block_cols block of x, in fp32. It is an exact maximum
// over bit patterns: for blocks split by a shard boundary, an integer max-reduce of the grids gives
// the same bits. Any NaN gives the canonical NaN.
QSHARD_DEFINE_OP(amax_block) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::AmaxBlock(call.exec, Data<decltype(in)>(call.arg(0)),
                                   BlocksOf(call.binding), Mutable<float>(call.ret(0))));
  });
}

// data = encode(x * scale). Follows the reduction of amaxes of blocks that span shards.
QSHARD_DEFINE_OP(cast_block) {
  return DispatchElement(call, call.arg(0), [&](auto code, auto in) {
    return call(kernels::CastBlock<decltype(in), decltype(code)>(
        call.exec, Data<decltype(in)>(call.arg(0)), Data<float>(call.arg(1)),
        BlocksOf(call.binding), Mutable<uint8_t>(call.ret(0))));
  });
}

// data = encode(x * scale) in E2M1 with stochastic rounding.
//
// The random bits of an element depend on the seed and on its index in the whole tensor
// (core/stochastic.h), so a shard gives the bytes of the whole tensor. The shard's position is an
// operand, because SPMD runs one program on all shards (ops/philox.h). `transposed` is a hint for a
// transpose [k, *outer, m]: all k slices have the same seed, and the index grows by row_step from
// one to the next.
QSHARD_DEFINE_OP(cast_block_stochastic) {
  Blocks blocks = BlocksOf(call.binding);
  kernels::Philox philox;
  QSHARD_RETURN_IF_ERROR(ReadPhilox(call, 2, blocks, &philox));
  QSHARD_REQUIRE(blocks.block_cols <= kernels::kMaxStochasticBlockCols, call.op(), ": block_cols (",
                 blocks.block_cols, ") is more than ", kernels::kMaxStochasticBlockCols,
                 "; use smaller blocks");
  const bool in_rows = blocks.block_rows == 1 && blocks.cols % blocks.block_cols == 0 &&
                       philox.run > 0 && blocks.GridCols() % philox.run == 0;
  const int64_t k = call.arg(0).dims[0];
  if (call.flag("transposed") && in_rows && k > 0) {
    blocks = {1, k, blocks.batch * blocks.rows / k * blocks.cols, 1, blocks.block_cols};
    philox.in_step = true;
  }
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::CastBlockStochastic(call.exec, Data<decltype(in)>(call.arg(0)),
                                             Data<float>(call.arg(1)), philox, blocks,
                                             Mutable<uint8_t>(call.ret(0))));
  });
}

// x = decode(data) * scale_inv, rounded once to the dtype of x. scale_inv is fp32 or E8M0.
QSHARD_DEFINE_OP(dequantize_block) {
  const auto with_scale = [&](auto scale) {
    using Scale = decltype(scale);
    return DispatchScaledElement<Scale>(call, [&](auto code) {
      return DispatchFloat(call.ret(0), [&](auto out) {
        return call(kernels::DequantizeBlock<decltype(code), Scale, decltype(out)>(
            call.exec, Data<uint8_t>(call.arg(0)),
            Data<typename StoredScale<Scale>::Type>(call.arg(1)), BlocksOf(call.binding),
            Mutable<decltype(out)>(call.ret(0))));
      });
    });
  };
  return call.text("scale_dtype") == E8M0::kName ? with_scale(E8M0{}) : with_scale(0.0f);
}

// x = decode(data) * (scale_inv * global_scale_inv), rounded once to the dtype of x.
QSHARD_DEFINE_OP(dequantize_nvfp4) {
  return DispatchFloat(call.ret(0), [&](auto out) {
    return call(kernels::DequantizeNvfp4(
        call.exec, Data<uint8_t>(call.arg(0)), Data<uint8_t>(call.arg(1)), Data<float>(call.arg(2)),
        call.ArgRun(2), BlocksOf(call.binding), Mutable<decltype(out)>(call.ret(0))));
  });
}

}  // namespace qshard
