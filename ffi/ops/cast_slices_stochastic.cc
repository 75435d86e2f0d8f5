// cast_slices_stochastic: cast_slices to E2M1, rounded up or down at random. Element i of weight w
// draws with seeds[w] and its index i in the weight (core/stochastic.h), so slices draw what the
// whole weight would.
#include "core/slices_op.h"
#include "kernels/slices.h"

namespace qshard {
namespace {

template <class Platform>
Error CastSlicesStochastic(Exec<Platform> exec, int64_t block_cols, int64_t block_rows, bool pieces,
                           std::string_view rounded_to, Span<const int64_t> shapes,
                           AnyBuffer starts, AnyBuffer seeds, AnyBuffer scale, RemainingArgs lists,
                           RemainingRets results) {
  constexpr char kOp[] = "cast_slices_stochastic";
  std::vector<BufferList> of;  // x, data
  Slices slices;
  QSHARD_RETURN_IF_ERROR(ListsOf(kOp, lists, 2, &of));
  QSHARD_RETURN_IF_ERROR(
      SlicesOf(kOp, shapes, rounded_to, starts, of[0],
               {block_rows, block_cols, WholeAmax::kNone, RoundedTo::kFloat32, pieces}, &slices));
  QSHARD_RETURN_IF_ERROR(CheckInPlace(kOp, "data", of[1], results));
  float* s = nullptr;
  const uint32_t* draws = nullptr;
  QSHARD_RETURN_IF_ERROR(SliceScalesOf(kOp, scale, slices, &s));
  QSHARD_RETURN_IF_ERROR(WordPairsOfEach(kOp, "seeds", seeds, of[0].size(), &draws));
  QSHARD_RETURN_IF_ERROR(SetData<E2M1>(kOp, of[1], &slices));
  return DispatchFloat(kOp, "x", slices.type, [&](auto in) {
    using In = typename decltype(in)::type;
    return ToError(kOp, kernels::CastSlicesStochastic<In>(exec, slices.data(), slices.size(),
                                                          slices.starts, draws, slices.rule, s));
  });
}

}  // namespace

QSHARD_DEFINE_OP(cast_slices_stochastic, CastSlicesStochastic,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<bool>("pieces")
                     .Attr<std::string_view>("rounded_to")
                     .Attr<Span<const int64_t>>("shapes")
                     .Arg<AnyBuffer>() /* starts */
                     .Arg<AnyBuffer>() /* seeds */
                     .Arg<AnyBuffer>() /* scale */
                     .RemainingArgs()  /* x[], data[] */
                     .RemainingRets() /* data[] */)

}  // namespace qshard
