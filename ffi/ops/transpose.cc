// Transposes of codes and scales.
#include "kernels/transpose.h"

#include "schema/handler.h"

namespace qshard {

namespace {

// Transposes codes of a byte, or of 4 bits packed along rows of both input and output.
template <class Platform>
Error Transpose(const Call<Platform>& call, int64_t codes_per_byte) {
  const Matrices m(call.binding);
  const kernels::TransposePair pair{Data<uint8_t>(call.arg(0)),
                                    Mutable<uint8_t>(call.ret(0)),
                                    m.batch,
                                    m.rows,
                                    m.cols * codes_per_byte,
                                    8 / codes_per_byte};
  return call(kernels::TransposeEach(call.exec, &pair, 1));
}

}  // namespace

// Columnwise plane of a tensor with the same scales in both directions. Packed codes are [*batch,
// rows, cols / 2] and become [*batch, cols, rows / 2]. With `split`, both are [*batch, m, k, 2]
// bytes, for rows = 2 * m and cols = 2 * k, where the last axis is the factor that the other matrix
// packs into a byte.
QSHARD_DEFINE_OP(transpose) { return Transpose(call, 1); }
QSHARD_DEFINE_OP(transpose_packed) { return Transpose(call, 2); }

// data_t[w] [*batch, cols, rows] = transpose of data[w] [*batch, rows, cols], for all weights in
// one call: the columnwise planes (codes and scales) of weights with the same scales in both
// directions. Elements are bytes, float32, or 4-bit codes packed along rows of both, if the shapes
// of bytes say so.
QSHARD_DEFINE_OP(transpose_each) {
  QSHARD_RETURN_IF_ERROR(call.InPlace(0));
  std::vector<kernels::TransposePair> pairs;
  pairs.reserve(call.binding.list_length());
  for (int64_t i = 0; i < call.binding.list_length(); ++i) {
    const Buffer &data = call.arg(0, i), &data_t = call.arg(1, i);
    const bool bytes = SizeOf(data.dtype) == 1;
    QSHARD_REQUIRE(bytes || data.dtype == XLA_FFI_DataType_F32, call.op(), ": data[", i, "] (",
                   NameOf(data.dtype), ") and data_t (", NameOf(data_t.dtype),
                   ") are not both of one byte, or float32; view them so");
    const int64_t lead = data.rank - 2;
    const auto fits = [&](int64_t per_byte) {
      if (lead < 0 || data_t.rank != data.rank ||
          !std::equal(data.dims, data.dims + lead, data_t.dims))
        return false;
      const int64_t *of = data.dims + lead, *to = data_t.dims + lead;
      return of[0] % per_byte == 0 && to[0] % per_byte == 0 && to[0] / per_byte == of[1] &&
             of[0] / per_byte == to[1];
    };
    QSHARD_REQUIRE(fits(1) || (bytes && fits(2)), call.op(), ": data_t[", i, "] ", Shape(data_t),
                   " is not the transpose of data ", Shape(data),
                   bytes ? ", with one code a byte or two" : "");
    if (Elements(data) == 0) continue;
    const int64_t per_byte = fits(1) ? 1 : 2;
    pairs.push_back({Data<uint8_t>(data), Mutable<uint8_t>(data_t),
                     Elements(data) / (data.dims[lead] * data.dims[lead + 1]), data.dims[lead],
                     data.dims[lead + 1] * per_byte, bytes ? 8 / per_byte : 32});
  }
  return call(kernels::TransposeEach(call.exec, pairs.data(), static_cast<int64_t>(pairs.size())));
}

// data_t[w] = transpose of data[w] for all weights, [rows, cols] to [cols, rows], one after the
// other in one buffer: the columnwise planes of the weights of experts. Elements are bytes or
// float32.
QSHARD_DEFINE_OP(transpose_stack) {
  const Buffer &first = call.arg(0), &data_t = call.ret(0);
  const bool bytes = SizeOf(first.dtype) == 1;
  QSHARD_REQUIRE(bytes || first.dtype == XLA_FFI_DataType_F32, call.op(), ": data_t (",
                 NameOf(first.dtype), ") is not of one byte, or float32; view it so");
  if (Elements(data_t) == 0) return {};
  const int64_t cols = data_t.dims[1], rows = data_t.dims[2], bits = bytes ? 8 : 32;
  std::vector<kernels::TransposePair> pairs(call.binding.list_length());
  for (size_t i = 0; i < pairs.size(); ++i)
    pairs[i] = {Data<uint8_t>(call.arg(1, i)),
                Mutable<uint8_t>(data_t) + i * rows * cols * bits / 8,
                1,
                rows,
                cols,
                bits};
  return call(kernels::TransposeEach(call.exec, pairs.data(), static_cast<int64_t>(pairs.size())));
}

}  // namespace qshard
