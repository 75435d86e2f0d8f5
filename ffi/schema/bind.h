// The binder checks a call, or its shapes while tracing, against the row of its op. All checks of
// shapes, dtypes and attributes are here, for handlers, torch and JAX alike.
//
// A handler's matrices have one of two forms: the axes of their pattern, or with attribute `split`
// the separate factors, major ones first (schema/pattern.cc explains why). Memory is the same in
// both.
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

// Returns the number of elements of a checked buffer.
int64_t Elements(const Buffer& buffer);

// Computes a * b. Returns false if it overflows int64.
inline bool Multiply(int64_t a, int64_t b, int64_t* product) {
  return !__builtin_mul_overflow(a, b, product);
}

// Prints a shape as Python does: (2, 3) or (2,).
struct Shape {
  explicit Shape(const Buffer& buffer) : dims(buffer.dims), rank(buffer.rank) {}
  Shape(const int64_t* d, int64_t r) : dims(d), rank(r) {}
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape);
  const int64_t* dims;
  int64_t rank;
};

// Prints an operand's name: "x", or "x[3]" for a list.
struct Name {
  const Operand& operand;
  int64_t index;
  friend std::ostream& operator<<(std::ostream& out, const Name& name) {
    out << name.operand.name;
    return name.operand.many ? out << '[' << name.index << ']' : out;
  }
};

// The buffers of one side of a call: single ones, then lists back to back.
struct Buffers {
  Buffer* const* data = nullptr;
  int64_t size = 0;
  const Buffer& operator[](int64_t i) const { return *data[i]; }
};

struct AttributeValue {
  int64_t integer;  // size of an array; 0 or 1 for a bool
  union {
    double number;
    const int64_t* integers;
    const FormatTraits* format;  // the format that `text` names, or null
  };
  const char* text_begin;
  size_t text_size;

  std::string_view text() const { return {text_begin, text_size}; }
};

// Sizes of the axes of a buffer.
struct Dims {
  int64_t sizes[kMaxRank], rank = 0;
};

// A factor of an axis that is sharded or kept as a unit: its name, unique in a binding, its size,
// and the number of elements that share a byte.
using Factor = std::tuple<std::string, int64_t, int64_t>;

class Binding {
 public:
  explicit Binding(const Row& row)
      : row_(row) {  // fills only the entries of the row, because every call constructs one
    std::fill_n(sizes_.begin(), row.symbols.size(), -1);
    std::fill_n(star_dims_.begin(), row.symbols.size(), nullptr);
    std::fill_n(lengths_.begin(), row.products, -1);
    std::fill_n(prefixes_.begin(), row.inputs.size(), 0);
  }
  Binding(const Binding&) = delete;

  // Checks a whole call with its memory. Without `rets`, checks shapes and dtypes of operands only.
  Error Bind(const XLA_FFI_Attrs& attributes, Buffers args, const Buffers* rets = nullptr);

  const Row& row() const { return row_; }

  // --- values of a whole call, for kernels ---

  const AttributeValue& attribute(std::string_view name) const;
  // Number of tensors in each list of the op.
  int64_t list_length() const { return list_length_; }
  // Index of operand or result `operand` in its side of the call; -1 for an absent list.
  int64_t ArgBegin(int operand) const { return arg_begins_[operand]; }
  int64_t RetBegin(int output) const { return ret_begins_[output]; }

  // Length of term `term` of the first operand. For `*name`, the product of its axes.
  int64_t Length(int term) const;
  // Size of a product's minor factor.
  int64_t Minor(int term) const { return sizes_[row_.inputs[0].terms[term].minor]; }
  // Number of elements, or blocks, of the first operand per value of `buffer`, a `...` operand.
  int64_t Run(const Operand& operand, const Buffer& buffer) const;

  // --- results of ops on single tensors, for front ends ---

  // Shape of a result, from its pattern.
  Error OutputShape(int output, Dims* dims) const;
  // Dtype of a result. Codes have their element's own dtype, if it exists. `chosen` is used if the
  // op can return any float.
  Error OutputDtype(int output, Buffers args, std::string_view chosen, DataType* dtype) const;
  // Axes of operands, then of results, as factors, major first. Returns whether the row has `split`
  // and all products are whole, so that matrices may be split.
  bool Axes(std::vector<std::vector<std::vector<Factor>>>* buffers) const;

 private:
  Error ReadAttributes(const XLA_FFI_Attrs& attributes);
  Error ReadAttribute(int i, XLA_FFI_AttrType type, const void* value);
  Error CheckBlocks() const;
  Error CheckWholeBlock() const;
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
  // Calls f(symbol, axis of a `*name`, size) for up to `count` major factors of the first operand.
  // Returns the number of calls.
  template <class Fn>
  int64_t ForMajors(int64_t count, Fn&& f) const;

  const Row& row_;
  std::array<AttributeValue, kMaxAttributes> values_;
  std::array<int64_t, kMaxSymbols> sizes_;  // number of axes for a `*name`; -1 while unknown
  std::array<const int64_t*, kMaxSymbols> star_dims_;
  std::array<int64_t, kMaxProducts> lengths_;   // of products; -1 while unknown
  std::array<int64_t, kMaxOperands> prefixes_;  // number of axes of an operand's `...`
  std::array<int64_t, kMaxOperands> arg_begins_, ret_begins_;
  int64_t list_length_ = 0;
  bool split_ = false;
};

}  // namespace qshard

#endif  // QSHARD_SCHEMA_BIND_H_
