// amax_slices: what flat slices of weights know of the amaxes of their blocks, for all weights at
// once. amax holds the grids of all weights, one after the other, then, if `whole` is "tensor" or
// "row", the amaxes of whole weights, or of all their rows.
//
// Each amax becomes the larger of itself and of what the slice has in that block, so zeros stay
// where the slice has no element, and an integer maximum over ranks gives the amaxes of the whole
// weights. x[i] is [start, start + length) of weight i, of shape (rows, cols); `starts` has pairs
// of words, the low one first, and what lies past the end of the weight is padding. x is rounded to
// `rounded_to` first: a model that sees its master weights in bfloat16 has those amaxes. Blocks of
// 0x0: the weight.
#include "core/slices_op.h"
#include "kernels/slices.h"

namespace qshard {
namespace {

template <class Platform>
Error AmaxSlices(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                 std::string_view rounded_to, Span<const int64_t> shapes, std::string_view whole,
                 AnyBuffer starts, AnyBuffer amax, RemainingArgs lists, Result<AnyBuffer> result) {
  constexpr char kOp[] = "amax_slices";
  QSHARD_REQUIRE(whole == "none" || whole == "tensor" || whole == "row", kOp, ": whole (", whole,
                 ") is not none, tensor or row");
  std::vector<BufferList> of;
  Slices slices;
  QSHARD_RETURN_IF_ERROR(ListsOf(kOp, lists, 1, &of));
  const WholeAmax whole_amax = whole == "tensor" ? WholeAmax::kTensor
                               : whole == "row"  ? WholeAmax::kRow
                                                 : WholeAmax::kNone;
  QSHARD_RETURN_IF_ERROR(SlicesOf(kOp, shapes, rounded_to, starts, of[0],
                                  {block_rows, block_cols, whole_amax, RoundedTo::kFloat32, false},
                                  &slices));
  QSHARD_RETURN_IF_ERROR(CheckInPlace(kOp, "amax", amax, *result));
  float* out = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", amax, &out));
  QSHARD_REQUIRE(static_cast<int64_t>(amax.element_count()) == slices.blocks + slices.wholes, kOp,
                 ": amax ", Shape(amax), " is not one number for each of ", slices.blocks,
                 " blocks and ", slices.wholes, " whole weights or rows");
  return DispatchFloat(kOp, "x", slices.type, [&](auto in) {
    using In = typename decltype(in)::type;
    return ToError(kOp, kernels::AmaxSlices<In>(exec, slices.data(), slices.size(), slices.starts,
                                                slices.rule, out));
  });
}

}  // namespace

QSHARD_DEFINE_OP(amax_slices, AmaxSlices,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<std::string_view>("rounded_to")
                     .Attr<Span<const int64_t>>("shapes")
                     .Attr<std::string_view>("whole")
                     .Arg<AnyBuffer>() /* starts */
                     .Arg<AnyBuffer>() /* amax */
                     .RemainingArgs()  /* x[] */
                     .Ret<AnyBuffer>() /* amax */)

}  // namespace qshard
