// Flat slices of weights, as optimizers shard them: elements [start, start + length) of a row-major
// matrix. A slice may split rows, blocks and bytes.
#ifndef QSHARD_CORE_SLICES_H_
#define QSHARD_CORE_SLICES_H_

#include <cstdint>

#include "core/round.h"
#include "core/scale.h"

namespace qshard {

// The slice of one weight [rows, cols] that a call has. Its start is an operand on the device, so
// the host does not know it and it is not stored here. Elements past the end of the weight are
// padding.
struct Slice {
  const void* x;   // `length` elements
  uint8_t* data;   // codes, or null
  int64_t length;  // elements of the slice
  int64_t rows, cols;
  int64_t grid;   // index of the weight's first block, over the grids of all weights
  int64_t whole;  // index of its first amax of tensor or row, which follow all grids
};

enum class WholeAmax { kNone, kTensor, kRow };

// dtype that x is rounded to first: the dtype of the weights that the model computes with.
enum class RoundedTo { kFloat32, kBFloat16, kFloat16 };

// Settings shared by all weights of a call.
struct SliceRule {
  int64_t block_rows, block_cols;  // 0 x 0: the whole weight is one block
  WholeAmax whole;                 // amaxes stored after the amaxes of blocks
  RoundedTo rounded_to;
  bool pieces;          // data starts at the byte of the slice's first element, not of the weight's
  Nonfinite nonfinite;  // result of infinite elements if no scale is NaN for them
};

QSHARD_INLINE float RoundTo(RoundedTo to, float v) {
  if (to == RoundedTo::kBFloat16) return Widen(Narrow<bfloat16>(v));
  if (to == RoundedTo::kFloat16) return Widen(Narrow<float16>(v));
  return v;
}

// Joins two uint32, low first.
QSHARD_INLINE uint64_t FromWords(const uint32_t* words) {
  return words[0] | static_cast<uint64_t>(words[1]) << 32;
}

// Returns the start of a slice in a weight of `size` elements, read as two uint32 and clamped to
// `size`.
QSHARD_INLINE int64_t StartOf(const uint32_t* words, int64_t size) {
  const uint64_t start = FromWords(words);
  return start < static_cast<uint64_t>(size) ? static_cast<int64_t>(start) : size;
}

}  // namespace qshard

#endif  // QSHARD_CORE_SLICES_H_
