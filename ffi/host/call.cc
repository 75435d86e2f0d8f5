#include "host/call.h"

#include <vector>

#include "host/attributes.h"
#include "host/run.h"
#include "host/small_array.h"
#include "host/tensor.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

// Inputs or outputs of one call. `Type` is the C API's enum for buffers.
template <class Type>
struct Side {
  // Copies the sequence into a tuple, which keeps tensors alive even if another thread changes the
  // sequence.
  Side(nb::sequence given, const Access& access, Type buffer, SharedProperties* shared)
      : objects(nb::steal<nb::tuple>(PySequence_Tuple(given.ptr()))),
        size(nb::len(objects)),
        tensors(size),
        pointers(size),
        types(size) {
    for (size_t i = 0; i < size; ++i) {
      const nb::handle object = NB_TUPLE_GET_ITEM(objects.ptr(), i);
      Tensor& t = tensors[i];
      nb::object owner = Import(object, access, i, t);
      if (owner.is_valid()) owners.push_back(std::move(owner));
      shared->Add(object, t);
      pointers[i] = &t.buffer;
      types[i] = buffer;
    }
  }
  Side(const Side&) = delete;

  nb::tuple objects;
  std::vector<nb::object> owners;  // keep imported memory alive for the call
  size_t size;
  SmallArray<Tensor> tensors;
  SmallArray<void*> pointers;
  SmallArray<Type> types;
};

}  // namespace

void Call(nb::str op, nb::sequence inputs, nb::sequence outputs, nb::dict attributes,
          bool refuse_negated) {
  SharedProperties shared;
  Side<XLA_FFI_ArgType> args(inputs, {"input", /*writable=*/false, refuse_negated},
                             XLA_FFI_ArgType_BUFFER, &shared);
  Side<XLA_FFI_RetType> rets(outputs, {"output", /*writable=*/true, refuse_negated},
                             XLA_FFI_RetType_BUFFER, &shared);
  Attributes attrs(attributes);
  const Step step{HandlerOf(op, shared.device),
                  {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size),
                   args.types.data(), args.pointers.data()},
                  {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size),
                   rets.types.data(), rets.pointers.data()},
                  attrs.Get()};
  Run(shared, &step, 1);
}

}  // namespace qshard::host
