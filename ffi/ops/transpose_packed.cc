// transpose_packed: the transpose of a matrix of 4-bit codes, packed two a byte along its rows
// before and after: data [*batch, rows, cols / 2] to data_t [*batch, cols, rows / 2]. The
// columnwise plane of square NVFP4 blocks, whose scales do not depend on the direction.
//
// With `split`, both are [*batch, m, k, 2] of the bytes, for rows = 2 * m and cols = 2 * k: the two
// is what the byte of the other matrix holds. The memory is the same.
#include "core/block_op.h"
#include "kernels/block_layout.h"

namespace qshard {
namespace {

template <class Platform>
Error TransposePacked(Exec<Platform> exec, bool split, AnyBuffer data, Result<AnyBuffer> data_t) {
  constexpr char kOp[] = "transpose_packed";
  const Dims dims = data.dimensions(), out = data_t->dimensions();
  const size_t axes = split ? 3 : 2;
  QSHARD_REQUIRE(dims.size() >= axes, kOp, ": data ", Shape(data), " does not have the ", axes,
                 " axes of a matrix; reshape it");
  const size_t lead = dims.size() - axes;
  const int64_t rows = dims[lead] * (split ? 2 : 1), cols = dims[lead + 1] * 2;
  QSHARD_REQUIRE(rows % 2 == 0 && (!split || dims[lead + 2] == 2), kOp, ": data ", Shape(data),
                 " does not have an even number of rows, and two codes share a byte");
  QSHARD_REQUIRE(split ? SameShape(out, dims)
                       : out.size() == dims.size() && IsPrefix(dims.first(lead), out) &&
                             out[lead] == cols && out[lead + 1] * 2 == rows,
                 kOp, ": data_t ", Shape(*data_t), " is not the transpose of data ", Shape(data),
                 " with two codes a byte");
  uint8_t *in = nullptr, *transposed = nullptr;
  QSHARD_RETURN_IF_ERROR(CodesOf<E2M1>(kOp, "data", data, &in));
  QSHARD_RETURN_IF_ERROR(CodesOf<E2M1>(kOp, "data_t", *data_t, &transposed));
  return ToError(
      kOp, kernels::TransposePacked(exec, in, Product(dims, 0, lead), rows, cols, transposed));
}

}  // namespace

QSHARD_DEFINE_OP(transpose_packed, TransposePacked,
                 .Attr<bool>("split").Arg<AnyBuffer>() /* data */.Ret<AnyBuffer>() /* data_t */)

}  // namespace qshard
