// What ops on blocks check: the shapes of matrices in blocks, and of their grids.
//
// A matrix reaches an op in one of two forms, told by the attribute `split`:
//   false: [*batch, rows, cols], plain. Edge blocks may be cut.
//   true: its factors in the order [*batch, m, k, block_rows, block_cols]. XLA partitions leading
//     axes, so the JAX front end puts those of the grid first, and gives the buffer a layout, which
//     a handler does not see, that leaves the memory [*batch, m * block_rows, k * block_cols].
// The memory is the same row-major matrix in both. Two 4-bit codes share a byte: the last axis of
// packed data is half as long.
#ifndef QSHARD_CORE_BLOCK_OP_H_
#define QSHARD_CORE_BLOCK_OP_H_

#include "core/block.h"
#include "core/op.h"

namespace qshard {

struct BlockShape {
  int64_t rows, cols;
  bool split;

  friend std::ostream& operator<<(std::ostream& out, const BlockShape& block) {
    return out << block.rows << 'x' << block.cols;
  }
};

// Reads the blocks of `buffer`, whose elements are 1 / per_byte of one of its own.
inline Error BlocksOf(const char* op, const char* argument, const AnyBuffer& buffer,
                      BlockShape block, int64_t per_byte, Blocks* blocks) {
  const Dims dims = buffer.dimensions();
  const size_t axes = block.split ? 4 : 2;
  QSHARD_REQUIRE(block.rows > 0 && block.cols > 0, op, ": block (", block,
                 ") is not of positive size");
  QSHARD_REQUIRE(dims.size() >= axes, op, ": ", argument, " ", Shape(buffer), " does not have the ",
                 axes, " axes of a matrix", block.split ? " in split blocks" : "", "; reshape it");
  const size_t lead = dims.size() - axes;
  const int64_t last = dims[dims.size() - 1] * per_byte;
  *blocks = {Product(dims, 0, lead), dims[lead], last, block.rows, block.cols};
  if (block.split) {
    QSHARD_REQUIRE(dims[lead + 2] == block.rows && last == block.cols, op, ": ", argument, " ",
                   Shape(buffer), " does not end with the axes of a block (", block,
                   "); split its rows and columns");
    blocks->rows = dims[lead] * block.rows;
    blocks->cols = dims[lead + 1] * block.cols;
  }
  return Error::Success();
}

// The axes of `buffer` before those of the matrix.
inline size_t BatchAxes(const AnyBuffer& buffer, BlockShape block) {
  return buffer.dimensions().size() - (block.split ? 4 : 2);
}

// Checks that `grid` is [*batch, grid_rows, grid_cols] of `matrix`.
inline Error CheckGrid(const char* op, const char* argument, const AnyBuffer& grid,
                       const AnyBuffer& matrix, BlockShape block, const Blocks& blocks) {
  const Dims dims = grid.dimensions(), of = matrix.dimensions();
  const size_t lead = BatchAxes(matrix, block);
  QSHARD_REQUIRE(dims.size() == lead + 2 &&
                     std::equal(of.begin(), of.begin() + lead, dims.begin()) &&
                     dims[lead] == blocks.GridRows() && dims[lead + 1] == blocks.GridCols(),
                 op, ": ", argument, " ", Shape(grid), " does not have one element for each ",
                 block, " block of ", Shape(matrix));
  return Error::Success();
}

// Checks that `b` is the matrix of the shape of `a`, which may have another number of elements in a
// byte of its last axis.
inline Error CheckSameMatrix(const char* op, const char* name_a, const AnyBuffer& a,
                             int64_t per_byte_a, const char* name_b, const AnyBuffer& b,
                             int64_t per_byte_b) {
  const Dims da = a.dimensions(), db = b.dimensions();
  const size_t last = da.size() - 1;
  QSHARD_REQUIRE(da.size() == db.size() && std::equal(da.begin(), da.begin() + last, db.begin()) &&
                     da[last] * per_byte_a == db[last] * per_byte_b,
                 op, ": ", name_b, " ", Shape(b), " does not have the shape of ", name_a, " ",
                 Shape(a), per_byte_a == per_byte_b ? "" : " with two codes a byte");
  return Error::Success();
}

// How many blocks in a row, row-major, share one element of `part`: those that follow one place of
// `prefix`, which is the first axes of the grid.
inline Error RunOf(const char* op, const char* argument, const AnyBuffer& part, Dims prefix,
                   const AnyBuffer& grid, int64_t* run) {
  QSHARD_REQUIRE(IsPrefix(prefix, grid.dimensions()), op, ": ", argument, " ", Shape(part),
                 " is not the first axes of the grid of blocks ", Shape(grid),
                 "; give it one element for each run of blocks");
  *run = Runs(prefix, grid.dimensions()).length;
  return Error::Success();
}

template <class F>
constexpr int64_t kCodesPerByte = 8 / F::kBits;

// Pairs of 32-bit words, [..., 2], the low word first: 64-bit numbers where x64 is off.
inline Error WordPairsOf(const char* op, const char* argument, const AnyBuffer& buffer,
                         const uint32_t** words) {
  const DataType t = buffer.element_type();
  const Dims dims = buffer.dimensions();
  QSHARD_REQUIRE(
      (t == DataType::U32 || t == DataType::S32) && dims.size() > 0 && dims[dims.size() - 1] == 2,
      op, ": ", argument, " (", t, " ", Shape(buffer),
      ") is not uint32 or int32 of shape (..., 2), low word first");
  *words = static_cast<const uint32_t*>(buffer.untyped_data());
  return Error::Success();
}

inline Error CheckScaleMaxNvfp4(const char* op, float scale_max) {
  QSHARD_REQUIRE(scale_max == E4M3::kMax || scale_max == kNvfp4SmallScaleMax, op, ": scale_max (",
                 scale_max, ") is not ", E4M3::kMax, " or ", kNvfp4SmallScaleMax);
  return Error::Success();
}

// What an op that makes NVFP4 scales of amaxes reads and writes, checked. global_amax has the first
// axes of amax: one element for each `run` blocks.
struct Nvfp4ScaleBuffers {
  float *amax, *global_amax, *scale;
  uint8_t* scale_inv;
  int64_t run;
};

inline Error Nvfp4ScaleBuffersOf(const char* op, float scale_max, const AnyBuffer& amax,
                                 const AnyBuffer& global_amax, const AnyBuffer& scale,
                                 const AnyBuffer& scale_inv, Nvfp4ScaleBuffers* of) {
  QSHARD_RETURN_IF_ERROR(CheckScaleMaxNvfp4(op, scale_max));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(op, "scale", scale, "amax", amax));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(op, "scale_inv", scale_inv, "amax", amax));
  QSHARD_RETURN_IF_ERROR(
      RunOf(op, "global_amax", global_amax, global_amax.dimensions(), amax, &of->run));
  QSHARD_RETURN_IF_ERROR(FloatsOf(op, "amax", amax, &of->amax));
  QSHARD_RETURN_IF_ERROR(FloatsOf(op, "global_amax", global_amax, &of->global_amax));
  QSHARD_RETURN_IF_ERROR(FloatsOf(op, "scale", scale, &of->scale));
  return CodesOf<E4M3>(op, "scale_inv", scale_inv, &of->scale_inv);
}

// The attributes that every op on blocks has, in the order of their names.
#define QSHARD_BLOCK_ATTRIBUTES .Attr<int64_t>("block_cols").Attr<int64_t>("block_rows")

}  // namespace qshard

#endif  // QSHARD_CORE_BLOCK_OP_H_
