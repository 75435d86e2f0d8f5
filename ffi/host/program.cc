#include "host/program.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "core/dtype.h"
#include "host/short.h"
#include "host/tensor.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

size_t Bytes(XLA_FFI_DataType dtype, const int64_t* dims, size_t rank) {
  size_t bytes = SizeOf(dtype);
  for (size_t axis = 0; axis < rank; ++axis) bytes *= static_cast<size_t>(dims[axis]);
  return bytes;
}

}  // namespace

Program::Program(const std::string& platform, size_t inputs, nb::list makers, nb::list slots,
                 nb::list steps, nb::list results)
    : device_(platform == "cuda" ? kDLCUDA : kDLCPU), inputs_(inputs) {
  for (nb::handle maker : makers) makers_.push_back(nb::borrow(maker));
  const size_t sources = inputs_ + makers_.size();
  for (nb::handle given : slots) {
    const auto slot = nb::cast<nb::tuple>(given);
    Slot made{DataTypeOf(nb::cast<std::string>(slot[0])), nb::cast<std::vector<int64_t>>(slot[1]),
              nb::cast<size_t>(slot[2]), nb::cast<size_t>(slot[3]), 0};
    if (made.dtype == XLA_FFI_DataType_INVALID || made.source >= sources)
      throw nb::value_error("Program: a slot has no such dtype or source");
    made.bytes = Bytes(made.dtype, made.dims.data(), made.dims.size());
    slots_.push_back(std::move(made));
  }
  const auto numbers = [](nb::handle given, size_t end) {
    auto listed = nb::cast<std::vector<size_t>>(given);
    if (std::any_of(listed.begin(), listed.end(), [&](size_t i) { return i >= end; }))
      throw nb::value_error("Program: there is no such slot");
    return listed;
  };
  size_t most = 0;
  for (nb::handle given : steps) {
    const auto step = nb::cast<nb::tuple>(given);
    Op op{HandlerOf(nb::cast<nb::str>(step[0]), {device_, 0}), numbers(step[1], slots_.size()),
          numbers(step[2], slots_.size()),
          std::make_unique<Attributes>(nb::cast<nb::dict>(step[3]))};
    buffers_ += op.operands.size() + op.results.size();
    most = std::max({most, op.operands.size(), op.results.size()});
    ops_.push_back(std::move(op));
  }
  for (nb::handle source : results) {
    results_.push_back(source.is_none() ? -1 : nb::cast<int64_t>(source));
    if (results_.back() >= static_cast<int64_t>(sources))
      throw nb::value_error("Program: there is no such source");
  }
  arg_types_.assign(most, XLA_FFI_ArgType_BUFFER);
  ret_types_.assign(most, XLA_FFI_RetType_BUFFER);
}

nb::object Program::Run(nb::args inputs) const {
  if (inputs.size() != inputs_) throw nb::value_error("Program: got another number of inputs");
  const size_t count = inputs_ + makers_.size();
  Common common;
  Short<nb::object> objects(count), owners(count);  // held for the call
  Short<Tensor> sources(count);
  for (size_t i = 0; i < count; ++i) {
    const bool is_input = i < inputs_;
    objects[i] = is_input ? nb::borrow(inputs[i]) : makers_[i - inputs_]();
    const Use use{is_input ? "input" : "output", !is_input, is_input};
    owners[i] = Import(objects[i], use, i, sources[i]);
    common.Add(objects[i], sources[i]);
  }
  if (common.device.device_type != device_)
    throw nb::value_error("Program: the tensors are not on its platform");

  Short<XLA_FFI_Buffer> slots(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const XLA_FFI_Buffer& source = sources[slot.source].buffer;
    const size_t there = Bytes(source.dtype, source.dims, source.rank);
    const bool fits = slot.source < inputs_ ? slot.offset == 0 && slot.bytes == there
                                            : slot.offset + slot.bytes <= there;
    if (!fits || (source.dtype != slot.dtype && source.dtype != XLA_FFI_DataType_U8))
      throw nb::value_error("Program: a tensor is not what the program was made for");
    slots[i] = {XLA_FFI_Buffer_STRUCT_SIZE,
                nullptr,
                slot.dtype,
                static_cast<char*>(source.data) + slot.offset,
                static_cast<int64_t>(slot.dims.size()),
                const_cast<int64_t*>(slot.dims.data())};
  }

  Short<void*> buffers(buffers_);
  Short<Step> steps(ops_.size());
  void** next = buffers.data();
  const auto pointers = [&](const std::vector<size_t>& numbers) {
    void** const first = next;
    for (size_t number : numbers) *next++ = &slots[number];
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
    PyTuple_SET_ITEM(made.ptr(), i, result.release().ptr());
  }
  return made;
}

void DefineProgram(nb::module_& m) {
  nb::class_<Program>(m, "Program", "Ops that follow one another, as one call.")
      .def(nb::init<const std::string&, size_t, nb::list, nb::list, nb::list, nb::list>(),
           nb::arg("platform"), nb::arg("inputs"), nb::arg("makers"), nb::arg("slots"),
           nb::arg("steps"), nb::arg("results"))
      .def("__call__", &Program::Run);
}

}  // namespace qshard::host
