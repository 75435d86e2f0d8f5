// cast_block_stochastic: data = encode(x * scale) in E2M1, rounded up or down at random, in blocks
// that share a scale.
//
// The random bits of an element are a function of a seed and of its index in the whole tensor
// (core/stochastic.h), so a shard gives the bytes of the whole. Where the shard is, is an operand,
// as SPMD runs one program on all: `first` has the index of the first element of x, or of each of
// its rows of blocks, or of each block; `seed` goes with it. From there the index grows by row_step
// a row and by col_step a column: by (columns of the whole tensor, 1), or (1, columns) where x is a
// transpose.
#include "core/block_op.h"
#include "kernels/block_cast.h"

namespace qshard {
namespace {

template <class Platform>
Error CastBlockStochastic(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                          int64_t col_step, int64_t row_step, bool split, AnyBuffer x,
                          AnyBuffer scale, AnyBuffer seed, AnyBuffer first,
                          Result<AnyBuffer> data) {
  constexpr char kOp[] = "cast_block_stochastic";
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "x", x, block, 1, &blocks));
  QSHARD_RETURN_IF_ERROR(CheckGrid(kOp, "scale", scale, x, block, blocks));
  QSHARD_RETURN_IF_ERROR(CheckSameMatrix(kOp, "x", x, 1, "data", *data, 2));
  QSHARD_REQUIRE(block_cols <= kernels::kMaxStochasticBlockCols, kOp, ": block_cols (", block_cols,
                 ") is more than ", kernels::kMaxStochasticBlockCols, "; take smaller blocks");
  float* s = nullptr;
  uint8_t* out = nullptr;
  kernels::Places places{nullptr, nullptr, 0, {row_step, col_step}};
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", scale, &s));
  QSHARD_RETURN_IF_ERROR(CodesOf<E2M1>(kOp, "data", *data, &out));
  QSHARD_RETURN_IF_ERROR(WordPairsOf(kOp, "seed", seed, &places.seed));
  QSHARD_RETURN_IF_ERROR(WordPairsOf(kOp, "first", first, &places.first));
  QSHARD_REQUIRE(SameShape(seed.dimensions(), first.dimensions()), kOp, ": seed ", Shape(seed),
                 " does not have the shape of first ", Shape(first), "; broadcast it");
  const Dims pairs = first.dimensions();
  QSHARD_RETURN_IF_ERROR(
      RunOf(kOp, "first", first, pairs.first(pairs.size() - 1), scale, &places.run));
  return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
    using In = typename decltype(in)::type;
    return ToError(kOp, kernels::CastBlockStochastic(exec, Data<In>(x), s, places, blocks, out));
  });
}

}  // namespace

QSHARD_DEFINE_OP(cast_block_stochastic, CastBlockStochastic,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<int64_t>("col_step")
                     .Attr<int64_t>("row_step")
                     .Attr<bool>("split")
                     .Arg<AnyBuffer>() /* x */
                     .Arg<AnyBuffer>() /* scale */
                     .Arg<AnyBuffer>() /* seed */
                     .Arg<AnyBuffer>() /* first */
                     .Ret<AnyBuffer>() /* data */)

}  // namespace qshard
