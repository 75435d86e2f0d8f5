// What ops on lists of tensors are made of: one handler call, and a constant number of launches,
// for all weights of a model.
//
// ops.def writes a list as `x[]`. Single buffers come first, then the lists one after the other,
// each of the same length, as XLA's remaining arguments; results likewise. A list that attributes
// make optional is left out as a whole. Every result is an operand, changed in place: XLA and the
// host give both the same memory.
#ifndef QSHARD_CORE_MULTI_OP_H_
#define QSHARD_CORE_MULTI_OP_H_

#include <vector>

#include "core/op.h"

namespace qshard {

using xla::ffi::RemainingArgs;
using xla::ffi::RemainingRets;
using xla::ffi::Span;

using BufferList = std::vector<AnyBuffer>;

// Reads the lists of a call: `count` lists of equal length.
inline Error ListsOf(const char* op, const RemainingArgs& args, size_t count,
                     std::vector<BufferList>* lists) {
  QSHARD_REQUIRE(args.size() % count == 0, op, ": lists (", args.size(),
                 " tensors in all) are not ", count, " of equal length; give each tensor its own");
  const size_t length = args.size() / count;
  lists->resize(count);
  for (size_t l = 0; l < count; ++l) {
    (*lists)[l].reserve(length);
    for (size_t i = 0; i < length; ++i) {
      auto buffer = args.get<AnyBuffer>(l * length + i);
      if (buffer.has_error()) return buffer.error();
      (*lists)[l].push_back(*buffer);
    }
  }
  return Error::Success();
}

inline Error CheckInPlace(const char* op, const char* argument, const AnyBuffer& operand,
                          const AnyBuffer& result) {
  QSHARD_REQUIRE(operand.untyped_data() == result.untyped_data() &&
                     operand.element_type() == result.element_type() &&
                     SameShape(operand.dimensions(), result.dimensions()),
                 op, ": ", argument, " ", Shape(result),
                 " is not the memory of its operand; alias the two");
  return Error::Success();
}

// Checks that the results from `first` on are the tensors of `list`, in place.
inline Error CheckInPlace(const char* op, const char* argument, const BufferList& list,
                          const RemainingRets& rets, size_t first = 0) {
  QSHARD_REQUIRE(rets.size() >= first + list.size(), op, ": results (", rets.size(),
                 ") are not one for each of the ", list.size(), " tensors of ", argument);
  for (size_t i = 0; i < list.size(); ++i) {
    auto result = rets.get<AnyBuffer>(first + i);
    if (result.has_error()) return result.error();
    QSHARD_RETURN_IF_ERROR(CheckInPlace(op, argument, list[i], **result));
  }
  return Error::Success();
}

}  // namespace qshard

#endif  // QSHARD_CORE_MULTI_OP_H_
