// The binder: holds a call, or the shapes of one, against the row of its op. It is the only place
// that checks shapes, dtypes and attributes, whoever asks: a handler, torch, or JAX while tracing.
//
// A handler's matrices come in one of two forms: by their pattern; or, with the attribute `split`,
// as factors with the major ones in front (schema/pattern.cc says why). The memory is the same.
#ifndef QSHARD_SCHEMA_BIND_H_
#define QSHARD_SCHEMA_BIND_H_

#include <algorithm>
#include <array>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "schema/error.h"
#include "schema/pattern.h"
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

// The sizes of the axes of a buffer.
struct Dims {
  int64_t sizes[kMaxRank], rank = 0;
};

// A piece of an axis that is cut or kept as one: its name, unique in a binding, its size, and how
// many of it share a byte.
using Factor = std::tuple<std::string, int64_t, int64_t>;

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

  // Checks a whole call, memory included; without `rets` the shapes and dtypes of its operands.
  Error Bind(const XLA_FFI_Attrs& attributes, Buffers args, const Buffers* rets = nullptr);

  const Row& row() const { return row_; }

  // --- of a whole call: what a kernel needs to know ---

  const AttributeValue& attribute(std::string_view name) const;
  // Of an op on lists: the length of each.
  int64_t list_length() const { return list_length_; }
  // Where in its side operand or result `operand` begins; -1 for a list that is not there.
  int64_t ArgBegin(int operand) const { return arg_begins_[operand]; }
  int64_t RetBegin(int output) const { return ret_begins_[output]; }

  // The length of term `term` of the first operand: of `*name`, all its axes as one.
  int64_t Length(int term) const;
  // The size of a product's minor factor.
  int64_t Minor(int term) const { return sizes_[row_.inputs[0].terms[term].minor]; }
  // How many elements, or blocks, of the first operand share a number of what `buffer`, `...`, has.
  int64_t Run(const Operand& operand, const Buffer& buffer) const;

  // --- of an op on single tensors ---

  // The shape of a result, by its pattern.
  Error OutputShape(int output, Dims* dims) const;
  // Of codes, the element's own, if it has one. `chosen`: where the op can give any float.
  Error OutputDtype(int output, Buffers args, std::string_view chosen, DataType* dtype) const;
  // The axes of operands, then of results: of each its factors, major first. Gives whether all
  // products are whole, so that matrices may be split.
  bool Axes(std::vector<std::vector<std::vector<Factor>>>* buffers) const;

 private:
  Error ReadAttributes(const XLA_FFI_Attrs& attributes);
  Error ReadAttribute(int i, XLA_FFI_AttrType type, const void* value);
  Error CheckBlocks() const;
  Error CountBuffers(Buffers args, const Buffers* rets);
  bool IsThere(const Operand& operand) const {
    return operand.conditions.empty() || MeetsCondition(operand);
  }
  bool MeetsCondition(const Operand& operand) const;
  Error BindBuffers(bool many, int64_t index, Buffers args, const Buffers* rets);
  bool Accepts(const Operand& operand, DataType dtype, DataType same) const;
  Error CheckDtype(const Operand& operand, int64_t index, const Buffer& buffer,
                   const Buffer& first) const;
  Error CheckBuffer(const Operand& operand, int64_t index, const Buffer& buffer, bool memory) const;
  Error CheckOverlaps(Buffers args, Buffers rets) const;
  Error BindBuffer(int operand, int64_t index, const Buffer& buffer);
  Error BindOne(const Operand& operand, int64_t index, const Buffer& buffer, const Term& term,
                int64_t size);
  Error CheckResult(const Operand& output, int64_t index, const Buffer& buffer) const;
  Error ShapeOf(const Operand& output, const std::vector<Term>& terms, Dims* dims) const;

  int64_t Lead() const { return row_.lead < 0 ? 0 : values_[row_.lead].integer; }
  int64_t PerByte(const Operand& operand) const;
  int64_t LengthOfProduct(const Term& term) const;
  // Calls f(symbol, axis of a `*name`, size) for the major factors of the first operand, up to
  // `count` of them, and says how many there were.
  template <class Fn>
  int64_t ForMajors(int64_t count, Fn&& f) const;

  const Row& row_;
  std::array<AttributeValue, kMaxAttributes> values_;
  std::array<int64_t, kMaxSymbols> sizes_;  // of a `*name` how many axes; -1 while unknown
  std::array<const int64_t*, kMaxSymbols> star_dims_;
  std::array<int64_t, kMaxProducts> lengths_;   // of products; -1 while unknown
  std::array<int64_t, kMaxOperands> prefixes_;  // how many axes `...` of an operand is
  std::array<int64_t, kMaxOperands> arg_begins_, ret_begins_;
  int64_t list_length_ = 0;
  bool split_ = false;
};

}  // namespace qshard

#endif  // QSHARD_SCHEMA_BIND_H_
