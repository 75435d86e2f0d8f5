// Ops that follow one another, as one call from Python.
#ifndef QSHARD_HOST_PROGRAM_H_
#define QSHARD_HOST_PROGRAM_H_

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "host/attributes.h"
#include "host/run.h"

namespace qshard::host {

// What depends on shapes, dtypes and attributes alone is worked out when a program is made; a call
// has only to make what it returns, and to run the handlers, which check all buffers as ever.
//
// Glossary. An input is a tensor that a call is given. A maker is a callable that makes a tensor: a
// result, or memory for what is needed between. Sources are the inputs, then what makers make. A
// slot is what ops take and write: some bytes of a source, seen as a dtype and a shape. A program
// holds no tensor, so it may be called from many threads, and on any stream.
class Program {
 public:
  // platform: "cpu" or "cuda".
  // slots: (dtype name, shape, source, first byte) each.
  // steps: (op, slots that it takes, slots that it writes, none of an input, attributes) each.
  // results: a source each, or None.
  Program(const std::string& platform, size_t inputs, nanobind::list makers, nanobind::list slots,
          nanobind::list steps, nanobind::list results);
  Program(const Program&) = delete;

  // The results, as a tuple. Inputs must have the dtypes and numbers of elements of their slots.
  // Raises as `Call` does; then nothing that was there before is changed.
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
  std::vector<int64_t> results_;  // -1: None
  size_t buffers_ = 0;            // operands and results of all ops
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
};

void DefineProgram(nanobind::module_& m);

}  // namespace qshard::host

#endif  // QSHARD_HOST_PROGRAM_H_
