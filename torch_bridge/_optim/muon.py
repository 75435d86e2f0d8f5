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
from qshard._core.optimizers.muon_plan import OWNED_ELEMENTS, plan_buckets
from qshard._core.validation import join_names, quote
from qshard.torch_bridge._distributed.dtensor import local_box, local_of, wrapped_like
from qshard.torch_bridge._fsdp.weight import ShardedWeight, memory_of
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._optim.adam import Adam
from qshard.torch_bridge._optim.matrix_exchange import MatrixExchange, Sending
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
    "match_rms_adamw". Arguments up to `adjust_lr_fn`, and the bits of float32 parameters, are as in `torch.optim.Muon`.
    Arithmetic outside Newton-Schulz is float32: values in 16 bits are rounded once a step.

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
        `exp_avg_sq_dtype`.
      master_weights: "float32" to keep float32 values of 16-bit parameters in the state; None rounds in every step.
      group: ranks with equal plain parameters and gradients, as under `DistributedDataParallel`, which divide the work.
        DTensors need none.

    Raises:
      TypeError: parameters have no names, or a setting or a parameter has a wrong type.
      ValueError: a setting is out of range, a rule has no effect, or in `step`, ranks have different parameters or
        gradients.
      NotImplementedError: the parameters belong to FSDP1 or a `ZeroOptimizer`.

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
        self._hypers, self._steps = {}, {}
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
                    settings = {**of_adamw, **given} if chosen else {**given, **of_adamw}
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
            groups = [[group.get("algorithm") for group in each] for each in (state["param_groups"], own)]
            if groups[0] != groups[1]:
                raise ValueError(
                    f"{self._op}: the state has groups of {groups[0]}, and this optimizer of {groups[1]}; load the "
                    "state of a Muon with the same rules"
                )
        super().__setstate__(state)
        self._plan, self._group = None, self.__dict__.get("_group")
        self._mesh_groups = self.__dict__.get("_mesh_groups", {})

    def _to_update(self, group: dict[str, Any]) -> Any:
        return super()._to_update(group) if group["algorithm"] == core.ADAMW else []

    def _update_values(self, inv_grad_scale: Tensor | float | None) -> None:
        for run in self._runs():
            run.update(1.0 if inv_grad_scale is None else inv_grad_scale)
        super()._update_values(inv_grad_scale)

    def _runs(self) -> Sequence[_Run]:
        """Return the planned updates. Ranks compare parameters and gradients whenever this rank plans anew."""
        members = [
            (group, p, name)
            for group in self.param_groups
            if group["algorithm"] == core.MUON
            for p, name in zip(group["params"], group.get("param_names") or [None] * len(group["params"]), strict=True)
        ]
        facts = [(id(p), p.grad is not None, memory_of(p).shape) for _, p, _ in members]
        if self._plan is None or self._plan.facts != facts:
            found: dict[tuple[int, ...], list[_Matrix]] = {}
            for group, p, name in members:
                matrix = _Matrix(name or f"parameter {tuple(p.shape)}", p, group, self.state)
                found.setdefault(_ranks_of(p, self._group), []).append(matrix)
            each = ((self._group_of(ranks), matrices) for ranks, matrices in found.items())
            self._plan = _Plan(facts, [run for of in each for run in _plan(self._op, *of, self.owned_elements)])
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


class _Matrix(NamedTuple):
    """A matrix or a stack, its settings, and the states of the optimizer."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    states: Mapping[Tensor, dict[str, Any]]

    @property
    def facts(self) -> tuple[Any, ...]:
        """The description and settings that ranks must agree on."""
        names = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "master_weights")
        given = "with" if self.parameter.grad is not None else "without"
        what = f"{self.name} {tuple(self.parameter.shape)} ({dtype_name(self.parameter.dtype)}) {given} a gradient"
        return what, *(self.group[name] for name in names)

    def values(self) -> Tensor:
        """Return the local values to update: the shard, or its float32 master. Create missing states."""
        memory, state = memory_of(self.parameter), self.states[self.parameter]
        if memory.dtype != torch.float32 and self.group["master_weights"] is not None and "master" not in state:
            state["master"] = wrapped_like(self.parameter, memory.float())
        values = memory_of(state["master"]) if "master" in state else memory
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = wrapped_like(self.parameter, torch.zeros_like(values))
        return values

    def momentum(self, grad_scale: Tensor | float) -> Tensor:
        """Update the momentum of the local shard, and return what Newton-Schulz takes."""
        grad, group = self.parameter.grad, self.group
        assert grad is not None
        if grad.is_sparse:
            raise NotImplementedError(f"Muon: grad (sparse) of {self.name} is not dense; call .to_dense() on it")
        local = memory_of(grad).float()
        if isinstance(grad_scale, Tensor) or grad_scale != 1:
            local = local * grad_scale
        self.values()  # Creates the state.
        buffer = memory_of(self.states[self.parameter]["momentum_buffer"])
        wide = buffer.float()  # Itself in float32. In 16 bits, loops of torch round as elements are aligned.
        wide.lerp_(local, 1 - group["momentum"])
        buffer.copy_(wide)
        return local.lerp(wide, group["momentum"]) if group["nesterov"] else wide

    def apply(self, update: Tensor) -> None:
        """Update the local shard by its part of the orthogonalized matrix."""
        group, memory, values = self.group, memory_of(self.parameter), self.values()
        scale = core.update_scale("Muon", group["adjust_lr_fn"], *self.parameter.shape[-2:])
        lr = float(group["lr"])
        wide = values.float()
        wide.mul_(1 - lr * group["weight_decay"])
        wide.add_(update, alpha=-lr * scale)
        values.copy_(wide)
        if values is not memory:
            memory.copy_(values)


class _Run(NamedTuple):
    """The matrices of one set of ranks, and the exchanges of their buckets."""

    matrices: list[_Matrix]
    exchanges: list[MatrixExchange]

    def update(self, grad_scale: Tensor | float) -> None:
        """Update all matrices. Messages of a bucket are on their way while another bucket is orthogonalized.

        send 0 | send 1, orthogonalize 0 | send 2, orthogonalize 1, apply 0 | send 3, orthogonalize 2, apply 1 | ...
        """
        count = len(self.exchanges)
        there: dict[int, Sending] = {}
        back: dict[int, Sending] = {}
        for i in range(count + 2):
            if i < count:
                there[i] = self.exchanges[i].send([each.momentum(grad_scale) for each in self._of(i)])
            if 0 < i <= count:
                back[i - 1] = self._orthogonalize(self.exchanges[i - 1], there.pop(i - 1))
            if i > 1:
                matrices = self._of(i - 2)
                local = [memory_of(each.parameter) for each in matrices]
                shapes, devices = [each.shape for each in local], [each.device for each in local]
                for each, part in zip(
                    matrices, self.exchanges[i - 2].parts(back.pop(i - 2), shapes, devices), strict=True
                ):
                    each.apply(part)

    def _of(self, bucket: int) -> list[_Matrix]:
        return [self.matrices[i] for i in self.exchanges[bucket].bucket.parameters]

    def _orthogonalize(self, exchange: MatrixExchange, sending: Sending) -> Sending:
        results = {}
        for unit, matrix in exchange.units(sending).items():
            group = self.matrices[exchange.bucket.units[unit][0]].group
            results[unit] = newton_schulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])
        return exchange.send_back(results)


class _Plan(NamedTuple):
    facts: list[tuple[Any, ...]]
    runs: list[_Run]


def newton_schulz(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return the orthogonalized bfloat16 matrix `[N, K]`, or matrices `[E, N, K]`, with the operations of torch's."""
    a, b, c = coefficients
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    add_product = torch.baddbmm if x.ndim == 3 else torch.addmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def _plan(op: str, group: dist.ProcessGroup | None, matrices: Sequence[_Matrix], owned_elements: int) -> list[_Run]:
    """Plan the update of matrices of one set of ranks. Collective."""
    boxes = [local_box(each.parameter) for each in matrices]
    facts: list[tuple[Any, ...]] = [each.facts for each in matrices]
    facts.append(("matrices in buckets", owned_elements))
    everyone: list[Any] = [(facts, boxes)]
    if group is not None:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (facts, boxes), group=group)
        _check_agreement(op, [of_rank for of_rank, _ in everyone])
    chosen = [i for i, each in enumerate(matrices) if each.parameter.grad is not None]
    if not chosen:
        return []
    device = _device_of(matrices[0].parameter)
    buckets = plan_buckets([[of_rank[i] for _, of_rank in everyone] for i in chosen], owned_elements=owned_elements)
    return [_Run([matrices[i] for i in chosen], [MatrixExchange(bucket, group, device) for bucket in buckets])]


def _check_agreement(op: str, everyone: Sequence[Sequence[tuple[Any, ...]]]) -> None:
    """Raise the same error on every rank if ranks differ."""
    for rank, facts in enumerate(everyone):
        if facts == everyone[0]:
            continue
        there = [[*each, ("nothing more",)] for each in (everyone[0], facts)]
        first, other = next((a, b) for a, b in zip(*there, strict=False) if a != b)
        differing = f"{first[0]}, and rank {rank} {other[0]}"
        if first[0] == other[0]:
            differing = f"{first[0]} with settings {first[1:]}, and rank {rank} with {other[1:]}"
        raise ValueError(
            f"{op}: rank 0 of {len(everyone)} would update {differing}; use the same parameters, settings and "
            "gradients on every rank"
        )


def _ranks_of(parameter: Tensor, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks that have a part or a copy of a parameter, as far as they are known."""
    if isinstance(parameter, DTensor):
        return tuple(sorted(parameter.device_mesh.mesh.flatten().tolist()))
    return () if group is None else tuple(dist.get_process_group_ranks(group))


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
            "fully_shard, not by FullyShardedDataParallel or ZeroOptimizer"
        )
    if isinstance(parameter, DTensor) and any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(f"{op}: {name or 'a parameter'} ({parameter.placements}) is a partial sum; redistribute it")


def _check_group(op: str, group: dict[str, Any], pairs: Sequence[tuple[str | None, Tensor]]) -> None:
    names = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps")
    core.check_settings(op, *(group[name] for name in names))
    core.update_scale(op, group["adjust_lr_fn"], 1, 1)
    if group["master_weights"] not in (None, "float32"):
        raise ValueError(
            f"{op}: master_weights ({quote(group['master_weights'])}) is not None or 'float32'; pass one of these"
        )
    for name, parameter in pairs if group["algorithm"] == core.MUON else ():
        core.check_shape(op, name or "parameter", tuple(parameter.shape))


def _device_of(parameter: Tensor) -> torch.device:
    """Return where matrices are whole: the device of the mesh, for a parameter that is offloaded too."""
    memory = memory_of(parameter)
    kind = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else memory.device.type
    if memory.device.type == kind:
        return memory.device
    return torch.device(kind, torch.get_device_module(kind).current_device())
