"""ZeRO: optimizer states, masters and, if asked for, weights cut over ranks; layers see quantized weights.

    convert(model, recipe)
    optimizer = ZeroOptimizer(model, lr=1e-3)          # in place of DistributedDataParallel and AdamW
    for batch in data:                                 # each rank its own
        optimizer.zero_grad(); loss_of(model, batch).backward(); optimizer.step()

Stage 1: each rank has all weights, quantized once a step, not once a forward, and a part of masters and states. A step:

    gradients summed and scattered -> Adam on the own slice -> ONE max-reduction -> codes of the own slice -> ONE gather

Fully sharded, `shard_weights=True`: each rank has a part of the codes too. Those of a unit, one or more layers, are
gathered before its forward and before its backward pass and freed after; its gradients are scattered as soon as they
are all there.

The bits do not depend on the stage or on how weights are cut, and those of W ranks are those of one process that runs
the W batches one after the other and adds their gradients: gradients are added in float32, in the order of ranks, then
divided by W; codes are those of the whole weight (`qshard.master`); Adam is elementwise. With several backward passes a
step that holds for each stage alone: stage 1 adds a rank's own first, and sharded weights add those of all ranks.

Sources: ZeRO, arXiv:1910.02054; PyTorch FSDP, arXiv:2304.11277; TransformerEngine `quantize_master_weights`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from qshard.pipeline import Scales
from qshard.torch_bridge.arguments import check_group, check_model
from qshard.torch_bridge.delayed import update_delayed
from qshard.torch_bridge.fsdp.weight import memory_of
from qshard.torch_bridge.optim.adam import Adam
from qshard.torch_bridge.optim.master import CastPlan, Parity, cast_master
from qshard.torch_bridge.optim.state import SCALED
from qshard.torch_bridge.quantize import max_over_ranks
from qshard.torch_bridge.zero.flat import ALIGNMENT, BLOCK_ALIGNMENT, Flat, Ranks, Weight
from qshard.torch_bridge.zero.units import by_setting, units_of, weights_of


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
      options: of `Adam`, for all: `decoupled_weight_decay=True` is `AdamW`, whose default of 0.01 is then to be given
        as `weight_decay`. States with scales have one for every 128 elements of the flattened weight.

    Gradients leave `.grad` as soon as they are made, for a flat float32 buffer that `zero_grad` clears and `step` does
    not. A parameter without one counts as zeros. `DelayedScaling` is taken care of: call neither `update_scales` nor
    `update_delayed`. Checkpoints: `state_dict` has this rank's slices, exactly; `full_weights` what another program
    needs. That of `model` has what layers see, and there is none of sharded weights, nor a copy or a pickle.

    `step` is collective, also on a rank whose slices are empty. Whatever the number of weights, it takes one all-to-all
    of float32 gradients, one max all-reduce of amaxes and one all-gather of bytes; with sharded weights the first and
    the last once for each unit, and the last again in backward. `DelayedScaling` takes an all-reduce of its own and
    needs no other. All ranks must run the same units in the same order; a gather begins when its unit is run.

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
        **options: Any,
    ):
        check_model("ZeroOptimizer", model)
        check_group("ZeroOptimizer", group)
        self._ranks, self._model = Ranks.of(group), model
        problem, chosen, alignment = None, [], ALIGNMENT
        try:
            weights = weights_of(model)
            chosen = units_of(model, weights, units) if shard_weights else [(model, weights)]
            groups_of = by_setting(weights, settings)
            # What these would refuse, before any collective.
            CastPlan([], parity=parity, op="ZeroOptimizer")
            trial = [{"params": [nn.Parameter(torch.empty(0))], **given} for given, _ in groups_of]
            adam = _Trial(trial, lr, **options)
            if unknown := {key for given, _ in groups_of for key in given} - set(adam.defaults):
                raise ValueError(
                    f"ZeroOptimizer: settings ({sorted(unknown)[0]!r}) is not an option of Adam; give options alone"
                )
            if any({group["exp_avg_dtype"], group["exp_avg_sq_dtype"]} & set(SCALED) for group in adam.param_groups):
                alignment = BLOCK_ALIGNMENT
        except (ValueError, TypeError) as error:
            problem, groups_of = error, []
        kinds = [(w.name, w.shape, str(w.dtype), str(w.fmt)) for _, of_unit in chosen for w in of_unit]
        self._layout = hashlib.sha256(
            repr((self._ranks.size, shard_weights, parity, alignment, kinds)).encode()
        ).hexdigest()
        self._agree(problem, "has another model or other options; make them alike")
        if self._ranks.size > 1:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(memory_of(tensor), group=self._ranks.group, group_src=0)
        self._flats = [Flat(of_unit, self._ranks, shard_weights, alignment) for _, of_unit in chosen]
        self._weights = [weight for flat in self._flats for weight in flat.weights]
        groups = [
            {"params": [w.master for w in of_group if w.master.numel()], **given} for given, of_group in groups_of
        ]
        super().__init__(groups, lr, **options)
        self._current = _Cast([w for w in self._weights if w.quantized and not w.delayed], parity)
        self._delayed = _Cast([w for w in self._weights if w.quantized and w.delayed], parity)
        self._queued = False
        for (module, _), flat in zip(chosen, self._flats, strict=True):
            self._watch(module, flat)
        self._publish()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Refuses: what it holds are views of a model's memory, hooks on it, and a process group.

        Raises:
          TypeError: always.
        """
        raise TypeError(
            "ZeroOptimizer: it cannot be pickled or copied, as it holds memory and hooks of its model; save "
            "state_dict(), and load it into one that is made of the other model"
        )

    def _update(self, inv_grad_scale: Tensor | float | None) -> None:
        """Updates the own slices with the mean of all ranks' gradients, and the weights that layers see. Collective."""
        self._delayed.observe()  # Of the weights that this step's forward has used.
        for flat in self._flats:
            mean = flat.mean_gradient()
            for weight, grad in zip(flat.weights, mean.split([w.master.numel() for w in flat.weights]), strict=True):
                weight.master.grad = grad.view(weight.master.shape)
        super()._update(inv_grad_scale)
        for weight in self._weights:
            weight.master.grad = None
        if self._delayed.delayed:
            update_delayed(self._model, self._ranks.group)
        self._publish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients. There is nothing to set to zeros."""
        self._queued = False  # A backward pass that raised has not seen to it.
        for flat in self._flats:
            flat.clear_gradient()

    def state_dict(self) -> dict[str, Any]:
        """What this rank owns: the states of `Adam` and, under "zero", the masters. No copies, no communication."""
        masters = [flat.masters for flat in self._flats]
        own = {"layout": self._layout, "rank": self._ranks.rank, "masters": masters}
        return {**super().state_dict(), "zero": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state of this rank, bit for bit, and makes the weights of it. Collective.

        Raises:
          ValueError: it is of another model, stage, number of ranks or rank; on all ranks, which have changed nothing.
        """
        own, problem = state_dict.get("zero", {}), None
        if (own.get("layout"), own.get("rank")) != (self._layout, self._ranks.rank):
            problem = ValueError(
                f"ZeroOptimizer: state (layout {str(own.get('layout'))[:8]}, rank {own.get('rank')}) is not of layout "
                f"{self._layout[:8]}, rank {self._ranks.rank}; load it with that model, stage and number of ranks, or "
                "start from full_weights"
            )
        self._agree(problem, "cannot load its state; see its message")
        super().load_state_dict(state_dict)
        for flat, masters in zip(self._flats, own["masters"], strict=True):
            flat.masters.copy_(masters)
        self._publish()

    def full_weights(self) -> dict[str, Tensor]:
        """The float32 masters of all weights, by name, on every rank: what a plain model loads. Collective."""
        return {name: value for flat in self._flats for name, value in flat.gather_masters().items()}

    @torch.no_grad()
    def _publish(self) -> None:
        """Makes the own part of the weights of the masters and, unless it is sharded, sends it to all."""
        self._current.cast(self._ranks.group)
        self._delayed.cast(self._ranks.group)
        plain_ones = [(w.values, w.master) for w in self._weights if w.values is not None and w.values.numel()]
        if plain_ones:
            torch._foreach_copy_([values for values, _ in plain_ones], [master for _, master in plain_ones])
        for flat in self._flats:
            if flat.sharded:
                flat.free()
            else:
                flat.publish()

    def _watch(self, module: nn.Module, flat: Flat) -> None:
        """Hooks by which weights are there when they are used, and gradients leave when they have been made."""
        for index, weight in enumerate(flat.weights):
            weight.parameter.register_post_accumulate_grad_hook(lambda _, i=index: self._arrived(flat, i))
        if not flat.sharded:
            return

        def before_backward(_: Tensor) -> None:
            flat.in_backward = True
            flat.gather()
            if not self._queued:
                self._queued = True
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

        def before_forward(*_: Any) -> None:
            flat.gather()

        def after_forward(_module: nn.Module, _args: Any, output: Any) -> None:
            tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
            if torch.is_grad_enabled() and not tensors:
                raise TypeError(
                    f"ZeroOptimizer: output of a unit ({type(output).__name__}) holds no tensor to see backward pass "
                    "by; return tensors in tuples, lists or dicts, or choose other units"
                )
            for t in tensors:
                if t.requires_grad:
                    t.register_hook(before_backward)
            if not flat.in_backward:  # Else activation checkpointing runs it, and backward goes on to use it.
                flat.free()

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)
        _refuse_copies(module, flat)

    def _arrived(self, flat: Flat, index: int) -> None:
        if flat.take_gradient(index) and flat.sharded:
            flat.end_backward()

    def _end_backward(self) -> None:
        """Units of which some parameter had no gradient."""
        self._queued = False
        for flat in self._flats:
            flat.end_backward()

    def _agree(self, problem: Exception | None, otherwise: str) -> None:
        """Raises on all ranks if one has a problem, or if layouts differ. Collective."""
        mine = hashlib.sha256(repr((str(problem), self._layout)).encode()).digest()
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to("cpu" if device.type == "meta" else device)
        everyone = [sent]
        if self._ranks.size > 1:
            everyone = [torch.empty_like(sent) for _ in range(self._ranks.size)]
            dist.all_gather(everyone, sent, group=self._ranks.group)
        if problem is not None:
            raise problem
        others = [rank for rank, digest in enumerate(everyone) if not torch.equal(digest, sent)]
        if others:
            raise ValueError(f"ZeroOptimizer: rank {others[0]} is not like rank {self._ranks.rank}: it {otherwise}")


def _refuse_copies(module: nn.Module, flat: Flat) -> None:
    """Keeps others from sharded weights while their memory is freed: to read it ends the process."""

    def refuse_state_dict(*_: Any) -> None:
        if flat.freed:
            raise RuntimeError(
                f"ZeroOptimizer: state_dict of {type(module).__name__} (sharded weights) is not there between uses; "
                "save full_weights() and state_dict() of the optimizer"
            )

    def refuse_copies(protocol: Any) -> Any:
        raise TypeError(
            f"ZeroOptimizer: {type(module).__name__} (sharded weights) cannot be pickled or copied; load "
            "full_weights() into another model"
        )

    module.register_state_dict_pre_hook(refuse_state_dict)
    module.register_load_state_dict_pre_hook(refuse_state_dict)
    module.__reduce_ex__ = refuse_copies  # type: ignore[method-assign]


class _Trial(Adam):
    """What refuses options."""

    _op = "ZeroOptimizer"


class _Cast:
    """Slices that are cast together: all with scales of their amaxes, or all with delayed ones."""

    def __init__(self, weights: Sequence[Weight], parity: Parity):
        self._pieces = [weight.quantized for weight in weights if weight.quantized is not None]
        self._masters = [weight.master.detach().view(-1) for weight in weights]
        self.delayed = [weight.delayed for weight in weights if weight.delayed is not None]
        self._parity = parity
        self._plan = CastPlan(self._pieces, parity=parity)
        self._starts = self._plan.words("starts", [weight.start for weight in weights])

    def cast(self, group: dist.ProcessGroup | None) -> None:
        """One all-reduce, if scales are made."""
        if self.delayed:
            scales = [Scales(state.scale, state.scale_inv) for state in self.delayed]
            known = [state.knows_scale() for state in self.delayed]
            if not all(known):
                whole = max_over_ranks(torch.stack(self._amaxes()), group).unbind()
                scales = [Scales(*state.scales_under(a)) for state, a in zip(self.delayed, whole, strict=True)]
            self._plan.cast(self._pieces, self._masters, self._starts, scales)
        elif self._pieces:
            cast_master(self._pieces, self._masters, self._starts, group, parity=self._parity, plan=self._plan)

    def observe(self) -> None:
        """Notes the amaxes of the slices; `update_delayed` makes those of whole weights of them."""
        if self.delayed:
            for state, amax in zip(self.delayed, self._amaxes(), strict=True):
                state.observe(amax)

    def _amaxes(self) -> list[Tensor]:
        return [amax.view(()) for amax in self._plan.amaxes(self._masters, self._starts)]
