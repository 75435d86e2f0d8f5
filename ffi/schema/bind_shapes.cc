// Shape inference of the binder: factors from shapes, and shapes from factors.
#include <algorithm>

#include "core/ceil_div.h"
#include "schema/bind.h"

namespace qshard {

int64_t Binding::PerByte(const Operand& operand) const {
  if (operand.dtype == Operand::kPacked) return 2;
  if (operand.dtype != Operand::kNamed) return 1;
  const FormatTraits* format = values_[operand.dtype_attribute].format;
  return format == nullptr ? 1 : format->codes_per_byte;
}

template <class Fn>
int64_t Binding::ForMajors(int64_t count, Fn&& f) const {
  int64_t n = 0;
  for (const Term& t : row_.inputs[0].terms) {
    const int64_t axes = t.kind == Term::kAxis ? 1 : sizes_[t.major];
    for (int64_t i = 0; i < axes && n < count; ++i, ++n)
      f(t.major, i, t.kind == Term::kAxis ? sizes_[t.major] : star_dims_[t.major][i]);
  }
  return n;
}

// Infers factors from one operand. A `*name` or `...` that nothing determines has 0 axes.
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
                     "' and the other operands; pass matching axes");
    } else {
      const int64_t* next = dim;
      bool fits = true;
      const int64_t n =
          ForMajors(count, [&](int, int64_t, int64_t size) { fits &= *next++ == size; });
      if (n < count || !fits) {
        Dims majors;
        ForMajors(kMaxRank,
                  [&](int, int64_t, int64_t size) { majors.sizes[majors.rank++] = size; });
        const std::string of = (row_.products > 0 ? "blocks of " : "") + row_.inputs[0].name;
        return ValueError(row_.name, ": ", Name{operand, index}, " ", Shape(buffer),
                          " does not match the leading axes of ", of, " ",
                          Shape(majors.sizes, majors.rank), "; pass one element for each run of ",
                          of);
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
                      operand.pattern, "' and the other operands; pass matching axes");
  };
  if (term.last && !Multiply(size, PerByte(operand), &size)) return mismatch();
  int64_t& major = sizes_[term.major];
  if (term.minor < 0) {
    if (major >= 0 && major != size) return mismatch();
    major = size;
    return {};
  }
  const int64_t run = sizes_[term.minor];
  const bool may_be_partial = term.partial && (term.major != row_.inner || sizes_[row_.outer] <= 0);
  if (run <= 0 || (size % run != 0 && !may_be_partial)) {
    const Symbol& s = row_.symbols[term.minor];
    const std::string given =
        s.fixed >= 0 ? s.name : s.name + "=" + std::to_string(std::max<int64_t>(run, 0));
    return ValueError(row_.name, ": ", Name{operand, index}, " ", Shape(buffer), " has an axis of ",
                      size, ", not a multiple of ", given,
                      "; pad it, or shard it on block boundaries");
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

Error Binding::ShapeOf(const Operand& output, const std::vector<Term>& terms, Dims* dims) const {
  const auto push = [&](int, int64_t, int64_t size) {
    if (dims->rank < kMaxRank) dims->sizes[dims->rank] = size;
    ++dims->rank;
  };
  dims->rank = 0;
  for (const Term& t : terms) {
    if (t.kind == Term::kPrefix) {
      QSHARD_REQUIRE(ForMajors(Lead(), push) == Lead(), row_.name, ": lead (", Lead(),
                     ") is more axes than ", row_.inputs[0].name, " has");
    } else if (t.kind == Term::kStar) {
      for (int64_t i = 0; i < sizes_[t.major]; ++i) push(0, i, star_dims_[t.major][i]);
    } else {
      const int64_t size = t.minor < 0 ? sizes_[t.major] : LengthOfProduct(t);
      const int64_t per_byte = t.last ? PerByte(output) : 1;
      QSHARD_REQUIRE(size >= 0, row_.name, ": ", output.name, " would be larger than memory");
      QSHARD_REQUIRE(size % per_byte == 0, row_.name, ": ", output.name, " has a last axis of ",
                     size, ", and ", per_byte, " codes share a byte; pad it");
      push(0, 0, size / per_byte);
    }
  }
  QSHARD_REQUIRE(dims->rank <= kMaxRank, row_.name, ": ", output.name, " would have ", dims->rank,
                 " axes, more than ", kMaxRank, "; reshape its operands");
  return {};
}

Error Binding::CheckResult(const Operand& output, int64_t index, const Buffer& buffer) const {
  const auto is = [&](const Dims& dims) {
    return dims.rank == buffer.rank && std::equal(dims.sizes, dims.sizes + dims.rank, buffer.dims);
  };
  Dims dims, logical;
  QSHARD_RETURN_IF_ERROR(ShapeOf(output, split_ ? output.split_terms : output.terms, &dims));
  if (is(dims)) return {};
  if (!split_) {  // XLA keeps the logical shape of a transposed result
    QSHARD_RETURN_IF_ERROR(ShapeOf(output, output.operand_order, &logical));
    if (is(logical)) return {};
  }
  return ValueError(row_.name, ": ", Name{output, index}, " ", Shape(buffer), " is not of shape ",
                    Shape(dims.sizes, dims.rank), ", which its operands need; pass axes '",
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
  const bool one_each = operand.terms.size() == 1;  // `...` with nothing after it
  if (one_each && row_.shared >= 0 && values_[row_.shared].integer != 0) skip = 0;
  ForMajors(kMaxRank, [&](int, int64_t, int64_t size) {
    if (--skip < 0) run *= size;
  });
  return run;
}

// --- for front ends ---

Error Binding::OutputShape(int output, Dims* dims) const {
  const Operand& o = row_.outputs[output];
  QSHARD_RETURN_IF_ERROR(ShapeOf(o, o.terms, dims));
  Buffer made{};
  made.dtype = XLA_FFI_DataType_F32;
  made.rank = dims->rank;
  made.dims = dims->sizes;
  return CheckBuffer(o, 0, made, false);
}

Error Binding::OutputDtype(int output, Buffers args, std::string_view chosen,
                           DataType* dtype) const {
  const Operand& o = row_.outputs[output];
  *dtype = o.exact;
  if (o.dtype == Operand::kSame) *dtype = args[0].dtype;
  if (o.dtype == Operand::kPacked) *dtype = XLA_FFI_DataType_U8;
  if (o.dtype == Operand::kNamed) {
    const AttributeValue& v = values_[o.dtype_attribute];
    *dtype = v.format == nullptr ? DataTypeOf(v.text()) : v.format->dtype;
  }
  if (o.dtype != Operand::kFloat) return {};
  *dtype = DataTypeOf(chosen);
  if (Accepts(o, *dtype, *dtype)) return {};
  return TypeError(row_.name, ": dtype (", chosen.empty() ? "None" : chosen,
                   ") is not float32, bfloat16 or float16; pass one of these");
}

bool Binding::Axes(std::vector<std::vector<std::vector<Factor>>>* buffers) const {
  bool whole = true;
  const auto axes_of = [&](const Operand& operand, int64_t prefix) {
    std::vector<std::vector<Factor>> axes;
    const auto add = [&](int symbol, int64_t i, int64_t size) {
      const Symbol& s = row_.symbols[symbol];
      axes.push_back({{s.star ? s.name + std::to_string(i) : s.name, size, 1}});
    };
    // A number is a size and not a name, so equal numbers are separate factors.
    const auto factor = [&](int symbol, int64_t per_byte) {
      const Symbol& s = row_.symbols[symbol];
      return Factor(s.fixed < 0 ? s.name : operand.name + "." + std::to_string(axes.size()),
                    sizes_[symbol], per_byte);
    };
    for (const Term& t : operand.terms) {
      if (t.kind == Term::kPrefix) {
        ForMajors(prefix, add);
        continue;
      }
      if (t.kind == Term::kStar) {
        for (int64_t i = 0; i < sizes_[t.major]; ++i) add(t.major, i, star_dims_[t.major][i]);
        continue;
      }
      const int64_t per_byte = t.last ? PerByte(operand) : 1;
      if (t.minor < 0) {
        axes.push_back({factor(t.major, per_byte)});
        continue;
      }
      axes.push_back({factor(t.major, 1), factor(t.minor, per_byte)});
      int64_t product;
      whole &= Multiply(sizes_[t.major], sizes_[t.minor], &product) &&
               product == LengthOfProduct(t) && sizes_[t.minor] % per_byte == 0;
    }
    buffers->push_back(std::move(axes));
  };
  for (size_t o = 0; o < row_.inputs.size(); ++o) axes_of(row_.inputs[o], prefixes_[o]);
  for (const Operand& output : row_.outputs) axes_of(output, Lead());
  return whole && row_.splits;
}

}  // namespace qshard
