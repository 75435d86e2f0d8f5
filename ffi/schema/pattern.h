// A row of ops.def, parsed: what an op takes and gives. ops.def says how rows are written.
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

// What a row may have, so that binding one needs no heap.
constexpr int kMaxSymbols = 24, kMaxProducts = 6, kMaxOperands = 16, kMaxAttributes = 16;

// A factor of an axis, or a `*name`, by its index in a row.
struct Symbol {
  std::string name;
  bool star = false;
  bool local = false;  // of lists alone: it is another one for each tensor
  int64_t fixed = -1;  // the size, if it is a number
  int attribute = -1;  // that gives the size, or the number of axes
};

// One axis of a pattern, or several.
struct Term {
  enum Kind { kAxis, kStar, kPrefix };
  Kind kind = kAxis;
  int major = -1;     // of an axis; the `*name` itself
  int minor = -1;     // of an axis that is a product
  int product = -1;   // which one it is, of those of the row
  bool cut = false;   // whether its last run may be cut short
  bool last = false;  // whether codes that share a byte lie along it
};

struct Attribute {
  enum Kind { kInt, kFloat, kBool, kText, kExtents };
  std::string name;
  Kind kind = kInt;
  double least = -std::numeric_limits<double>::infinity();  // of a number
  double most = std::numeric_limits<double>::infinity();
  std::vector<double> numbers;               // the only ones that are legal, if there are any
  std::vector<std::string> texts;            // likewise
  std::vector<const FormatTraits*> formats;  // that they name, or null
  std::string legal;                         // in words
  bool optional = false;                     // left out, it is the first text, 0 or false
};

// Which blocks an op takes.
struct BlockRule {
  enum Kind { kNone, kAny, kSquare, kListed, kAnyOrWhole };
  Kind kind = kNone;
  std::vector<std::pair<int64_t, int64_t>> listed;
  std::string legal;
};

// One operand or result, or a list of them.
struct Operand {
  enum Dtype { kFloat, kByte, kWord, kAny, kSame, kPacked, kNamed, kExact };
  // It is there if one of these attributes has one of the values; or always, if there is none.
  struct Condition {
    int attribute;
    std::vector<std::string> texts;  // a bool is "true" or "false"
  };
  std::string name, pattern, dtype_name;
  bool many = false;
  std::vector<Condition> conditions;
  Dtype dtype = kExact;
  DataType exact = XLA_FFI_DataType_INVALID;
  int dtype_attribute = -1;  // that names the dtype
  int alias = -1;            // the result that may be this operand, and the other way round

  // The axes as they lie in memory; of a matrix that is split; and of a result in the order of the
  // first operand, which is how XLA sees one that lies transposed.
  std::vector<Term> terms, split_terms, operand_order;
};

struct Row {
  // Throws std::invalid_argument, for a row that is not well written.
  Row(std::string name, std::string_view operands, std::string_view attributes);

  int FindAttribute(std::string_view attribute) const;  // -1 for none

  std::string name, attribute_types;
  std::vector<Operand> inputs, outputs;  // lists come last
  std::vector<Attribute> attributes;     // by name
  std::vector<Symbol> symbols;
  bool many = false;           // whether there are lists
  bool splits = false;         // whether a call may have the attribute `split`
  int list_length = -1;        // the symbol `n` of an op on lists
  int outer = -1, inner = -1;  // the symbols `*outer`, and of the axis that follows it
  int products = 0;
  int lead = -1, block_rows = -1, block_cols = -1, shared = -1;  // the attributes of these names
  BlockRule blocks;
};

// The ops of ops.def, in its order.
enum class Op : size_t {
#define QSHARD_OP(name, ...) name,
#include "ops.def"
#undef QSHARD_OP
};

// The row of an op. The first call parses all rows, and throws std::invalid_argument if one is not
// well written; the module makes it when it is imported.
const Row& RowOf(Op op);

}  // namespace qshard

#endif  // QSHARD_SCHEMA_PATTERN_H_
