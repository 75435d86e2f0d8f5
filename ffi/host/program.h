// Program: back-to-back ops as one call from Python.
#ifndef QSHARD_HOST_PROGRAM_H_
#define QSHARD_HOST_PROGRAM_H_

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "host/attributes.h"
#include "host/run.h"

namespace qshard::host {

// A recorded sequence of ops. Everything that depends only on shapes, dtypes and attributes is
// computed once, when the program is built. A call only allocates its outputs and runs the
// handlers, which still check all buffers.
//
// Terms. An input is a tensor passed to a call. A maker is a callable that allocates a tensor, for
// a result or for workspace. Sources are the inputs followed by the makers' tensors. A slot is a
// byte range of a source, viewed with a dtype and a shape: ops read and write slots. A program
// stores no tensors, so it may be called from several threads and on any stream.
class Program {
 public:
  // Args:
  //   platform: "cpu" or "cuda".
  //   inputs: number of inputs.
  //   makers: callables without arguments.
  //   slots: (dtype name, shape, source, first byte) each.
  //   steps: (op, operand slots, result slots, attributes) each. Result slots must not be in an
  //   input. results: a source each, or None.
  Program(const std::string& platform, size_t inputs, nanobind::list makers, nanobind::list slots,
          nanobind::list steps, nanobind::list results);
  Program(const Program&) = delete;

  // Returns the results as a tuple. Inputs must have the dtypes and numbers of elements of their
  // slots. Raises like `Call`, and then leaves the inputs unchanged.
  nanobind::object Run(nanobind::args inputs) const;

 private:
  struct Slot {
    XLA_FFI_DataType dtype;
    std::vector<int64_t> dims;
    int64_t source, offset, bytes;
  };
  struct Op {
    XLA_FFI_Handler* handler;
    std::vector<int64_t> operands, results;
    std::unique_ptr<Attributes> attributes;
  };

  DLDeviceType device_;
  size_t inputs_;
  std::vector<nanobind::object> makers_;
  std::vector<Slot> slots_;
  std::vector<Op> ops_;
  std::vector<int64_t> results_;  // -1 for None
  size_t buffers_ = 0;            // operands and results of all ops
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
};

void DefineProgram(nanobind::module_& m);

}  // namespace qshard::host

#endif  // QSHARD_HOST_PROGRAM_H_
