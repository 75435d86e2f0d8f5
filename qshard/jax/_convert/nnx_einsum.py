"""Conversion of nnx modules with `jnp.einsum(equation, x, self.w)` in their `__call__`, as in tunix and gemma.

`convert(einsums=)` gives the equation of each module. `check_equation` compares it with a trace of `__call__`, so a
wrong equation, or a module that also adds a bias, raises and never changes a result.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import jax
from flax import nnx
from jax.extend import core

from qshard.jax._jax_internals import is_nnx_pytree
from qshard.jax._nn.dimension_numbers import Terms

_PASS_ON = ("convert_element_type", "copy")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "checkpoint", "remat", "remat2")


_EXTENDED: dict[type, type] = {}


def extend_class(kind: type[nnx.Module]) -> type[nnx.Module]:
    """The subclass of `kind` that multiplies in the formats of a recipe. Its instances need two attributes.

    Attributes:
      einsum_op: a `qshard.jax.nnx.Einsum`.
      einsum_rule: the equation, and the name of the attribute with the weight.
    """
    if is_extended(kind):
        return kind
    if kind not in _EXTENDED:
        own = {"_extends": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
        own |= {"__call__": _call, "__reduce_ex__": _reduce}  # No second base: it would change the layout of objects.
        options = {"pytree": is_nnx_pytree(kind)}
        _EXTENDED[kind] = types.new_class(f"Quantized{kind.__name__}", (kind,), options, lambda ns: ns.update(own))
    return _EXTENDED[kind]


def is_extended(kind: type) -> bool:
    return kind in _EXTENDED.values()


def _call(self: Any, *args: Any) -> jax.Array:
    """Compute the einsum of x, the last argument, and the weight, in the dtype that the user's class returns."""
    equation, name = self.einsum_rule
    *given, x = args
    plain = jax.eval_shape(lambda x: self._extends.__call__(self, *given, x), x)
    ndim = getattr(self, name).get_value().ndim
    if given and _number(terms_of(given[0], ndim)) != _number(terms_of(equation, ndim)):
        raise ValueError(
            f"einsum: {given[0]!r} is not {equation!r}, the equation of this {self._extends.__name__} in einsums= of "
            "convert; leave the module out of einsums="
        )
    made: jax.Array = self.einsum_op(equation, x, getattr(self, name).get_value(), preferred_element_type=plain.dtype)
    return made


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle the user's class instead of the subclass, which `extend_class` creates again."""
    reduced = super(type(self), self).__reduce_ex__(max(int(protocol), 2))
    return (_new, (self._extends,), *reduced[2:])


def _new(kind: type[nnx.Module]) -> nnx.Module:
    made: nnx.Module = object.__new__(extend_class(kind))
    return made


def check_equation(op: str, name: str, module: nnx.Module, parameter: str, equation: str, stacked: int) -> None:
    """Raise ValueError unless `module(x)` is the einsum `equation` of x and `module.parameter`, and nothing else.

    `stacked` is the number of leading axes of layers, which `nnx.scan` or `nnx.vmap` remove. `name` is for errors.
    """
    graph, state = nnx.split(module)
    flat, structure = jax.tree_util.tree_flatten_with_path(state)
    arrays = [jax.ShapeDtypeStruct(leaf.shape[stacked:], leaf.dtype) for _, leaf in flat]
    at = [i for i, (path, _) in enumerate(flat) if _attribute_of(path) == parameter]
    w = arrays[at[0]]
    terms = terms_of(equation, w.ndim)
    sizes = dict(zip(terms.w, w.shape, strict=True))
    x = jax.ShapeDtypeStruct(tuple(sizes.get(label, 2) for label in terms.x), w.dtype)
    takes = [p for p in inspect.signature(type(module).__call__).parameters.values() if p.default is p.empty]
    given = (equation,) * (len(takes) == 3)  # Modules of gemma take an equation and x.
    try:
        traced = jax.make_jaxpr(lambda arrays, x: nnx.merge(graph, jax.tree.unflatten(structure, arrays))(*given, x))(
            arrays, x
        )
    except Exception as error:
        what = f"cannot be called with an x of {x.shape}: {str(error).partition(chr(10))[0][:80]}"
        raise ValueError(
            f"{op}: {name} ({type(module).__name__}) {what}; pass the equation that the module computes"
        ) from None
    found = _product_of(traced.jaxpr, w=at[0])
    if isinstance(found, str):
        raise ValueError(
            f"{op}: {name} ({type(module).__name__}) does more than einsum {equation!r}: {found}; call "
            "qshard.jax.einsum in its __call__, or leave it out of einsums="
        )
    if _number(found) != _number(terms):
        raise ValueError(
            f"{op}: {name} ({type(module).__name__}) computes {_write(found)!r}, not {equation!r} as in einsums=; pass "
            "the equation that it computes"
        )


def terms_of(equation: str, ndim: int) -> Terms:
    """The labels of an equation for a weight of `ndim` axes. An ellipsis stands for two axes of x."""
    first = equation.partition(",")[0].strip()
    x_ndim = len(first.replace("...", "").replace(" ", "")) + 2 * ("..." in first)
    x, w = (cast(Any, jax.ShapeDtypeStruct((2,) * n, "float32")) for n in (x_ndim, ndim))
    return Terms.of(equation, x, w)


def _attribute_of(path: Any) -> str:
    return str(getattr(path[0], "key", getattr(path[0], "name", path[0])))


class _Value(NamedTuple):
    """An array of a trace: the operand "x" or "w", or the product "y", with a label for each axis."""

    operand: str
    labels: tuple[int, ...]


def _product_of(jaxpr: Any, w: int) -> Terms | str:
    """The labels of a program that only multiplies its last argument by argument `w`; else why it is not that."""
    values: dict[Any, _Value] = {}
    ndim = len(jaxpr.invars[w].aval.shape)
    values[jaxpr.invars[w]] = _Value("w", tuple(range(ndim)))
    x = jaxpr.invars[-1]
    values[x] = _Value("x", tuple(range(ndim, ndim + len(x.aval.shape))))
    same: dict[int, int] = {}
    if (why := _walk(jaxpr, values, same)) is not None:
        return why
    out = values.get(jaxpr.outvars[0]) if len(jaxpr.outvars) == 1 and _is_var(jaxpr.outvars[0]) else None
    if out is None or out.operand != "y":
        return "its result is not a product with the weight"

    def named(labels: Iterable[int]) -> tuple[str, ...]:
        return tuple(chr(ord("a") + same.get(label, label)) for label in labels)

    return Terms(named(values[x].labels), named(range(ndim)), named(out.labels))


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, core.Literal)


def _walk(jaxpr: Any, values: dict[Any, _Value], same: dict[int, int]) -> str | None:
    """Propagate labels through a program. Return the name of the first op that is not part of a plain product.

    Adds to `values`, the labels of arrays, and to `same`: labels of x, and the labels of w that they are contracted
    with or share.
    """
    for eqn in jaxpr.eqns:
        known = [values.get(atom) if _is_var(atom) else None for atom in eqn.invars]
        name = str(eqn.primitive)
        if all(value is None for value in known):
            continue
        if name in _CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            inner = getattr(inner, "jaxpr", inner)
            inside = {var: value for var, value in zip(inner.invars, known, strict=True) if value is not None}
            if (why := _walk(inner, inside, same)) is not None:
                return why
            for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
                if _is_var(atom) and atom in inside:
                    values[var] = inside[atom]
        elif name in _PASS_ON and known[0] is not None:
            values[eqn.outvars[0]] = known[0]
        elif name == "transpose" and known[0] is not None:
            labels = tuple(known[0].labels[axis] for axis in eqn.params["permutation"])
            values[eqn.outvars[0]] = known[0]._replace(labels=labels)
        elif name == "dot_general" and {value and value.operand for value in known} == {"x", "w"}:
            left, right = (value for value in known if value is not None)
            (contracted, batch) = eqn.params["dimension_numbers"]
            pairs = [*zip(*contracted, strict=True), *zip(*batch, strict=True)]
            for a, b in pairs:
                pair = left.labels[a], right.labels[b]
                of_w, of_x = pair if left.operand == "w" else pair[::-1]
                same[of_x] = of_w
            free = [
                [label for axis, label in enumerate(value.labels) if axis not in (*contracted[i], *batch[i])]
                for i, value in enumerate((left, right))
            ]
            values[eqn.outvars[0]] = _Value("y", (*(left.labels[axis] for axis in batch[0]), *free[0], *free[1]))
        else:
            return name
    return None


def _number(terms: Terms) -> tuple[tuple[int, ...], ...]:
    """Replace the labels of an equation by numbers, in order of appearance."""
    numbers: dict[str, int] = {}
    return tuple(tuple(numbers.setdefault(label, len(numbers)) for label in term) for term in terms)


def _write(terms: Terms) -> str:
    x, w, out = ("".join(term) for term in terms)
    return f"{x},{w}->{out}"
