// transpose_each: data_t[w] = the transpose of matrix data[w], for all weights at once, of elements
// of `bits`: 4, two a byte along rows before and after; 8; or 32. The columnwise planes of weights
// whose scales do not depend on the direction, codes and scales, after the gather.
#include "core/multi_op.h"
#include "kernels/slices.h"

namespace qshard {
namespace {

template <class Platform>
Error TransposeEach(Exec<Platform> exec, int64_t bits, RemainingArgs lists, RemainingRets results) {
  constexpr char kOp[] = "transpose_each";
  QSHARD_REQUIRE(bits == 4 || bits == 8 || bits == 32, kOp, ": bits (", bits,
                 ") is not 4, 8 or 32");
  std::vector<BufferList> of;  // data, data_t
  QSHARD_RETURN_IF_ERROR(ListsOf(kOp, lists, 2, &of));
  QSHARD_RETURN_IF_ERROR(CheckInPlace(kOp, "data_t", of[1], results));
  const int64_t per_byte = bits == 4 ? 2 : 1;
  std::vector<kernels::TransposePair> pairs;
  pairs.reserve(of[0].size());
  for (size_t i = 0; i < of[0].size(); ++i) {
    const AnyBuffer &data = of[0][i], &data_t = of[1][i];
    const Dims dims = data.dimensions(), out = data_t.dimensions();
    QSHARD_REQUIRE(dims.size() == 2 && out.size() == 2 && dims[0] == out[1] * per_byte &&
                       dims[1] * per_byte == out[0],
                   kOp, ": data_t[", i, "] ", Shape(data_t), " is not the transpose of data ",
                   Shape(data), per_byte == 2 ? " with two codes a byte" : "");
    QSHARD_REQUIRE(
        data.element_type() == data_t.element_type() &&
            (bits == 32 ? data.element_type() == DataType::F32 : IsByte(data.element_type())),
        kOp, ": data[", i, "] (", data.element_type(), ") and data_t (", data_t.element_type(),
        ") are not both of ", bits == 32 ? "float32" : "one byte", "; view them so");
    pairs.push_back({Data<uint8_t>(data), static_cast<uint8_t*>(data_t.untyped_data()), dims[0],
                     dims[1] * per_byte});
  }
  return ToError(
      kOp, kernels::TransposeEach(exec, pairs.data(), static_cast<int64_t>(pairs.size()), bits));
}

}  // namespace

QSHARD_DEFINE_OP(transpose_each, TransposeEach,
                 .Attr<int64_t>("bits")
                     .RemainingArgs() /* data[], data_t[] */
                     .RemainingRets() /* data_t[] */)

}  // namespace qshard
