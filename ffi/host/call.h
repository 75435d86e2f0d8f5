// What ffi/module.cc binds: rows of ops.def, and calls of ops on tensors of any framework that
// speaks DLPack.
#ifndef QSHARD_HOST_CALL_H_
#define QSHARD_HOST_CALL_H_

#include <nanobind/nanobind.h>

#include <string>

namespace qshard::host {

// Runs `op` on `inputs`, writing `outputs` in place, with `attributes` (bool, int, float, str or a
// tuple of int). A tensor that an op changes in place is in both.
//
// Tensors must be C-contiguous, on one device, and hold memory: fake, meta and subclass tensors are
// refused, and with `refuse_negated` views that torch has only marked as negated. On CUDA the work
// is enqueued on the framework's current stream. Raises TypeError, ValueError, NotImplementedError
// or RuntimeError.
void Call(nanobind::str op, nanobind::sequence inputs, nanobind::sequence outputs,
          nanobind::dict attributes, bool refuse_negated);

// {op name: capsule} for "cpu" or "cuda".
nanobind::dict Handlers(const std::string& platform);

// Adds the class Row, and the function `ops`.
void DefineRows(nanobind::module_& m);

}  // namespace qshard::host

#endif  // QSHARD_HOST_CALL_H_
