"""Which processes of a DDP model are a node, and when a node is a worker (``collectives.node``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from regimes.base.capabilities import ON_NODES, Mode, check, find_missing
from regimes.base.errors import ConfigError, is_integer, require
from regimes.collectives.group import nodes_between, nodes_by_name
from regimes.collectives.launcher import node_name, on_one_node
from regimes.collectives.sharded_models import mesh_fault
from regimes.compression.calls import sends_apart
from regimes.job.choices import Choice

if TYPE_CHECKING:
    from regimes.collectives.sharded_models import DeviceMesh

GivenNodes: TypeAlias = "int | DeviceMesh | Literal[False] | None"
_EXPECTED = 'a number of nodes from 2 up, mesh["node"], false (each process is a worker), or none'


def choose_nodes(
    given: GivenNodes,
    ranks: Sequence[int],
    chosen: Choice,
    modes: Collection[Mode],
    divided: bool,
    timeout: float,
    dtype: torch.dtype = torch.float32,
) -> list[list[int]] | None:
    """Return the ranks of each node, if a node is a worker; None if each process is one.

    Without a word nodes are workers where that sends less: where several devices share a node, and
    would each send something of their own.

    Args:
        ranks: of the model's processes, which all call this.
        modes: of the job, whose parts have been checked.
        divided: layers are divided among other processes, too (tensor parallel).
        dtype: of the gradients, in which the compressor is tried.
    """
    if given is None:
        parts = [*chosen.needed_parts()]
        lacks = any(find_missing(part.needs, [ON_NODES]) for part in parts)
        if divided or lacks or len(ranks) == 1 or on_one_node():
            return None
        nodes = nodes_by_name(node_name(), ranks, timeout, "attach()")
        if len({len(node) for node in nodes}) > 1 or not 1 < len(nodes) < len(ranks):
            return None
        # Last, because it calls the compressor, which may be a user's.
        return nodes if sends_apart(chosen.compressor, chosen.levels.values(), dtype) else None
    if given is False:
        return None
    if divided:
        raise ConfigError(
            "nodes: expected false with tensor parallelism, which divides layers among devices"
        )
    check(chosen.needed_parts(), [*modes, ON_NODES])
    if isinstance(given, int):
        require(is_integer(given, 2), "nodes", given, _EXPECTED)
        size, rest = divmod(len(ranks), given)
        require(rest == 0, "nodes", given, f"a number that divides the {len(ranks)} processes")
        nodes = [[*ranks[i : i + size]] for i in range(0, len(ranks), size)]
    else:
        require(mesh_fault(given) is None, "nodes", given, _EXPECTED)
        nodes = nodes_between(given.get_group(), ranks, timeout, "attach()")
        require(len(nodes) > 1, "nodes", "a mesh of one node", "two nodes or more")
    return nodes if len(nodes) < len(ranks) else None
