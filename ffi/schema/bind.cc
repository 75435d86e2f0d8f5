#include "schema/bind.h"

#include <algorithm>
#include <cassert>
#include <vector>

namespace qshard {
namespace {

std::string_view View(const XLA_FFI_ByteSpan& span) { return {span.ptr, span.len}; }

std::string JoinNames(const std::vector<std::string>& names) {
  std::string joined;
  for (const std::string& name : names) joined += (joined.empty() ? "" : ", ") + name;
  return joined.empty() ? "none" : joined;
}

// Counts elements and checks for overflow. Multiplies only extents that are not 0, so that no part
// of an empty shape overflows either.
bool CountElements(const Buffer& buffer, int64_t* count) {
  int64_t product = 1;
  bool empty = false;
  for (int64_t i = 0; i < buffer.rank; ++i) {
    if (buffer.dims[i] < 0) return false;
    empty |= buffer.dims[i] == 0;
    if (buffer.dims[i] != 0 && !Multiply(product, buffer.dims[i], &product)) return false;
  }
  *count = empty ? 0 : product;
  return Multiply(product, SizeOf(buffer.dtype), &product);
}

}  // namespace

int64_t Elements(const Buffer& buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= buffer.dims[i];
  return count;
}

std::ostream& operator<<(std::ostream& out, const Shape& shape) {
  out << '(';
  for (int64_t i = 0; i < shape.rank; ++i) out << (i ? ", " : "") << shape.dims[i];
  return out << (shape.rank == 1 ? ",)" : ")");
}

// --- attributes ---

const AttributeValue& Binding::attribute(std::string_view name) const {
  const int i = row_.FindAttribute(name);
  assert(i >= 0);
  return values_[i];
}

Error Binding::ReadAttributes(const XLA_FFI_Attrs& attributes) {
  const auto& expected = row_.attributes;
  for (size_t i = 0; i < expected.size(); ++i) values_[i] = {};
  uint32_t seen = 0;
  bool alien = false;
  size_t next = 0;  // both are usually sorted by name
  for (int64_t i = 0; i < attributes.size; ++i) {
    const std::string_view name = View(*attributes.names[i]);
    const int found = next < expected.size() && expected[next].name == name
                          ? static_cast<int>(next)
                          : row_.FindAttribute(name);
    if (found >= 0) {
      QSHARD_RETURN_IF_ERROR(ReadAttribute(found, attributes.types[i], attributes.attrs[i]));
      seen |= 1u << found;
      next = found + 1;
    } else if (row_.splits && name == "split") {
      const auto* scalar = static_cast<const XLA_FFI_Scalar*>(attributes.attrs[i]);
      if (attributes.types[i] != XLA_FFI_AttrType_SCALAR || scalar->dtype != XLA_FFI_DataType_PRED)
        return TypeError(row_.name, ": split is not a bool; pass one");
      split_ = *static_cast<const bool*>(scalar->value);
    } else {
      alien = true;
    }
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    if ((seen >> i & 1) != 0) continue;
    alien |= !expected[i].optional;
    if (!expected[i].optional || expected[i].texts.empty()) continue;
    values_[i].text_begin = expected[i].texts[0].data();
    values_[i].text_size = expected[i].texts[0].size();
  }
  if (alien) {
    std::vector<std::string> given, needed;
    for (int64_t i = 0; i < attributes.size; ++i) given.emplace_back(View(*attributes.names[i]));
    for (const Attribute& a : expected) needed.push_back(a.name);
    return TypeError(row_.name, ": attributes (", JoinNames(given),
                     ") do not match the op; pass exactly ", JoinNames(needed));
  }
  for (size_t i = 0; i < row_.symbols.size(); ++i) {
    const Symbol& s = row_.symbols[i];
    if (s.fixed >= 0) sizes_[i] = s.fixed;
    if (s.attribute >= 0) sizes_[i] = values_[s.attribute].integer;
  }
  return CheckBlocks();
}

Error Binding::ReadAttribute(int i, XLA_FFI_AttrType type, const void* value) {
  const Attribute& a = row_.attributes[i];
  AttributeValue& v = values_[i];
  const auto wrong = [&](const char* needed) {
    return TypeError(row_.name, ": ", a.name, " is not ", needed, "; pass one");
  };
  const auto* scalar = static_cast<const XLA_FFI_Scalar*>(value);
  const DataType dtype = type == XLA_FFI_AttrType_SCALAR ? scalar->dtype : XLA_FFI_DataType_INVALID;
  switch (a.kind) {
    case Attribute::kBool:
      if (dtype != XLA_FFI_DataType_PRED) return wrong("a bool");
      v.integer = *static_cast<const bool*>(scalar->value);
      return {};
    case Attribute::kText: {
      if (type != XLA_FFI_AttrType_STRING) return wrong("a string");
      const auto* span = static_cast<const XLA_FFI_ByteSpan*>(value);
      v.text_begin = span->ptr;
      v.text_size = span->len;
      for (size_t j = 0; j < a.texts.size(); ++j) {
        if (a.texts[j] != v.text()) continue;
        v.format = a.formats[j];
        return {};
      }
      return ValueError(row_.name, ": ", a.name, " (", v.text(), ") is not ", a.legal);
    }
    case Attribute::kExtents: {
      const auto* array = static_cast<const XLA_FFI_Array*>(value);
      if (type != XLA_FFI_AttrType_ARRAY ||
          (array->dtype != XLA_FFI_DataType_S64 && array->size != 0))
        return wrong("an array of int64");
      v.integer = static_cast<int64_t>(array->size);
      v.integers = static_cast<const int64_t*>(array->data);
      for (int64_t j = 0; j < v.integer; ++j)
        QSHARD_REQUIRE(v.integers[j] >= 0 && v.integers[j] <= int64_t{1} << 62, row_.name, ": ",
                       a.name, "[", j, "] (", v.integers[j], ") is not from 0 to 2^62");
      return {};
    }
    case Attribute::kInt:
      if (dtype != XLA_FFI_DataType_S64) return wrong("an int");
      v.integer = *static_cast<const int64_t*>(scalar->value);
      v.number = static_cast<double>(v.integer);
      break;
    case Attribute::kFloat:
      if (dtype != XLA_FFI_DataType_F32) return wrong("a float");
      v.number = *static_cast<const float*>(scalar->value);
      break;
  }
  const bool legal = a.numbers.empty() ? v.number >= a.least && v.number <= a.most
                                       : std::find(a.numbers.begin(), a.numbers.end(), v.number) !=
                                             a.numbers.end();
  const bool is_int = a.kind == Attribute::kInt;
  if (legal) return {};
  if (is_int) return ValueError(row_.name, ": ", a.name, " (", v.integer, ") is not ", a.legal);
  return ValueError(row_.name, ": ", a.name, " (", v.number, ") is not ", a.legal);
}

Error Binding::CheckBlocks() const {
  const BlockRule& rule = row_.blocks;
  if (rule.kind == BlockRule::kNone) return {};
  const int64_t rows = values_[row_.block_rows].integer, cols = values_[row_.block_cols].integer;
  bool legal = rows > 0 && cols > 0;
  if (rule.kind == BlockRule::kSquare) legal &= rows == cols;
  if (rule.kind == BlockRule::kAnyOrWhole) legal |= rows == 0 && cols == 0;
  if (rule.kind == BlockRule::kListed)
    legal = std::find(rule.listed.begin(), rule.listed.end(), std::make_pair(rows, cols)) !=
            rule.listed.end();
  QSHARD_REQUIRE(legal, row_.name, ": block (", rows, "x", cols, ") is not ", rule.legal);
  return {};
}

// Checks a block that must be square or cover each matrix, once the first operand is bound.
Error Binding::CheckWholeBlock() const {
  const int64_t rows = values_[row_.block_rows].integer, cols = values_[row_.block_cols].integer;
  if (rows == cols) return {};
  const auto& terms = row_.inputs[0].terms;
  bool whole = true;
  for (size_t i = 0; i < terms.size(); ++i) {
    const Term& t = terms[i];
    if (t.minor >= 0) whole &= sizes_[t.major] <= 1;
    if (t.kind == Term::kStar && t.major == row_.outer) whole &= Length(static_cast<int>(i)) <= 1;
  }
  QSHARD_REQUIRE(whole, row_.name, ": block (", rows, "x", cols, ") is not ", row_.blocks.legal);
  return {};
}

// --- counts ---

bool Binding::MeetsCondition(const Operand& operand) const {
  for (const Operand::Condition& c : operand.conditions) {
    const AttributeValue& v = values_[c.attribute];
    const bool is_bool = row_.attributes[c.attribute].kind == Attribute::kBool;
    const std::string_view text = is_bool ? (v.integer ? "true" : "false") : v.text();
    if (std::find(c.texts.begin(), c.texts.end(), text) != c.texts.end()) return true;
  }
  return false;
}

Error Binding::CountBuffers(Buffers args, const Buffers* rets) {
  list_length_ = -1;
  const auto count = [&](const std::vector<Operand>& operands, int64_t size, const char* side,
                         auto& begins) -> Error {
    if (!row_.many && size == static_cast<int64_t>(operands.size())) {
      for (int64_t i = 0; i < size; ++i) begins[i] = i;
      return {};
    }
    int64_t singles = 0, lists = 0;
    for (const Operand& o : operands) (o.many ? lists : singles) += IsThere(o);
    if (lists == 0) {
      QSHARD_REQUIRE(size == singles, row_.name, ": ", size, " ", side, " are not the ", singles,
                     " that it has");
    } else if (list_length_ < 0) {
      QSHARD_REQUIRE(size >= singles && (size - singles) % lists == 0, row_.name, ": lists (",
                     std::max<int64_t>(0, size - singles), " tensors in all) are not ", lists,
                     " of equal length; pass one entry per tensor");
      list_length_ = (size - singles) / lists;
    } else {
      QSHARD_REQUIRE(size == singles + lists * list_length_, row_.name, ": ", side, " (", size,
                     ") are not ", lists, " for each of ", list_length_, " tensors");
    }
    int64_t next = 0;
    for (size_t i = 0; i < operands.size(); ++i) {
      const bool there = IsThere(operands[i]);
      begins[i] = there ? next : -1;
      if (there) next += operands[i].many ? list_length_ : 1;
    }
    return {};
  };
  QSHARD_RETURN_IF_ERROR(count(row_.inputs, args.size, "operands", arg_begins_));
  if (rets != nullptr)
    QSHARD_RETURN_IF_ERROR(count(row_.outputs, rets->size, "results", ret_begins_));
  if (list_length_ < 0) list_length_ = 0;
  if (row_.list_length >= 0) sizes_[row_.list_length] = list_length_;
  return {};
}

// --- one buffer by itself ---

bool Binding::Accepts(const Operand& operand, DataType dtype, DataType same) const {
  const auto is_byte = [](DataType t) { return SizeOf(t) == 1 && t != XLA_FFI_DataType_PRED; };
  switch (operand.dtype) {
    case Operand::kFloat:
      return dtype == XLA_FFI_DataType_F32 || dtype == XLA_FFI_DataType_BF16 ||
             dtype == XLA_FFI_DataType_F16;
    case Operand::kByte:
      return is_byte(dtype);
    case Operand::kWord:
      return dtype == XLA_FFI_DataType_U32 || dtype == XLA_FFI_DataType_S32;
    case Operand::kAny:
      return SizeOf(dtype) > 0;
    case Operand::kSame:
      return dtype == same;
    case Operand::kPacked:
      return dtype == XLA_FFI_DataType_U8;
    case Operand::kNamed: {
      const AttributeValue& v = values_[operand.dtype_attribute];
      if (v.format == nullptr) return dtype == DataTypeOf(v.text());
      return dtype == XLA_FFI_DataType_U8 || dtype == v.format->dtype;
    }
    case Operand::kExact:
      break;
  }
  // One-byte floats may be passed as uint8.
  const bool byte_float = is_byte(operand.exact) && operand.exact != XLA_FFI_DataType_S8;
  return dtype == operand.exact || (byte_float && dtype == XLA_FFI_DataType_U8);
}

// Checks a dtype against a row. `first` is the tensor that dtype `same` repeats, or the first of
// the list.
Error Binding::CheckDtype(const Operand& operand, int64_t index, const Buffer& buffer,
                          const Buffer& first) const {
  if (!Accepts(operand, buffer.dtype, first.dtype)) {
    std::string legal, last;  // "a, b or c"
    for (const DataTypeTraits& t : kDataTypes) {
      if (!Accepts(operand, t.dtype, first.dtype)) continue;
      if (!last.empty()) legal += (legal.empty() ? "" : ", ") + last;
      last = t.name;
    }
    legal += (legal.empty() ? "" : " or ") + last;
    return TypeError(row_.name, ": ", Name{operand, index}, " (", NameOf(buffer.dtype), ") is not ",
                     legal, "; cast or view it first");
  }
  if (operand.many && operand.dtype == Operand::kFloat && buffer.dtype != first.dtype)
    return ValueError(row_.name, ": ", Name{operand, index}, " (", NameOf(buffer.dtype),
                      ") is not ", NameOf(first.dtype), " as ", operand.name,
                      "[0] is; call once for each dtype");
  return {};
}

Error Binding::CheckBuffer(const Operand& operand, int64_t index, const Buffer& buffer,
                           bool memory) const {
  int64_t count;
  QSHARD_REQUIRE(buffer.rank >= 0 && buffer.rank <= kMaxRank, row_.name, ": ", Name{operand, index},
                 " has ", buffer.rank, " axes, more than ", kMaxRank, "; reshape it");
  QSHARD_REQUIRE(CountElements(buffer, &count), row_.name, ": ", Name{operand, index}, " ",
                 Shape(buffer), " is negative or larger than memory");
  if (!memory || count == 0) return {};
  const auto address = reinterpret_cast<uintptr_t>(buffer.data);
  QSHARD_REQUIRE(address != 0, row_.name, ": ", Name{operand, index}, " has no memory");
  QSHARD_REQUIRE((address & (SizeOf(buffer.dtype) - 1)) == 0, row_.name, ": ", Name{operand, index},
                 " is not aligned to the ", SizeOf(buffer.dtype), " bytes of ",
                 NameOf(buffer.dtype), "; copy it");
  return {};
}

// --- memory ---

// Checks that no result shares a byte with another result, or with an operand other than its own.
Error Binding::CheckOverlaps(Buffers args, Buffers rets) const {
  struct Range {
    uintptr_t begin, end;
    int64_t at;  // among operands, then results
  };
  constexpr int64_t kFew = 24;
  Range few[kFew];
  std::vector<Range> many;
  Range* ranges = few;
  if (args.size + rets.size > kFew) {
    many.resize(args.size + rets.size);
    ranges = many.data();
  }
  int64_t n = 0;
  const auto add = [&](const Buffer& b, int64_t at) {
    const auto begin = reinterpret_cast<uintptr_t>(b.data);
    const int64_t bytes = Elements(b) * SizeOf(b.dtype);
    if (bytes > 0) ranges[n++] = {begin, begin + bytes, at};
  };
  for (int64_t i = 0; i < rets.size; ++i) add(rets[i], args.size + i);
  for (size_t o = 0; o < row_.inputs.size(); ++o) {
    const int64_t begin = arg_begins_[o], alias = row_.inputs[o].alias;
    const int64_t result = alias < 0 ? -1 : ret_begins_[alias];
    for (int64_t i = 0; begin >= 0 && i < (row_.inputs[o].many ? list_length_ : 1); ++i) {
      const Buffer& arg = args[begin + i];
      if (result < 0 || arg.data != rets[result + i].data || arg.dtype != rets[result + i].dtype)
        add(arg, begin + i);
    }
  }
  std::sort(ranges, ranges + n, [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const auto name = [&](int64_t at) {
    const bool is_result = at >= args.size;
    const auto& begins = is_result ? ret_begins_ : arg_begins_;
    const auto& operands = is_result ? row_.outputs : row_.inputs;
    if (is_result) at -= args.size;
    size_t last = 0;
    for (size_t o = 0; o < operands.size(); ++o)
      if (begins[o] >= 0 && begins[o] <= at) last = o;
    return Name{operands[last], at - begins[last]};
  };
  const Range *last = nullptr, *last_result = nullptr;  // the ranges that end last
  for (const Range* r = ranges; r < ranges + n; ++r) {
    const bool is_result = r->at >= args.size;
    const Range* other = is_result ? last : last_result;
    if (other != nullptr && r->begin < other->end) {
      const int64_t result = std::max(r->at, other->at), against = std::min(r->at, other->at);
      return ValueError(row_.name, ": result ", name(result), " overlaps ",
                        against < args.size ? "operand " : "result ", name(against),
                        "; allocate it separately");
    }
    if (last == nullptr || r->end > last->end) last = r;
    if (is_result && (last_result == nullptr || r->end > last_result->end)) last_result = r;
  }
  return {};
}

// --- calls ---

// Binds single operands before lists, then the first tensor of every list, the second, and so on.
Error Binding::Bind(const XLA_FFI_Attrs& attributes, Buffers args, const Buffers* rets) {
  QSHARD_RETURN_IF_ERROR(ReadAttributes(attributes));
  QSHARD_RETURN_IF_ERROR(CountBuffers(args, rets));
  QSHARD_RETURN_IF_ERROR(BindBuffers(false, 0, args, rets));
  for (int64_t i = 0; row_.many && i < list_length_; ++i) {
    for (size_t s = 0; s < row_.symbols.size(); ++s) {
      if (!row_.symbols[s].local) continue;
      sizes_[s] = -1;
      star_dims_[s] = nullptr;
    }
    QSHARD_RETURN_IF_ERROR(BindBuffers(true, i, args, rets));
  }
  return rets == nullptr ? Error() : CheckOverlaps(args, *rets);
}

Error Binding::BindBuffers(bool many, int64_t index, Buffers args, const Buffers* rets) {
  const auto check = [&](const Operand& o, int64_t begin, Buffers side) -> Error {
    const Buffer& buffer = side[begin + index];
    const Buffer& first =
        o.dtype == Operand::kSame ? args[row_.inputs[0].many ? index : 0] : side[begin];
    QSHARD_RETURN_IF_ERROR(CheckDtype(o, index, buffer, first));
    return CheckBuffer(o, index, buffer, rets != nullptr);
  };
  for (size_t o = 0; o < row_.inputs.size(); ++o) {
    const Operand& operand = row_.inputs[o];
    if (operand.many != many || arg_begins_[o] < 0) continue;
    QSHARD_RETURN_IF_ERROR(check(operand, arg_begins_[o], args));
    QSHARD_RETURN_IF_ERROR(BindBuffer(static_cast<int>(o), index, args[arg_begins_[o] + index]));
    if (o == 0 && row_.blocks.kind == BlockRule::kSquareOrWhole)
      QSHARD_RETURN_IF_ERROR(CheckWholeBlock());
  }
  for (size_t r = 0; rets != nullptr && r < row_.outputs.size(); ++r) {
    const Operand& output = row_.outputs[r];
    if (output.many != many || ret_begins_[r] < 0) continue;
    QSHARD_RETURN_IF_ERROR(check(output, ret_begins_[r], *rets));
    QSHARD_RETURN_IF_ERROR(CheckResult(output, index, (*rets)[ret_begins_[r] + index]));
  }
  return {};
}

}  // namespace qshard
