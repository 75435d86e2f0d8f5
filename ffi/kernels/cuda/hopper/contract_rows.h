// Weight gradients of experts by a kernel of this project, for Hopper: grouped products of FP8
// codes that contract the rows of each expert, with one scale for each expert or 1x128 blocks. It
// is faster than cuBLASLt 13.8, which computes the products that it does not take.
#ifndef QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_ROWS_H_
#define QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_ROWS_H_

#include "kernels/gemm.h"

namespace qshard::kernels {

// Returns whether the kernel takes a product on the current device. The environment variable
// QSHARD_CONTRACT_ROWS=0 leaves all to cuBLASLt.
bool ContractsRows(const GemmProblem& gemm, const GemmGroups& groups, const Workspace& workspace);

// Computes a product that ContractsRows takes, in two launches.
template <class Out>
Status ContractRows(const Exec<Cuda>& exec, const GemmProblem& gemm, const GemmGroups& groups,
                    const Workspace& workspace, Out* out);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_ROWS_H_
