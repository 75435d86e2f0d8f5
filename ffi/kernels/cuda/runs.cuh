// Which run of `length` elements an element of a row-major [runs, length] buffer is in, without a
// division per element.
#ifndef QSHARD_KERNELS_CUDA_RUNS_CUH_
#define QSHARD_KERNELS_CUDA_RUNS_CUH_

#include <climits>
#include <cstdint>

namespace qshard::kernels {

// A block of threads looks at no more than this many consecutive elements. Runs are short if they
// are shorter than that.
constexpr int kMaxSpan = 1 << 14;

struct RunLength {
  explicit RunLength(int64_t n)
      : length(n), magic(n > 1 && n < kMaxSpan ? (uint64_t{1} << 32) / n + 1 : 0) {}

  int64_t length;
  // For short runs of 2 and more: v / length == umulhi(v, magic) for v < 2 * kMaxSpan. magic
  // exceeds 2^32 / length by at most 1, so the product exceeds v / length by at most v / 2^32, less
  // than the 1 / length that could change the quotient.
  uint32_t magic;
};

// The runs of the elements [base, base + kMaxSpan).
class BlockRuns {
 public:
  __device__ __forceinline__ BlockRuns(const RunLength& runs, int64_t base)
      : short_(runs.length < kMaxSpan), magic_(runs.magic), first_(base / runs.length) {
    const int64_t into = base - first_ * runs.length;
    // Short: how far `base` is into its run. Long: how far the next run is; no more than one begins
    // here.
    const int64_t mark = short_ ? into : runs.length - into;
    mark_ = mark < INT_MAX ? static_cast<int>(mark) : INT_MAX;
    unit_ = runs.length == 1 ? ~0 : 0;
  }

  // The run of element base + offset.
  __device__ __forceinline__ int64_t Run(int offset) const { return first_ + Skipped(offset); }

  // True if the elements from base + offset to base + offset + count - 1 are in one run.
  __device__ __forceinline__ bool OneRun(int offset, int count) const {
    return Skipped(offset) == Skipped(offset + count - 1);
  }

 private:
  __device__ __forceinline__ int Skipped(int offset) const {
    const int v = mark_ + offset;
    const int of_short = static_cast<int>(__umulhi(v, magic_)) + (v & unit_);
    return short_ ? of_short : offset >= mark_;
  }

  bool short_;
  uint32_t magic_;
  int64_t first_;
  int mark_, unit_;
};

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_RUNS_CUH_
