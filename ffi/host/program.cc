#include "host/program.h"

#include <nanobind/stl/string.h>

#include <algorithm>

#include "host/small_array.h"
#include "host/tensor.h"
#include "schema/bind.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

// Computes the size of a buffer in bytes. Returns false if it overflows int64 or a dimension is
// negative.
bool Bytes(XLA_FFI_DataType dtype, const int64_t* dims, size_t rank, int64_t* bytes) {
  *bytes = SizeOf(dtype);
  for (size_t axis = 0; axis < rank; ++axis)
    if (dims[axis] < 0 || !Multiply(*bytes, dims[axis], bytes)) return false;
  return true;
}

[[noreturn]] void Refuse(const char* what) {
  throw nb::value_error((std::string("Program: ") + what).c_str());
}

// Copies a sequence, because converting its items may run code that changes the original.
nb::tuple ToTuple(nb::handle given) {
  nb::object copy = nb::steal(PySequence_Tuple(given.ptr()));
  if (!copy.is_valid()) nb::raise_python_error();
  return nb::borrow<nb::tuple>(copy);
}

nb::tuple ToTuple(nb::handle given, size_t size, const char* what) {
  nb::tuple copy = ToTuple(given);
  if (copy.size() != size) Refuse(what);
  return copy;
}

// Converts to an int in [0, end).
int64_t Number(nb::handle given, int64_t end, const char* what) {
  if (!PyLong_Check(given.ptr())) Refuse(what);
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(given.ptr(), &overflow);
  if (overflow != 0 || number < 0 || number >= end) Refuse(what);
  return number;
}

std::vector<int64_t> Numbers(nb::handle given, int64_t end, const char* what) {
  std::vector<int64_t> numbers;
  for (nb::handle number : ToTuple(given)) numbers.push_back(Number(number, end, what));
  return numbers;
}

}  // namespace

Program::Program(const std::string& platform, size_t inputs, nb::list makers, nb::list slots,
                 nb::list steps, nb::list results)
    : device_(platform == "cuda" ? kDLCUDA : kDLCPU), inputs_(inputs) {
  constexpr size_t kMostInputs = 1 << 16;
  constexpr int64_t kAny = INT64_MAX;
  if (platform != "cpu" && platform != "cuda") Refuse("platform is not cpu or cuda");
  if (inputs > kMostInputs) Refuse("there are more inputs than a call has");
  for (nb::handle maker : ToTuple(makers)) makers_.push_back(nb::borrow(maker));
  const auto sources = static_cast<int64_t>(inputs_ + makers_.size());
  for (nb::handle given : ToTuple(slots)) {
    const nb::tuple slot = ToTuple(given, 4, "a slot is not (dtype, shape, source, first byte)");
    Slot made{DataTypeOf(nb::cast<std::string>(slot[0])),
              Numbers(slot[1], kAny, "a shape is not of sizes"),
              Number(slot[2], sources, "a slot has no such source"),
              Number(slot[3], kAny, "the first byte of a slot is not one"), 0};
    if (made.dtype == XLA_FFI_DataType_INVALID) Refuse("a slot has no such dtype");
    if (!Bytes(made.dtype, made.dims.data(), made.dims.size(), &made.bytes))
      Refuse("a slot is more than memory has");
    slots_.push_back(std::move(made));
  }
  size_t most = 0;
  for (nb::handle given : ToTuple(steps)) {
    const nb::tuple step = ToTuple(given, 4, "a step is not (op, slots, slots, attributes)");
    const auto end = static_cast<int64_t>(slots_.size());
    Op op{HandlerOf(nb::cast<nb::str>(step[0]), {device_, 0}),
          Numbers(step[1], end, "there is no such slot"),
          Numbers(step[2], end, "there is no such slot"),
          std::make_unique<Attributes>(nb::cast<nb::dict>(step[3]))};
    for (int64_t slot : op.results)
      if (slots_[slot].source < static_cast<int64_t>(inputs_)) Refuse("a step writes to an input");
    buffers_ += op.operands.size() + op.results.size();
    most = std::max({most, op.operands.size(), op.results.size()});
    ops_.push_back(std::move(op));
  }
  for (nb::handle source : ToTuple(results))
    results_.push_back(source.is_none() ? -1 : Number(source, sources, "there is no such source"));
  arg_types_.assign(most, XLA_FFI_ArgType_BUFFER);
  ret_types_.assign(most, XLA_FFI_RetType_BUFFER);
}

nb::object Program::Run(nb::args inputs) const {
  if (inputs.size() != inputs_) throw nb::value_error("Program: the number of inputs differs");
  const size_t count = inputs_ + makers_.size();
  Common common;
  SmallArray<nb::object> objects(count), owners(count);  // keep tensors alive for the call
  SmallArray<Tensor> sources(count);
  // Call makers first: they may change the memory of an input.
  for (size_t i = 0; i < count; ++i)
    objects[i] = i < inputs_ ? nb::borrow(inputs[i]) : makers_[i - inputs_]();
  for (size_t i = 0; i < count; ++i) {
    const bool is_input = i < inputs_;
    const Use use{is_input ? "input" : "output", !is_input, is_input};
    owners[i] = Import(objects[i], use, i, sources[i]);
    common.Add(objects[i], sources[i]);
  }
  if (common.device.device_type != device_)
    throw nb::value_error("Program: the tensors are not on its platform");

  SmallArray<XLA_FFI_Buffer> slots(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const XLA_FFI_Buffer& source = sources[slot.source].buffer;
    int64_t there;
    bool fits = Bytes(source.dtype, source.dims, source.rank, &there) && slot.bytes <= there;
    fits = fits &&
           (slot.source < static_cast<int64_t>(inputs_) ? slot.offset == 0 && slot.bytes == there
                                                        : slot.offset <= there - slot.bytes);
    if (!fits || (source.dtype != slot.dtype && source.dtype != XLA_FFI_DataType_U8))
      throw nb::value_error("Program: a tensor does not match the program");
    slots[i] = {XLA_FFI_Buffer_STRUCT_SIZE,
                nullptr,
                slot.dtype,
                static_cast<char*>(source.data) + slot.offset,
                static_cast<int64_t>(slot.dims.size()),
                const_cast<int64_t*>(slot.dims.data())};
  }

  SmallArray<void*> buffers(buffers_);
  SmallArray<Step> steps(ops_.size());
  void** next = buffers.data();
  const auto pointers = [&](const std::vector<int64_t>& numbers) {
    void** const first = next;
    for (int64_t number : numbers) *next++ = &slots[number];
    return first;
  };
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    steps[i] = {op.handler,
                {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(op.operands.size()),
                 const_cast<XLA_FFI_ArgType*>(arg_types_.data()), pointers(op.operands)},
                {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(op.results.size()),
                 const_cast<XLA_FFI_RetType*>(ret_types_.data()), pointers(op.results)},
                op.attributes->Get()};
  }
  host::Run(common, steps.data(), ops_.size());

  nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(results_.size())));
  for (size_t i = 0; i < results_.size(); ++i) {
    nb::object result = results_[i] < 0 ? nb::none() : objects[results_[i]];
    NB_TUPLE_SET_ITEM(made.ptr(), i, result.release().ptr());
  }
  return made;
}

void DefineProgram(nb::module_& m) {
  nb::class_<Program>(m, "Program", "Back-to-back ops as one call.")
      .def(nb::init<const std::string&, size_t, nb::list, nb::list, nb::list, nb::list>(),
           nb::arg("platform"), nb::arg("inputs"), nb::arg("makers"), nb::arg("slots"),
           nb::arg("steps"), nb::arg("results"))
      .def("__call__", &Program::Run);
}

}  // namespace qshard::host
