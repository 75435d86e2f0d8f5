// amax_block: amax[m, k] = max |x| over one block_rows x block_cols block of x, fp32.
//
// A maximum over bit patterns of |x|: exact, so blocks that shards cut may be reduced in parts, an
// integer max-reduce of the grids giving the same bits. Any NaN gives the canonical one.
#include "core/block_op.h"
#include "kernels/block_cast.h"

namespace qshard {
namespace {

template <class Platform>
Error AmaxBlock(Exec<Platform> exec, int64_t block_cols, int64_t block_rows, bool split,
                AnyBuffer x, Result<AnyBuffer> amax) {
  constexpr char kOp[] = "amax_block";
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "x", x, block, 1, &blocks));
  QSHARD_RETURN_IF_ERROR(CheckGrid(kOp, "amax", *amax, x, block, blocks));
  float* out = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", *amax, &out));
  return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
    using In = typename decltype(in)::type;
    return ToError(kOp, kernels::AmaxBlock(exec, Data<In>(x), blocks, out));
  });
}

}  // namespace

QSHARD_DEFINE_OP(amax_block, AmaxBlock,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<bool>("split")
                     .Arg<AnyBuffer>() /* x */
                     .Ret<AnyBuffer>() /* amax */)

}  // namespace qshard
