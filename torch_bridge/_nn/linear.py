"""`Linear` and its base class: layers with a quantized weight, their state dicts, moves and pickles."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from qshard._core.operands import check_weight_format, check_weight_shape
from qshard._core.validation import WeightLayout, quote
from qshard.formats import Usage
from qshard.recipes import Recipe, RecipeLike, as_recipe
from qshard.torch_bridge._distributed.activation_group import ActivationGroup
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.scaling_state import load_state_if_present
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._fsdp.gathered_weight import is_converted, warn_of_late_quantization
from qshard.torch_bridge._fsdp.weight import ShardedWeight, wrap
from qshard.torch_bridge._nn.functional import linear
from qshard.torch_bridge._nn.weight_module import LinearOperands, WeightModule, wrap_weight
from qshard.torch_bridge._ops.eager import autocast_dtype
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype, check_tensor


def _codes_without_scale(state_dict: Any, key: str) -> str | None:
    """Return the name of the codes of a weight in a state dict that was read from a file, with their dtype; or None."""
    for suffix in ("", "_packed", "_blocks", ".rowwise.data"):
        stored = state_dict.get(key + suffix)
        if isinstance(stored, Tensor) and stored.dtype.itemsize == 1:
            return f"{key}{suffix} ({stored.dtype})"
    return None


class WeightLayer(WeightModule):
    """Base class of layers with one quantized weight. `Linear` documents its attributes.

    A module with `is_one_layer` lets a model that contains it take over the refresh of its scales.
    """

    weight: Any
    bias: Any
    weight_layout: ClassVar[WeightLayout] = "NK"
    scatter_dim: int | None = None
    overlap: bool = False
    activation_group: ActivationGroup | None = None
    is_one_layer = True

    def begin(self, recipe: Recipe, weight: nn.Parameter) -> None:
        self.recipe, self.weight = recipe, weight
        self._begin_scaling(self._states()["weight"], self._empty_seed() if recipe.stochastic else None)

    @property
    def _stored_weight(self) -> Tensor:
        """The parameter itself: a parametrization computes `weight` on each access, and may change its state then."""
        own = self._parameters.get("weight")
        return next(self.parameters()) if own is None else own

    def _empty_seed(self) -> Tensor:
        return torch.empty(2, dtype=torch.int32, device=self._stored_weight.device)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter. Tensor parallelism replaces the weight by a shard through this method.

        Some shardings copy the weight, and DTensor copies to a plain tensor, which is wrapped again here. Whether the
        layer can run with this sharding is checked in `forward`, because a weight that is gathered before may have any
        sharding. A plain parameter has no scaling state, so sharding would gather its values: this warns.
        """
        old: Any = self._parameters.get("weight")
        new: Any = param
        if name == "weight" and isinstance(new, DTensor) and isinstance(old, ShardedWeight):
            state, part = old.scale_state, ShardSpec(tuple(new.shape), new.device_mesh, new.placements)
            state.part = part
            state.passes.watch()  # Their forward passes share one reduction of amaxes.
            if not isinstance(local_of(new), ShardedWeight):
                param = nn.Parameter(wrap(new, state), requires_grad=new.requires_grad)
        elif name == "weight" and type(new) is nn.Parameter and isinstance(local_of(old), ShardedWeight):
            warnings.warn(
                f"{type(self).__name__}: the converted weight is replaced by a plain parameter, which FSDP2 would "
                "gather as values; write to weight.data instead, or call convert(model, recipe) again",
                stacklevel=3,
            )
        super().register_parameter(name, param)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules, except the scaling states while `parallelize_module` shards this layer.

        `parallelize_module` shards each module before it requests the next, and turns all parameters and buffers into
        DTensors. The states must stay plain tensors.
        """
        was_sharded = isinstance(self._parameters.get("weight"), DTensor)
        modules = super().named_modules(memo, prefix, remove_duplicate)
        for name, module in modules:
            yield name, module
            if module is self and not was_sharded and isinstance(self._parameters.get("weight"), DTensor):
                if self.seed is not None:
                    self.seed = local_of(self.seed)
                return

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any) -> None:
        """Load values or codes. Scaling state in old state dicts is ignored if the recipe does not use it."""
        key, seed = prefix + "weight", prefix + "seed"
        assign, was_meta = metadata.get("assign_to_params_buffers", False), self._stored_weight.is_meta
        loaded, held = state_dict.get(key), cast(Any, self._parameters.get("weight"))
        if isinstance(loaded, Tensor) and isinstance(local_of(loaded), QuantizedTensor):
            if (problem := self._unfit(local_of(loaded), key, assign)) is not None:
                others[-1].append(problem)
                state_dict = {**state_dict, key: self.weight}
        elif (found := _codes_without_scale(state_dict, key)) is not None:
            others[-1].append(
                f"load_state_dict: {found} has codes of a file, and load_state_dict does not apply their scales; call "
                "qshard.torch_bridge.load_quantized(model, path)"
            )
            state_dict = {**state_dict, key: self.weight}
        elif isinstance(loaded, Tensor) and assign:
            loaded = self._assigned("weight", loaded)
            if isinstance(held, QuantizedTensor) and type(loaded) in (Tensor, nn.Parameter):
                loaded = self._wrap(loaded, key)  # Values replace codes.
            state_dict = {**state_dict, key: loaded}
        foreign = [prefix + "delayed."] * ("delayed" not in self._modules) + [seed] * (self.seed is None)
        state_dict = {name: value for name, value in state_dict.items() if not name.startswith(tuple(foreign))}
        with load_state_if_present(self, state_dict, prefix):
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *others)
        if was_meta and not self._stored_weight.is_meta:
            self._make_state(self._stored_weight.device)

    def _unfit(self, codes: Tensor, name: str, assign: bool) -> str | None:
        """Return an error message if codes in a state dict cannot become the weight, else None."""
        assert isinstance(codes, QuantizedTensor)
        what, state = f"load_state_dict: {name} ({codes.format})", self._states().get("weight")
        if isinstance(self.weight, DTensor) or (state is not None and state.is_sealed):
            return f"{what} is quantized, but the layer has sharded values or a master; load codes.dequantize()"
        if state is not None and not assign:
            return f"{what} is quantized, but the layer has values; pass assign=True, or load codes.dequantize()"
        if codes.parts(Usage.ROWWISE) is None:
            return f"{what} has no rowwise plane, which a layer needs; quantize with usage=Usage.ROWWISE or Usage.BOTH"
        if self.recipe is None:
            return f"{what} is quantized, but the layer has no recipe now; load codes.dequantize()"
        try:
            check_weight_format("load_state_dict", name, codes.format, self.recipe, frozen=True)
        except ValueError as error:
            return str(error)
        return None

    def call_operands(self, input: Tensor) -> LinearOperands:
        """Return the operands of one call, and take a seed for it."""
        given: Any = input
        if not isinstance(given, Tensor):
            check_tensor("Linear", "input", given)
        weight: Tensor = self.weight  # Read once: a parametrization may compute or gather it on each access.
        if type(weight) is Tensor and is_converted(self._parameters.get("weight")):
            warn_of_late_quantization(weight)
        return self.operands_of_call(input, weight)

    def forward(self, input: Tensor) -> Tensor:
        """Compute `linear` with the weight, bias and recipe of the layer, or without a recipe the product of values."""
        if self.recipe is None:
            return self._multiply_values(input)
        x, weight, seed, delayed, dtype = self.call_operands(input)
        return linear(
            x,
            weight,
            self.bias,
            self.recipe,
            seed=seed,
            delayed=delayed,
            dtype=dtype,
            scatter_dim=self.scatter_dim,
            overlap=self.overlap,
            activation_group=self.activation_group,
            weight_layout=self.weight_layout,
        )

    def _multiply_values(self, input: Tensor) -> Tensor:
        """Compute `y = x @ w.T + bias` as the layer would without `convert`. x decides the dtype."""
        weight, bias = self.weight, self.bias
        if isinstance(input, DTensor) and isinstance(weight, DTensor):  # As PyTorch's `ColwiseParallel` gathers rows.
            pairs = zip(input.placements, weight.placements, strict=True)
            placements = tuple(Replicate() if w == Shard(0) else p for p, w in pairs)
            # Even where it moves nothing, `redistribute` would sum a partial gradient of x for each layer.
            input = input if input.placements == placements else input.redistribute(placements=placements)
        if autocast_dtype(input.device) is None:
            weight, bias = (None if each is None else each.to(input.dtype) for each in (weight, bias))
        if self.weight_layout == "NK":
            return nn.functional.linear(input, weight, bias)
        columns = input.reshape(-1, input.shape[-1])
        y = columns @ weight if bias is None else torch.addmm(bias, columns, weight)
        return y.view(*input.shape[:-1], -1)


class Linear(WeightLayer, nn.Linear):
    """`nn.Linear` with quantized GEMM operands, and a weight that FSDP2 gathers as codes.

    The weight stays a parameter in high precision, for any optimizer, and is saved as a plain tensor. Each forward pass
    quantizes it. Under `fully_shard` each rank quantizes its shard, and codes are gathered.

    The layer can be moved, pickled, copied and shared between processes like `nn.Linear`.
    `load_state_dict(assign=True)` also accepts a `QuantizedTensor` in the recipe's weight format, and then uses its
    codes as the weight.

    Args:
      in_features: K.
      out_features: N.
      bias: add a learned bias.
      recipe: the format of each role, for example `CurrentScaling()`, or the name of a recipe, such as
        "CurrentScaling".
      device: as for `nn.Linear`.
      dtype: float32, bfloat16 or float16; as for `nn.Linear`.

    Attributes:
      seed: for stochastic rounding, if the recipe uses it: a buffer, a uint64 as int32 `[2]`, low word first. Each
        forward pass uses it and increments it on the device. Each rank adds its rank number to the high word of the
        seed that it uses, so that ranks with equal buffers, for example after loading one checkpoint, draw different
        bits. The initial value is random, from `torch.manual_seed`.
      delayed: under `DelayedScaling`, the `DelayedScale` of each role. `update_scales` updates it.
      scatter_dim: as for `linear`; set by the styles of `tensor_parallel.py`.
      overlap: as for `linear`; set by the styles of `tensor_parallel.py`.
      activation_group: the ranks that each save a part of the codes of x, if passed to `prepare_modules_for_fsdp1`.

    Raises:
      TypeError: `bias` is a recipe.
      ValueError: a size is negative, or the weight is not whole blocks of the recipe's formats.

    >>> from qshard.recipes import CurrentScaling
    >>> layer = Linear(8, 4, bias=False, recipe=CurrentScaling())
    >>> layer(torch.ones(2, 8)).shape, layer.state_dict()["weight"].__class__.__name__
    (torch.Size([2, 4]), 'Tensor')
    """

    _of: type[nn.Module] = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        recipe: RecipeLike | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        given: Any = bias
        if isinstance(given, Recipe | str):
            raise TypeError(f"Linear: bias ({quote(given)}) is not True or False; pass a recipe as recipe=")
        recipe = as_recipe(recipe, "Linear")
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if not hasattr(size, "__index__") or size < 0:
                raise ValueError(f"Linear: {name} ({quote(size)}) is not a size; pass an integer of at least 0")
        check_weight_shape("Linear", "weight", recipe, (out_features, in_features))
        check_dtype("Linear", "dtype", torch.get_default_dtype() if dtype is None else dtype)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.begin(recipe, wrap_weight(self.weight, recipe, "weight", self))

    def reset_parameters(self) -> None:
        """Initialize weight and bias like `nn.Linear`, and reset the seed and the scaling state."""
        super().reset_parameters()
        self._reset_state()
