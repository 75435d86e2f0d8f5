// transpose_each: data_t[w] [*batch, cols, rows] = the transposes of data[w] [*batch, rows, cols],
// for all weights at once: the columnwise planes of weights whose scales do not depend on the
// direction, codes and scales. Elements are bytes, 32-bit words, or, where shapes of bytes say so,
// 4-bit codes, two a byte along rows before and after.
#include "core/multi_op.h"
#include "kernels/slices.h"

namespace qshard {
namespace {

template <class Platform>
Error TransposeEach(Exec<Platform> exec, RemainingArgs lists, RemainingRets results) {
  constexpr char kOp[] = "transpose_each";
  std::vector<BufferList> of;  // data, data_t
  QSHARD_RETURN_IF_ERROR(ListsOf(kOp, lists, 2, &of));
  QSHARD_RETURN_IF_ERROR(CheckInPlace(kOp, "data_t", of[1], results));
  std::vector<kernels::TransposePair> pairs;
  pairs.reserve(of[0].size());
  for (size_t i = 0; i < of[0].size(); ++i) {
    const AnyBuffer &data = of[0][i], &data_t = of[1][i];
    const bool bytes = IsByte(data.element_type());
    QSHARD_REQUIRE(data.element_type() == data_t.element_type() &&
                       (bytes || data.element_type() == DataType::F32),
                   kOp, ": data[", i, "] (", data.element_type(), ") and data_t (",
                   data_t.element_type(), ") are not both of one byte, or float32; view them so");
    const Dims dims = data.dimensions(), out = data_t.dimensions();
    const size_t lead = dims.size() - 2;
    const auto fits = [&](int64_t per_byte) {
      return out[lead] == dims[lead + 1] * per_byte && dims[lead] == out[lead + 1] * per_byte;
    };
    QSHARD_REQUIRE(dims.size() >= 2 && out.size() == dims.size() &&
                       IsPrefix(dims.first(lead), out) && (fits(1) || (bytes && fits(2))),
                   kOp, ": data_t[", i, "] ", Shape(data_t), " is not the transpose of data ",
                   Shape(data), bytes ? ", with one code a byte or two" : "");
    const int64_t per_byte = fits(1) ? 1 : 2;
    pairs.push_back({Data<uint8_t>(data), static_cast<uint8_t*>(data_t.untyped_data()),
                     Product(dims, 0, lead), dims[lead], dims[lead + 1] * per_byte,
                     bytes ? 8 / per_byte : 32});
  }
  return ToError(kOp,
                 kernels::TransposeEach(exec, pairs.data(), static_cast<int64_t>(pairs.size())));
}

}  // namespace

QSHARD_DEFINE_OP(transpose_each, TransposeEach,
                 .RemainingArgs() /* data[], data_t[] */
                     .RemainingRets() /* data_t[] */)

}  // namespace qshard
