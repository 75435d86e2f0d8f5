// Ops on flat slices of weights, for all weights in one call.
//
// x[i] is [start, start + length) of the row-major elements of weight i, of shape (rows, cols).
// `starts` has each start as two uint32, low first. Elements past the end of the weight are
// padding. x is first rounded to `rounded_to`, so a model that computes with bfloat16 weights gets
// their amaxes and codes from fp32 masters. Blocks of 0x0 cover the whole weight. Grids of all
// weights are stored back to back.
#include "core/slices.h"

#include "core/ceil_div.h"
#include "kernels/slices.h"
#include "schema/handler.h"

namespace qshard {
namespace {

struct Slices {
  std::vector<Slice> weights;
  SliceRule rule;
  int64_t blocks = 0, wholes = 0;

  int64_t size() const { return static_cast<int64_t>(weights.size()); }
};

RoundedTo RoundedToOf(std::string_view name) {
  return name == "bfloat16"  ? RoundedTo::kBFloat16
         : name == "float16" ? RoundedTo::kFloat16
                             : RoundedTo::kFloat32;
}

// Reads `shapes`, the sizes that no buffer has, and derives the required buffer sizes.
template <class Platform>
Error SlicesOf(const Call<Platform>& call, int x, WholeAmax whole, bool pieces, Slices* slices) {
  const AttributeValue& shapes = call.binding.attribute("shapes");
  const int64_t n = call.binding.list_length();
  SliceRule& rule = slices->rule;
  rule = {call.integer("block_rows"),
          call.integer("block_cols"),
          whole,
          RoundedToOf(call.text("rounded_to")),
          pieces,
          Nonfinite::kSaturate};
  QSHARD_REQUIRE(shapes.integer == 2 * n, call.op(), ": shapes (", shapes.integer,
                 " numbers) are not the rows and columns of ", n, " weights");
  slices->weights.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t rows = shapes.integers[2 * i], cols = shapes.integers[2 * i + 1];
    int64_t blocks = 1, elements;
    // Kernels multiply sizes by up to 128 for their tiles.
    constexpr int64_t kMost = int64_t{1} << 56;
    bool fits =
        rows <= kMost && cols <= kMost && Multiply(rows, cols, &elements) && elements <= kMost;
    if (rule.block_rows > 0)
      fits &= Multiply(CeilDiv(rows, rule.block_rows), CeilDiv(cols, rule.block_cols), &blocks);
    const int64_t wholes = whole == WholeAmax::kNone ? 0 : whole == WholeAmax::kRow ? rows : 1;
    slices->weights.push_back({call.arg(x, i).data, nullptr, Elements(call.arg(x, i)), rows, cols,
                               slices->blocks, slices->wholes});
    fits = fits && !__builtin_add_overflow(slices->blocks, blocks, &slices->blocks) &&
           !__builtin_add_overflow(slices->wholes, wholes, &slices->wholes);
    QSHARD_REQUIRE(fits, call.op(), ": shapes (", rows, ", ", cols, ") of weight ", i,
                   " are larger than memory");
  }
  return {};
}

// Reads the codes buffer of each weight: all codes of the weight, or with `pieces` the slice's.
template <class Platform>
Error SetData(const Call<Platform>& call, int data_index, int scale, int64_t per_byte,
              Slices* slices) {
  QSHARD_REQUIRE(Elements(call.arg(scale)) == slices->blocks, call.op(), ": scale ",
                 Shape(call.arg(scale)), " is not one number for each of ", slices->blocks,
                 " blocks");
  for (int64_t i = 0; i < slices->size(); ++i) {
    Slice& slice = slices->weights[i];
    const Buffer& data = call.arg(data_index, i);
    const int64_t bytes = Elements(data);
    slice.data = Mutable<uint8_t>(data);
    QSHARD_REQUIRE(slice.cols % per_byte == 0, call.op(), ": shapes (", slice.rows, ", ",
                   slice.cols, ") of weight ", i, " have an odd number of columns, and two codes ",
                   "share a byte; pad it");
    if (!slices->rule.pieces) {
      QSHARD_REQUIRE(bytes == slice.rows * slice.cols / per_byte, call.op(), ": data[", i, "] ",
                     Shape(data), " is not the codes of a weight of ", slice.rows, " x ",
                     slice.cols, per_byte == 1 ? "" : ", two a byte");
    } else {
      // With two codes a byte, a slice that starts within a byte needs half a byte more.
      const int64_t needed = slice.length == 0 ? 0 : CeilDiv(slice.length + per_byte - 1, per_byte);
      QSHARD_REQUIRE(bytes >= needed, call.op(), ": data[", i, "] ", Shape(data),
                     " is too small for the codes of ", slice.length, " elements; pass ", needed,
                     " bytes");
    }
  }
  return {};
}

// With `random`, operand 1 is the seeds, and the later operands shift by one.
template <class Code, class Platform>
Error CastSlices(const Call<Platform>& call, bool random) {
  const int scale = 1 + random, x = 2 + random, data = 3 + random;
  Slices slices;
  QSHARD_RETURN_IF_ERROR(SlicesOf(call, x, WholeAmax::kNone, call.flag("pieces"), &slices));
  QSHARD_RETURN_IF_ERROR(call.InPlace(0));
  QSHARD_RETURN_IF_ERROR(SetData(call, data, scale, kCodesPerByte<Code>, &slices));
  if (!random) slices.rule.nonfinite = call.nonfinite();
  return DispatchFloat(call.arg(x), [&](auto in) {
    return call(kernels::CastSlices<decltype(in), Code>(
        call.exec, slices.weights.data(), slices.size(), Data<uint32_t>(call.arg(0)),
        random ? Data<uint32_t>(call.arg(1)) : nullptr, slices.rule, Data<float>(call.arg(scale))));
  });
}

}  // namespace

// amax has the grids of all weights, then, for `whole` "tensor" or "row", which need blocks, one
// amax per weight or per row of each weight. Each value becomes the maximum of itself and the
// slice's elements in that block. Zeros stay where the slice has no element, so an integer max over
// ranks gives the amaxes of the whole weights.
QSHARD_DEFINE_OP(amax_slices) {
  const std::string_view whole = call.text("whole");
  Slices slices;
  QSHARD_RETURN_IF_ERROR(SlicesOf(call, 2,
                                  whole == "tensor" ? WholeAmax::kTensor
                                  : whole == "row"  ? WholeAmax::kRow
                                                    : WholeAmax::kNone,
                                  false, &slices));
  QSHARD_REQUIRE(slices.rule.whole == WholeAmax::kNone || slices.rule.block_rows > 0, call.op(),
                 ": whole (", whole, ") needs blocks, but blocks of 0x0 cover the whole weight; ",
                 "pass whole='none', or the sizes of a block");
  QSHARD_RETURN_IF_ERROR(call.InPlace(0));
  int64_t amaxes;
  QSHARD_REQUIRE(!__builtin_add_overflow(slices.blocks, slices.wholes, &amaxes) &&
                     Elements(call.arg(1)) == amaxes,
                 call.op(), ": amax ", Shape(call.arg(1)), " is not one number for each of ",
                 slices.blocks, " blocks and ", slices.wholes, " whole weights or rows");
  if (slices.size() == 0) return {};
  for (Slice& slice : slices.weights) slice.whole += slices.blocks;
  return DispatchFloat(call.arg(2), [&](auto in) {
    return call(kernels::AmaxSlices<decltype(in)>(call.exec, slices.weights.data(), slices.size(),
                                                  Data<uint32_t>(call.arg(0)), slices.rule,
                                                  Mutable<float>(call.ret(0))));
  });
}

// Element i of a weight becomes encode(x[i - start] * scale of its block). Only the slice's codes
// are written: a half byte of another rank keeps its value. data[w] has all codes of weight w, or
// with `pieces` only the slice's, starting at the byte of its first element. Pieces that start as
// zeros can be joined by addition or OR.
QSHARD_DEFINE_OP(cast_slices) {
  return DispatchElement(call, [&](auto code) { return CastSlices<decltype(code)>(call, false); });
}

// cast_slices to E2M1 with stochastic rounding. Element i of weight w has key seeds[w] and Philox
// index i (core/stochastic.h), so slices draw the bits of the whole weight.
QSHARD_DEFINE_OP(cast_slices_stochastic) { return CastSlices<E2M1>(call, true); }

}  // namespace qshard
