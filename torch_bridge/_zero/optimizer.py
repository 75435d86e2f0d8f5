"""ZeRO: optimizer states, masters and, if asked for, weights cut over ranks; layers see quantized weights.

    convert(model, recipe)
    optimizer = ZeroOptimizer(model, lr=1e-3)          # in place of DistributedDataParallel and AdamW
    for batch in data:                                 # each rank its own
        optimizer.zero_grad(); loss_of(model, batch).backward(); optimizer.step()

Stage 1: each rank has all weights, quantized once a step, not once a forward, and a part of masters and states. A step:

    gradients summed and scattered -> Adam on the own slice -> ONE max-reduction -> codes of the own slice -> ONE gather

Fully sharded, `shard_weights=True`: each rank has a part of the codes too. Those of a unit, one or more layers, are
gathered while the unit before it runs, in forward and in backward, and freed after it; its gradients are scattered as
soon as they are all there, while the next one runs (`schedule.py`).

The bits do not depend on the stage or on how weights are cut, and those of W ranks are those of one process that runs
the W batches one after the other and adds their gradients: gradients are added in float32, in the order of ranks, then
divided by W; codes are those of the whole weight (`_core.flat_shards`); Adam is elementwise. With several backward
passes a step that holds for each stage alone: stage 1 adds a rank's own first, and sharded weights add those of all
ranks.

Sources: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277; TransformerEngine `quantize_master_weights`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qshard.torch_bridge._delayed_scaling import DelayedScale, update_delayed
from qshard.torch_bridge._fsdp.weight import memory_of
from qshard.torch_bridge._module_tree import modules_of
from qshard.torch_bridge._ops.collectives import unlike_ranks
from qshard.torch_bridge._optim.adam import Adam, initialize_state
from qshard.torch_bridge._optim.adam_state import SCALED
from qshard.torch_bridge._optim.cast_master import CastPlan, Parity
from qshard.torch_bridge._quantized.validation import check_dtype, check_group, check_model
from qshard.torch_bridge._zero.buffers import ALIGNMENT, BLOCK_ALIGNMENT, FlatBuffer, buckets_of
from qshard.torch_bridge._zero.gradients import clip_by_norm, norm_over_ranks
from qshard.torch_bridge._zero.meta_init import Init, MetaInit, check_init, default_device
from qshard.torch_bridge._zero.placeholders import weakly
from qshard.torch_bridge._zero.schedule import (
    Schedule,
    autograd_runs,
    check_parameters,
    watch_gradients,
    watch_model,
    watch_moves,
    watch_uses,
)
from qshard.torch_bridge._zero.state_dict import StateDicts
from qshard.torch_bridge._zero.weight import Ranks, SliceCast, ZeroParameter, by_setting, units_of, weights_of


class ZeroOptimizer(Adam):
    """`Adam`, or AdamW, over slices of float32 masters, which makes the weights that layers compute with.

    Weights of `Linear` become `QuantizedTensor`s of the recipe's format, all others are gathered in the dtype that they
    have; so are weights of formats with vectors as blocks, whose two planes are different numbers, and of
    `four_over_six`: layers quantize these. Frozen parameters stay as they are.

    Args:
      model: on its device, the same layers on all ranks; values, and buffers, are taken from the first rank. Do not
        wrap it in DistributedDataParallel. Its parameters become other objects: hold on to those afterwards.
      lr: a number or a tensor of one.
      group: the ranks; all of them by default. One process needs none.
      shard_weights: whether weights are sharded too.
      units: with it, the modules whose weights are gathered together, innermost first served; by default each module
        that has parameters of its own. A parameter of two modules needs a unit that holds both.
      settings: called with the name and the parameter, gives options of `Adam` for it: `{"weight_decay": 0.0}`.
      parity: "model": codes are those of the master rounded to the dtype of the parameter; "master": of the master.
      reduce_dtype: in which gradients travel: float32, bfloat16 or float16. Sums are float32. Of a model in that dtype
        bits are those of float32, if each gradient is made by one backward pass, and half as much travels.
      init, device: of a model on meta, which goes to `device`, by default the accelerator there is. `init` is called
        with each module that has parameters or buffers of its own, to fill them; by default their `reset_parameters`
        or `init_weights` is. A rank has one module whole at a time. Values follow from the names of modules and from
        `torch.manual_seed` on the first rank, for any number of ranks and either stage.
      options: of `Adam`, for all: `decoupled_weight_decay=True` is `AdamW`, whose default of 0.01 is then to be given
        as `weight_decay`. States with scales have one for every 128 elements of the flattened weight.

    Gradients leave `.grad` as soon as they are made, for a flat float32 buffer that `zero_grad`, of the optimizer or of
    the model, clears and `step` does not. What stands at `.grad` raises where it is read: clip with `clip_grad_norm_`.
    A parameter without one counts as zeros; one that you put at `.grad` counts. `DelayedScaling` is taken care of: no
    call of `update_scales` is needed; one more changes nothing.

    Sharded weights are there while their unit runs. Between, `model.parameters()` have shapes and dtypes, and all that
    would read values raises. Layers may be compiled: hooks that gather and free stay outside. A move to another
    dtype or device, such as `model.half()`, raises and moves nothing. Any other change of parameters that a step would
    pass over, such as freezing, or a write to them, raises in the next step.

    Checkpoints: `state_dict` of the model has the float32 masters, exactly, in whole shapes, that of the optimizer the
    states. With several ranks both are slices of this one: for `torch.distributed.checkpoint`, which loads them with
    any number of ranks, in either stage and into plain models, and for `get_model_state_dict`,
    `get_optimizer_state_dict` and their `set_` twins, with `full_state_dict=True` for one file. `load_state_dict` of
    the model takes whole tensors or slices, and is collective: the weights are made anew. `full_weights` are the
    masters, whole, on every rank. There is no pickle or copy of a model with sharded weights.

    `step` is collective, also on a rank whose slices are empty. Whatever the number of weights, it takes one all-to-all
    of gradients for every 128 MiB, one max all-reduce of amaxes and one all-gather of bytes; with sharded weights the
    first and the last for each unit, and the last again in backward, but for the unit that forward ends with.
    `DelayedScaling` takes an all-reduce of its own and needs no other. All ranks must run the same units in the same
    order, and have gradients for the same parameters.

    Sharded weights are gathered one unit ahead, in the order of the last pass. In another order, or when a part of the
    model is run alone, all is as right: what was gathered for nothing is freed. Two units are whole at a time, beside
    those that hold others, so choose `units` alike in size, as the blocks of a transformer. On CUDA gathers and sums
    have streams of their own; such weights refuse to be captured in a graph.

    Raises:
      ValueError: the model, or an option, cannot be taken: on all ranks, also if one rank alone sees why.

    >>> from qshard.recipes import CurrentScaling
    >>> from qshard.torch_bridge import convert
    >>> model = convert(nn.Linear(2, 2, bias=False), CurrentScaling())
    >>> _ = model.weight.detach().fill_(1.0)
    >>> optimizer = ZeroOptimizer(model, lr=0.25)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> optimizer.step()
    >>> model.weight.dequantize()
    tensor([[0.7500, 0.7500],
            [0.7500, 0.7500]])
    """

    _op = "ZeroOptimizer"

    def __init__(
        self,
        model: nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        group: dist.ProcessGroup | None = None,
        shard_weights: bool = False,
        units: Sequence[nn.Module] | None = None,
        settings: Callable[[str, nn.Parameter], dict[str, Any]] | None = None,
        parity: Parity = "model",
        reduce_dtype: torch.dtype = torch.float32,
        init: Init | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ):
        check_model("ZeroOptimizer", model)
        check_group("ZeroOptimizer", group)
        self._ranks, self._model = Ranks.of(group), model
        there = next((p.device for p in model.parameters() if not p.is_meta), None)
        self._device = there or (default_device() if device is None else torch.device(device))
        problem, chosen, alignment = None, [], ALIGNMENT
        try:
            weights = weights_of(model)
            check_init(model, init)
            chosen = units_of(model, weights, units) if shard_weights else [(model, weights)]
            groups_of = by_setting(weights, settings)
            # What these would refuse, before any collective.
            CastPlan([], parity=parity, op="ZeroOptimizer")
            check_dtype("ZeroOptimizer", "reduce_dtype", reduce_dtype)
            trial = [{"params": [nn.Parameter(torch.empty(0))], **given} for given, _ in groups_of]
            adam = _Trial(trial, lr, **options)
            if unknown := {key for given, _ in groups_of for key in given} - set(adam.defaults):
                raise ValueError(
                    f"ZeroOptimizer: settings ({sorted(unknown)[0]!r}) is not an option of Adam; pass options of Adam "
                    "only"
                )
            if any({group["exp_avg_dtype"], group["exp_avg_sq_dtype"]} & set(SCALED) for group in adam.param_groups):
                alignment = BLOCK_ALIGNMENT
        except (ValueError, TypeError) as error:
            problem, groups_of = error, []
        kinds = [(w.name, w.shape, str(w.dtype), str(w.fmt)) for _, of_unit in chosen for w in of_unit]
        self._layout = hashlib.sha256(
            repr((self._ranks.size, shard_weights, parity, alignment, kinds)).encode()
        ).hexdigest()
        self._agree(problem, "has another model or other options; use the same on all ranks", also=reduce_dtype)
        initial = MetaInit(model, weights, init, self._ranks, self._device)
        if self._ranks.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                if not tensor.is_meta:
                    dist.broadcast(memory_of(tensor), group=self._ranks.group, group_src=0)
        self._stale = False  # Whether masters have been loaded that the weights were not made of yet.
        self._schedule = Schedule(self._device)
        make: dict[str, Any] = {
            "device": self._device,
            "written": weakly(self._note_write),
            "make": initial.make,
            "reduce_dtype": reduce_dtype,
            "reductions": self._schedule.reductions,
        }
        self._flats = [FlatBuffer(of_unit, self._ranks, shard_weights, alignment, **make) for _, of_unit in chosen]
        self._weights = [weight for flat in self._flats for weight in flat.weights]
        super().__init__(
            [{"params": [w.master for w in of_group], **given} for given, of_group in groups_of], lr, **options
        )
        self._of_groups = [of_group for _, of_group in groups_of]
        for made, of_group in zip(self.param_groups, self._of_groups, strict=True):
            made["params"] = [w.shown for w in of_group]  # What users know of: the same on every rank.
        self._buckets = buckets_of(self._flats, self._of_groups)
        self._initialize_states()
        self._current = SliceCast([w for w in self._weights if w.quantized and not w.delayed], parity)
        self._delayed = SliceCast([w for w in self._weights if w.quantized and w.delayed], parity)
        for (module, _), flat in zip(chosen, self._flats, strict=True):
            watch_gradients(flat)
            if shard_weights:
                watch_uses(module, flat, self._schedule, self._renew)
        watch_model(model, self._schedule, self._renew)
        watch_moves(model, self._weights)
        for module in modules_of(model):
            if isinstance(module, DelayedScale):
                module.group = self._ranks.group
        self._states = StateDicts(self._ranks, self._device, self._note_write)
        self._states.watch(model, self._flats, self._renew)
        self._publish()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Refuses: what it holds are views of a model's memory, hooks on it, and a process group.

        Raises:
          TypeError: always.
        """
        raise TypeError(
            "ZeroOptimizer: it owns memory and hooks of its model, so it cannot be pickled or copied; save "
            "state_dict(), and load it into the optimizer of the other model"
        )

    def _initialize_states(self) -> None:
        for group, of_group in zip(self.param_groups, self._of_groups, strict=True):
            for weight in of_group:
                initialize_state(self.state[weight.shown], weight.master, group)

    def _trained(self, group: dict[str, Any]) -> Iterable[tuple[dict[str, Any], Tensor]]:
        index = next(i for i, one in enumerate(self.param_groups) if one is group)
        return [(self.state[weight.shown], weight.master) for weight in self._bucket.of_groups[index]]

    def _by_kind(self, group: dict[str, Any]) -> dict[Any, list[tuple[dict[str, Any], dict[str, Tensor]]]]:
        """As in `Adam`, by bucket too: each has its step numbers in memory that stays."""
        return {(*kind, self._bucket.number): members for kind, members in super()._by_kind(group).items()}

    def _update(self, inv_grad_scale: Tensor | float | None) -> None:
        """Updates the own slices with the mean of all ranks' gradients, and the weights that layers see. Collective."""
        check_parameters(self._model, self._flats)
        self._schedule.abandon()
        self._delayed.observe()  # Of the weights that this step's forward has used.
        for flat in self._flats:
            flat.gradient.settle()
        # Adam may divide sums by a power of two: it multiplies, which is the same.
        sums = inv_grad_scale is None and self._ranks.size.bit_count() == 1
        sums = sums and not any(flat.gradient.is_clipped for flat in self._flats)
        for bucket in self._buckets:
            self._bucket = bucket
            for flat in bucket.flats:
                flat.give_gradient(flat.gradient.total() if sums else flat.gradient.mean())
            self._update_values(1 / self._ranks.size if sums else inv_grad_scale)
            for flat in bucket.flats:
                flat.give_gradient(None)
        if self._delayed.delayed:
            update_delayed(self._model, self._ranks.group)
        self._publish()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float | Tensor, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips the mean gradient of all ranks by its norm, as `torch.nn.utils.clip_grad_norm_` clips a whole one.

        Call it on all ranks, after the last backward pass of a step, before `step`. The norm does not depend on the
        stage or on how weights are cut, to the bit: it is the exact sum of powers that are rounded to 60 bits.

        Args:
          max_norm: of the clipped gradient; `math.inf` only measures.
          norm_type: a number above 0, or infinity.
          error_if_nonfinite: whether to raise, on all ranks, where the norm is infinite or NaN. This waits for the
            device.

        Returns:
          The norm before clipping, float32 `[]`, the same bits on every rank. Collective: the gradients' reduction,
          which `step` then does not need, and two all-reduces of at most 16 bytes.

        Raises:
          ValueError: `norm_type` is not a norm.
          RuntimeError: the norm is infinite or NaN, and `error_if_nonfinite` is True.

        >>> model = nn.Linear(2, 1, bias=False)
        >>> optimizer = ZeroOptimizer(model)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> optimizer.clip_grad_norm_(1.0)
        tensor(5.)
        """
        if isinstance(norm_type, bool) or not isinstance(norm_type, int | float) or not norm_type > 0:
            raise ValueError(
                f"clip_grad_norm_: norm_type ({norm_type!r}) is not a number above 0; pass 2.0, or math.inf"
            )
        for flat in self._flats:
            flat.gradient.settle()
        means = [flat.gradient.fixed_mean() for flat in self._flats]
        norm = norm_over_ranks(means, float(norm_type), self._ranks.group)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"clip_grad_norm_: norm ({norm.item()}) of the gradients is not finite; skip the step with "
                "zero_grad(), or pass error_if_nonfinite=False"
            )
        clip_by_norm(means, norm, max_norm)
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients. There is nothing to set to zeros."""
        if self._schedule.in_backward and not autograd_runs():
            self._schedule.abandon()  # A backward pass that raised has not seen to it.
        for flat in self._flats:
            flat.gradient.clear()
            for weight in flat.weights:
                weight.parameter.grad = weight.shown.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The states of `Adam`, in the shapes of whole weights, and, under "zero", the masters. No communication.

        Of several ranks they are slices of this one, which share memory with the optimizer: for
        `torch.distributed.checkpoint`, for `get_optimizer_state_dict`, which drops "zero" (`state_dict` of the model
        has masters too), or, by `copy.deepcopy`, to come back to.
        """
        given = super().state_dict()
        ordered = [weight for of_group in self._of_groups for weight in of_group]
        state = {
            key: {name: self._each(self._states.shown, ordered[key], name, value) for name, value in values.items()}
            for key, values in given["state"].items()
        }
        own = {
            "layout": self._layout,
            "rank": self._ranks.rank,
            "masters": [self._states.shown(w, "master", w.master, master=True) for w in self._weights],
        }
        return {**given, "state": state, "zero": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state, bit for bit: this rank's part of it, whatever it is cut into. Collective.

        Masters come along if it is one of `state_dict` itself, for the same model, stage and ranks. Else load the model
        too: one of `get_optimizer_state_dict`, or of torch's AdamW, is of the states alone.

        Raises:
          ValueError: it is of another model, or has the masters of another stage, number of ranks or rank; on all
            ranks, which have changed nothing.
        """
        problem: Exception | None = None
        states: dict[Any, Any] = {}
        masters: list[Tensor] = []
        try:
            states, masters = self._own_state(state_dict)
        except ValueError as error:
            problem = error
        self._agree(problem, "cannot load its state; see its message")
        super().load_state_dict({**state_dict, "state": states})
        self._initialize_states()
        for weight, master in zip(self._weights, masters, strict=False):
            weight.master.detach().copy_(master)
        self._publish()

    def _own_state(self, state_dict: dict[str, Any]) -> tuple[dict[Any, Any], list[Tensor]]:
        own = state_dict.get("zero")
        if own is not None and (own.get("layout"), own.get("rank")) != (self._layout, self._ranks.rank):
            raise ValueError(
                f"ZeroOptimizer: state (layout {str(own.get('layout'))[:8]}, rank {own.get('rank')}) does not match "
                f"layout {self._layout[:8]}, rank {self._ranks.rank}; load it with the same model, stage and number of "
                "ranks, or save with get_optimizer_state_dict"
            )
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        ordered = [weight for of_group in self._of_groups for weight in of_group]
        if len(names) != len(ordered):
            raise ValueError(
                f"ZeroOptimizer: state (of {len(names)} parameters) does not match the {len(ordered)} of this model; "
                "load a state of the same model"
            )
        weights = dict(zip(names, ordered, strict=True))
        states = {
            key: {name: self._each(self._states.own, weights[key], name, value) for name, value in values.items()}
            for key, values in state_dict["state"].items()
        }
        masters = [] if own is None else own["masters"]
        return states, [self._states.own(w, "master", m) for w, m in zip(self._weights, masters, strict=False)]

    def _each(
        self, change: Callable[[ZeroParameter, str, Tensor], Tensor], weight: ZeroParameter, name: str, value: Any
    ) -> Any:
        """Changes what is of each element; a step number is of all. FP8 may be bytes in a dict."""
        if isinstance(value, dict):
            return {key: self._each(change, weight, name, part) for key, part in value.items()}
        return change(weight, name, value) if isinstance(value, Tensor) and name != "step" else value

    def full_weights(self) -> dict[str, Tensor]:
        """The float32 masters of all weights, by name, on every rank: what a plain model loads. Collective."""
        return {name: value for flat in self._flats for name, value in flat.gather_masters().items()}

    def _note_write(self) -> None:
        self._stale = True

    def _renew(self) -> None:
        """Publishes masters that have been loaded. Collective if they have, which all ranks do alike."""
        if self._stale or (self._ranks.size == 1 and any(flat.is_written for flat in self._flats)):
            self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Makes the own part of the weights of the masters and, unless it is sharded, sends it to all."""
        self._stale = False
        self._schedule.abandon()
        self._current.cast(self._ranks.group)
        self._delayed.cast(self._ranks.group)
        kept = (weight for flat in self._flats if not flat.values_alone for weight in flat.weights)
        plain_ones = [(w.values, w.master) for w in kept if w.values is not None and w.values.numel()]
        if plain_ones:
            torch._foreach_copy_([values for values, _ in plain_ones], [master for _, master in plain_ones])
        for flat in self._flats:
            if not flat.sharded:
                flat.publish()
            flat.note_versions()

    def _agree(self, problem: Exception | None, otherwise: str, also: object = None) -> None:
        """Raises on all ranks if one has a problem, or if layouts, or something else, differ. Collective."""
        facts = repr((str(problem), self._layout, also)).encode()
        others = unlike_ranks(facts, self._ranks.group, self._device)
        if problem is not None:
            raise problem
        if others:
            raise ValueError(f"ZeroOptimizer: rank {others[0]} differs from rank {self._ranks.rank}: it {otherwise}")


class _Trial(Adam):
    """What refuses options."""

    _op = "ZeroOptimizer"
