"""Private names of torch: every one that this package uses stands here, with its reason.

A name is private if it begins with an underscore; torch may rename or drop it without notice. Each
is tried with torch 2.9 (``make minima``), 2.13 (``make test``) and the newest one (``make
newest``); a comment names the version where they differ. No other module writes such a name.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd

# The dispatch mode sees which operations backward calls; it is documented, its module is private.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# The tensors in whatever a module returns, as torch's own hooks find them.
from torch.utils._pytree import tree_leaves as tree_leaves

# -- operations ------------------------------------------------------------------------------

# One launch for many tensors, as torch's own optimisers have it; the public functions take one.
foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div = torch._foreach_div
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub
foreach_sub_ = torch._foreach_sub_
foreach_zero_ = torch._foreach_zero_
# What nn.LSTM.flatten_parameters calls, for all layers at once; our LSTM has one call a layer.
flatten_lstm_weights = torch._cudnn_rnn_flatten_weight


# -- tensors ---------------------------------------------------------------------------------


def version_of(tensor: Tensor) -> int:
    """Return how often torch has written to a tensor; autograd compares the same number."""
    return tensor._version


def own_part(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that is on this process, itself and not a new view, whose
    version could not be compared; any other tensor as it is."""
    if type(tensor) is Tensor:  # to miss an attribute costs more than all the rest
        return tensor
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def has_hooks(parameter: Any) -> bool:
    """Has anybody registered a gradient hook? torch has no public list of them."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


# -- autograd --------------------------------------------------------------------------------


def current_backward() -> int:
    """Return the number of the backward pass that runs in this thread, -1 in none."""
    return torch._C._current_graph_task_id()


def queue_callback(callback: Any) -> None:
    """Call something at the end of the backward pass that runs; DDP and FSDP2 do it so.

    Raises:
        RuntimeError: No backward pass runs in this thread.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def forward_class(node: Any) -> type:
    """Return the user's Function of a node in the graph, whose own class torch has made."""
    return cast("type", getattr(node, "_forward_cls", type(node)))


# The generators around a checkpointed call, which are replaced to keep its activations.
CHECKPOINT_GENERATORS = (
    "_checkpoint_without_reentrant_generator",
    "_checkpoint_without_reentrant_generator_impl",  # from torch 2.15 on
)

# -- modules ---------------------------------------------------------------------------------

# The base classes for 1 to 3 dimensions: of BatchNorm, of all normalisations with running
# statistics, and of Dropout.
BatchNorm = _BatchNorm
NormBase = _NormBase
Dropout = _DropoutNd
# The attributes in which a module keeps parameters, buffers and modules, and its forward hooks.
MODULE_TABLES = ("_parameters", "_buffers", "_modules")
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
COMPILED = "_orig_mod"  # torch.compile's module has the original by this name, and in all names


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters; an entry is replaced without a registration, as FSDP2 does
    it."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers, so that the same objects can be put back."""
    return module._buffers


def uncompiled(model: Any) -> Any:
    """Return the model of which ``torch.compile(model)`` has made this one; any other as it is."""
    return getattr(model, COMPILED, model)


def is_compiled(module: Any) -> bool:
    """Has it been compiled, by ``torch.compile(module)`` or by ``module.compile()``?"""
    return module._compiled_call_impl is not None or hasattr(module, COMPILED)


def compile_errors() -> type[Exception]:
    """Return what a failed compilation raises; its module takes a second to import."""
    return torch._dynamo.exc.TorchDynamoException


def has_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Has a GradScaler seen this optimiser since its last update?"""
    return id(optimizer) in getattr(scaler, "_per_optimizer_states", ())


def has_scaled(scaler: Any) -> bool:
    """Has a GradScaler scaled a loss? ``get_scale`` answers before that, too."""
    return scaler._scale is not None


# -- processes -------------------------------------------------------------------------------


def abort_default_group() -> None:
    """End NCCL's collectives of all groups without waiting for processes that may be dead;
    ``dist.destroy_process_group`` waits."""
    torch.distributed.distributed_c10d._abort_process_group()


def default_store() -> Any:
    """Return the store in which the processes of the default group have met."""
    return torch.distributed.distributed_c10d._get_default_store()


def nccl_of(group: Any) -> Any:
    """Return the NCCL backend of a group of processes, which alone can be aborted."""
    return group._get_backend(torch.device("cuda"))


def has_nccl() -> bool:
    """Was torch built with NCCL? ``torch.cuda.nccl.version`` raises where it was not."""
    return hasattr(torch._C, "_nccl_version")


# -- DDP -------------------------------------------------------------------------------------


def comm_hooks(model: Any) -> list[tuple[Any, Any]]:
    """Return the communication hooks that a DDP model lists, each with its state; DDP itself reads
    the list before it takes a hook."""
    hooks: list[tuple[Any, Any]] = model._comm_hooks
    return hooks


def allows_uneven_inputs(model: Any) -> bool:
    """Answer whether a DDP model is within ``join()``."""
    return bool(model._join_config.enable)


def used_parameters(model: Any) -> Tensor:
    """Return, for each parameter of a DDP model, how many processes have used it in this pass."""
    return cast("Tensor", model.reducer._get_local_used_map())


def reduces_in_python(model: Any) -> bool:
    """Answer whether DDP reduces gradients one by one; Dynamo's "python_reducer" makes it so."""
    return bool(getattr(model, "_use_python_reducer", False))


def tensor_parallel_part(parameter: Any) -> Any:
    """Which part of a layer DDP has flattened a DTensor to: its mesh and placements. None: it was
    none."""
    return getattr(parameter, "_st_info", None)


# -- FSDP2, which has no public view of its groups of parameters -----------------------------


def fsdp_state(module: Any) -> Any:
    """Return what ``fully_shard`` keeps of its call for a module."""
    return module._get_fsdp_state()


def is_root(module: Any) -> bool | None:
    """Answer whether it is the outermost divided module; None before the first forward pass."""
    root: bool | None = fsdp_state(module)._is_root
    return root


def param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of a call of ``fully_shard``; torch up to 2.10 keeps one, or
    None."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def place_of(fsdp_param: Any) -> tuple[nn.Module, str]:
    """Return the module of a parameter of a group, and the parameter's name there."""
    info = fsdp_param._module_info
    return info.module, info.param_name


def was_gathered(fsdp_param: Any) -> bool:
    """Has the whole parameter ever been there?"""
    return hasattr(fsdp_param, "_unsharded_param")


def own_collectives(group: Any) -> tuple[Any, Any]:
    """Return the reduce-scatter and the all-gather that a group calls: there are public functions
    to set them (torch 2.9), and none to read them."""
    return group._reduce_scatter_comm, group._all_gather_comm


def all_reduce_hook(group: Any) -> Any:
    """Return what a group calls with its reduced gradients; only ``set_all_reduce_hook`` is
    public."""
    return group._all_reduce_hook


def set_all_reduce_hook(group: Any, hook: Any) -> None:
    """Let one group call this, on the stream that its user has chosen; the public function sets
    that, too."""
    group._all_reduce_hook = hook


def mesh_infos() -> tuple[Any, Any]:
    """Return the classes by which a group knows its mesh: of FSDP, and of HSDP."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return _fsdp_common.FSDPMeshInfo, _fsdp_common.HSDPMeshInfo
