// Binding: what front ends ask for, results of operands that are bound.
#include <algorithm>

#include "core/bind.h"

namespace qshard {

bool Binding::splits() const {
  if (row_.split < 0) return false;
  const auto whole = [&](const std::vector<Operand>& operands) {
    return std::all_of(operands.begin(), operands.end(), [&](const Operand& o) {
      return std::all_of(o.terms.begin(), o.terms.end(), [&](const Term& t) {
        if (t.minor < 0) return true;
        int64_t product;
        return Multiply(sizes_[t.major], sizes_[t.minor], &product) &&
               LengthOfProduct(t) == product && (!t.last || sizes_[t.minor] % PerByte(o) == 0);
      });
    });
  };
  return whole(row_.inputs) && whole(row_.outputs);
}

Error Binding::OutputShape(int output, int64_t (*dims)[kMaxRank], int64_t* rank) const {
  const Operand& o = row_.outputs[output];
  for (const Term& t : o.terms) {
    if (t.kind != Term::kAxis) continue;
    const int64_t size = t.minor < 0 ? sizes_[t.major] : LengthOfProduct(t);
    QSHARD_REQUIRE(size >= 0, row_.name, ": ", o.name, " would be larger than memory is");
    QSHARD_REQUIRE(!t.last || size % PerByte(o) == 0, row_.name, ": ", o.name,
                   " has a last axis of ", size, ", and ", PerByte(o),
                   " codes share a byte; pad it");
  }
  int64_t majors = 0;
  for (const Term& t : row_.inputs[0].terms) majors += t.kind == Term::kStar ? sizes_[t.major] : 1;
  QSHARD_REQUIRE(!row_.open_prefix || lead_ <= majors, row_.name, ": lead (", lead_,
                 ") is more axes than ", row_.inputs[0].name, " has");
  Expand(o, o.terms, lead_, dims, rank);
  Buffer made{};
  made.dtype = XLA_FFI_DataType_F32;
  made.rank = *rank;
  made.dims = *dims;
  return CheckBuffer(o, 0, made, false);
}

Error Binding::OutputDtype(int output, Buffers args, std::string_view chosen,
                           DataType* dtype) const {
  const Operand& o = row_.outputs[output];
  switch (o.dtype) {
    case Operand::kFloat:
      *dtype = DataTypeOf(chosen);
      if (Accepts(o, *dtype, *dtype)) return {};
      return TypeError(row_.name, ": dtype (", chosen.empty() ? "None" : chosen,
                       ") is not float32 or bfloat16 or float16; ask for one of them");
    case Operand::kSame:
      *dtype = args[0].dtype;
      return {};
    case Operand::kPacked:
      *dtype = XLA_FFI_DataType_U8;
      return {};
    case Operand::kNamed: {
      const AttributeValue& v = values_[o.dtype_attribute];
      *dtype = v.format == nullptr ? DataTypeOf(v.text()) : v.format->dtype;
      return {};
    }
    default:
      *dtype = o.exact;
      return {};
  }
}

std::vector<Extent> Binding::OutputExtents(int output) const {
  std::array<Extent, kMaxSymbols> majors;  // of a `*name` its first axis
  std::array<Extent, kMaxProducts> products;
  for (size_t o = 0; o < row_.inputs.size(); ++o) {
    int axis = 0;
    for (const Term& t : row_.inputs[o].terms) {
      Extent e;
      e.operand = static_cast<int>(o);
      e.axis = axis;
      if (t.last) e.times = PerByte(row_.inputs[o]);
      axis += t.kind == Term::kAxis     ? 1
              : t.kind == Term::kPrefix ? static_cast<int>(prefixes_[o])
                                        : static_cast<int>(sizes_[t.major]);
      if (t.kind == Term::kPrefix) continue;
      if (t.minor >= 0) {
        if (products[t.product].operand < 0) products[t.product] = e;
        e.run = sizes_[t.minor];
      }
      if (majors[t.major].operand < 0 && row_.symbols[t.major].fixed < 0) majors[t.major] = e;
    }
  }
  for (size_t i = 0; i < row_.symbols.size(); ++i)
    if (majors[i].operand < 0) majors[i].size = sizes_[i];
  std::vector<Extent> extents;
  const auto push = [&](const Term& t, int64_t left) {
    Extent e = majors[t.major];
    const int64_t count = t.kind == Term::kStar ? std::min(left, sizes_[t.major]) : 1;
    for (int64_t i = 0; i < count; ++i, ++e.axis) extents.push_back(e);
    return count;
  };
  const Operand& o = row_.outputs[output];
  for (const Term& t : o.terms) {
    if (t.kind == Term::kPrefix) {
      int64_t left = lead_;
      for (const Term& first : row_.inputs[0].terms)
        if (left > 0) left -= push(first, left);
      continue;
    }
    push(t, kMaxRank);
    if (t.kind == Term::kStar) continue;
    if (t.minor >= 0 && products[t.product].operand >= 0)
      extents.back() = products[t.product];
    else if (t.minor >= 0)
      extents.back().size *= sizes_[t.minor];
    if (t.last) extents.back().per_byte = PerByte(o);
  }
  return extents;
}

std::vector<std::vector<Factor>> Binding::Axes(const Operand& operand, int64_t prefix,
                                               bool split) const {
  std::vector<std::vector<Factor>> axes;
  const auto major = [&](const Term& t, int64_t left) {
    const std::string& name = row_.symbols[t.major].name;
    if (t.kind == Term::kAxis) axes.push_back({{name, sizes_[t.major]}});
    if (t.kind == Term::kAxis) return int64_t{1};
    const int64_t count = std::min(left, sizes_[t.major]);
    for (int64_t i = 0; i < count; ++i)
      axes.push_back({{name + std::to_string(i), star_dims_[t.major][i]}});
    return count;
  };
  bool joined = false;  // whether a product before is one factor
  for (const Term& t : operand.terms) {
    if (t.kind == Term::kPrefix) {
      for (const Term& first : row_.inputs[0].terms)
        if (prefix > 0) prefix -= major(first, prefix);
      continue;
    }
    // A number is a size, not a name: two of them are no common factor.
    const auto name = [&](int symbol) {
      return row_.symbols[symbol].fixed < 0 ? row_.symbols[symbol].name
                                            : operand.name + "." + std::to_string(axes.size());
    };
    if (t.kind == Term::kStar) {
      major(t, kMaxRank);
    } else if (t.minor < 0) {
      axes.push_back({{name(t.major), sizes_[t.major]}});
    } else if (split) {
      const std::string minor = name(t.minor);
      axes.push_back({{name(t.major), sizes_[t.major]}, {minor, sizes_[t.minor]}});
    } else if (sizes_[t.minor] == 1 && !joined) {
      axes.push_back({{name(t.major), sizes_[t.major]}});
    } else {
      const std::string both = name(t.major) + " " + name(t.minor);
      axes.push_back({{both, LengthOfProduct(t)}});
      joined = true;
    }
    const int64_t per_byte = t.last ? PerByte(operand) : 1;
    if (per_byte > 1) {
      Factor& last = axes.back().back();
      last = {last.name + "/" + std::to_string(per_byte), last.size / per_byte};
    }
  }
  return axes;
}

}  // namespace qshard
