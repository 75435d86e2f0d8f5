#include "schema/pattern.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <stdexcept>
#include <tuple>

namespace qshard {
namespace {

using Texts = std::vector<std::string>;

std::string_view Strip(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

Texts Split(std::string_view text, std::string_view separator) {
  Texts parts;
  if (Strip(text).empty()) return parts;
  for (;;) {
    const size_t end = text.find(separator);
    parts.emplace_back(Strip(text.substr(0, end)));
    if (end == text.npos) return parts;
    text.remove_prefix(end + separator.size());
  }
}

// Splits at the first separator. Without one, returns the whole text and "".
std::pair<std::string, std::string> SplitOnce(std::string_view text, std::string_view separator) {
  const size_t end = text.find(separator);
  if (end == text.npos) return {std::string(Strip(text)), ""};
  return {std::string(Strip(text.substr(0, end))),
          std::string(Strip(text.substr(end + separator.size())))};
}

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

bool IsNumber(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(),
                                      [](unsigned char c) { return std::isdigit(c) != 0; });
}

std::string Join(const Texts& texts, const char* between) {
  std::string joined;
  for (const std::string& text : texts) joined += (joined.empty() ? "" : between) + text;
  return joined;
}

// Parser of one row.
class Parser {
 public:
  explicit Parser(Row* row) : row_(*row) {}

  void Check(bool condition, std::string_view what) const {
    if (!condition) throw std::invalid_argument("ops.def: " + row_.name + ": " + std::string(what));
  }

  // --- attributes ---

  void AddAttributes(std::string_view text) {
    for (const std::string& part : Split(text, ",")) {
      row_.splits |= part == "split";
      if (part == "split") continue;
      const auto [name, type] = SplitOnce(part, ":");
      Check(!type.empty(), part + " has no type");
      if (name == "block")
        AddBlocks(type);
      else
        row_.attributes.push_back(ParseAttribute(name, type));
    }
    auto& all = row_.attributes;
    std::sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.name < b.name; });
    Check(all.size() <= kMaxAttributes, "too many attributes");
    row_.lead = row_.FindAttribute("lead");
    row_.shared = row_.FindAttribute("shared");
    row_.block_rows = row_.FindAttribute("block_rows");
    row_.block_cols = row_.FindAttribute("block_cols");
  }

  void AddBlocks(const std::string& type) {
    BlockRule& rule = row_.blocks;
    rule.legal = "of positive size";
    if (type == "any") {
      rule.kind = BlockRule::kAny;
    } else if (type == "square") {
      rule.kind = BlockRule::kSquare;
      rule.legal = "square, and of positive size";
    } else if (type == "square or whole") {
      rule.kind = BlockRule::kSquareOrWhole;
      rule.legal = "square or the whole matrix, and of positive size";
    } else if (type == "any or whole") {
      rule.kind = BlockRule::kAnyOrWhole;
      rule.legal = "of positive size, or 0x0 for the whole weight";
    } else {
      rule.kind = BlockRule::kListed;
      const Texts listed = Split(type, "|");
      rule.legal = Join(listed, " or ");
      for (const std::string& block : listed) {
        const auto [rows, cols] = SplitOnce(block, "x");
        Check(IsNumber(rows) && IsNumber(cols), block + " is not a block");
        rule.listed.emplace_back(std::atoll(rows.c_str()), std::atoll(cols.c_str()));
      }
    }
    for (const char* name : {"block_cols", "block_rows"})  // so that their product fits in int64
      row_.attributes.push_back(ParseAttribute(name, "int ..2147483647"));
  }

  Attribute ParseAttribute(const std::string& name, const std::string& type) const {
    Attribute a;
    a.name = name;
    const auto [kind, range] = SplitOnce(type, " ");
    if (kind == "axis") {
      a.optional = true;
      a.least = 0;
      a.most = 64;  // more than any buffer has
      a.legal = "a number of axes";
    } else if (kind == "int" || kind == "float") {
      a.kind = kind == "int" ? Attribute::kInt : Attribute::kFloat;
      SetNumbers(range, &a);
    } else if (kind == "bool" || kind == "bool?") {
      a.kind = Attribute::kBool;
      a.optional = kind.back() == '?';
    } else if (kind == "extents") {
      a.kind = Attribute::kExtents;
    } else {
      a.kind = Attribute::kText;
#define QSHARD_NAME(member, F) F::member,
      if (type == "fp8")
        a.texts = {QSHARD_FOR_EACH_FP8(QSHARD_NAME, kName)};
      else if (type == "element")
        a.texts = {QSHARD_FOR_EACH_ELEMENT(QSHARD_NAME, kName)};
      else if (type == "code")
        a.texts = {QSHARD_FOR_EACH_CODE(QSHARD_NAME, kName)};
      else if (a.optional = type.back() == '?'; a.optional)
        a.texts = Split(type.substr(0, type.size() - 1), "|");
      else
        a.texts = Split(type, "|");
#undef QSHARD_NAME
      for (const std::string& text : a.texts) a.formats.push_back(FindFormat(text));
      a.legal = "one of " + Join(a.texts, ", ");
    }
    return a;
  }

  void SetNumbers(const std::string& range, Attribute* a) const {
    if (range.empty()) {
      a->legal = "a number";
    } else if (range.find("..") == range.npos) {
      const Texts numbers = Split(range, "|");
      for (const std::string& number : numbers) a->numbers.push_back(std::atof(number.c_str()));
      a->legal = (numbers.size() > 1 ? "one of " : "") + Join(numbers, ", ");
    } else {
      const auto [least, most] = SplitOnce(range, "..");
      if (!least.empty()) a->least = std::atof(least.c_str());
      if (!most.empty()) a->most = std::atof(most.c_str());
      a->legal = most.empty()    ? "at least " + least
                 : least.empty() ? "at most " + most
                                 : "from " + least + " to " + most;
    }
  }

  // --- operands ---

  void AddOperands(std::string_view text) {
    const Texts sides = Split(text, "->");
    Check(sides.size() == 2, "operands and results are not two sides");
    for (int side = 0; side < 2; ++side) {
      auto& operands = side == 0 ? row_.inputs : row_.outputs;
      for (const std::string& part : Split(sides[side], ",")) {
        const bool after_list = !operands.empty() && operands.back().many;
        operands.push_back(ParseOperand(part));
        Check(operands.back().many || !after_list, "lists do not come last");
        row_.many |= operands.back().many;
      }
    }
    Check(!row_.inputs.empty() && row_.inputs.size() + row_.outputs.size() <= kMaxOperands,
          "too many operands, or none");
    Check(row_.symbols.size() <= kMaxSymbols && row_.products <= kMaxProducts, "too many factors");
    for (size_t r = 0; r < row_.outputs.size(); ++r)
      for (size_t i = 0; i < row_.inputs.size(); ++i) {
        if (row_.inputs[i].name != row_.outputs[r].name) continue;
        row_.outputs[r].alias = static_cast<int>(i);
        row_.inputs[i].alias = static_cast<int>(r);
      }
  }

  Operand ParseOperand(std::string_view text) {
    auto [name, kind] = SplitOnce(text, ":");
    Operand o;
    o.many = EndsWith(name, "[]");
    if (o.many) name.resize(name.size() - 2);
    if (kind.empty()) {
      for (const Operand& operand : row_.inputs)
        if (operand.name == name && operand.many == o.many) return operand;
      Check(false, name + " has no dtype");
    }
    const auto [buffer, condition] = SplitOnce(kind, " if ");
    Check(condition.empty() || o.many, "a condition is for lists");
    for (const std::string& clause : Split(condition, " or ")) {
      const auto [attribute, values] = SplitOnce(clause, "=");
      o.conditions.push_back({row_.FindAttribute(attribute), Split(values, "|")});
      Check(o.conditions.back().attribute >= 0, clause + " names no attribute");
    }
    o.name = name;
    std::tie(o.dtype_name, o.pattern) = SplitOnce(buffer, " ");
    ParseTerms(o.pattern, &o);
    SetDtype(o.dtype_name, &o);
    return o;
  }

  void SetDtype(const std::string& name, Operand* o) const {
    constexpr const char* kClasses[] = {"float", "byte", "word", "any", "same", "packed"};
    for (int i = Operand::kFloat; i <= Operand::kPacked; ++i)
      if (name == kClasses[i]) o->dtype = static_cast<Operand::Dtype>(i);
    o->exact = DataTypeOf(name);
    if (o->dtype != Operand::kExact || o->exact != XLA_FFI_DataType_INVALID) return;
    o->dtype = Operand::kNamed;
    o->dtype_attribute = row_.FindAttribute(name == "code"    ? "element"
                                            : name == "scale" ? "scale_dtype"
                                                              : name);
    Check(o->dtype_attribute >= 0, name + " is no dtype");
  }

  void ParseTerms(std::string_view text, Operand* o) {
    while (!(text = Strip(text)).empty()) {
      Term term;
      const size_t end = text.front() == '(' ? text.find(')') + 1 : text.find(' ');
      std::string_view token = text.substr(0, end);
      text.remove_prefix(token.size());
      if (token == "...") {
        term.kind = Term::kPrefix;
      } else if (token.front() == '*') {
        term.kind = Term::kStar;
        term.major = SymbolOf(token.substr(1), true);
      } else if (token.front() == '(') {
        const Texts factors = Split(token.substr(1, token.size() - 2), " ");
        Check(factors.size() == 2, "a product is not of two factors");
        std::string_view minor = factors[1];
        term.partial = EndsWith(minor, "?");
        if (term.partial) minor.remove_suffix(1);
        term.major = SymbolOf(factors[0], false);
        term.minor = SymbolOf(minor, false);
        term.product = ProductOf(term.major, term.minor);
      } else {
        term.major = SymbolOf(token, false);
      }
      o->terms.push_back(term);
    }
    if (!o->terms.empty() && o->terms.back().kind == Term::kAxis) o->terms.back().last = true;
  }

  // A number is a size and not a name, so equal numbers are separate factors.
  int SymbolOf(std::string_view name, bool star) {
    auto& symbols = row_.symbols;
    const bool number = IsNumber(name);
    for (size_t i = 0; !number && i < symbols.size(); ++i)
      if (symbols[i].name == name && symbols[i].star == star) return static_cast<int>(i);
    Symbol s;
    s.name = name;
    s.star = star;
    if (number) s.fixed = std::atoll(s.name.c_str());
    s.attribute = number ? -1 : row_.FindAttribute(name);
    symbols.push_back(s);
    return static_cast<int>(symbols.size()) - 1;
  }

  int ProductOf(int major, int minor) {
    for (size_t i = 0; i < products_.size(); ++i)
      if (products_[i] == std::make_pair(major, minor)) return static_cast<int>(i);
    products_.emplace_back(major, minor);
    return row_.products++;
  }

  // --- derived values ---

  void Finish() {
    FindLocals();
    const auto& first = row_.inputs[0].terms;
    for (size_t i = 0; i + 1 < first.size(); ++i) {
      if (first[i].kind != Term::kStar || row_.symbols[first[i].major].name != "outer") continue;
      row_.outer = first[i].major;
      row_.inner = first[i + 1].major;
    }
    for (auto* operands : {&row_.inputs, &row_.outputs})
      for (Operand& o : *operands) SetOrders(&o);
    for (const Operand& o : row_.outputs)
      for (const Term& t : o.terms)
        Check(t.kind != Term::kPrefix || row_.lead >= 0, "'...' of a result needs `lead: axis`");
  }

  void FindLocals() {
    for (size_t i = 0; i < row_.symbols.size(); ++i) {
      Symbol& s = row_.symbols[i];
      s.local = row_.many && s.fixed < 0 && s.attribute < 0;
      for (const Operand& o : row_.inputs)
        for (const Term& t : o.terms)
          if (!o.many && (t.major == static_cast<int>(i) || t.minor == static_cast<int>(i)))
            s.local = false;
      if (row_.many && s.name == "n" && !s.star) row_.list_length = static_cast<int>(i);
    }
  }

  // Computes the order of axes of split matrices. XLA partitions an op over leading axes that all
  // its buffers share. So a matrix that it may shard has its major factors first, in the order of
  // the first operand, then other axes, then the minor factors, which are blocks. A layout, which a
  // handler does not see, keeps the memory order.
  void SetOrders(Operand* o) const {
    const auto place = [&](const Term& t) {
      const auto& first = row_.inputs[0].terms;
      if (t.kind == Term::kPrefix) return -1;
      for (size_t i = 0; i < first.size(); ++i)
        if (t.kind == first[i].kind && t.major == first[i].major) return static_cast<int>(i);
      return kMaxSymbols;
    };
    o->operand_order = o->terms;
    std::stable_sort(o->operand_order.begin(), o->operand_order.end(),
                     [&](const Term& a, const Term& b) { return place(a) < place(b); });
    for (Term t : o->operand_order) {
      if (t.minor >= 0) t.last = false;
      t.minor = t.product = -1;
      o->split_terms.push_back(t);
    }
    for (const Term& t : o->terms) {
      if (t.minor < 0) continue;
      Term minor;
      minor.major = t.minor;
      minor.last = t.last;
      o->split_terms.push_back(minor);
    }
  }

 private:
  Row& row_;
  std::vector<std::pair<int, int>> products_;
};

}  // namespace

Row::Row(std::string op, std::string_view operands, std::string_view attribute_column)
    : name(std::move(op)), attribute_types(attribute_column) {
  Parser parser(this);
  parser.AddAttributes(attribute_types);
  parser.AddOperands(operands);
  parser.Finish();
}

int Row::FindAttribute(std::string_view attribute) const {
  for (size_t i = 0; i < attributes.size(); ++i)
    if (attributes[i].name == attribute) return static_cast<int>(i);
  return -1;
}

const Row& RowOf(Op op) {
  static const auto& rows = *new std::vector<Row>{
#define QSHARD_OP(name, ...) Row(#name, __VA_ARGS__),
#include "ops.def"
#undef QSHARD_OP
  };
  return rows[static_cast<size_t>(op)];
}

}  // namespace qshard
