"""The parameter groups of a model that ``fully_shard`` (FSDP2) has divided: what each exchanges in
one reduce-scatter and one all-gather. The only module that reads what torch keeps about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from regimes.ddp.sharded import CHECKPOINT
from regimes.ddp.source import plain_names
from regimes.errors import ConfigError

ROOT = "(root)"  # the name of a group without a path of its own


@dataclass(frozen=True)
class Group:
    """The parameters that one call of ``fully_shard`` has divided.

    Attributes:
        name: of its module, or of its modules.
        module: takes the collectives of the group.
        trained: its parameters that have a gradient, in the order of the flat input.
        frozen: the others.
        scatter, gather: torch's own collectives.
    """

    name: str
    module: Any
    trained: Sequence[nn.Parameter]
    frozen: Sequence[nn.Parameter]
    scatter: Any
    gather: Any

    def part(self, shards: int) -> int:
        """How many numbers of the trained parameters each process owns, with padding."""
        return sum(_padded_part(p, shards) for p in self.trained)


def groups_of(network: nn.Module) -> list[Group]:
    """All groups that have a parameter, in the order of the modules.

    Raises:
        ConfigError: a module has several groups, one for each mesh, or is offloaded.
    """
    found: dict[int, tuple[Any, list[str], Any]] = {}
    for path, module in network.named_modules(remove_duplicate=True):
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            state = module._get_fsdp_state()
            found.setdefault(id(state), (state, [], module))[1].append(path or ROOT)
    groups = []
    paths = [path for _, several, _ in found.values() for path in several]
    plain = plain_names(paths)
    for state, several, module in found.values():
        name = "+".join(plain[path].replace(CHECKPOINT, "") for path in several)
        kept = _param_groups(state)
        if len(kept) > 1:
            raise ConfigError(
                f"module {name!r} has {len(kept)} groups of parameters, each on a mesh of its own: "
                "the hook needs one mesh for all parameters of a module"
            )
        for group in kept:
            if any(one.offload_to_cpu for one in group.fsdp_params):
                raise ConfigError(
                    f"module {name!r} keeps its parameters on the CPU (CPUOffloadPolicy), which "
                    "the hook does not serve: leave offload_policy out"
                )
            parameters = [_present(one) for one in group.fsdp_params]
            groups.append(
                Group(
                    name,
                    module,
                    [p for p in parameters if p.requires_grad],
                    [p for p in parameters if not p.requires_grad],
                    group._reduce_scatter_comm,
                    group._all_gather_comm,
                )
            )
    return groups


def _param_groups(state: Any) -> list[Any]:
    """torch up to 2.10 keeps one group, or None."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _present(one: Any) -> Any:
    """The parameter in its module. torch keeps the one that ``fully_shard`` has made, until the
    first step, where another has taken its place since, as in a library that loads the weights of a
    model that was divided on the meta device."""
    return getattr(one._module_info.module, one._module_info.param_name)


def _padded_part(parameter: Any, shards: int) -> int:
    """FSDP2 pads the divided dimension to a multiple of the number of shards."""
    rows = parameter.shape[parameter.placements[-1].dim]
    return -(-rows // shards) * (parameter.numel() // rows) if rows else 0
