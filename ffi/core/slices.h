// Flat slices of weights: [start, start + length) of the row-major elements of a matrix, as
// optimizers cut it: anywhere, through rows, blocks and bytes.
#ifndef QSHARD_CORE_SLICES_H_
#define QSHARD_CORE_SLICES_H_

#include <cstdint>

#include "core/round.h"
#include "core/scale.h"

namespace qshard {

// One weight [rows, cols], and the slice of it that a call has. Where the slice starts is an
// operand, so it is not here: on a GPU, the host does not know it. What lies past the end of the
// weight is padding.
struct Slice {
  const void* x;   // `length` elements
  uint8_t* data;   // codes, or null
  int64_t length;  // of the slice
  int64_t rows, cols;
  int64_t grid;   // its first block, counted over the grids of all weights
  int64_t whole;  // its first amax of the tensor or of a row, which follow all grids
};

enum class WholeAmax { kNone, kTensor, kRow };

// What x is rounded to before anything else: the dtype that a model sees its master weights in.
enum class RoundedTo { kFloat32, kBFloat16, kFloat16 };

// What all weights of a call have in common.
struct SliceRule {
  int64_t block_rows, block_cols;  // 0 x 0: the whole weight is one block
  WholeAmax whole;                 // which amaxes follow those of blocks
  RoundedTo rounded_to;
  bool pieces;  // data begins with the byte of the slice's first element, not with the weight's
  Nonfinite nonfinite;  // what infinite elements become where no scale shows them
};

QSHARD_INLINE float RoundTo(RoundedTo to, float v) {
  if (to == RoundedTo::kBFloat16) return Widen(Narrow<bfloat16>(v));
  if (to == RoundedTo::kFloat16) return Widen(Narrow<float16>(v));
  return v;
}

// A pair of words, the low one first.
QSHARD_INLINE uint64_t FromWords(const uint32_t* words) {
  return words[0] | static_cast<uint64_t>(words[1]) << 32;
}

// Where a slice starts in a weight of `size` elements, by a pair of words: at most at the end.
QSHARD_INLINE int64_t StartOf(const uint32_t* words, int64_t size) {
  const uint64_t start = FromWords(words);
  return start < static_cast<uint64_t>(size) ? static_cast<int64_t>(start) : size;
}

}  // namespace qshard

#endif  // QSHARD_CORE_SLICES_H_
