// The steps of quantizing in blocks that share a scale, and the way back. 4-bit codes are packed
// two a byte along the last axis.
#include "kernels/block_cast.h"
#include "ops/places.h"
#include "schema/handler.h"

namespace qshard {

// amax[m, k] = max |x| over one block_rows x block_cols block of x, fp32. A maximum over bit
// patterns: exact, so blocks that shards cut may be reduced in parts, an integer max-reduce of the
// grids giving the same bits. Any NaN gives the canonical one.
QSHARD_DEFINE_OP(amax_block) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::AmaxBlock(call.exec, Data<decltype(in)>(call.arg(0)),
                                   BlocksOf(call.binding), Mutable<float>(call.ret(0))));
  });
}

// data = encode(x * scale): the last step, once the amaxes of cut blocks are reduced.
QSHARD_DEFINE_OP(cast_block) {
  return DispatchElement(call, call.arg(0), [&](auto code, auto in) {
    return call(kernels::CastBlock<decltype(in), decltype(code)>(
        call.exec, Data<decltype(in)>(call.arg(0)), Data<float>(call.arg(1)),
        BlocksOf(call.binding), Mutable<uint8_t>(call.ret(0))));
  });
}

// data = encode(x * scale) in E2M1, rounded up or down at random.
//
// The random bits of an element are a function of a seed and of its index in the whole tensor
// (core/stochastic.h), so a shard gives the bytes of the whole. Where the shard is, is an operand,
// as SPMD runs one program on all (ops/places.h). `turned` says of a transpose [k, *outer, m] that
// from one k to the next nothing but the row changes: the seed is the same, and the index grows by
// row_step.
QSHARD_DEFINE_OP(cast_block_stochastic) {
  Blocks blocks = BlocksOf(call.binding);
  kernels::Places places;
  QSHARD_RETURN_IF_ERROR(PlacesOf(call, 2, blocks, &places));
  QSHARD_REQUIRE(blocks.block_cols <= kernels::kMaxStochasticBlockCols, call.op(), ": block_cols (",
                 blocks.block_cols, ") is more than ", kernels::kMaxStochasticBlockCols,
                 "; use smaller blocks");
  const bool in_rows = blocks.block_rows == 1 && blocks.cols % blocks.block_cols == 0 &&
                       places.run > 0 && blocks.GridCols() % places.run == 0;
  const int64_t k = call.arg(0).dims[0];
  if (call.flag("turned") && in_rows && k > 0) {
    blocks = {1, k, blocks.batch * blocks.rows / k * blocks.cols, 1, blocks.block_cols};
    places.in_step = true;
  }
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::CastBlockStochastic(call.exec, Data<decltype(in)>(call.arg(0)),
                                             Data<float>(call.arg(1)), places, blocks,
                                             Mutable<uint8_t>(call.ret(0))));
  });
}

// x = decode(data) * scale_inv, fp32 or E8M0, rounded once to the dtype of x.
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
