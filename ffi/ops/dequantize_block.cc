// dequantize_block: x = decode(data) * scale_inv, rounded once to the dtype of x, where the
// elements of a block share a scale, fp32 or E8M0.
#include "core/block_op.h"
#include "kernels/block_cast.h"

namespace qshard {
namespace {

constexpr char kOp[] = "dequantize_block";

// Calls f(Type<Scale>{}, pointer to stored scales) with the scales that `dtype` names.
template <class Fn>
Error DispatchScale(std::string_view dtype, const AnyBuffer& scale_inv, Fn&& f) {
  if (dtype == "float32") {
    float* s = nullptr;
    QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale_inv", scale_inv, &s));
    return f(Type<float>{}, s);
  }
  QSHARD_REQUIRE(dtype == E8M0::kName, kOp, ": scale_dtype (", dtype, ") is not float32 or ",
                 E8M0::kName);
  uint8_t* s = nullptr;
  QSHARD_RETURN_IF_ERROR(CodesOf<E8M0>(kOp, "scale_inv", scale_inv, &s));
  return f(Type<E8M0>{}, s);
}

template <class Platform>
Error DequantizeBlock(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                      std::string_view element, std::string_view scale_dtype, bool split,
                      AnyBuffer data, AnyBuffer scale_inv, Result<AnyBuffer> x) {
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "data", data, block, 1, &blocks));
  QSHARD_RETURN_IF_ERROR(CheckGrid(kOp, "scale_inv", scale_inv, data, block, blocks));
  QSHARD_RETURN_IF_ERROR(CheckSameMatrix(kOp, "data", data, 1, "x", *x, 1));
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t* in = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data", data, &in));
    return DispatchScale(scale_dtype, scale_inv, [&](auto scale, auto* s) {
      using Scale = typename decltype(scale)::type;
      return DispatchFloat(kOp, "x", x->element_type(), [&](auto out) {
        using Out = typename decltype(out)::type;
        return ToError(
            kOp, kernels::DequantizeBlock<Code, Scale, Out>(exec, in, s, blocks, Data<Out>(x)));
      });
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(dequantize_block, DequantizeBlock,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<std::string_view>("element")
                     .Attr<std::string_view>("scale_dtype")
                     .Attr<bool>("split")
                     .Arg<AnyBuffer>() /* data */
                     .Arg<AnyBuffer>() /* scale_inv */
                     .Ret<AnyBuffer>() /* x */)

}  // namespace qshard
