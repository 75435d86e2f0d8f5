#include "host/program.h"

#include <nanobind/stl/string.h>
#include <pthread.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "host/small_array.h"
#include "schema/bind.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

constexpr int64_t kAny = INT64_MAX;

using Programs = std::map<std::string, std::shared_ptr<const Program>, std::less<>>;

std::mutex mutex;                    // of the programs
Programs& programs = *new Programs;  // never deleted: other threads may call at exit

// Without this, a forked child could wait forever for a mutex that another thread of its parent had
// locked.
const bool registered [[maybe_unused]] =
    pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); }) == 0;

// Computes the size of a buffer in bytes. Returns false if it overflows int64 or a dimension is
// negative.
bool Bytes(DataType dtype, const int64_t* dims, size_t rank, int64_t* bytes) {
  *bytes = SizeOf(dtype);
  for (size_t axis = 0; axis < rank; ++axis)
    if (dims[axis] < 0 || !Multiply(*bytes, dims[axis], bytes)) return false;
  return true;
}

[[noreturn]] void Refuse(const std::string& what) {
  throw std::invalid_argument("run_program: " + what);
}

// Returns a list of a JSON object.
nb::list ListOf(nb::handle given, const char* what) {
  if (!PyList_Check(given.ptr())) Refuse(std::string(what) + " is not a list");
  return nb::borrow<nb::list>(given);
}

nb::list ListOf(nb::handle given, size_t size, const char* what) {
  nb::list list = ListOf(given, what);
  if (list.size() != size) Refuse(std::string(what) + " does not have its items");
  return list;
}

// Converts to an int in [0, end).
int64_t NumberOf(nb::handle given, int64_t end, const char* what) {
  int overflow = 0;
  const int64_t number =
      PyLong_Check(given.ptr()) ? PyLong_AsLongLongAndOverflow(given.ptr(), &overflow) : -1;
  if (overflow != 0 || number < 0 || number >= end) Refuse(std::string(what) + " is out of range");
  return number;
}

std::vector<int64_t> NumbersOf(nb::handle given, int64_t end, const char* what) {
  std::vector<int64_t> numbers;
  for (nb::handle number : ListOf(given, what)) numbers.push_back(NumberOf(number, end, what));
  return numbers;
}

DataType DtypeNamed(nb::handle given) {
  const DataType dtype = PyUnicode_Check(given.ptr()) ? DataTypeOf(nb::cast<std::string>(given))
                                                      : XLA_FFI_DataType_INVALID;
  if (dtype == XLA_FFI_DataType_INVALID) Refuse("a dtype is none of qshard's");
  return dtype;
}

std::shared_ptr<const Program> Parse(std::string_view text) {
  try {
    std::string quoted(text);
    std::replace(quoted.begin(), quoted.end(), '\'', '"');
    const nb::object json =
        nb::module_::import_("json").attr("loads")(nb::str(quoted.data(), quoted.size()));
    if (!PyDict_Check(json.ptr())) Refuse("the text is not a JSON object");
    // The last owner may be a kernel that does not hold the GIL, which attributes need.
    return {new Program(nb::borrow<nb::dict>(json)), [](const Program* program) {
              nb::gil_scoped_acquire gil;
              delete program;
            }};
  } catch (nb::python_error& error) {
    Refuse(error.what());
  } catch (const nb::builtin_exception& error) {
    Refuse(error.what());
  } catch (const nb::cast_error& error) {
    Refuse(error.what());
  }
}

}  // namespace

std::shared_ptr<const Program> Program::Of(std::string_view text) {
  constexpr size_t kMost = 4096;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const auto found = programs.find(text); found != programs.end()) return found->second;
  }
  nb::gil_scoped_acquire gil;
  std::shared_ptr<const Program> made = Parse(text);
  Programs dropped;  // deleted after the lock is released, because that may run Python
  const std::lock_guard<std::mutex> lock(mutex);
  if (programs.size() >= kMost) dropped.swap(programs);
  return programs.emplace(text, std::move(made)).first->second;
}

Program::Program(nb::dict description) {
  const auto platform = nb::cast<std::string>(description["platform"]);
  if (platform != "cpu" && platform != "cuda") Refuse("platform is not cpu or cuda");
  device_type_ = platform == "cuda" ? kDLCUDA : kDLCPU;
  constexpr int64_t kMostInputs = 1 << 16;
  inputs_ = static_cast<size_t>(NumberOf(description["inputs"], kMostInputs, "inputs"));
  scratch_ = NumberOf(description["scratch"], kAny, "scratch");
  for (nb::handle given : ListOf(description["outputs"], "outputs")) {
    const nb::list output = ListOf(given, 2, "an output");
    outputs_.push_back(
        {DtypeNamed(output[0]), NumbersOf(output[1], kAny, "the shape of an output")});
    if (outputs_.back().dims.size() > kMaxRank) Refuse("an output has too many axes");
  }
  for (nb::handle given : ListOf(description["slots"], "slots")) {
    const nb::list slot = ListOf(given, 4, "a slot");
    Slot made{DtypeNamed(slot[0]), NumbersOf(slot[1], kAny, "the shape of a slot"),
              NumberOf(slot[2], static_cast<int64_t>(sources()), "the source of a slot"),
              NumberOf(slot[3], kAny, "the first byte of a slot"), 0};
    if (!Bytes(made.dtype, made.dims.data(), made.dims.size(), &made.bytes))
      Refuse("a slot is larger than memory");
    slots_.push_back(std::move(made));
  }
  size_t most = 0;
  for (nb::handle given : ListOf(description["steps"], "steps")) {
    const nb::list step = ListOf(given, 4, "a step");
    const auto end = static_cast<int64_t>(slots_.size());
    RecordedOp op{HandlerOf(nb::cast<nb::str>(step[0]), {device_type_, 0}),
                  NumbersOf(step[1], end, "an operand"), NumbersOf(step[2], end, "a result"),
                  std::make_unique<Attributes>(nb::cast<nb::dict>(step[3]))};
    for (int64_t slot : op.results)
      if (slots_[slot].source < static_cast<int64_t>(inputs_)) Refuse("a step writes to an input");
    buffers_ += op.operands.size() + op.results.size();
    most = std::max({most, op.operands.size(), op.results.size()});
    ops_.push_back(std::move(op));
  }
  arg_types_.assign(most, XLA_FFI_ArgType_BUFFER);
  ret_types_.assign(most, XLA_FFI_RetType_BUFFER);
}

std::optional<Failure> Program::Run(DLDevice device, void* stream,
                                    const XLA_FFI_Buffer* const* sources) const {
  SmallArray<XLA_FFI_Buffer> slots(slots_.size());
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const XLA_FFI_Buffer& source = *sources[slot.source];
    int64_t there;
    bool fits = Bytes(source.dtype, source.dims, source.rank, &there) && slot.bytes <= there;
    fits = fits &&
           (slot.source < static_cast<int64_t>(inputs_) ? slot.offset == 0 && slot.bytes == there
                                                        : slot.offset <= there - slot.bytes);
    if (!fits || (source.dtype != slot.dtype && source.dtype != XLA_FFI_DataType_U8))
      Refuse("a tensor does not have the shape or dtype that the program was recorded for");
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
    const RecordedOp& op = ops_[i];
    steps[i] = {op.handler,
                {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(op.operands.size()),
                 const_cast<XLA_FFI_ArgType*>(arg_types_.data()), pointers(op.operands)},
                {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(op.results.size()),
                 const_cast<XLA_FFI_RetType*>(ret_types_.data()), pointers(op.results)},
                op.attributes->Get()};
  }
  return RunOn(device, stream, steps.data(), ops_.size());
}

}  // namespace qshard::host
