// cast_block: data = encode(x * scale), where the elements of a block share a scale.
//
// The last step of quantizing in blocks, once the amaxes of cut blocks are reduced. E2M1 codes are
// packed two a byte along the last axis.
#include "core/block_op.h"
#include "kernels/block_cast.h"

namespace qshard {
namespace {

template <class Platform>
Error CastBlock(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                std::string_view element, bool split, AnyBuffer x, AnyBuffer scale,
                Result<AnyBuffer> data) {
  constexpr char kOp[] = "cast_block";
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "x", x, block, 1, &blocks));
  QSHARD_RETURN_IF_ERROR(CheckGrid(kOp, "scale", scale, x, block, blocks));
  float* s = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", scale, &s));
  return DispatchElement<E4M3, E5M2, E2M1>(kOp, element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t* out = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data", *data, &out));
    QSHARD_RETURN_IF_ERROR(CheckSameMatrix(kOp, "x", x, 1, "data", *data, kCodesPerByte<Code>));
    return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError(kOp, kernels::CastBlock<In, Code>(exec, Data<In>(x), s, blocks, out));
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(cast_block, CastBlock,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<std::string_view>("element")
                     .Attr<bool>("split")
                     .Arg<AnyBuffer>() /* x */
                     .Arg<AnyBuffer>() /* scale */
                     .Ret<AnyBuffer>() /* data */)

}  // namespace qshard
