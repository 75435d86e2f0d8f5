"""Settings of `ZeroOptimizer`: the groups and defaults of an `Adam`, `AdamW` or `Muon` of the whole weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qshard._core.layer_recipes import check_function
from qshard._core.validation import quote
from qshard.torch_bridge._optim.adam import Adam, AdamW
from qshard.torch_bridge._optim.adam_state import SCALED
from qshard.torch_bridge._optim.muon import Muon
from qshard.torch_bridge._zero.weight import ZeroParameter

SettingsOf = Callable[[str, nn.Parameter], Mapping[str, Any]]


class Group(NamedTuple):
    """Weights of one parameter group, and its settings, which are all there."""

    settings: dict[str, Any]
    weights: list[ZeroParameter]


class Settings(NamedTuple):
    """Parameter groups and defaults."""

    groups: list[Group]
    defaults: dict[str, Any]

    @property
    def has_scaled_states(self) -> bool:
        dtypes = {group.settings[name] for group in self.groups for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
        return bool(dtypes & set(SCALED))

    @property
    def facts(self) -> str:
        """The settings that ranks must agree on."""
        groups = [
            ([weight.name for weight in group.weights], {name: _plain(own) for name, own in group.settings.items()})
            for group in self.groups
        ]
        return repr(groups)


def settings_of(
    optimizer_class: type[Adam],
    weights: Sequence[ZeroParameter],
    settings: SettingsOf | None,
    lr: float | Tensor,
    options: Mapping[str, Any],
) -> Settings:
    """Check the options of all weights, and return their groups: the same on every rank.

    An optimizer of tensors on meta, which have the whole shapes, checks the options and divides the weights.

    Raises:
      TypeError, ValueError: an option is unknown, has a wrong type or is out of range, or a rule has no effect.
    """
    if optimizer_class not in (Adam, AdamW, Muon):
        raise TypeError(
            f"ZeroOptimizer: optimizer_class ({quote(optimizer_class)}) is not Adam, AdamW or Muon of qshard; pass one "
            "of these classes"
        )
    if settings is not None:
        check_function(
            "ZeroOptimizer", "settings", settings, "a name and its parameter", "lambda name, p: {'lr': 1e-3}"
        )
    weight_of = {nn.Parameter(torch.empty(w.shape, dtype=torch.float32, device="meta")): w for w in weights}
    of_settings: list[tuple[Mapping[str, Any], list[Any]]] = []
    for parameter, weight in weight_of.items():
        given = settings(weight.name, weight.parameter) if settings else {}
        if not isinstance(given, Mapping):
            raise TypeError(
                f"ZeroOptimizer: settings({weight.name!r}) ({quote(given)}) is not a dict; return options, such as "
                "{'weight_decay': 0.0}"
            )
        if "params" in given:
            raise _unknown("params", optimizer_class)
        members = next((members for known, members in of_settings if _are_one(known, given)), None)
        if members is None:
            of_settings.append((given, members := []))
        members.append((weight.name, parameter) if optimizer_class is Muon else parameter)
    named: type[Adam] = type(optimizer_class.__name__, (optimizer_class,), {"_op": "ZeroOptimizer"})
    trial = named([{**given, "params": members} for given, members in of_settings], lr, **options)
    known = {*trial.defaults, "algorithm"} if optimizer_class is Muon else {*trial.defaults}
    if unknown := {key for given, _ in of_settings for key in given} - known:
        raise _unknown(sorted(unknown)[0], optimizer_class)
    groups = [
        Group({name: own for name, own in group.items() if name != "params"}, [weight_of[p] for p in group["params"]])
        for group in trial.param_groups
    ]
    return Settings(groups, trial.defaults)


def _are_one(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether two settings make one group. Two tensors make two: a schedule may change each by itself."""

    def is_same(x: Any, y: Any) -> bool:
        return x is y or not (isinstance(x, Tensor) or isinstance(y, Tensor) or x != y)

    return a.keys() == b.keys() and all(is_same(a[name], b[name]) for name in a)


def _unknown(option: str, optimizer_class: type[Adam]) -> ValueError:
    name = optimizer_class.__name__
    return ValueError(f"ZeroOptimizer: settings ({option!r}) is not an option of {name}; pass options of {name} only")


def _plain(setting: Any) -> Any:
    return float(setting) if isinstance(setting, Tensor) else setting
