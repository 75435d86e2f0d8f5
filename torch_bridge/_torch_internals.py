"""Private APIs of PyTorch. No other module of this package uses a private name of torch.

Each was checked against torch 2.11 and 2.13; the comment above it says what to do when a later version drops it.
Registries of `nn.Module` (`_parameters`, `_buffers`, `_modules`), methods that its subclasses override (`_apply`,
`_load_from_state_dict`, ...) and operators (`aten._to_copy`, `torch._foreach_copy_`) are used where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed._symmetric_memory as _symmetric_memory
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.distributed.fsdp import FlatParameter, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.nn.modules.conv import _ConvNd as ConvolutionBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from qshard.formats import Format

__all__ = [
    "BatchNormBase",
    "ConvolutionBase",
    "DTensorSpec",
    "TensorMeta",
    "compute_local_shape_and_global_offset",
    "current_dispatch_mode",
    "functional_collectives",
    "is_traceable_wrapper_subclass",
    "preserve_version_counter",
    "pytree",
]
# Without these imports: for BatchNormBase and ConvolutionBase lists of public layers, for `functional_collectives` the
# ops of torch.ops._c10d_functional, for `pytree` a walk through lists, tuples and dicts. `preserve_version_counter` has
# no substitute: autograd refuses a saved buffer that is filled again, be it with the same bytes.


# Observers of ops. Without one of them: return True, and every op goes through the dispatcher, which is slower.

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_level, _jit_state = torch._C._functorch.maybe_current_level, torch._C._get_tracing_state
_profiler_is_on = torch._C._autograd._profiler_enabled


def is_observed() -> bool:
    """Returns True if a mode, a profiler, a transform of functorch or `torch.jit` sees the ops of this thread."""
    if _dispatch_modes() or _function_modes() or _profiler_is_on():
        return True
    return _functorch_level() is not None or _jit_state() is not None


def in_functorch() -> bool:
    """Returns True in a transform of `torch.func`."""
    return _functorch_level() is not None


# Autograd.


# Without it: a flag that hooks of a backward pass set.
def backward_id() -> int | None:
    """The number of the backward pass that this thread runs; None outside of one."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


# Without it: True. Layers then save codes, and never the tensors to make them of.
def has_saved_tensors_hooks() -> bool:
    """Returns True under `torch.autograd.graph.saved_tensors_hooks`, as of activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# Without these two: `call_that_made` gives None, and factors of a product are not used in place of its codes.
def next_node_number() -> int:
    """A number that no autograd node of this thread has yet; later nodes have this or a larger one."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def node_number(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


# Without these two: False and RuntimeError; codes are saved.
def saves_its_result(node: Any) -> bool:
    """Returns True if an autograd node saves its result. Looks at the type: the attribute would unpack the tensor."""
    return any(hasattr(type(node), name) for name in ("_saved_result", "_saved_output"))


def saved_factors(node: Any) -> tuple[Tensor, Tensor]:
    """The two tensors that the node of a product has saved."""
    return node._saved_self, node._saved_other


# Without it: `forward_ad.unpack_dual` of every input, which is slower.
def has_forward_ad_level() -> bool:
    """Returns True in a `torch.autograd.forward_ad.dual_level`."""
    return forward_ad._current_level >= 0


# Without it: a hook on the gradient of the model's first input.
def call_after_backward(function: Callable[[], None]) -> None:
    """Calls `function` when the backward pass that runs is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Tensors.

# PyTorch's own wrapper subclasses are made by it (DTensor, FakeTensor).
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
# The functions by which parameters are pickled. Without them: one of our own, and files that need qshard to load.
rebuild_parameter: Callable[..., Any] = torch._utils._rebuild_parameter
rebuild_parameter_with_state: Callable[..., Any] = torch._utils._rebuild_parameter_with_state


def base_of(tensor: Tensor) -> Tensor | None:
    """The base of a view; None for any other tensor."""
    return tensor._base if tensor._is_view() else None


# Without it: compare the addresses of storages, which a freed one has not.
def have_one_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


# Without it: no error for weights that somebody else holds.
def has_other_owners(tensor: Any) -> bool:
    """Returns True if C++ holds a tensor besides its Python object, as an autograd graph or a wrapper does."""
    return bool(tensor._use_count() > 1)


# `torch.utils.swap_tensors` loses both. Without them: raise for parameters that have hooks.
def hooks_of(parameter: Any) -> tuple[Any, Any]:
    """The hooks of a parameter: those on its gradient, and those after that is accumulated."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def put_hooks(parameter: Any, backward: Any, post_accumulate: Any) -> None:
    if backward:
        parameter._backward_hooks = backward
    if post_accumulate:
        parameter._post_accumulate_grad_hooks = post_accumulate


# DTensor. Without it: `to_local()`, and attributes in a dictionary by identity, as it gives a new object.
def local_tensor(tensor: DTensor) -> Tensor:
    """The local shard of a DTensor: the object itself."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


# Symmetric memory: copies of tiles by the GPUs' copy engines. Without it: messages, as between hosts.
pipelined_all_gather: Callable[..., None] = _symmetric_memory._pipelined_multi_all_gather_and_consume
pipelined_all_to_all: Callable[..., None] = _symmetric_memory._pipelined_produce_and_all2all


# Wrappers of models.


# Without it: weights of two-dimensional sharding and of `reshard_after_forward=N` raise when they are gathered.
def fsdp_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together for a module: its `FSDPParamGroup`s.

    Callers read `mesh_info`, `post_forward_mesh_info`, and of `fsdp_params` their `sharded_param`, and write to
    `padded_sharded_param_size`. torch 2.11 has one group a module.
    """
    state: Any = cast(Any, module)._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


# Without it: raise under DistributedDataParallel, which would overwrite the amaxes of all ranks but the first.
def active_ddp() -> Any:
    """The DistributedDataParallel that runs its forward pass; None if none does."""
    return DistributedDataParallel._active_ddp_module


def modules_of_flat(flat: FlatParameter) -> list[tuple[str, nn.Module]]:
    """By the qualified name of each parameter that FSDP1 has put into a flat one, the module that it is of."""
    infos: Any = flat._param_infos
    return [(f"{info.module_name}.{info.param_name}".lstrip("."), info.module) for info in infos]


# Dynamo. Under `torch.compile(dynamic=True)` floats of an object become symbols. Dynamo of torch 2.13 fails on one in
# an autograd.Function, unless it is marked as a constant. Dynamo of 2.11 has no such mark, and does not fail.
_NUMBERS_ARE_SYMBOLS = torch.__version__ >= "2.13"  # Compares versions, not strings.


class _Constant:
    """A format, or its scaling, with some attributes that are constants to a compiler."""

    def __init__(self, real: Any, **constants: Any):
        self._real = real
        for name, value in constants.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def as_constant(fmt: Format) -> Format:
    """Returns the format; while a graph is traced, one with numbers that do not become symbols."""
    if not (_NUMBERS_ARE_SYMBOLS and torch.compiler.is_compiling()):
        return fmt
    eps, scale_max = _numbers(fmt)
    return cast(Format, _Constant(fmt, scaling=_Constant(fmt.scaling, eps=eps, scale_max=scale_max)))


@torch.compiler.assume_constant_result
def _numbers(fmt: Format) -> tuple[float, float]:
    return fmt.scaling.eps, fmt.scaling.scale_max
