// Kernels of torch.ops.qshard in C++, so that a compiled graph runs no Python for an op. They run
// with and without the GIL, and call Python in grad mode alone (OwnedTensor::RequiresGrad).
#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "host/call.h"
#include "host/program.h"
#include "host/run.h"
#include "host/small_array.h"
#include "host/torch_tensor.h"
#include "schema/bind.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

void Require(const Error& error) {
  if (!error) return;
  if (error.kind() == ErrorKind::kInternal) throw std::runtime_error(error.text());
  throw std::invalid_argument(error.text());
}

void Require(const std::optional<Failure>& failure) {
  if (!failure) return;
  if (failure->code == XLA_FFI_Error_Code_INVALID_ARGUMENT)
    throw std::invalid_argument(failure->message);
  throw std::runtime_error(failure->message);
}

bool AreOnOneDevice(const OwnedTensor& a, const OwnedTensor& b) {
  return a.device.device_type == b.device.device_type && a.device.device_id == b.device.device_id;
}

// Attributes of a call in XLA's C layout, and the strings that the kernel owns.
class TorchAttributes {
 public:
  explicit TorchAttributes(const Row& row) : size_(row.attributes.size()) {}
  TorchAttributes(const TorchAttributes&) = delete;
  ~TorchAttributes() {
    for (size_t i = 0; i < size_; ++i)
      if (texts_[i] != nullptr) torch.torch_delete_string(texts_[i]);
  }

  // Takes all values, before anything can throw.
  void Take(const Row& row, const TorchValue* values) {
    for (size_t i = 0; i < size_; ++i) {
      values_[i] = values[i];
      if (row.attributes[i].kind == Attribute::kText)
        texts_[i] = reinterpret_cast<TorchString*>(values[i]);
    }
  }

  XLA_FFI_Attrs Get(const Row& row) {
    for (size_t i = 0; i < size_; ++i) {
      const Attribute& attribute = row.attributes[i];
      names_[i] = {attribute.name.data(), attribute.name.size()};
      name_pointers_[i] = &names_[i];
      types_[i] = XLA_FFI_AttrType_SCALAR;
      pointers_[i] = &scalars_[i];
      switch (attribute.kind) {
        case Attribute::kInt:
          scalars_[i] = {XLA_FFI_DataType_S64, &values_[i]};
          break;
        case Attribute::kBool:
          std::memcpy(&flags_[i], &values_[i], sizeof(bool));
          scalars_[i] = {XLA_FFI_DataType_PRED, &flags_[i]};
          break;
        case Attribute::kFloat: {
          double number;
          std::memcpy(&number, &values_[i], sizeof(number));
          numbers_[i] = static_cast<float>(number);
          scalars_[i] = {XLA_FFI_DataType_F32, &numbers_[i]};
          break;
        }
        case Attribute::kText: {
          types_[i] = XLA_FFI_AttrType_STRING;
          pointers_[i] = &spans_[i];
          const bool failed = torch.torch_string_length(texts_[i], &spans_[i].len) != 0 ||
                              torch.torch_string_c_str(texts_[i], &spans_[i].ptr) != 0;
          Check(failed, "read a string");
          break;
        }
        case Attribute::kExtents:
          Refuse(row.name, ": ", attribute.name, " is a tuple, which no kernel in C++ takes");
      }
    }
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(size_),
            types_,
            name_pointers_,
            pointers_};
  }

 private:
  size_t size_;
  TorchString* texts_[kMaxAttributes] = {};
  TorchValue values_[kMaxAttributes];
  bool flags_[kMaxAttributes];
  float numbers_[kMaxAttributes];
  XLA_FFI_ByteSpan names_[kMaxAttributes], spans_[kMaxAttributes];
  XLA_FFI_Scalar scalars_[kMaxAttributes];
  XLA_FFI_AttrType types_[kMaxAttributes];
  XLA_FFI_ByteSpan* name_pointers_[kMaxAttributes];
  void* pointers_[kMaxAttributes];
};

// Runs an op on single tensors: `stack` has its operands, its attributes, and the dtype of results
// that may have any.
void RunOp(Op op, TorchValue* stack, uint64_t arguments) {
  const Row& row = RowOf(op);
  const size_t inputs = row.inputs.size(), outputs = row.outputs.size();
  OwnedTensor operands[kMaxOperands], results[kMaxOperands];
  TorchAttributes attributes(row);
  for (size_t i = 0; i < inputs; ++i) operands[i].Take(stack[i]);
  attributes.Take(row, stack + inputs);
  std::string_view chosen;
  if (const size_t read = inputs + row.attributes.size(); arguments > read) {
    int32_t number;
    std::memcpy(&number, &stack[read], sizeof(number));
    chosen = NameOf(DtypeOf(number));
  }

  Buffer *args[kMaxOperands], *rets[kMaxOperands];
  double numbers = 0;
  for (size_t i = 0; i < inputs; ++i) {
    operands[i].Read(row.name, row.inputs[i].name);
    args[i] = &operands[i].buffer;
    numbers += static_cast<double>(Elements(*args[i]));
    if (!AreOnOneDevice(operands[i], operands[0]))
      Refuse(row.name, ": operands (", row.inputs[0].name, ", ", row.inputs[i].name,
             ") are not on one device; move them to one");
  }
  if (torch.aoti_torch_grad_mode_is_enabled())  // neither in autograd nodes nor in compiled graphs
    for (size_t i = 0; i < inputs; ++i)
      if (operands[i].RequiresGrad())
        Refuse(row.name, ": ", row.inputs[i].name,
               " requires grad, but the op has no derivative; pass .detach(), or use "
               "qshard.torch_bridge.Linear");
  const DLDevice device = operands[0].device;
  const XLA_FFI_Attrs attrs = attributes.Get(row);
  const Buffers given{args, static_cast<int64_t>(inputs)};
  Binding binding(row);
  Require(binding.Bind(attrs, given));
  for (size_t i = 0; i < outputs; ++i) {
    Dims dims;
    DataType dtype;
    Require(binding.OutputShape(static_cast<int>(i), &dims));
    Require(binding.OutputDtype(static_cast<int>(i), given, chosen, &dtype));
    // Codes and one-byte scales are uint8 (torch_bridge/_ops/bind.py).
    if (row.outputs[i].dtype != Operand::kSame && SizeOf(dtype) == 1) dtype = XLA_FFI_DataType_U8;
    results[i].Allocate(row.name, dims.sizes, dims.rank, dtype, device);
    rets[i] = &results[i].buffer;
    numbers += static_cast<double>(Elements(*rets[i]));
  }

  void* const stream = BeginCall(device, numbers);
  XLA_FFI_ArgType arg_types[kMaxOperands];
  XLA_FFI_RetType ret_types[kMaxOperands];
  std::fill_n(arg_types, inputs, XLA_FFI_ArgType_BUFFER);
  std::fill_n(ret_types, outputs, XLA_FFI_RetType_BUFFER);
  XLA_FFI_Handler* const handler = HandlerOf(op, device);
  if (handler == nullptr) throw std::runtime_error(NoKernels(row.name, device));
  const Step step{handler,
                  {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(inputs), arg_types,
                   reinterpret_cast<void**>(args)},
                  {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(outputs), ret_types,
                   reinterpret_cast<void**>(rets)},
                  attrs};
  Require(RunOn(device, stream, &step, 1));
  for (size_t i = 0; i < outputs; ++i) stack[i] = results[i].Release();
}

template <Op op>
void Kernel(TorchValue* stack, uint64_t arguments, uint64_t /*results*/) {
  RunOp(op, stack, arguments);
}

// Takes the tensors of a list, and deletes the list.
class OwnedList {
 public:
  explicit OwnedList(TorchValue value) : list_(reinterpret_cast<TorchList*>(value)) {
    Check(torch.torch_list_size(list_, &size_), "count the tensors of a list");
  }
  OwnedList(const OwnedList&) = delete;
  ~OwnedList() { torch.torch_delete_list(list_); }

  size_t size() const { return size_; }
  void Take(OwnedTensor* tensors) {
    for (size_t i = 0; i < size_; ++i) {
      TorchValue item;
      Check(torch.torch_list_get_item(list_, i, &item), "read a list");
      tensors[i].Take(item);
    }
  }

 private:
  TorchList* list_;
  size_t size_;
};

// A text that the kernel owns.
class OwnedText {
 public:
  explicit OwnedText(TorchValue value) : text_(reinterpret_cast<TorchString*>(value)) {}
  OwnedText(const OwnedText&) = delete;
  ~OwnedText() { torch.torch_delete_string(text_); }

  std::string_view Get() const {
    const char* data;
    size_t size;
    Check(torch.torch_string_c_str(text_, &data), "read a string");
    Check(torch.torch_string_length(text_, &size), "read a string");
    return {data, size};
  }

 private:
  TorchString* text_;
};

// Runs `run_program(Tensor[] inputs, str program)` (torch_bridge/_ops/programs.py), which returns a
// list of tensors, or as many tensors as its overload has.
template <bool kReturnsList>
void RunProgram(TorchValue* stack, uint64_t /*arguments*/, uint64_t expected) {
  static const std::string kOp = "run_program", kInput = "an input";
  const OwnedText text(stack[1]);
  OwnedList list(stack[0]);
  SmallArray<OwnedTensor> inputs(list.size());
  list.Take(inputs.data());
  const std::shared_ptr<const Program> program = Program::Of(text.Get());
  if (list.size() != program->inputs() || list.size() == 0)
    Refuse(kOp, ": the number of inputs (", list.size(), ") is not that of the program (",
           program->inputs(), "); pass the tensors that it was recorded for");

  const size_t outputs = program->outputs().size(), made = program->sources() - list.size();
  if (!kReturnsList && outputs != expected)
    Refuse(kOp, ": the number of results (", outputs, ") is not that of the overload (", expected,
           "); call another overload");
  SmallArray<OwnedTensor> results(made);  // and the scratch memory
  SmallArray<const Buffer*> sources(program->sources());
  double elements = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    inputs[i].Read(kOp, kInput);
    if (!AreOnOneDevice(inputs[i], inputs[0]))
      Refuse(kOp, ": the inputs are not on one device; move them to one");
    sources[i] = &inputs[i].buffer;
    elements += static_cast<double>(Elements(*sources[i]));
  }
  const DLDevice device = inputs[0].device;
  if (device.device_type != program->device_type())
    Refuse(kOp, ": the inputs are not on the platform of the program; move them to it");
  for (size_t i = 0; i < made; ++i) {
    if (i < outputs) {
      const Program::Output& output = program->outputs()[i];
      results[i].Allocate(kOp, output.dims.data(), static_cast<int64_t>(output.dims.size()),
                          output.dtype, device);
    } else {
      const int64_t bytes = program->scratch();
      results[i].Allocate(kOp, &bytes, 1, XLA_FFI_DataType_U8, device);
    }
    sources[list.size() + i] = &results[i].buffer;
    elements += static_cast<double>(Elements(results[i].buffer));
  }
  Require(program->Run(device, BeginCall(device, elements), sources.data()));

  if constexpr (kReturnsList) {
    TorchList* given;
    Check(torch.torch_new_list_reserve_size(outputs, &given), "make a list");
    for (size_t i = 0; i < outputs; ++i) torch.torch_list_push_back(given, results[i].Release());
    stack[0] = reinterpret_cast<TorchValue>(given);
  } else {
    for (size_t i = 0; i < outputs; ++i) stack[i] = results[i].Release();
  }
}

}  // namespace

void DefineTorchKernels(const std::string& library, nb::handle tensor) {
  if (!LoadTorch(library, tensor)) return;
  for (const char* key : {"CPU", "CUDA"}) {
    TorchLibrary* kernels = nullptr;  // never deleted: kernels stay until the process ends
    Check(torch.aoti_torch_library_init_impl("qshard", key, __FILE__, __LINE__, &kernels),
          "take kernels");
#define QSHARD_OP(name, ...)                                                                \
  if (!RowOf(Op::name).many)                                                                \
    Check(torch.torch_library_impl(kernels, "qshard::" #name, Kernel<Op::name>, kTorchAbi), \
          "take the kernel of " #name);
#include "ops.def"
#undef QSHARD_OP
    const auto take = [&](const char* op, TorchKernel kernel) {
      Check(torch.torch_library_impl(kernels, op, kernel, kTorchAbi),
            "take the kernels of programs");
    };
    take("qshard::run_program", RunProgram<true>);
    take("qshard::run_program.one", RunProgram<false>);
    take("qshard::run_program.two", RunProgram<false>);
  }
}

}  // namespace qshard::host
