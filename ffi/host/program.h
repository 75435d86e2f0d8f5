// Program: back-to-back ops on tensors, as one call.
#ifndef QSHARD_HOST_PROGRAM_H_
#define QSHARD_HOST_PROGRAM_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "host/attributes.h"
#include "host/run.h"
#include "schema/dtype.h"

namespace qshard::host {

// A recorded sequence of ops (torch_bridge/_ops/programs.py). Everything that depends only on
// shapes, dtypes and attributes is computed once, when the program is built. A call only allocates
// its outputs and runs the handlers, which still check all buffers.
//
// Terms. Sources are the inputs, the outputs, and the scratch memory if there is any. A slot is a
// byte range of a source, viewed with a dtype and a shape: ops read and write slots. A program
// stores no tensors, so it may be called from several threads and on any stream.
class Program {
 public:
  struct Output {
    DataType dtype;
    std::vector<int64_t> dims;
  };

  // Returns the program of a text, from a cache of the last texts. Raises ValueError if the text is
  // not a program. Needs no GIL.
  //
  // The text is a JSON object, with apostrophes in place of quotes:
  //   platform: "cpu" or "cuda".
  //   inputs: number of inputs.
  //   outputs: [dtype name, shape] each.
  //   scratch: bytes of scratch memory.
  //   slots: [dtype name, shape, source, first byte] each.
  //   steps: [op, operand slots, result slots, attributes] each. Result slots are not of an input.
  static std::shared_ptr<const Program> Of(std::string_view text);

  explicit Program(nanobind::dict description);
  Program(const Program&) = delete;

  DLDeviceType device_type() const { return device_type_; }
  size_t inputs() const { return inputs_; }
  const std::vector<Output>& outputs() const { return outputs_; }
  int64_t scratch() const { return scratch_; }
  size_t sources() const { return inputs_ + outputs_.size() + (scratch_ > 0 ? 1 : 0); }

  // Runs the ops on `sources` on `device`, on CUDA on `stream`. Inputs must have the dtypes and
  // numbers of elements of their slots. Raises ValueError if they do not, before any op runs.
  // Returns the first failure of an op. Needs no GIL.
  std::optional<Failure> Run(DLDevice device, void* stream,
                             const XLA_FFI_Buffer* const* sources) const;

 private:
  struct Slot {
    DataType dtype;
    std::vector<int64_t> dims;
    int64_t source, offset, bytes;
  };
  struct RecordedOp {
    XLA_FFI_Handler* handler;
    std::vector<int64_t> operands, results;
    std::unique_ptr<Attributes> attributes;
  };

  DLDeviceType device_type_;
  size_t inputs_;
  int64_t scratch_;
  std::vector<Output> outputs_;
  std::vector<Slot> slots_;
  std::vector<RecordedOp> ops_;
  size_t buffers_ = 0;  // operands and results of all ops
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
};

}  // namespace qshard::host

#endif  // QSHARD_HOST_PROGRAM_H_
