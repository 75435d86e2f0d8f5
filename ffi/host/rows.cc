#include "host/rows.h"

#include <nanobind/stl/string.h>

#include <string>
#include <utility>
#include <vector>

#include "core/bind.h"
#include "host/attributes.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

[[noreturn]] void Raise(const Error& error) {
  if (error.kind() == ErrorKind::kType) throw nb::type_error(error.text().c_str());
  throw nb::value_error(error.text().c_str());
}

// Shapes and dtypes as buffers without memory.
class Shapes {
 public:
  Shapes(nb::sequence shapes, nb::handle dtypes) {
    const size_t n = nb::len(shapes);
    dims_.resize(n);
    buffers_.resize(n);
    pointers_.resize(n);
    for (size_t i = 0; i < n; ++i) {
      for (nb::handle size : nb::borrow<nb::sequence>(shapes[i])) {
        const int64_t extent = PyLong_AsLongLong(size.ptr());
        if (extent == -1 && PyErr_Occurred()) nb::raise_python_error();
        dims_[i].push_back(extent);
      }
      buffers_[i] = {};
      buffers_[i].dtype = XLA_FFI_DataType_U8;
      buffers_[i].rank = static_cast<int64_t>(dims_[i].size());
      buffers_[i].dims = dims_[i].data();
      pointers_[i] = &buffers_[i];
    }
    if (dtypes.is_none()) return;
    nb::sequence names = nb::borrow<nb::sequence>(dtypes);
    if (nb::len(names) != n) throw nb::value_error("bind: dtypes are not one for each shape");
    for (size_t i = 0; i < n; ++i) buffers_[i].dtype = DataTypeOf(nb::cast<std::string>(names[i]));
  }
  Shapes(const Shapes&) = delete;

  Buffers Get() const { return {pointers_.data(), static_cast<int64_t>(pointers_.size())}; }

 private:
  std::vector<std::vector<int64_t>> dims_;
  std::vector<Buffer> buffers_;
  std::vector<Buffer*> pointers_;
};

void RequireSingles(const Row& row) {
  if (row.many) throw nb::value_error((row.name + ": shapes of lists are not bound").c_str());
}

nb::tuple TupleOf(const int64_t* values, int64_t count) {
  nb::list list;
  for (int64_t i = 0; i < count; ++i) list.append(values[i]);
  return nb::tuple(list);
}

nb::list Bind(const Row& row, nb::sequence shapes, nb::sequence dtypes, nb::dict attributes,
              nb::handle dtype) {
  const Shapes operands(shapes, dtypes);
  Attributes attrs(attributes);
  Binding binding(row);
  if (Error error = binding.BindShapes(attrs.Get(), operands.Get())) Raise(error);
  const std::string chosen = dtype.is_none() ? "" : nb::cast<std::string>(dtype);
  nb::list results;
  if (row.many) return results;  // they are operands
  for (size_t i = 0; i < row.outputs.size(); ++i) {
    int64_t dims[kMaxRank], rank;
    DataType type;
    if (Error error = binding.OutputShape(static_cast<int>(i), &dims, &rank)) Raise(error);
    if (Error error = binding.OutputDtype(static_cast<int>(i), operands.Get(), chosen, &type))
      Raise(error);
    results.append(nb::make_tuple(TupleOf(dims, rank), std::string(NameOf(type))));
  }
  return results;
}

nb::list Extents(const Row& row, nb::sequence shapes, nb::dict attributes) {
  RequireSingles(row);
  const Shapes operands(shapes, nb::none());
  Attributes attrs(attributes);
  Binding binding(row);
  if (Error error = binding.BindAxes(attrs.Get(), operands.Get())) Raise(error);
  nb::list results;
  for (size_t i = 0; i < row.outputs.size(); ++i) {
    nb::list extents;
    for (const Extent& e : binding.OutputExtents(static_cast<int>(i)))
      extents.append(nb::make_tuple(e.operand, e.axis, e.times, e.run, e.size, e.per_byte));
    results.append(extents);
  }
  return results;
}

nb::tuple Axes(const Row& row, nb::sequence shapes, nb::dict attributes, bool split) {
  RequireSingles(row);
  const Shapes operands(shapes, nb::none());
  Attributes attrs(attributes);
  Binding binding(row);
  if (Error error = binding.BindAxes(attrs.Get(), operands.Get())) Raise(error);
  for (size_t i = 0; i < row.outputs.size(); ++i) {
    int64_t dims[kMaxRank], rank;
    if (Error error = binding.OutputShape(static_cast<int>(i), &dims, &rank)) Raise(error);
  }
  split = split && binding.splits();
  const auto side = [&](const std::vector<Operand>& buffers, bool outputs) {
    nb::list list;
    for (size_t i = 0; i < buffers.size(); ++i) {
      nb::list axes;
      const int64_t prefix = outputs ? binding.lead() : binding.Prefix(static_cast<int>(i));
      for (const auto& axis : binding.Axes(buffers[i], prefix, split)) {
        nb::list factors;
        for (const Factor& f : axis) factors.append(nb::make_tuple(f.name, f.size));
        axes.append(nb::tuple(factors));
      }
      list.append(nb::tuple(axes));
    }
    return nb::tuple(list);
  };
  return nb::make_tuple(side(row.inputs, false), side(row.outputs, true), split);
}

// A plain or composite axis is a tuple of factors; the others are as they are written.
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
    attributes[a.name.c_str()] = nb::make_tuple(kKinds[a.kind], nb::tuple(legal), a.least, a.most);
  }
  return attributes;
}

nb::dict OptionalAttributesOf(const Row& row) {
  nb::dict values;
  for (const Attribute& a : row.attributes)
    if (a.optional) values[a.name.c_str()] = a.texts[0];
  return values;
}

nb::tuple BlocksOf(const Row& row) {
  nb::list listed;
  for (auto [rows, cols] : row.blocks.listed) listed.append(nb::make_tuple(rows, cols));
  return nb::tuple(listed);
}

nb::tuple OperandsOf(const Row& row, const std::vector<Operand>& operands) {
  nb::list list;
  for (const Operand& o : operands) {
    nb::dict d;
    d["name"] = o.name;
    d["dtype"] = o.dtype_name;
    d["terms"] = TermsOf(row, o);
    d["pattern"] = o.pattern;
    d["many"] = o.many;
    d["optional"] = !o.conditions.empty();
    list.append(d);
  }
  return nb::tuple(list);
}

}  // namespace

void DefineRows(nb::module_& m) {
  nb::class_<Row>(m, "Row", "A row of ops.def, parsed, and the binder of its op.")
      .def(
          "__init__",
          [](Row* row, const std::string& name, const std::string& arguments,
             const std::string& pattern, const std::string& dtypes, const std::string& attributes) {
            new (row) Row(name, arguments, pattern, dtypes, attributes);
          })
      .def_ro("name", &Row::name)
      .def_ro("attribute_types", &Row::attribute_types, "The column as it is written.")
      .def_ro("many", &Row::many, "Whether the op takes lists of tensors.")
      .def_prop_ro("inputs", [](const Row& row) { return OperandsOf(row, row.inputs); })
      .def_prop_ro("outputs", [](const Row& row) { return OperandsOf(row, row.outputs); })
      .def_prop_ro("attributes", AttributesOf, "{name: (type, legal values or (), least, most)}.")
      .def_prop_ro("optional_attributes", OptionalAttributesOf, "{name: what it is if left out}.")
      .def_prop_ro("blocks", BlocksOf, "The legal (block_rows, block_cols), or () for a range.")
      .def_prop_ro("open_axes",
                   [](const Row& row) {
                     nb::list names;
                     for (int symbol : row.open_axes) names.append(row.symbols[symbol].name);
                     if (row.open_prefix) names.append("lead");
                     return nb::tuple(names);
                   })
      .def("bind", Bind, nb::arg("shapes"), nb::arg("dtypes"), nb::arg("attributes"),
           nb::arg("dtype") = nb::none(), "[(shape, dtype)] of the results.")
      .def("axes", Axes, nb::arg("shapes"), nb::arg("attributes"), nb::arg("split"),
           "(operands, results, split): axes as factors (name, size).")
      .def("extents", Extents, nb::arg("shapes"), nb::arg("attributes"),
           "Of each result, of each axis (operand, axis, times, run, size, per_byte).");
  m.def(
      "ops",
      [] {
        nb::list rows;
        for (const Row& row : Rows()) rows.append(nb::cast(&row, nb::rv_policy::reference));
        return rows;
      },
      "The rows of ops.def, in its order.");
}

}  // namespace qshard::host
