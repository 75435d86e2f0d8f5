// Functions that ffi/module.cc binds: rows of ops.def, and calls of ops on tensors.
#ifndef QSHARD_HOST_CALL_H_
#define QSHARD_HOST_CALL_H_

#include <nanobind/nanobind.h>

#include <string>

namespace qshard::host {

// Runs `op` on `inputs` with `attributes` (bool, int, float, str or a tuple of int), and writes
// `outputs` in place. A tensor that an op updates in place is in both lists.
//
// Tensors must be C-contiguous, on one device, and own memory: fake, meta and wrapper-subclass
// tensors are refused. `refuse_negated` also refuses torch views with a lazy negation bit. On CUDA
// the work is enqueued on the framework's current stream. Raises TypeError, ValueError,
// NotImplementedError, MemoryError or RuntimeError.
void Call(nanobind::str op, nanobind::sequence inputs, nanobind::sequence outputs,
          nanobind::dict attributes, bool refuse_negated);

// Returns {op name: capsule} for "cpu" or "cuda".
nanobind::dict Handlers(const std::string& platform);

// Registers C++ kernels for the ops on single tensors of torch.ops.qshard and for its op
// run_program, which are defined, on CPU and CUDA. `library` is a file through which PyTorch's C
// functions are found, and `tensor` the type of its tensors. Does nothing if it was called before.
void DefineTorchKernels(const std::string& library, nanobind::handle tensor);

// Adds class Row and function `ops` to the module.
void DefineRows(nanobind::module_& m);

}  // namespace qshard::host

#endif  // QSHARD_HOST_CALL_H_
