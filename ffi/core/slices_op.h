// What ops on flat slices check: shapes, lists and totals.
#ifndef QSHARD_CORE_SLICES_OP_H_
#define QSHARD_CORE_SLICES_OP_H_

#include "core/block_op.h"
#include "core/multi_op.h"
#include "core/slices.h"

namespace qshard {

// Slices of the weights whose shapes are `shapes`, [rows, cols] one after the other.
struct Slices {
  std::vector<Slice> weights;
  SliceRule rule;
  DataType type;  // of x
  int64_t blocks, wholes;
  const uint32_t* starts;

  const Slice* data() const { return weights.data(); }
  int64_t size() const { return static_cast<int64_t>(weights.size()); }
};

inline Error RoundedToOf(const char* op, std::string_view name, RoundedTo* rounded_to) {
  const bool bfloat16 = name == "bfloat16", float16 = name == "float16";
  QSHARD_REQUIRE(name == "float32" || bfloat16 || float16, op, ": rounded_to (", name,
                 ") is not float32, bfloat16 or float16");
  *rounded_to = bfloat16  ? RoundedTo::kBFloat16
                : float16 ? RoundedTo::kFloat16
                          : RoundedTo::kFloat32;
  return Error::Success();
}

inline Error WordPairsOfEach(const char* op, const char* argument, const AnyBuffer& buffer,
                             size_t n, const uint32_t** words) {
  QSHARD_RETURN_IF_ERROR(WordPairsOf(op, argument, buffer, words));
  QSHARD_REQUIRE(buffer.element_count() == 2 * n, op, ": ", argument, " ", Shape(buffer),
                 " is not one pair of words for each of ", n, " weights");
  return Error::Success();
}

inline Error SlicesOf(const char* op, Span<const int64_t> shapes, std::string_view rounded_to,
                      const AnyBuffer& starts, const BufferList& x, SliceRule rule,
                      Slices* slices) {
  const size_t n = x.size();
  QSHARD_REQUIRE(shapes.size() == 2 * n, op, ": shapes (", shapes.size(),
                 " numbers) are not the rows and columns of ", n, " weights");
  QSHARD_REQUIRE((rule.block_rows > 0 && rule.block_cols > 0) ||
                     (rule.block_rows == 0 && rule.block_cols == 0),
                 op, ": block (", rule.block_rows, "x", rule.block_cols,
                 ") is not of positive size, or 0x0 for the whole weight");
  *slices = {{}, rule, n == 0 ? DataType::F32 : x[0].element_type(), 0, 0, nullptr};
  QSHARD_RETURN_IF_ERROR(RoundedToOf(op, rounded_to, &slices->rule.rounded_to));
  QSHARD_RETURN_IF_ERROR(WordPairsOfEach(op, "starts", starts, n, &slices->starts));
  slices->weights.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const int64_t rows = shapes[2 * i], cols = shapes[2 * i + 1];
    QSHARD_REQUIRE(rows >= 0 && cols >= 0, op, ": shapes (", rows, ", ", cols,
                   ") are not rows and columns of weight ", i);
    QSHARD_REQUIRE(x[i].element_type() == slices->type, op, ": x[", i, "] (", x[i].element_type(),
                   ") is not ", slices->type, " as x[0] is; call once for each dtype");
    slices->weights.push_back({x[i].untyped_data(), nullptr,
                               static_cast<int64_t>(x[i].element_count()), rows, cols,
                               slices->blocks, slices->wholes});
    const Blocks blocks{1, rows, cols, rule.block_rows, rule.block_cols};
    slices->blocks += rule.block_rows == 0 ? 1 : blocks.GridSize();
    slices->wholes += rule.whole == WholeAmax::kNone ? 0 : rule.whole == WholeAmax::kRow ? rows : 1;
  }
  return Error::Success();
}

// Reads the operand of casts: the scales of all weights' blocks.
inline Error SliceScalesOf(const char* op, const AnyBuffer& scale, const Slices& slices,
                           float** floats) {
  QSHARD_REQUIRE(static_cast<int64_t>(scale.element_count()) == slices.blocks, op, ": scale ",
                 Shape(scale), " is not one number for each of ", slices.blocks, " blocks");
  return FloatsOf(op, "scale", scale, floats);
}

// Takes the codes of each weight: all of them, or a piece that has room for the slice.
template <class F>
Error SetData(const char* op, const BufferList& data, Slices* slices) {
  for (size_t i = 0; i < data.size(); ++i) {
    Slice& slice = slices->weights[i];
    QSHARD_RETURN_IF_ERROR(CodesOf<F>(op, "data", data[i], &slice.data));
    const int64_t bytes = static_cast<int64_t>(data[i].element_count());
    QSHARD_REQUIRE(slice.cols % kCodesPerByte<F> == 0, op, ": shapes (", slice.rows, ", ",
                   slice.cols, ") of weight ", i, " have an odd number of columns, and two codes ",
                   "share a byte; pad it");
    if (!slices->rule.pieces) {
      QSHARD_REQUIRE(bytes * kCodesPerByte<F> == slice.rows * slice.cols, op, ": data[", i, "] ",
                     Shape(data[i]), " is not the codes of a weight of ", slice.rows, " x ",
                     slice.cols, kCodesPerByte<F> == 1 ? "" : ", two a byte");
    } else {
      // Two codes a byte: a slice that starts amid one needs half a byte more.
      const int64_t needed =
          slice.length == 0
              ? 0
              : (slice.length + kCodesPerByte<F> - 1 + kCodesPerByte<F> - 1) / kCodesPerByte<F>;
      QSHARD_REQUIRE(bytes >= needed, op, ": data[", i, "] ", Shape(data[i]),
                     " has no room for the codes of ", slice.length, " elements; give it ", needed,
                     " bytes");
    }
  }
  return Error::Success();
}

}  // namespace qshard

#endif  // QSHARD_CORE_SLICES_OP_H_
