// What the ops that quantize in blocks with one read of x check.
#ifndef QSHARD_CORE_QUANTIZE_OP_H_
#define QSHARD_CORE_QUANTIZE_OP_H_

#include "core/block_op.h"
#include "kernels/quantize_block.h"

namespace qshard {

// What an axis of a result counts.
enum class Each { kElement, kBlock };

// How a result holds a matrix in blocks: one number for each element or block along its rows and
// columns, plain or transposed.
struct Held {
  Each rows, cols;
  bool transposed = false;
  int64_t per_byte = 1;
};

// The last axes of a buffer that is held so: those of the matrix, or, split, [m, k] and then the
// sizes of blocks in the order of the axes that they are part of.
struct LastAxes {
  LastAxes(BlockShape block, const Blocks& blocks, Held held, bool transposed) {
    const bool by_row = held.rows == Each::kElement, by_col = held.cols == Each::kElement;
    if (block.split) {
      axis[size++] = blocks.GridRows();
      axis[size++] = blocks.GridCols();
      if (transposed && by_col) axis[size++] = block.cols;
      if (by_row) axis[size++] = block.rows;
      if (!transposed && by_col) axis[size++] = block.cols;
    } else {
      const int64_t rows = by_row ? blocks.rows : blocks.GridRows();
      const int64_t cols = by_col ? blocks.cols : blocks.GridCols();
      axis[size++] = transposed ? cols : rows;
      axis[size++] = transposed ? rows : cols;
    }
    whole = axis[size - 1] % held.per_byte == 0;
    axis[size - 1] /= held.per_byte;
  }

  int64_t axis[4];
  size_t size = 0;
  bool whole;  // no byte is half empty
};

// Checks that `result` holds x, which is `blocks`, as `held` says. Not split, a transposed result
// may also have the axes in x's order: XLA keeps the logical shape and gives the transposed memory
// a layout, which a handler does not see.
inline Error CheckHeld(const char* op, const char* argument, const AnyBuffer& result,
                       const AnyBuffer& x, BlockShape block, const Blocks& blocks, Held held) {
  const Dims dims = result.dimensions(), of = x.dimensions();
  const size_t lead = BatchAxes(x, block);
  const auto fits = [&](const LastAxes& last) {
    return last.whole && dims.size() == lead + last.size &&
           std::equal(of.begin(), of.begin() + lead, dims.begin()) &&
           std::equal(last.axis, last.axis + last.size, dims.begin() + lead);
  };
  const LastAxes wanted(block, blocks, held, held.transposed);
  if (fits(wanted)) return Error::Success();
  if (held.transposed && held.per_byte == 1 && !block.split &&
      fits(LastAxes(block, blocks, held, false)))
    return Error::Success();
  std::ostringstream text;
  for (size_t i = 0; i < wanted.size; ++i) text << (i ? ", " : "") << wanted.axis[i];
  return InvalidArgument(op, ": ", argument, " ", Shape(result), " does not end with the axes (",
                         text.str(), ") that x ", Shape(x), " has in blocks of ", block,
                         held.per_byte > 1 ? " with two codes a byte" : "",
                         "; give it the axes of the op's pattern");
}

// scale_inv as bytes of E8M0 or E4M3, or as floats.
template <class Scales>
Error ScalesOf(const char* op, const char* argument, const AnyBuffer& buffer,
               typename Scales::Stored** stored) {
  if constexpr (std::is_same_v<Scales, kernels::FloatScales>)
    return FloatsOf(op, argument, buffer, stored);
  else if constexpr (std::is_same_v<Scales, kernels::E8M0Scales>)
    return CodesOf<E8M0>(op, argument, buffer, stored);
  else
    return CodesOf<E4M3>(op, argument, buffer, stored);
}

// How fp32 and E8M0 scales are asked for, and calls f(scales) with the one that is.
struct ScaleAttributes {
  float eps;
  bool pow2;
  std::string_view rounding, scale_dtype;
};

template <class Fn>
Error DispatchScales(const char* op, const ScaleAttributes& scales, Fn&& f) {
  QSHARD_REQUIRE(scales.eps >= 0.0f, op, ": eps (", scales.eps, ") is not zero or positive");
  QSHARD_REQUIRE(scales.rounding == "up" || scales.rounding == "floor", op, ": rounding (",
                 scales.rounding, ") is not up or floor");
  if (scales.scale_dtype == "float32") return f(kernels::FloatScales{scales.eps, scales.pow2});
  QSHARD_REQUIRE(scales.scale_dtype == E8M0::kName, op, ": scale_dtype (", scales.scale_dtype,
                 ") is not float32 or ", E8M0::kName);
  return f(
      kernels::E8M0Scales{scales.rounding == "up" ? PowerRounding::kUp : PowerRounding::kFloor});
}

// What the attributes and x of an op on FP8 blocks say, checked, and calls f(In, Code, scales).
template <class Fn>
Error DispatchQuantize(const char* op, const AnyBuffer& x, std::string_view element,
                       const ScaleAttributes& attributes, Fn&& f) {
  return DispatchElement<E4M3, E5M2>(op, element, [&](auto code) {
    return DispatchScales(op, attributes, [&](auto scales) {
      return DispatchFloat(op, "x", x.element_type(), [&](auto in) { return f(in, code, scales); });
    });
  });
}

// --- NVFP4 ---

// Blocks of 16 or 16 x 16, whole.
inline Error CheckBlocksNvfp4(const char* op, const AnyBuffer& x, const Blocks& blocks,
                              BlockShape block, bool legal, const char* legal_blocks) {
  QSHARD_REQUIRE(legal, op, ": block (", block, ") is not ", legal_blocks);
  QSHARD_REQUIRE(blocks.Whole(), op, ": x ", Shape(x), " is not a whole number of ", block,
                 " blocks; pad it");
  return Error::Success();
}

// Reads global_amax: the first axes of [*batch, grid_rows, grid_cols]. `axes`: how many it has.
inline Error GlobalAmaxOf(const char* op, const AnyBuffer& global_amax, const AnyBuffer& x,
                          BlockShape block, const Blocks& blocks, float scale_max, size_t* axes,
                          kernels::Nvfp4Scales* scales) {
  QSHARD_RETURN_IF_ERROR(CheckScaleMaxNvfp4(op, scale_max));
  const Dims dims = global_amax.dimensions(), of = x.dimensions();
  const size_t lead = BatchAxes(x, block);
  const int64_t grid[] = {blocks.GridRows(), blocks.GridCols()};
  bool prefix = dims.size() <= lead + 2;
  for (size_t i = 0; prefix && i < dims.size(); ++i)
    prefix = dims[i] == (i < lead ? of[i] : grid[i - lead]);
  QSHARD_REQUIRE(prefix, op, ": global_amax ", Shape(global_amax),
                 " is not the first axes of the grid of ", block, " blocks of x ", Shape(x),
                 "; give it one element for each run of blocks");
  int64_t run = 1;
  for (size_t i = dims.size(); i < lead + 2; ++i) run *= i < lead ? of[i] : grid[i - lead];
  float* amax = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(op, "global_amax", global_amax, &amax));
  *scales = {amax, run, scale_max};
  *axes = dims.size();
  return Error::Success();
}

#define QSHARD_QUANTIZE_ATTRIBUTES                          \
  QSHARD_BLOCK_ATTRIBUTES.Attr<std::string_view>("element") \
      .Attr<float>("eps")                                   \
      .Attr<bool>("pow2")                                   \
      .Attr<std::string_view>("rounding")                   \
      .Attr<std::string_view>("scale_dtype")                \
      .Attr<bool>("split")

}  // namespace qshard

#endif  // QSHARD_CORE_QUANTIZE_OP_H_
