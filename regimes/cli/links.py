"""The links of a launched group, measured for `regimes cost --links`: within and between machines.

Processes of one machine reduce a number, and a large tensor, among themselves: that is ``within``.
Then each takes part in a group with one process of every machine, all groups at once, so that the
processes of a machine share its link: that is ``between``. A ring of P processes takes 2 (P - 1)
messages and sends each byte 2 (P - 1) / P times (`cost.network`); latency and bandwidth follow
from the two durations.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from regimes.collectives.world import World
from regimes.cost.measure import median_seconds
from regimes.cost.network import ALGORITHMS, Network
from regimes.records import write_output

FLOATS = 2**22  # of the large tensor, 16 MiB: larger than the cache of one process
TIMES = 11  # timed reductions, of which the median counts


def measure_links(world: World, hosts: Sequence[str], device: torch.device) -> dict[str, Network]:
    """Measure two links: ``within``, the link inside the slowest machine, and ``between``, the
    slowest link from a machine to the others. A link that the group does not have is missing. All
    processes must call it, after they have connected.

    Args:
        hosts: the machine of each process.
    """
    members = {host: [r for r, h in enumerate(hosts) if h == host] for host in dict.fromkeys(hosts)}
    alike = min(len(ranks) for ranks in members.values())
    across = [[ranks[i] for ranks in members.values()] for i in range(alike)]
    networks = {}
    for name, groups in (("within", [*members.values()]), ("between", across)):
        own = _own_link(world, [ranks for ranks in groups if len(ranks) > 1], device)
        links: list[Network | None] = world.gather_object(own)
        known = {r: link for r, link in enumerate(links) if link is not None}
        if not known:
            continue
        latency = statistics.median(float(link.latency) for link in known.values())
        speeds = [float(link.bandwidth) for link in known.values()]
        if name == "between":  # a machine's processes share its link
            speeds = [
                sum(float(known[r].bandwidth) for r in ranks if r in known)
                for ranks in members.values()
            ]
        networks[name] = Network(min(speeds), latency)
    return networks


def _own_link(
    world: World, groups: Sequence[Sequence[int]], device: torch.device
) -> Network | None:
    """This process's share of a link, measured in its group; None where it has no group."""
    ours, size = None, 0
    for ranks in groups:  # in one order: to make a group is a collective of all processes
        group = dist.new_group(list(ranks))
        if world.rank in ranks:
            ours, size = group, len(ranks)
    world.gather_object(None)  # all groups begin at once
    if ours is None:
        return None
    one, large = (
        median_seconds(_reduction(ours, count, device), TIMES, device) for count in (1, FLOATS)
    )
    pattern = ALGORITHMS["ring"]["mean"]
    latency = one / float(pattern.hops(size))
    moved = 8 * 4 * FLOATS * float(pattern.copies(size))
    return Network(moved / max(large - one, 1e-9), latency)


def _reduction(group: Any, count: int, device: torch.device) -> Callable[[], Any]:
    numbers = torch.ones(count, device=device)
    return lambda: dist.all_reduce(numbers, group=group)


def write_links(path: Path, links: dict[str, Network]) -> None:
    """Write links (bits per second, seconds) to a file that `cost.nodes.read_links` reads."""
    plain = {name: vars(link) for name, link in links.items()}
    write_output(path, json.dumps(plain, indent=1) + "\n")
