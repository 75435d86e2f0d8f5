// Python view of the rows of ops.def.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "host/attributes.h"
#include "host/call.h"
#include "schema/bind.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

[[noreturn]] void Raise(const Error& error) {
  if (error.kind() == ErrorKind::kType) throw nb::type_error(error.text().c_str());
  throw nb::value_error(error.text().c_str());
}

// Infers results and axes of a call. Returns (results, axes, whole): the shape and dtype of each
// result, the axes of operands and then results as lists of factors (name, size, codes per byte),
// major first, and whether matrices may be split.
nb::tuple Match(const Row& row, const std::vector<std::vector<int64_t>>& shapes,
                const std::vector<std::string>& dtypes, nb::dict attributes,
                std::optional<std::string> dtype) {
  if (dtypes.size() != shapes.size())
    throw nb::value_error("match: dtypes are not one for each shape");
  std::vector<Buffer> buffers(shapes.size());
  std::vector<Buffer*> pointers;
  for (size_t i = 0; i < shapes.size(); ++i) {
    buffers[i].dtype = DataTypeOf(dtypes[i]);
    buffers[i].rank = static_cast<int64_t>(shapes[i].size());
    buffers[i].dims = const_cast<int64_t*>(shapes[i].data());
    pointers.push_back(&buffers[i]);
  }
  const Buffers operands{pointers.data(), static_cast<int64_t>(pointers.size())};
  Attributes attrs(attributes);
  Binding binding(row);
  if (Error error = binding.Bind(attrs.Get(), operands)) Raise(error);
  nb::list results;
  if (row.many) return nb::make_tuple(results, nb::list(), false);  // results are operands
  for (int i = 0; i < static_cast<int>(row.outputs.size()); ++i) {
    Dims dims;
    DataType type;
    if (Error error = binding.OutputShape(i, &dims)) Raise(error);
    if (Error error = binding.OutputDtype(i, operands, dtype.value_or(""), &type)) Raise(error);
    nb::list shape;
    for (int64_t axis = 0; axis < dims.rank; ++axis) shape.append(dims.sizes[axis]);
    results.append(nb::make_tuple(nb::tuple(shape), std::string(NameOf(type))));
  }
  std::vector<std::vector<std::vector<Factor>>> axes;
  const bool whole = binding.Axes(&axes);
  return nb::make_tuple(results, axes, whole);
}

// A plain or composite axis is a tuple of factor names. Other terms are strings as written.
nb::tuple TermsOf(const Row& row, const Operand& operand) {
  nb::list terms;
  for (const Term& t : operand.terms) {
    if (t.kind == Term::kPrefix)
      terms.append("...");
    else if (t.kind == Term::kStar)
      terms.append("*" + row.symbols[t.major].name);
    else if (t.minor < 0)
      terms.append(nb::make_tuple(row.symbols[t.major].name));
    else
      terms.append(nb::make_tuple(row.symbols[t.major].name, row.symbols[t.minor].name));
  }
  return nb::tuple(terms);
}

nb::dict AttributesOf(const Row& row) {
  constexpr const char* kKinds[] = {"int", "float", "bool", "str", "int[]"};
  nb::dict attributes;
  for (const Attribute& a : row.attributes) {
    nb::list legal;
    for (double number : a.numbers) legal.append(number);
    for (const std::string& text : a.texts) legal.append(text);
    const nb::object left_out = !a.optional                  ? nb::none()
                                : a.kind == Attribute::kBool ? nb::cast(false)
                                : a.texts.empty()            ? nb::cast(0)
                                                             : nb::cast(a.texts[0]);
    attributes[a.name.c_str()] =
        nb::make_tuple(kKinds[a.kind], nb::tuple(legal), a.least, a.most, left_out);
  }
  return attributes;
}

nb::tuple BlocksOf(const Row& row) {
  nb::list listed;
  for (auto [rows, cols] : row.blocks.listed) listed.append(nb::make_tuple(rows, cols));
  return nb::tuple(listed);
}

nb::list OperandsOf(const Row& row, const std::vector<Operand>& operands) {
  nb::list list;
  for (const Operand& o : operands)
    list.append(
        nb::make_tuple(o.name, o.dtype_name, TermsOf(row, o), o.many, !o.conditions.empty()));
  return list;
}

nb::list Ops() {
  nb::list rows;
#define QSHARD_OP(name, ...) rows.append(nb::make_tuple(#name, __VA_ARGS__));
#include "ops.def"
#undef QSHARD_OP
  return rows;
}

}  // namespace

void DefineRows(nb::module_& m) {
  nb::class_<Row>(m, "Row", "A parsed row of ops.def, with the binder of its op.")
      .def(nb::init<std::string, std::string_view, std::string_view>(), nb::arg("name"),
           nb::arg("operands"), nb::arg("attributes") = "")
      .def_ro("name", &Row::name)
      .def_ro("attribute_types", &Row::attribute_types, "The attribute column, as written.")
      .def_ro("many", &Row::many, "Whether the op takes lists of tensors.")
      .def_ro("splits", &Row::splits, "Whether a call may have the attribute `split`.")
      .def(
          "sides",
          [](const Row& row) {
            return nb::make_tuple(OperandsOf(row, row.inputs), OperandsOf(row, row.outputs));
          },
          "(operands, results), with (name, dtype, terms, many, optional) each.")
      .def_prop_ro("attributes", AttributesOf,
                   "{name: (type, legal values or (), least, most, default or None)}.")
      .def_prop_ro("blocks", BlocksOf,
                   "The legal (block_rows, block_cols) pairs, or () for a range.")
      .def("match", Match, nb::arg("shapes"), nb::arg("dtypes"), nb::arg("attributes"),
           nb::arg("dtype") = nb::none());
  m.def("ops", Ops, "The rows of ops.def in order, as arguments of `Row`.");
}

}  // namespace qshard::host
