// Grouped products of experts. They need a cuBLASLt with grouped layouts.
#include "kernels/gemm.h"

namespace qshard::kernels {

template <class Out>
Status GroupedGemm(const Exec<Cuda>&, const GemmProblem&, const GemmGroups&, const Workspace&,
                   Out*) {
  return {"no cuBLASLt of version 13.5 or newer is loaded; call a product for each expert"};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, GroupedGemm)

}  // namespace qshard::kernels
