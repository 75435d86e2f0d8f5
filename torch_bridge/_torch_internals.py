"""Private APIs of PyTorch. No other module of this package uses a private name of torch.

Each was checked with torch 2.11, 2.13 and 2.14. The comment above it says what to do if a later version removes it.
Registries of `nn.Module` (`_parameters`, `_buffers`, `_modules`), methods meant for subclasses (`_apply`,
`_load_from_state_dict`, ...) and operators (`aten._to_copy`, `torch._foreach_copy_`) are used directly elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed._composable_state as _composable_state
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed._symmetric_memory as _symmetric_memory
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.distributed.fsdp import FlatParameter, FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._api import _ToTorchTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.nn.modules.conv import _ConvNd as ConvolutionBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from qshard.formats import Format

__all__ = [
    "BatchNormBase",
    "ConvolutionBase",
    "SKIPS_DISPATCH_OF_DTENSORS",
    "DTensorSpec",
    "TensorMeta",
    "compute_local_shape_and_global_offset",
    "current_dispatch_mode",
    "functional_collectives",
    "is_traceable_wrapper_subclass",
    "preserve_version_counter",
    "pytree",
]
# Without these imports: list public layers for BatchNormBase and ConvolutionBase, use the ops of
# torch.ops._c10d_functional for `functional_collectives`, and walk lists, tuples and dicts for `pytree`.
# `preserve_version_counter` has no substitute: autograd rejects a saved buffer that is filled again, even with the same
# bytes.


# A library through which the C functions of PyTorch's stable ABI are found. If it moves: any loaded library that
# depends on libtorch_cpu.
TORCH_LIBRARY: str = torch._C.__file__

# Observers of ops. Without one of them: return True. Then every op goes through the dispatcher, which is slower.

_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_level, _jit_state = torch._C._functorch.maybe_current_level, torch._C._get_tracing_state
_profiler_is_on = torch._C._autograd._profiler_enabled


def is_observed() -> bool:
    """Return True if a mode, a profiler, a functorch transform or `torch.jit` observes the ops of this thread."""
    if _dispatch_modes() or _function_modes() or _profiler_is_on():
        return True
    return _functorch_level() is not None or _jit_state() is not None


def in_functorch() -> bool:
    return _functorch_level() is not None


# Without it: return False. Then batches of gradients fail in the bridge, which finds no memory.
def is_batch(grad: Tensor) -> bool:
    """Return True for a batch of gradients: of `is_grads_batched`, or in a `vmap`."""
    return in_functorch() or bool(torch._C._functorch.is_legacy_batchedtensor(grad))


# Without it: return False. Compiled layers then save codes under any budget.
@torch.compiler.assume_constant_result
def has_memory_budget() -> bool:
    """Return True if PyTorch's partitioner may repeat cheap ops in the backward pass to save memory."""
    return bool(functorch_config.activation_memory_budget < 1)


# Autograd.


# Without it: a flag set by hooks of the backward pass.
def backward_id() -> int | None:
    """Return the number of the backward pass that this thread runs, or None."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


# Without it: return False. That is right from torch 2.14 on, where PyTorch restores the buffers of a stage; before, the
# amaxes of the run would stay in the histories of delayed scaling.
def infers_metadata() -> bool:
    """Return True while a `PipelineStage` learns shapes: it runs its module once on memory without values."""
    stage = sys.modules.get("torch.distributed.pipelining.stage")
    if stage is None:
        return False
    methods = ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")
    found = (getattr(stage.PipelineStage, name, None) for name in methods)
    codes = {id(method.__code__) for method in found if method is not None}
    # A variable that refers to the frame of this function would keep the frames, and all that they hold, alive.
    if _is_called_by(sys._getframe(1), codes):
        return True
    # Autograd runs a backward pass on a GPU, and recomputation in it, in a thread of its own.
    return backward_id() is not None and any(_is_called_by(each, codes) for each in sys._current_frames().values())


def _is_called_by(frame: FrameType | None, codes: Collection[int]) -> bool:
    while frame is not None:
        if id(frame.f_code) in codes:
            return True
        frame = frame.f_back
    return False


# Without it: return True. Then layers always save codes of x.
def has_saved_tensors_hooks() -> bool:
    """Return True under `torch.autograd.graph.saved_tensors_hooks`, as in activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


# Without these two: `call_that_made` returns None, and codes are saved even if autograd saves the factors of a product.
def next_node_number() -> int:
    """Return a lower bound of the sequence numbers of autograd nodes that this thread creates later."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def node_number(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


# Without these two: return False, and raise RuntimeError. Then codes are saved.
def saves_its_result(node: Any) -> bool:
    """Return True if an autograd node saves its result. Reads the type: the attribute would unpack the tensor."""
    return any(hasattr(type(node), name) for name in ("_saved_result", "_saved_output"))


def saved_factors(node: Any) -> tuple[Tensor, Tensor]:
    return node._saved_self, node._saved_other


# Without it: call `forward_ad.unpack_dual` on every input, which is slower.
def has_forward_ad_level() -> bool:
    return forward_ad._current_level >= 0


# Without it: a hook on the gradient of the model's first input.
def call_after_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the current backward pass."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# Tensors.

# PyTorch creates its own wrapper subclasses with it (DTensor, FakeTensor).
make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
# The functions that pickled parameters refer to. Without them: define one here; then files need qshard to load.
rebuild_parameter: Callable[..., Any] = torch._utils._rebuild_parameter
rebuild_parameter_with_state: Callable[..., Any] = torch._utils._rebuild_parameter_with_state


def base_of(tensor: Tensor) -> Tensor | None:
    return tensor._base if tensor._is_view() else None


# Without it: `torch.cuda.current_stream(x.device).cuda_stream`, which creates an object, in each call of a layer.
def stream_of(x: Tensor) -> int | None:
    """Return the number of the current stream on the GPU of a tensor; None on a CPU."""
    return torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else None


# Without it: compare the addresses of storages, which freed storages do not have.
def have_one_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


# Without it: do not detect weights that another object holds.
def has_other_owners(tensor: Any) -> bool:
    """Return True if C++ code holds a tensor besides its Python object, such as an autograd graph or a wrapper."""
    return bool(tensor._use_count() > 1)


# `torch.utils.swap_tensors` drops both kinds of hooks. Without these two: raise for parameters with hooks.
def hooks_of(parameter: Any) -> tuple[Any, Any]:
    """Return the hooks of a parameter: on its gradient, and after gradient accumulation."""
    return parameter._backward_hooks, parameter._post_accumulate_grad_hooks


def put_hooks(parameter: Any, backward: Any, post_accumulate: Any) -> None:
    if backward:
        parameter._backward_hooks = backward
    if post_accumulate:
        parameter._post_accumulate_grad_hooks = post_accumulate


# Without it: return True. Then compiled experts read their rows once more, and MLPs are not fused.
def has_module_hooks(module: nn.Module, own: Sequence[Any] = ()) -> bool:
    """Return True if a call of a module runs hooks that were registered on it, other than `own`."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    others = [hook for hook in hooks if hook not in own]
    return bool(others or module._backward_hooks or module._backward_pre_hooks)


# Without it: keep PyTorch's ids, which differ between modules. Dynamo of torch 2.14 guards on the ids of hooks that
# have options, so alike modules would share no compiled code, and all but the first eight would run eagerly.
def set_hook_id(handle: RemovableHandle, number: int) -> None:
    """Give a registered hook a fixed id. PyTorch's ids are not negative."""
    for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
        hooks: Any = reference()
        if handle.id in hooks:
            hooks[number] = hooks.pop(handle.id)
    handle.id = number


# DTensor. Without it: use `to_local()`, which returns a new object, and store attributes in a dict by id.
def local_tensor(tensor: DTensor) -> Tensor:
    """Return the local shard of a DTensor, as the object that the DTensor holds."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


# Symmetric memory: GPU copy engines copy tiles. Without it: send messages, as between hosts.
pipelined_all_gather: Callable[..., None] = _symmetric_memory._pipelined_multi_all_gather_and_consume
pipelined_all_to_all: Callable[..., None] = _symmetric_memory._pipelined_produce_and_all2all


# Wrappers of models.


# Without it: weights with 2-D sharding or `reshard_after_forward=N` raise when they are gathered.
def fsdp_groups(module: FSDPModule) -> list[Any]:
    """Return the `FSDPParamGroup`s of a module: parameters that FSDP2 gathers together.

    Callers read `mesh_info`, `post_forward_mesh_info`, and `sharded_param` and `_unsharded_param` of each of
    `fsdp_params`, and write to `padded_sharded_param_size`. torch 2.11 has one group per module.
    """
    state: Any = cast(Any, module)._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


# Without these two: `switch_recipe` raises for weights that `fully_shard` has sharded. An `FSDPParam` allocates the
# result of its all-gather once, with the size and the type of the first one. Same names in torch 2.11 to 2.14.
def has_unreduced_gradient(param: Any) -> bool:
    """Return True if an `FSDPParam` has a gradient that was not reduced yet, as between micro-batches."""
    unsharded = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def forget_gathered(param: Any) -> None:
    """Make an `FSDPParam` that is resharded allocate the result of its next all-gather anew.

    The memory of the old result is freed, so autograd raises in graphs that saved it.
    """
    torch.autograd.graph.increment_version([each for each in param.all_gather_outputs if not each.is_inference()])
    param.all_gather_outputs, param._unsharded_inner_tensors = [], []
    param.__dict__.pop("_unsharded_param", None)


# Without it: return an empty list. Then no error tells that FSDP2 mixes different experts of expert parallelism.
def fsdp_modules() -> list[FSDPModule]:
    """Return all modules of this process that `fully_shard` has wrapped."""
    return [module for module in [*_composable_state._module_state_mapping] if isinstance(module, FSDPModule)]


# Without it: raise under DistributedDataParallel, which would overwrite the amaxes of all ranks except the first.
def active_ddp() -> Any:
    """Return the DistributedDataParallel that is in its forward pass, or None."""
    return DistributedDataParallel._active_ddp_module


# Without it: raise in `switch_recipe` for models in DistributedDataParallel, which fails if its last buffer is gone.
def forget_buffers(ddp: DistributedDataParallel) -> None:
    """Make DistributedDataParallel broadcast the buffers that its module has now."""
    ddp._assign_modules_buffers()


# FSDP1. Without it: do not detect weights in a flat parameter.
def is_flattened(parameter: nn.Parameter) -> bool:
    """Return True if FSDP1 has put a parameter into a flat parameter, or made it a view of one."""
    return "_fsdp_flattened" in vars(parameter)


def modules_of_flat(flat: FlatParameter) -> list[tuple[str, nn.Module]]:
    """Return the qualified name and the module of each parameter in a flat parameter of FSDP1."""
    infos: Any = flat._param_infos
    return [(f"{info.module_name}.{info.param_name}".lstrip("."), info.module) for info in infos]


# DTensor. Before torch 2.13 the backward pass of `to_local` builds its result without autograd, so a second derivative
# ends there without a word. Without the class: drop the check, because no supported version needs it then.
_DTENSOR_LOSES_SECOND_DERIVATIVES = torch.__version__ < "2.13"
# Its ops then do not call `__torch_dispatch__` of a subclass, but compute with the local tensors.
SKIPS_DISPATCH_OF_DTENSORS = torch.__version__ < "2.13"


def loses_second_derivatives(functions: Iterable[tuple[Any, int]]) -> bool:
    """Return True if a gradient that flows to `functions` passes a DTensor that would cut its graph.

    Args:
      functions: `next_functions` of an autograd node.
    """
    if not _DTENSOR_LOSES_SECOND_DERIVATIVES:
        return False
    to_local: Any = _ToTorchTensor._backward_cls
    seen, pending = set(), [function for function, _ in functions]
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        if isinstance(function, to_local):
            return True
        seen.add(function)
        pending.extend(each for each, _ in function.next_functions)
    return False


# Dynamo. Under `torch.compile(dynamic=True)` floats of an object become symbols. Dynamo of torch 2.13 fails on such a
# symbol in an autograd.Function, unless it is marked as a constant. Dynamo of 2.11 has no such mark, and does not fail.
# `torch.__version__` compares as a version, not as a string.
_NUMBERS_ARE_SYMBOLS = torch.__version__ >= "2.13"


class _Constant:
    """Proxy of a format or its scaling, with some attributes that the compiler treats as constants."""

    def __init__(self, real: Any, **constants: Any):
        self._real = real
        for name, value in constants.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def as_constant(fmt: Format) -> Format:
    """Return the format itself; while a graph is traced, a proxy with numbers that do not become symbols."""
    if not (_NUMBERS_ARE_SYMBOLS and torch.compiler.is_compiling()):
        return fmt
    eps, scale_max = _numbers(fmt)
    return cast(Format, _Constant(fmt, scaling=_Constant(fmt.scaling, eps=eps, scale_max=scale_max)))


def has_static_shape(x: Any) -> bool:
    """Return whether no size of a matrix is symbolic. Dynamo shows symbolic sizes as ints, except to this function.

    Without `has_static_value`: return `not torch.compiler.is_compiling()`. Then compiled code takes separate ops.
    """
    return bool(has_static_value(x.shape[0]) and has_static_value(x.shape[1]))


@torch.compiler.assume_constant_result
def _numbers(fmt: Format) -> tuple[float, float]:
    return fmt.scaling.eps, fmt.scaling.scale_max
