"""Muon for hidden matrices and AdamW for the other parameters, in one optimizer, on sharded parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from qshard._core.optimizers import muon as core
from qshard._core.optimizers.muon_plan import OWNED_ELEMENTS
from qshard._core.validation import join_names, quote
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._fsdp.weight import ShardedWeight, memory_of
from qshard.torch_bridge._optim.adam import Adam
from qshard.torch_bridge._optim.newton_schulz import NEWTON_SCHULZ_SETTINGS
from qshard.torch_bridge._optim.orthogonalize import Matrix, MatrixPlan, plan_updates, ranks_of
from qshard.torch_bridge._quantized.validation import check_group

_ADAMW_OPTIONS = ("lr", "weight_decay", "betas", "eps", "exp_avg_dtype", "exp_avg_sq_dtype")


class Muon(Adam):
    """Muon for hidden matrices, sharded or not, and AdamW for the other parameters.

        M = M + (1 - momentum) (G - M)                        G: gradient, M: momentum
        U = G + momentum (M - G) with nesterov, else M        rounded to bfloat16
        X = U / max(|U|, eps); ns_steps times: A = X X^T; X = a X + (b A + c A A) X
        P = (1 - lr weight_decay) P - lr scale X

    `|U|` is the Frobenius norm, and a matrix with more rows than columns is transposed before and after. `scale` is
    `sqrt(max(1, rows / columns))` for `adjust_lr_fn="original"`, and `0.2 sqrt(max(rows, columns))` for
    "match_rms_adamw". Arguments up to `adjust_lr_fn` are as in `torch.optim.Muon`, and so are the bits of float32
    parameters, without `ns_fp8_steps`. Arithmetic outside Newton-Schulz is float32: values in 16 bits are rounded once
    a step.

    Args:
      params: named parameters, `model.named_parameters()`, or groups of them with settings of their own. A group may
        say itself which algorithm it has, `{"params": [...], "algorithm": "muon"}` or "adamw"; its parameters need no
        names.
      lr: learning rate of both algorithms.
      weight_decay: decoupled weight decay of both.
      momentum: decay of the momentum, in [0, 1).
      nesterov: whether to use Nesterov momentum.
      ns_coefficients: (a, b, c) of Newton-Schulz.
      eps: smallest norm to divide by.
      ns_steps: steps of Newton-Schulz.
      adjust_lr_fn: None or "original", or "match_rms_adamw", which fits the learning rate and weight decay of AdamW.
      rules: algorithms by pattern of the names of parameters, such as `{"*.router.*": "adamw"}`; patterns as in
        `convert`. Without a rule, Muon updates matrices and stacks of matrices, except for embeddings and heads.
      adamw: settings of `AdamW` that differ: `lr`, `weight_decay`, `betas`, `eps` (1e-8), `exp_avg_dtype`,
        `exp_avg_sq_dtype`. A parameter group's settings come first. Exceptions are `lr` and `eps` of a group
        that also has matrices for Muon.
      ns_fp8_steps: the first steps of Newton-Schulz that multiply in FP8, at most `ns_steps`. 3 of 5 add little to the
        error of bfloat16, and 4 or 5 are coarse: docs/muon.md has errors and times.
      ns_fp8_min_side: the smallest side of a matrix that multiplies in FP8. Smaller matrices stay in bfloat16, which is
        at least as fast for them on an H200. So do matrices with a side that 16 does not divide.
      master_weights: "float32" to keep float32 values of 16-bit parameters in the state; None rounds in every step.
      group: ranks with equal plain parameters and gradients, as under `DistributedDataParallel`, which divide the work.
        DTensors need none.

    Raises:
      TypeError: parameters have no names, or a setting or a parameter has a wrong type.
      ValueError: a setting is out of range, a rule has no effect, or in `step`, ranks have different parameters or
        gradients.
      NotImplementedError: the parameters belong to FSDP1, or to a `ZeroOptimizer`, which has `optimizer_class=Muon`.

    Each matrix has one owner among the ranks of its mesh. Ranks send it their parts of U in bfloat16, it runs
    Newton-Schulz once, and it returns to each rank its part of X: two all-to-alls for a bucket of matrices, while
    another bucket is computed. Owners have about equal work. Matrices of a stack `[E, N, K]` are orthogonalized in
    batches of 8. Products do not depend on ranks, so parameters have the same bits for every number of ranks and every
    sharding, if the ranks have equal devices, libraries and numbers of threads.

    The state of a matrix is `momentum_buffer`, in the dtype of its values, and `master` if there is one; other
    parameters have the state of `AdamW`. State dicts load on any number of ranks. Primary weights are cast again in
    `step`, as by `AdamW`. A group of the optimizer has one algorithm, `group["algorithm"]`.

    >>> model = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
    >>> optimizer = Muon(model.named_parameters(), lr=0.02, adamw={"lr": 1e-3})
    >>> [(group["algorithm"], group["lr"], group["param_names"]) for group in optimizer.param_groups]
    [('muon', 0.02, ['0.weight']), ('adamw', 0.001, ['0.bias', '1.weight', '1.bias'])]
    >>> model(torch.eye(4)).sum().backward()
    >>> optimizer.step()

    Sources: Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., arXiv:2502.16982.
    """

    owned_elements = OWNED_ELEMENTS
    """Elements of a bucket for each rank, which bound its memory. Set it on all ranks before the first step."""
    _op = "Muon"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = core.COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = core.STEPS,
        adjust_lr_fn: str | None = None,
        *,
        rules: Mapping[str, str] | None = None,
        adamw: Mapping[str, Any] | None = None,
        ns_fp8_steps: int = 0,
        ns_fp8_min_side: int = core.FP8_MIN_SIDE,
        master_weights: str | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if isinstance(params, nn.Module):
            raise TypeError(f"{self._op}: params ({type(params).__name__}) is a module; pass its .named_parameters()")
        if group is not None:
            check_group(self._op, group)
        self._adamw = {"betas": (0.9, 0.999), "eps": 1e-8, **(adamw or {})}
        if unknown := [name for name in self._adamw if name not in _ADAMW_OPTIONS]:
            raise TypeError(
                f"{self._op}: adamw[{unknown[0]!r}] is not a setting of AdamW; pass {join_names(_ADAMW_OPTIONS)}"
            )
        self._group = group
        self._mesh_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._plan: _Plan | None = None
        self._hypers, self._steps, self._versions = {}, {}, {}
        groups = _named_groups(self._op, params)
        names = [name for each in groups for name, _ in each["params"] if name is not None]
        self._rules = core.check_rules(self._op, {} if rules is None else rules, names)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_fp8_steps": ns_fp8_steps,
            "ns_fp8_min_side": ns_fp8_min_side,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": self._adamw["betas"],
            "decoupled_weight_decay": True,
            "exp_avg_dtype": torch.float32,
            "exp_avg_sq_dtype": torch.float32,
            "master_weights": master_weights,
            "capturable": True,  # `step` of AdamW is on the device of the parameter.
        }
        Optimizer.__init__(self, groups, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add named parameters with settings of their own, as one group for each algorithm.

        Raises:
          TypeError, ValueError, NotImplementedError: as for the constructor.
        """
        [given] = _named_groups(self._op, [param_group])
        chosen = given.get("algorithm")
        if chosen is not None:
            core.check_algorithm(self._op, "algorithm", chosen)
        members: dict[str, list[Any]] = {algorithm: [] for algorithm in core.ALGORITHMS}
        for name, parameter in given["params"]:
            _check_parameter(self._op, name, parameter)
            members[chosen or self._algorithm_of(name, parameter)].append((name, parameter))
        first = len(self.param_groups)
        try:
            for algorithm, pairs in members.items():
                if pairs:
                    of_adamw = self._adamw if algorithm == core.ADAMW else {}
                    settings = {**of_adamw, **given}
                    if members[core.MUON]:  # Both rules have these settings: the group's are those of Muon.
                        settings |= {name: of_adamw[name] for name in ("lr", "eps") if name in of_adamw}
                    params = [parameter if name is None else (name, parameter) for name, parameter in pairs]
                    super().add_param_group({**settings, "params": params, "algorithm": algorithm})
                    _check_group(self._op, self.param_groups[-1], pairs)
        except BaseException:
            del self.param_groups[first:]
            raise
        self._plan = None

    def _algorithm_of(self, name: str | None, parameter: Tensor) -> str:
        if name is None:
            raise TypeError(
                f"{self._op}: parameter {tuple(parameter.shape)} has no name, which rules need; pass "
                "model.named_parameters(), or groups with 'algorithm': 'muon' or 'adamw'"
            )
        return core.algorithm_of(self._op, name, tuple(parameter.shape), self._rules)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rules": self._rules, "_adamw": self._adamw}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if own := self.__dict__.get("param_groups"):  # Not in a copy.
            check_algorithms(self._op, state["param_groups"], own)
        super().__setstate__(state)
        self._plan, self._group = None, self.__dict__.get("_group")
        self._mesh_groups = self.__dict__.get("_mesh_groups", {})

    def _to_update(self, group: dict[str, Any]) -> Any:
        return super()._to_update(group) if group["algorithm"] == core.ADAMW else []

    def _update_values(self, inv_grad_scale: Tensor | float | None) -> None:
        for run in self._runs():
            run.update(1.0 if inv_grad_scale is None else inv_grad_scale)
        super()._update_values(inv_grad_scale)

    def _runs(self) -> Sequence[MatrixPlan]:
        """Return the planned updates. Ranks compare parameters and gradients whenever this rank plans anew."""
        members = [
            (group, p, name)
            for group in self.param_groups
            if group["algorithm"] == core.MUON
            for p, name in zip(group["params"], group.get("param_names") or [None] * len(group["params"]), strict=True)
        ]
        facts = [(id(p), p.grad is not None, memory_of(p).shape) for _, p, _ in members]
        if self._plan is None or self._plan.facts != facts:
            found: dict[tuple[int, ...], list[Matrix]] = {}
            for group, p, name in members:
                found.setdefault(ranks_of(p, self._group), []).append(Matrix.of(name, p, group, self.state))
            each = ((self._group_of(ranks), matrices) for ranks, matrices in found.items())
            self._plan = _Plan(facts, [plan_updates(self._op, *of, self.owned_elements) for of in each])
        return self._plan.runs

    def _group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return a group of these global ranks, which all call this: a mesh of several axes has none of its own."""
        if len(ranks) < 2:
            return None
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        if ranks not in self._mesh_groups:
            self._mesh_groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
        return self._mesh_groups[ranks]


class _Plan(NamedTuple):
    facts: list[tuple[Any, ...]]
    runs: list[MatrixPlan]


def check_algorithms(op: str, groups: Sequence[dict[str, Any]], own: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless the parameter groups of a state have the algorithms of the optimizer's own."""
    algorithms, of_optimizer = [[group.get("algorithm") for group in each] for each in (groups, own)]
    if algorithms != of_optimizer:
        raise ValueError(
            f"{op}: the state has groups of {algorithms}, and this optimizer of {of_optimizer}; load the state of an "
            "optimizer with the same rules"
        )


def _named_groups(op: str, params: Any) -> list[dict[str, Any]]:
    """Return parameter groups with pairs of a name, or None, and a parameter."""
    if isinstance(params, Tensor):
        raise TypeError(f"{op}: params ({quote(params)}) is one tensor; pass model.named_parameters()")
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    found = []
    for group in groups:
        given = group["params"]
        members = [given] if isinstance(given, Tensor) else list(given)
        found.append({**group, "params": [each if isinstance(each, tuple) else (None, each) for each in members]})
    return found


def _check_parameter(op: str, name: str | None, parameter: Any) -> None:
    """Raise if a parameter is not a tensor, or belongs to a wrapper that has whole matrices nowhere."""
    if not isinstance(parameter, Tensor):
        raise TypeError(f"{op}: parameter {name or ''} ({quote(parameter)}) is not a tensor; pass nn.Parameters")
    local = local_of(parameter)
    is_fsdp1 = isinstance(local, FlatParameter) or "_fsdp_wrapped_module" in (name or "")
    has_values = type(local).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(local, ShardedWeight)
    if is_fsdp1 or not has_values:
        kind = "FullyShardedDataParallel" if is_fsdp1 else type(local).__name__
        raise NotImplementedError(
            f"{op}: {name or 'a parameter'} ({kind}) is not a whole or sharded matrix of values; shard the model by "
            "fully_shard, or pass optimizer_class=Muon to ZeroOptimizer"
        )
    if isinstance(parameter, DTensor) and any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(f"{op}: {name or 'a parameter'} ({parameter.placements}) is a partial sum; redistribute it")


def _check_group(op: str, group: dict[str, Any], pairs: Sequence[tuple[str | None, Tensor]]) -> None:
    core.check_settings(op, group["momentum"], group["nesterov"], *(group[name] for name in NEWTON_SCHULZ_SETTINGS))
    core.update_scale(op, group["adjust_lr_fn"], 1, 1)
    if group["master_weights"] not in (None, "float32"):
        raise ValueError(
            f"{op}: master_weights ({quote(group['master_weights'])}) is not None or 'float32'; pass one of these"
        )
    for name, parameter in pairs if group["algorithm"] == core.MUON else ():
        core.check_shape(op, name or "parameter", tuple(parameter.shape))
