// Parsed rows of ops.def: operands, results and attributes of an op. ops.def documents the
// notation.
#ifndef QSHARD_SCHEMA_PATTERN_H_
#define QSHARD_SCHEMA_PATTERN_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "schema/dtype.h"

namespace qshard {

// Upper bounds per row, so that binding needs no heap.
constexpr int kMaxSymbols = 24, kMaxProducts = 6, kMaxOperands = 16, kMaxAttributes = 16;

// A factor of an axis, or a `*name`. Terms refer to it by its index in the row.
struct Symbol {
  std::string name;
  bool star = false;
  bool local = false;  // in lists only, so its size differs by tensor
  int64_t fixed = -1;  // the size, if the name is a number
  int attribute = -1;  // attribute that gives the size, or number of axes
};

// A term of a pattern: one axis, or several for `*name` and `...`.
struct Term {
  enum Kind { kAxis, kStar, kPrefix };
  Kind kind = kAxis;
  int major = -1;        // symbol of the axis or of `*name`
  int minor = -1;        // symbol of the minor factor of a product
  int product = -1;      // index of the product in the row
  bool partial = false;  // whether its last run may be partial
  bool last = false;     // whether packed codes lie along it
};

struct Attribute {
  enum Kind { kInt, kFloat, kBool, kText, kExtents };
  std::string name;
  Kind kind = kInt;
  double least = -std::numeric_limits<double>::infinity();  // bounds of a number
  double most = std::numeric_limits<double>::infinity();
  std::vector<double> numbers;               // the legal numbers, if listed
  std::vector<std::string> texts;            // the legal strings
  std::vector<const FormatTraits*> formats;  // formats that the strings name, or null
  std::string legal;                         // description for errors
  bool optional = false;                     // if absent: the first string, 0 or false
};

// Legal blocks of an op.
struct BlockRule {
  enum Kind { kNone, kAny, kSquare, kSquareOrWhole, kListed, kAnyOrWhole };
  Kind kind = kNone;
  std::vector<std::pair<int64_t, int64_t>> listed;
  std::string legal;
};

// An operand or result, or a list of them.
struct Operand {
  enum Dtype { kFloat, kByte, kWord, kAny, kSame, kPacked, kNamed, kExact };
  // A list is present if any of its conditions holds, or if it has none.
  struct Condition {
    int attribute;
    std::vector<std::string> texts;  // "true" or "false" for a bool
  };
  std::string name, pattern, dtype_name;
  bool many = false;
  std::vector<Condition> conditions;
  Dtype dtype = kExact;
  DataType exact = XLA_FFI_DataType_INVALID;
  int dtype_attribute = -1;  // attribute that names the dtype
  int alias = -1;            // the result that may share this operand's memory, and vice versa

  // `terms`: axes in memory order. `split_terms`: axes of a split matrix. `operand_order`: axes of
  // a result in the order of the first operand, which is XLA's view of a transposed result.
  std::vector<Term> terms, split_terms, operand_order;
};

struct Row {
  // Parses a row. Throws std::invalid_argument if it is malformed.
  Row(std::string name, std::string_view operands, std::string_view attributes);

  int FindAttribute(std::string_view attribute) const;  // -1 for none

  std::string name, attribute_types;
  std::vector<Operand> inputs, outputs;  // lists come last
  std::vector<Attribute> attributes;     // sorted by name
  std::vector<Symbol> symbols;
  bool many = false;           // whether there are lists
  bool splits = false;         // whether a call may have attribute `split`
  int list_length = -1;        // symbol `n` of an op on lists
  int outer = -1, inner = -1;  // symbols of `*outer` and of the axis after it
  int products = 0;
  int lead = -1, block_rows = -1, block_cols = -1, shared = -1;  // attributes of these names
  BlockRule blocks;
};

// The ops of ops.def, in its order.
enum class Op : size_t {
#define QSHARD_OP(name, ...) name,
#include "ops.def"
#undef QSHARD_OP
};

// Returns the row of an op. The first call parses all rows, and throws std::invalid_argument if one
// is malformed. The module calls it at import.
const Row& RowOf(Op op);

}  // namespace qshard

#endif  // QSHARD_SCHEMA_PATTERN_H_
