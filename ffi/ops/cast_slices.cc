// cast_slices: the codes of flat slices of weights, in place, for all weights at once.
//
// Element i of a weight becomes encode(x[i - start] * scale of its block), with x rounded to
// `rounded_to` first; `scale` has the grids of all weights, one after the other. Only codes of the
// slice are written: where a rank has half of a byte, the other half stays as it is. data[w] holds
// all codes of weight w; or, with `pieces`, those of the slice alone, from the byte of its first
// element on. So pieces that start as zeros meet in a byte by addition, or OR.
#include "core/slices_op.h"
#include "kernels/slices.h"

namespace qshard {
namespace {

template <class Platform>
Error CastSlices(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                 std::string_view element, bool pieces, std::string_view rounded_to,
                 Span<const int64_t> shapes, AnyBuffer starts, AnyBuffer scale, RemainingArgs lists,
                 RemainingRets results) {
  constexpr char kOp[] = "cast_slices";
  std::vector<BufferList> of;  // x, data
  Slices slices;
  QSHARD_RETURN_IF_ERROR(ListsOf(kOp, lists, 2, &of));
  QSHARD_RETURN_IF_ERROR(
      SlicesOf(kOp, shapes, rounded_to, starts, of[0],
               {block_rows, block_cols, WholeAmax::kNone, RoundedTo::kFloat32, pieces}, &slices));
  QSHARD_RETURN_IF_ERROR(CheckInPlace(kOp, "data", of[1], results));
  float* s = nullptr;
  QSHARD_RETURN_IF_ERROR(SliceScalesOf(kOp, scale, slices, &s));
  return DispatchElement<E4M3, E5M2, E2M1>(kOp, element, [&](auto f) {
    using Code = typename decltype(f)::type;
    QSHARD_RETURN_IF_ERROR(SetData<Code>(kOp, of[1], &slices));
    return DispatchFloat(kOp, "x", slices.type, [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError(kOp, kernels::CastSlices<In, Code>(exec, slices.data(), slices.size(),
                                                        slices.starts, slices.rule, s));
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(cast_slices, CastSlices,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<std::string_view>("element")
                     .Attr<bool>("pieces")
                     .Attr<std::string_view>("rounded_to")
                     .Attr<Span<const int64_t>>("shapes")
                     .Arg<AnyBuffer>() /* starts */
                     .Arg<AnyBuffer>() /* scale */
                     .RemainingArgs()  /* x[], data[] */
                     .RemainingRets() /* data[] */)

}  // namespace qshard
