"""A model that FSDP2 divides, whole for a measurement.

FSDP2 has the weights of a module whole within its own forward and backward passes alone, and what
it does around them has no second derivative. For a measurement each process gets all weights, by
one all-gather for each group of parameters, and then runs the modules by themselves: however often
they run, nothing more is sent, and nothing that FSDP2 keeps has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regimes.base.config.arguments import check_arguments
from regimes.base.errors import ConfigError
from regimes.base.torch_compat import FORWARD_HOOKS, is_compiled, parameter_table
from regimes.collectives.sharded_models import (
    all_param_groups,
    current_parameter,
    is_dtensor,
    join_rows,
    local_part,
    mean_over,
    optimizer_rows,
)
from regimes.collectives.world import World

if TYPE_CHECKING:
    from regimes.collectives.sharded_models import DeviceMesh


@check_arguments("mesh")
@contextmanager
def whole_model(
    model: nn.Module, mesh: DeviceMesh | None = None
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Gathers a model that ``fully_shard`` (FSDP2) has divided: inside the ``with`` block it is an
    ordinary model.

    There each process has copies of all weights, and may run the model by itself. So you can
    measure curvature::

        with regimes.whole_model(model) as mean:
            hessian = HessianProduct(model, loss, batches, mode="eval", mean=mean)
            top = eigenvalues(hessian, largest=5)

    All processes of the mesh call it. Weights are gathered once, in their own type, by one
    all-gather for each group of parameters. A process holds the whole model until the end of the
    block. The trained parameters and their gradients stay as they are. Inside the block a
    ``MixedPrecisionPolicy`` has no effect, and compiled modules run uncompiled.

    Args:
        model: The divided model.
        mesh: All processes that have samples of their own, in all replicas. None: the processes
            that divide the parameters.

    Yields:
        A function that computes the mean of a tensor over the processes of the mesh: the argument
            ``mean`` of ``HessianProduct`` and ``critical_sharpness``.

    Raises:
        ConfigError: ``fully_shard`` has divided no module, or a parameter is divided otherwise, as
            by tensor parallelism, or is on the device meta.
    """
    groups = _list_groups(model)
    if not groups:
        raise ConfigError("whole_model: no module of the model is divided by fully_shard")
    (_, rows), *_ = groups[0]
    with whole_weights(model, World(1)):  # of no job: nothing is counted
        yield partial(mean_over, rows.device_mesh if mesh is None else mesh)


@contextmanager
def whole_weights(model: nn.Module, world: World) -> Iterator[None]:
    """Make any model of a job whole inside, as ``whole_model`` does. A model that FSDP2 has not
    divided stays as it is. What is gathered counts as an instrument's.

    Raises:
        TrainingError: a process is lost while weights are gathered.
    """
    groups = _list_groups(model)
    if not groups:
        yield
        return
    _check_division(model, groups)
    replaced: dict[int, nn.Parameter] = {}
    for group in groups:
        with world.explain_loss("an all-gather of weights"):
            wholes = join_rows([rows for _, rows in group], world.instruments.count_weights)
        for (now, rows), whole in zip(group, wholes, strict=True):
            replaced[id(now)] = nn.Parameter(whole, rows.requires_grad)
    with ExitStack() as stack:
        for module in model.modules():
            _make_whole(module, replaced, stack)
        if any(is_compiled(module) for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _list_groups(model: nn.Module) -> list[list[tuple[Any, Any]]]:
    """By group of parameters: each as its module has it now, and as it is trained."""
    return [
        [(current_parameter(param), optimizer_rows(param)) for param in group.fsdp_params]
        for group in all_param_groups(model)
        if group.fsdp_params
    ]


def _check_division(model: nn.Module, groups: Sequence[Sequence[tuple[Any, Any]]]) -> None:
    """Raise ConfigError where a parameter is divided otherwise than by FSDP2."""
    known = {id(now): rows for group in groups for now, rows in group}
    for name, parameter in model.named_parameters():
        rows = known.get(id(parameter), parameter)
        if not is_dtensor(rows):
            continue
        ways = [place for place in rows.placements if not place.is_replicate()]
        if id(parameter) not in known or len(ways) > 1 or not all(way.is_shard() for way in ways):
            raise ConfigError(
                f"parameter {name!r} is divided as {', '.join(map(str, rows.placements))}: the "
                "model can be whole for a measurement only where fully_shard alone divides it, "
                "without tensor parallelism"
            )
        if rows.device.type == "meta":
            raise ConfigError(f"parameter {name!r} is on the device meta: measure after its start")
        if hasattr(local_part(rows), "fsdp_pre_all_gather"):
            raise ConfigError(
                f"parameter {name!r} has an all-gather of its own (fsdp_pre_all_gather), which a "
                "measurement does not know: leave the instruments out"
            )


def _make_whole(module: nn.Module, replaced: dict[int, nn.Parameter], stack: ExitStack) -> None:
    """Give a module whole weights and take FSDP2's hooks from it, until the stack is left."""
    table = parameter_table(module)
    for name, now in [*table.items()]:
        if id(now) in replaced:
            table[name] = replaced[id(now)]
            stack.callback(table.__setitem__, name, now)
    for kind in FORWARD_HOOKS:  # a user's own stay
        hooks = getattr(module, kind)
        own = OrderedDict(
            (key, hook)
            for key, hook in hooks.items()
            if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
        )
        if len(own) < len(hooks):
            setattr(module, kind, own)
            stack.callback(setattr, module, kind, hooks)
