// The binder: holds a call, or the shapes of one, against the row of its op. It is the only place
// that checks shapes, dtypes and attributes, whoever asks: a handler, torch, or JAX while tracing.
//
// A handler's matrices come in one of two forms, told by the attribute `split`: by their pattern,
// or as factors with the major ones in front (core/pattern.cc says why). The memory is the same.
#ifndef QSHARD_CORE_BIND_H_
#define QSHARD_CORE_BIND_H_

#include <algorithm>
#include <array>
#include <ostream>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/pattern.h"
#include "xla/ffi/api/c_api.h"

namespace qshard {

constexpr int kMaxRank = 64;

using Buffer = XLA_FFI_Buffer;

// How many numbers a buffer that was checked has.
int64_t Elements(const Buffer& buffer);

// False if the product does not fit an int64.
inline bool Multiply(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}
inline int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Prints as (2, 3), and as Python does (2,).
struct Shape {
  explicit Shape(const Buffer& buffer) : dims(buffer.dims), rank(buffer.rank) {}
  Shape(const int64_t* d, int64_t r) : dims(d), rank(r) {}
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape);
  const int64_t* dims;
  int64_t rank;
};

// "x", or of a list "x[3]".
struct Name {
  const Operand& operand;
  int64_t index;
  friend std::ostream& operator<<(std::ostream& out, const Name& name) {
    out << name.operand.name;
    return name.operand.many ? out << '[' << name.index << ']' : out;
  }
};

// The buffers of one side of a call, in order: single ones, then lists one after the other.
struct Buffers {
  Buffer* const* data = nullptr;
  int64_t size = 0;
  const Buffer& operator[](int64_t i) const { return *data[i]; }
};

struct AttributeValue {
  int64_t integer;  // of an array, how many; of a bool, 0 or 1
  union {
    double number;
    const int64_t* integers;
    const FormatTraits* format;  // that `text` names, or null
  };
  const char* text_begin;
  size_t text_size;

  std::string_view text() const { return {text_begin, text_size}; }
};

// An extent of a result as it follows from one of an operand:
// ceil(dims(operand)[axis] * times / run) * size / per_byte. Without one, `operand` is -1, and it
// is size / per_byte.
struct Extent {
  int operand = -1, axis = 0;
  int64_t times = 1, run = 1, size = 1, per_byte = 1;
};

// A piece of an axis that is cut or kept as one. Names are unique in a binding.
struct Factor {
  std::string name;
  int64_t size;
};

class Binding {
 public:
  explicit Binding(const Row& row)
      : row_(row) {  // Fills no more than the row needs: it is on every call's way.
    std::fill_n(sizes_.begin(), row.symbols.size(), -1);
    std::fill_n(star_dims_.begin(), row.symbols.size(), nullptr);
    std::fill_n(lengths_.begin(), row.products, -1);
    std::fill_n(prefixes_.begin(), row.inputs.size(), 0);
  }
  Binding(const Binding&) = delete;

  // Checks a whole call, memory included.
  Error Bind(const XLA_FFI_Attrs& attributes, Buffers args, Buffers rets);

  // Binds the shapes and dtypes of operands alone, by their patterns. `attributes` may lack
  // `split`, and have the numbers of axes that shapes leave open: by name, of a result's `...` as
  // "lead".
  Error BindShapes(const XLA_FFI_Attrs& attributes, Buffers args);

  // Binds shapes alone, with those of the attributes that matter to them.
  Error BindAxes(const XLA_FFI_Attrs& attributes, Buffers args);

  const Row& row() const { return row_; }

  // --- after Bind: what a kernel needs to know ---

  const AttributeValue& attribute(std::string_view name) const;
  // Of an op on lists: the length of each.
  int64_t list_length() const { return list_length_; }
  // Whether the list that is operand or result `operand` is there, and where in its side it begins.
  int64_t ArgBegin(int operand) const { return arg_begins_[operand]; }
  int64_t RetBegin(int output) const { return ret_begins_[output]; }

  // The length of term `term` of the first operand: of `*name`, all its axes as one.
  int64_t Length(int term) const;
  // The size of a product's minor factor.
  int64_t Minor(int term) const { return sizes_[row_.inputs[0].terms[term].minor]; }
  // How many elements, or blocks, of the first operand share a number of what `buffer`, `...`, has.
  int64_t Run(const Operand& operand, const Buffer& buffer) const;

  // --- after BindShapes, of an op on single tensors ---

  // Whether products can be split into their factors.
  bool splits() const;
  // The sizes of the axes of a result.
  Error OutputShape(int output, int64_t (*dims)[kMaxRank], int64_t* rank) const;
  // Of codes, the element's own, if it has one. `chosen`: where the op can give any float.
  Error OutputDtype(int output, Buffers args, std::string_view chosen, DataType* dtype) const;

  // The same as extents of operands, for sizes that are symbols.
  std::vector<Extent> OutputExtents(int output) const;
  // The axes of an operand or result as factors, major first. Products that are not split are one
  // factor, or the major one where blocks have length 1; but only if no product comes before:
  // factors that buffers share lead, and the order may not change.
  std::vector<std::vector<Factor>> Axes(const Operand& operand, int64_t prefix, bool split) const;
  // How many axes `...` of an operand is.
  int64_t Prefix(int operand) const { return prefixes_[operand]; }
  int64_t lead() const { return lead_; }

 private:
  enum class Mode { kCall, kShapes, kAxes };
  Error ReadAttributes(const XLA_FFI_Attrs& attributes, Mode mode);
  Error ReadAttribute(int i, XLA_FFI_AttrType type, void* value);
  Error CheckBlocks() const;
  Error BindBuffers(Buffers args, const Buffers* rets, Mode mode);
  Error BindOperands(const XLA_FFI_Attrs& attributes, Buffers args, Mode mode);
  int64_t PerByte(const Operand& operand) const;
  int64_t LengthOfProduct(const Term& term) const;
  bool IsThere(const Operand& operand) const {
    return operand.conditions.empty() || MeetsCondition(operand);
  }
  bool MeetsCondition(const Operand& operand) const;
  Error CountBuffers(Buffers args, const Buffers* rets);
  Error CheckBuffer(const Operand& operand, int64_t index, const Buffer& buffer, bool memory) const;
  Error CheckDtype(const Operand& operand, int64_t index, const Buffer& buffer,
                   const Buffer& first) const;
  bool Accepts(const Operand& operand, DataType dtype, DataType same) const;
  void FindOpenAxes(Buffers rets);
  Error BindBuffer(int operand, int64_t index, const Buffer& buffer);
  Error BindOne(const Operand& operand, int64_t index, const Buffer& buffer, const Term& term,
                int64_t size);
  Error CheckResult(const Operand& output, int64_t index, const Buffer& buffer) const;
  bool Expand(const Operand& output, const std::vector<Term>& terms, int64_t prefix,
              int64_t (*dims)[kMaxRank], int64_t* rank) const;
  Error CheckOverlaps(Buffers args, Buffers rets) const;

  // The major factors of the first operand's axes: calls f(size) of each, until it is false.
  template <class Fn>
  void ForMajors(Fn&& f) const;

  const Row& row_;
  std::array<AttributeValue, kMaxAttributes> values_;
  std::array<int64_t, kMaxSymbols> sizes_;  // of a `*name` how many axes; -1 while unknown
  std::array<const int64_t*, kMaxSymbols> star_dims_;
  std::array<int64_t, kMaxProducts> lengths_;  // of products; -1 while unknown
  std::array<int64_t, kMaxOperands> prefixes_;
  std::array<int64_t, kMaxOperands> arg_begins_, ret_begins_;  // -1 for a list that is not there
  int64_t list_length_ = 0, lead_ = 0;
  bool split_ = false;
};

}  // namespace qshard

#endif  // QSHARD_CORE_BIND_H_
