"""The ``doctor`` command in a launched group: do all processes connect, have they the same code
and libraries, how fast are they and their network::

    torchrun --nnodes 2 --nproc-per-node 4 ... -m regimes doctor
    srun --nodes 2 --ntasks-per-node 4 python -m regimes doctor

What makes runs impossible or wrong makes the exit code 1: a process that does not connect, code or
torch that differs. What only makes runs slow is reported.
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
FATAL = ("code", "torch")  # a run refuses other code; another torch computes other numbers
FLOATS = 2**22  # of the large mean, 16 MiB: larger than the cache of one process
SIZE = 512  # of the matrices whose product is timed
TIMES = 11
Process = dict[str, Any]
SLOW = 1.5  # times the median of all processes


def report(patience: float = 60.0) -> bool:
    """Connect all processes, compare and time them, print it on process 0; False if runs would
    fail.

    Raises:
        TrainingError: a process does not connect in time, or is lost.
    """
    from regimes.collectives.devices import pick_device
    from regimes.collectives.processes import connect

    place, device = launched(), pick_device("auto")
    world = connect(place.count, device, patience)
    try:
        processes = world.gather_object(_describe(device))
        seconds = {count: _time_mean(world, device, count) for count in (1, FLOATS)}
    finally:
        world.close()
    differ = differences(processes)
    if place.rank == 0:
        _print(processes, seconds, differ)
    return not any(name in FATAL for name, _ in differ)


def _describe(device: torch.device) -> Process:
    """This process."""
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


def _time_mean(world: World, device: torch.device, count: int) -> float:
    """Seconds of a mean of ``count`` numbers over all processes."""
    import torch

    from regimes.cost.measure import median_seconds

    numbers = torch.ones(1, count, device=device)
    return median_seconds(functools.partial(world.mean, [numbers]), TIMES, device)


def differences(processes: Sequence[Process]) -> list[tuple[str, str]]:
    """(what, in words): versions that differ from the most frequent one, and slow processes.

    >>> alike = dict.fromkeys(ALIKE, "1") | {"seconds": 1.0}
    >>> for words in differences([alike, alike, alike | {"torch": "2", "seconds": 4.0}]):
    ...     print(*words, sep=": ")
    torch: process 2 has 2, the others have 1
    speed: process 2 takes 4.0 times as long
    """
    differ = []
    for name in ALIKE:
        values = [str(process[name]) for process in processes]
        usual = max(dict.fromkeys(values), key=values.count)
        for value in dict.fromkeys(v for v in values if v != usual):
            ranks = ", ".join(str(rank) for rank, v in enumerate(values) if v == value)
            differ.append((name, f"process {ranks} has {value}, the others have {usual}"))
    middle = statistics.median(process["seconds"] for process in processes)
    for rank, process in enumerate(processes):
        if (ratio := process["seconds"] / middle) > SLOW:
            differ.append(("speed", f"process {rank} takes {ratio:.1f} times as long"))
    return differ


def _print(
    processes: Sequence[Process],
    seconds: dict[int, float],
    differ: Sequence[tuple[str, str]],
) -> None:
    rows = [
        (str(rank), p["host"], p["device"], str(p["threads"]), f"{1e3 * p['seconds']:.2g}")
        for rank, p in enumerate(processes)
    ]
    heads = ("process", "host", "device", "threads", "ms of a product")
    out, first = console(highlight=False), processes[0]
    out.print(Table(heads, rows, title=f"{len(processes)} processes met", texts=3).drawn())
    versions = ", ".join(f"{name} {first[name]}" for name in ALIKE if first[name] != "none")
    rate, size = human(4 * FLOATS / seconds[FLOATS], "B"), human(4 * FLOATS, "B")
    lines = [
        f"process 0: {versions}",
        f"a mean over all: {1e6 * seconds[1]:.0f} us of one number, {rate}/s of {size}",
    ]
    for name, words in differ:
        lines.append(f"{name}: {words}" + ": runs would be refused or differ" * (name in FATAL))
    out.print("\n".join(lines if differ else [*lines, "all processes are alike"]), markup=False)
