// TensorTable: many tensors in one launch. The host's data about them is passed as kernel
// parameters. Nothing is allocated or copied, and a captured graph contains everything it needs.
#ifndef QSHARD_KERNELS_CUDA_TENSOR_TABLE_CUH_
#define QSHARD_KERNELS_CUDA_TENSOR_TABLE_CUH_

#include <cstdint>

#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {

constexpr int kParameterBytes = 32764;  // limit of a launch

// Parts of work, one per thread block, are numbered over all tensors. An Entry has the first part
// of its tensor as `unsigned first`.
template <class Entry, int kMax>
struct TensorTable {
  static constexpr int kSize = kMax;

  // Returns the tensor that a part belongs to.
  __device__ __forceinline__ int Find(unsigned part) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (entries[middle].first <= part)
        low = middle;
      else
        high = middle - 1;
    }
    return low;
  }

  int count;
  unsigned parts;
  Entry entries[kMax];
};

// Fills the table with tensors 0 to n - 1 and calls launch(begin) once per kSize tensors, from
// tensor `begin` on. enter(i, entry) fills in tensor i and returns its number of parts.
template <class Table, class Enter, class Launch>
Status ForEachTable(Table& table, int64_t n, const Enter& enter, const Launch& launch) {
  static_assert(sizeof(Table) <= kParameterBytes);
  for (int64_t begin = 0; begin < n; begin += Table::kSize) {
    table.count = static_cast<int>(std::min<int64_t>(Table::kSize, n - begin));
    int64_t parts = 0;
    for (int i = 0; i < table.count; ++i) {
      auto& entry = table.entries[i];
      const int64_t more = enter(begin + i, entry);
      entry.first = static_cast<unsigned>(parts);
      parts += more;
    }
    if (parts > UINT32_MAX) return kTooManyBlocks;
    table.parts = static_cast<unsigned>(parts);
    QSHARD_RETURN_IF_ERROR(launch(begin));
  }
  return {};
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_TENSOR_TABLE_CUH_
