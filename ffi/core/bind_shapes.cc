// Binding: what shapes say of the factors of a pattern, and the factors of shapes.
#include <algorithm>

#include "core/bind.h"

namespace qshard {

int64_t Binding::PerByte(const Operand& operand) const {
  if (operand.dtype == Operand::kPacked) return 2;
  if (operand.dtype != Operand::kNamed) return 1;
  const FormatTraits* format = values_[operand.dtype_attribute].format;
  return format == nullptr ? 1 : format->codes_per_byte;
}

template <class Fn>
void Binding::ForMajors(Fn&& f) const {
  for (const Term& t : row_.inputs[0].terms) {
    if (t.kind == Term::kAxis) {
      if (!f(sizes_[t.major])) return;
      continue;
    }
    for (int64_t i = 0; i < sizes_[t.major]; ++i)
      if (!f(star_dims_[t.major][i])) return;
  }
}

// Numbers of axes that operands leave open are those of results.
void Binding::FindOpenAxes(Buffers rets) {
  for (int symbol : row_.open_axes) {
    if (sizes_[symbol] >= 0) continue;
    sizes_[symbol] = 0;
    for (size_t r = 0; r < row_.outputs.size(); ++r) {
      int64_t others = 0;
      bool has = false, alone = true;
      for (const Term& t : row_.outputs[r].terms) {
        if (t.kind == Term::kAxis)
          ++others;
        else if (t.kind == Term::kStar && t.major == symbol)
          has = true;
        else
          alone = false;
      }
      if (has && alone && ret_begins_[r] >= 0 && !row_.outputs[r].many)
        sizes_[symbol] = std::max<int64_t>(0, rets[ret_begins_[r]].rank - others);
    }
  }
}

// Learns from one operand. Numbers of axes that nothing says are 0.
Error Binding::BindBuffer(int index_of_operand, int64_t index, const Buffer& buffer) {
  const Operand& operand = row_.inputs[index_of_operand];
  const auto& terms = split_ ? operand.split_terms : operand.terms;
  int64_t least = 0;
  const Term* open = nullptr;
  for (const Term& t : terms) {
    if (t.kind == Term::kAxis)
      ++least;
    else if (t.kind == Term::kStar && sizes_[t.major] >= 0)
      least += sizes_[t.major];
    else
      open = &t;
  }
  QSHARD_REQUIRE(buffer.rank == least || (buffer.rank > least && open != nullptr), row_.name, ": ",
                 Name{operand, index}, " ", Shape(buffer), " does not have the axes '",
                 operand.pattern, split_ ? "' in split blocks" : "'", "; reshape it");
  const int64_t* dim = buffer.dims;
  for (const Term& t : terms) {
    if (t.kind == Term::kAxis) {
      QSHARD_RETURN_IF_ERROR(BindOne(operand, index, buffer, t, *dim++));
      continue;
    }
    const int64_t count = &t == open ? buffer.rank - least : sizes_[t.major];
    if (t.kind == Term::kStar && star_dims_[t.major] == nullptr) {
      sizes_[t.major] = count;
      star_dims_[t.major] = dim;
    } else if (t.kind == Term::kStar) {
      QSHARD_REQUIRE(std::equal(dim, dim + count, star_dims_[t.major]), row_.name, ": ",
                     Name{operand, index}, " ", Shape(buffer), " does not fit '", operand.pattern,
                     "' and the other operands; give them matching axes");
    } else {
      int64_t i = 0;
      bool fits = true;
      ForMajors([&](int64_t size) {
        if (i < count) fits &= dim[i] == size;
        return ++i < count;
      });
      if (i < count || !fits) {
        int64_t majors[kMaxRank], n = 0;
        ForMajors([&](int64_t size) {
          majors[n++] = size;
          return n < kMaxRank;
        });
        const std::string of = (row_.products > 0 ? "blocks of " : "") + row_.inputs[0].name;
        return ValueError(row_.name, ": ", Name{operand, index}, " ", Shape(buffer),
                          " is not the first axes of ", of, " ", Shape(majors, n),
                          "; give it one element for each run of ", of);
      }
      prefixes_[index_of_operand] = count;
    }
    dim += count;
  }
  return {};
}

Error Binding::BindOne(const Operand& operand, int64_t index, const Buffer& buffer,
                       const Term& term, int64_t size) {
  const auto mismatch = [&] {
    return ValueError(row_.name, ": ", Name{operand, index}, " ", Shape(buffer), " does not fit '",
                      operand.pattern, "' and the other operands; give them matching axes");
  };
  if (term.last && !Multiply(size, PerByte(operand), &size)) return mismatch();
  int64_t& major = sizes_[term.major];
  if (term.minor < 0) {
    if (major >= 0 && major != size) return mismatch();
    major = size;
    return {};
  }
  const int64_t run = sizes_[term.minor];
  if (run <= 0 || (size % run != 0 && !term.cut)) {
    const Symbol& s = row_.symbols[term.minor];
    const std::string given =
        s.fixed >= 0 ? s.name : s.name + "=" + std::to_string(std::max<int64_t>(run, 0));
    return ValueError(row_.name, ": ", Name{operand, index}, " ", Shape(buffer), " has an axis of ",
                      size, ", which is not a whole number of ", given, "; pad or shard it to one");
  }
  if (major >= 0 && major != CeilDiv(size, run)) return mismatch();
  major = CeilDiv(size, run);
  int64_t& length = lengths_[term.product];
  if (length >= 0 && length != size) return mismatch();
  length = size;
  return {};
}

int64_t Binding::LengthOfProduct(const Term& term) const {
  if (!split_ && lengths_[term.product] >= 0) return lengths_[term.product];
  int64_t length;
  return Multiply(sizes_[term.major], sizes_[term.minor], &length) ? length : -1;
}

// False if codes do not fill their bytes, or an extent is too large.
bool Binding::Expand(const Operand& output, const std::vector<Term>& terms, int64_t prefix,
                     int64_t (*dims)[kMaxRank], int64_t* rank) const {
  int64_t n = 0;
  const auto push = [&](int64_t size) {
    if (n < kMaxRank) (*dims)[n++] = size;
    return n < kMaxRank;
  };
  for (const Term& t : terms) {
    if (t.kind == Term::kPrefix) {
      int64_t left = prefix;
      if (left > 0) ForMajors([&](int64_t size) { return push(size) && --left > 0; });
    } else if (t.kind == Term::kStar) {
      for (int64_t i = 0; i < sizes_[t.major]; ++i) push(star_dims_[t.major][i]);
    } else {
      int64_t size = t.minor < 0 ? sizes_[t.major] : LengthOfProduct(t);
      const int64_t per_byte = t.last ? PerByte(output) : 1;
      if (size < 0 || size % per_byte != 0) return false;
      push(size / per_byte);
    }
  }
  *rank = n;
  return true;
}

Error Binding::CheckResult(const Operand& output, int64_t index, const Buffer& buffer) const {
  int64_t dims[kMaxRank], rank = 0, axes = 0;
  bool has_prefix = false;
  for (const Term& t : output.terms) {
    if (t.kind == Term::kPrefix)
      has_prefix = true;
    else
      axes += t.kind == Term::kStar ? sizes_[t.major] : 1;
  }
  const int64_t prefix = has_prefix ? std::max<int64_t>(0, buffer.rank - axes) : 0;
  const auto fits = [&](const std::vector<Term>& terms) {
    return Expand(output, terms, prefix, &dims, &rank) && rank == buffer.rank &&
           std::equal(dims, dims + rank, buffer.dims);
  };
  if (fits(split_ ? output.split_terms : output.terms)) return {};
  // XLA keeps the logical shape of what lies transposed.
  if (!split_ && fits(output.operand_order)) return {};
  if (!Expand(output, split_ ? output.split_terms : output.terms, prefix, &dims, &rank))
    return ValueError(row_.name, ": ", Name{output, index}, " ", Shape(buffer),
                      " has codes that do not fill their bytes; pad it");
  return ValueError(row_.name, ": ", Name{output, index}, " ", Shape(buffer), " is not of shape ",
                    Shape(dims, rank), ", as its operands have it; give it the axes '",
                    output.pattern, split_ ? "' in split blocks" : "'");
}

int64_t Binding::Length(int term) const {
  const Term& t = row_.inputs[0].terms[term];
  if (t.kind == Term::kAxis) return t.minor < 0 ? sizes_[t.major] : LengthOfProduct(t);
  int64_t product = 1;
  for (int64_t i = 0; i < sizes_[t.major]; ++i) product *= star_dims_[t.major][i];
  return product;
}

int64_t Binding::Run(const Operand& operand, const Buffer& buffer) const {
  int64_t skip = buffer.rank, run = 1;
  for (const Term& t : operand.terms) skip -= t.kind == Term::kAxis;
  ForMajors([&](int64_t size) {
    if (--skip < 0) run *= size;
    return true;
  });
  return run;
}

}  // namespace qshard
