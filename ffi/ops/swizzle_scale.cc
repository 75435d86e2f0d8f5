// swizzle_scale: one-byte scales [*batch, rows, cols] in the tiles that block-scaled GEMMs read,
// [*batch, tile_rows, tile_cols, 32, 4, 4], padded with zeros. Scales are kept and gathered compact
// and row-major; this is the only op that makes another order.
//
// A tile has 128 rows. `rows` scales fill it, so each is repeated over 128 / rows: 128, or 8 for
// scales of 16x16 blocks. Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
#include "core/op.h"
#include "kernels/block_layout.h"

namespace qshard {
namespace {

template <class Platform>
Error SwizzleScale(Exec<Platform> exec, int64_t rows, AnyBuffer scale_inv,
                   Result<AnyBuffer> tiles) {
  constexpr char kOp[] = "swizzle_scale";
  const Dims dims = scale_inv.dimensions(), out = tiles->dimensions();
  QSHARD_REQUIRE(rows > 0 && 128 % rows == 0, kOp, ": rows (", rows,
                 ") is not a divisor of the 128 of a tile");
  QSHARD_REQUIRE(dims.size() >= 2, kOp, ": scale_inv ", Shape(scale_inv),
                 " does not have the axes of a matrix; reshape it");
  const size_t lead = dims.size() - 2;
  const int64_t tile[] = {(dims[lead] + rows - 1) / rows, (dims[lead + 1] + 3) / 4, 32, 4, 4};
  QSHARD_REQUIRE(out.size() == lead + 5 && IsPrefix(dims.first(lead), out) &&
                     std::equal(tile, tile + 5, out.begin() + lead),
                 kOp, ": tiles ", Shape(*tiles), " does not hold scale_inv ", Shape(scale_inv),
                 " in tiles of 32x4x4");
  QSHARD_REQUIRE(
      IsByte(scale_inv.element_type()) && tiles->element_type() == scale_inv.element_type(), kOp,
      ": scale_inv (", scale_inv.element_type(), ") and tiles (", tiles->element_type(),
      ") are not of one one-byte dtype; view them as uint8");
  return ToError(
      kOp, kernels::SwizzleScale(exec, Data<uint8_t>(scale_inv), Product(dims, 0, lead), dims[lead],
                                 dims[lead + 1], 128 / rows, Data<uint8_t>(tiles)));
}

}  // namespace

QSHARD_DEFINE_OP(swizzle_scale, SwizzleScale,
                 .Attr<int64_t>("rows")
                     .Arg<AnyBuffer>() /* scale_inv */
                     .Ret<AnyBuffer>() /* tiles */)

}  // namespace qshard
