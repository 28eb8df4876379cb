"""The ``doctor`` command in a launched group: do all processes meet, are they alike, how fast is
what is between them::

    torchrun --nnodes 2 --nproc-per-node 4 ... -m regimes doctor
    srun --nodes 2 --ntasks-per-node 4 python -m regimes doctor

What makes runs impossible or wrong makes the exit code 1: processes that do not meet, code or
torch that differs. What only makes them slow is said and no more.
"""

from __future__ import annotations

import functools
import platform
import socket
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from regimes.collectives.launcher import launched
from regimes.console.stdout import console
from regimes.console.tables import Table
from regimes.console.units import human
from regimes.records import provenance

if TYPE_CHECKING:
    import torch

    from regimes.collectives.world import World

ALIKE = ("code", "python", "torch", "cuda", "nccl")
DECIDE = ("code", "torch")  # a run refuses another code; another torch has other numbers
FLOATS = 2**22  # of the large mean, 16 MiB: more than any cache that is one process's own
SIZE = 512  # of the product that is timed
TIMES = 11
SLOW = 1.5  # times the median of all processes


def report(patience: float = 60.0) -> bool:
    """Meet the others, try what a run needs, print it on process 0; False if runs would fail.

    Raises:
        TrainingError: they are not there in time, or one is lost meanwhile.
    """
    from regimes.collectives.processes import connect, pick_device

    us, device = launched(), pick_device("auto")
    world = connect(us.count, device, patience)
    try:
        every = world.gather_object(_mine(device))
        links = _links(world, device)
    finally:
        world.close()
    found = differences(every)
    if us.rank == 0:
        _print(every, links, found)
    return not any(name in DECIDE for name, _ in found)


def _mine(device: torch.device) -> dict[str, Any]:
    """What this process is, and how long a product takes it."""
    import torch

    from regimes.cost.measure import median_seconds

    left = torch.randn(SIZE, SIZE, device=device)
    gpu = device.type == "cuda"
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if gpu else provenance.processor(),
        "threads": torch.get_num_threads(),
        "seconds": median_seconds(lambda: left @ left, TIMES, device),
        "code": provenance.code_digest()[:12],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else "none",
    }


def _links(world: World, device: torch.device) -> dict[str, float]:
    """Seconds of a mean over all processes, of one number and of many."""
    import torch

    from regimes.cost.measure import median_seconds

    found = {}
    for name, count in (("one", 1), ("many", FLOATS)):
        numbers = torch.ones(1, count, device=device)
        found[name] = median_seconds(functools.partial(world.mean, [numbers]), TIMES, device)
    return found


def differences(every: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(what, in words) of processes that are not alike: of each version the rarest, and who is
    slower than most.

    >>> alike = dict.fromkeys(ALIKE, "1") | {"seconds": 1.0}
    >>> for words in differences([alike, alike, alike | {"torch": "2", "seconds": 4.0}]):
    ...     print(*words, sep=": ")
    torch: process 2 has 2, the others have 1
    speed: process 2 takes 4.0 times as long
    """
    found = []
    for name in ALIKE:
        values = [str(one[name]) for one in every]
        usual = max(dict.fromkeys(values), key=values.count)
        for value in dict.fromkeys(v for v in values if v != usual):
            who = ", ".join(str(rank) for rank, v in enumerate(values) if v == value)
            found.append((name, f"process {who} has {value}, the others have {usual}"))
    middle = statistics.median(one["seconds"] for one in every)
    for rank, one in enumerate(every):
        if (ratio := one["seconds"] / middle) > SLOW:
            found.append(("speed", f"process {rank} takes {ratio:.1f} times as long"))
    return found


def _print(
    every: Sequence[dict[str, Any]], links: dict[str, float], found: Sequence[tuple[str, str]]
) -> None:
    rows = [
        (str(rank), one["host"], one["device"], str(one["threads"]), f"{1e3 * one['seconds']:.2g}")
        for rank, one in enumerate(every)
    ]
    heads = ("process", "host", "device", "threads", "ms of a product")
    out, first = console(highlight=False), every[0]
    out.print(Table(heads, rows, title=f"{len(every)} processes met", texts=3).drawn())
    versions = ", ".join(f"{name} {first[name]}" for name in ALIKE if first[name] != "none")
    rate = human(4 * FLOATS / links["many"], "B")
    lines = [
        f"process 0: {versions}",
        f"a mean over all: {1e6 * links['one']:.0f} us of one number, {rate}/s of "
        f"{human(4 * FLOATS, 'B')}",
        *(
            f"{name}: {words}" + ": runs would be refused or differ" * (name in DECIDE)
            for name, words in found
        ),
    ]
    out.print("\n".join(lines if found else [*lines, "all processes are alike"]), markup=False)
