"""The ``doctor`` command: tries this machine, a launched group of processes, or records.

A failure of what Regimes needs makes the exit code 1. What only a user's own script needs (``import
torchvision`` as a whole), or what only makes runs slow, is reported and does not change it. A
group is checked by ::

    torchrun --nnodes 2 --nproc-per-node 4 ... -m regimes doctor
    srun --nodes 2 --ntasks-per-node 4 python -m regimes doctor
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.base.console.stdout import escape_control, make_console
from regimes.base.console.tables import Table
from regimes.base.console.units import format_quantity
from regimes.base.errors import RecordError
from regimes.cli.monitor import ACTIVE, describe_state
from regimes.collectives.launcher import LOOPBACK, read_launch
from regimes.records import find_edit, find_runs, load, provenance, unpack_records

if TYPE_CHECKING:
    import torch

# -- a machine -------------------------------------------------------------------------------

NEEDED = (
    *(
        "torch",
        "torchvision",
        "numpy",
        "scipy",
        "scikit-learn",
        "joblib",
        "pandas",
        "seaborn",
        "matplotlib",
    ),
    *("jinja2", "rich", "tyro", "tomli-w", "jaxtyping"),
)
EXTRAS = ("pyhessian", "tensorboard", "wandb", "jupyterlab", "ipywidgets")
MINUTE = 60.0  # seconds that importing torchvision may take
TWO_INDEXES = (
    "Regimes reads its data sets all the same; a script of your own that imports it fails. "
    "Install torch and torchvision from one index, e.g. pip install --force-reinstall torch "
    "torchvision --index-url https://download.pytorch.org/whl/cpu"
)


def print_report() -> bool:
    """Print a table; False if something that is needed does not work."""
    from regimes.data import sources

    needed: dict[str, Callable[[], str]] = {
        **{name: functools.partial(version, name) for name in NEEDED},
        "torchvision's data": _data_sets,
        "digits": _digits,
        "figures": _figures,
        "curvature": lambda: _curvature("lanczos"),
        "gloo": lambda: _backend("gloo"),
    }
    useful: dict[str, Callable[[], str]] = {
        **{f"{name} (optional)": functools.partial(version, name) for name in EXTRAS},
        "curvature by pyhessian": lambda: _curvature("pyhessian"),
        "notebooks": _notebooks,
        "import torchvision": _torchvision,
        "CUDA": _cuda,
        "NCCL": lambda: _backend("nccl"),
    }
    rows = [(name, *_tried(attempt)) for name, attempt in (needed | useful).items()]
    good = all(state == "ok" for name, state, _ in rows if name in needed)
    rows += [
        (f"data: {data.name}", "found" if data.available else "not found", data.where)
        for data in sources.find_data()
    ]
    heads = ("what", "state", "detail")
    make_console().print(Table(heads, rows, title="regimes doctor", texts=3).drawn())
    return good


def _tried(attempt: Callable[[], str]) -> tuple[str, str]:
    """(ok or no, detail)."""
    try:
        return "ok", attempt()
    except Exception as error:  # any failure is a row of the table
        return "no", (str(error).splitlines() or [type(error).__name__])[0]


def _torchvision() -> str:
    """Import torchvision alone in another Python, as a user's script does."""
    command = [sys.executable, "-c", "import torchvision"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTE, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not imported within {MINUTE:.0f} s") from None
    if done.returncode:
        # the first line of the error itself, which follows the indented calls
        calls = done.stderr.rpartition("Traceback (most recent call last):")[2].splitlines()
        lines = (line for line in calls if line.strip() and not line.startswith(" "))
        error = next(lines, "no message")
        missing = error.startswith("ModuleNotFoundError")
        raise RuntimeError(error if missing else f"{error}. {TWO_INDEXES}")
    return "as a script of your own would"


def _data_sets() -> str:
    """The part of torchvision that Regimes needs."""
    from regimes.data.sources import torchvision_datasets

    return f"{len(torchvision_datasets().__all__)} data sets"


def _figures() -> str:
    """Draw with seaborn and matplotlib, into memory."""
    import seaborn as sns

    from regimes.plotting import style

    with style.theme():
        fig = style.figure(2.0)
        sns.lineplot(x=[0, 1, 2], y=[1, 2, 4], ax=fig.subplots())
    return f"a curve drawn, PNG of {len(style.render_figure(fig, 'png'))} bytes"


def _curvature(backend: str) -> str:
    """The top eigenvalue of a Hessian, which SciPy or PyHessian finds; it is known: 3."""
    import torch
    from torch import nn

    from regimes.instruments.hessian import HessianProduct, eigenvalues

    model = nn.Linear(2, 1, bias=False).double()
    inputs = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64).sqrt())
    product = HessianProduct(model, lambda m, x: m(x).square().sum() / 2, [inputs])
    found = float(eigenvalues(product, backend=backend).largest[0])
    if abs(found - 3) > 0.03:
        raise RuntimeError(f"top eigenvalue {found:.1f} of a Hessian that has 3")
    return f"top eigenvalue {found:.1f} of a Hessian that has 3"


def _notebooks() -> str:
    """What `jupyter lab` needs: its server, and a Python kernel to start."""
    from jupyter_client.kernelspec import find_kernel_specs

    importlib.import_module("jupyterlab.labapp")
    kernels = find_kernel_specs()
    if not kernels:
        raise RuntimeError("jupyter knows no kernel: pip install ipykernel")
    return f"JupyterLab {version('jupyterlab')}, kernels {', '.join(sorted(kernels))}"


def _digits() -> str:
    from regimes.base.config import DataConfig
    from regimes.data import images

    digits = images.load_images(DataConfig())
    return f"{len(digits.train_y)} training, {len(digits.test_y)} test images"


def _cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU")
    count = torch.cuda.device_count()
    names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
    direct, pairs = sum(map(len, provenance.find_peers())), count * (count - 1)
    return f"{names}; direct access in {direct} of {pairs} ordered pairs" if pairs else names


def _backend(name: str) -> str:
    """One all-reduce in a group of one."""
    import torch
    import torch.distributed as dist

    device = "cuda" if name == "nccl" else "cpu"
    if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise RuntimeError("needs a GPU and a torch built with NCCL")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device=device))
    finally:
        dist.destroy_process_group()
    return "one all-reduce done"


# -- a group of processes --------------------------------------------------------------------

ALIKE = ("code", "python", "torch", "cuda", "nccl")
FATAL = ("code", "torch")  # a run refuses other code; another torch computes other numbers
FLOATS = 2**22  # of the large mean, 16 MiB: larger than the cache of one process
SIZE = 512  # of the matrices whose product is timed
TIMES = 11  # timed calls, of which the median counts
SLOW = 1.5  # times the median of the other processes
Process = dict[str, Any]


def group_report(patience: float = 60.0, links: Path | None = None) -> bool:
    """Connect the processes of a launched group, compare and time them, print it on process 0;
    False if runs would fail.

    Args:
        patience: seconds in which all must connect.
        links: file for the bandwidth and latency within and between machines.

    Raises:
        TrainingError: a process does not connect in time, or is lost.
    """
    import torch

    from regimes.cli.links import measure_links, write_links
    from regimes.collectives.connect import connect_world
    from regimes.collectives.devices import pick_device
    from regimes.cost.measure import median_seconds

    place, device = read_launch(), pick_device("auto")
    world, seconds = connect_world(place.count, device, patience), dict[int, float]()
    try:
        processes = world.gather_object(_describe(device))
        for count in (1, FLOATS):  # numbers in a mean over all processes
            mean = functools.partial(world.mean_over_workers, [torch.ones(1, count, device=device)])
            seconds[count] = median_seconds(mean, TIMES, device)
        networks = measure_links(world, [str(process["host"]) for process in processes], device)
    finally:
        world.close()
    differ = describe_differences(processes)
    if place.rank == 0:
        _print(processes, seconds, differ)
        for name, link in networks.items():
            make_console(highlight=False).print(f"{name} machines: {link} a message", markup=False)
        if links:
            write_links(links, networks)
    return not any(name in FATAL for name, _ in differ)


def _describe(device: torch.device) -> Process:
    """What is compared of this process, and how long it takes for a product of matrices."""
    import torch

    from regimes.cost.measure import median_seconds

    left = torch.randn(SIZE, SIZE, device=device)
    gpu = device.type == "cuda"
    return {
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if gpu else provenance.processor_name(),
        "threads": torch.get_num_threads(),
        "seconds": median_seconds(lambda: left @ left, TIMES, device),
        "code": provenance.code_digest()[:12],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu else "none",
    }


def describe_differences(processes: Sequence[Process]) -> list[tuple[str, str]]:
    """Find versions that differ from the most frequent one, and slow processes: (what, in words).

    >>> alike = dict.fromkeys(ALIKE, "1") | {"seconds": 1.0}
    >>> for words in describe_differences([alike, alike, alike | {"torch": "2", "seconds": 4.0}]):
    ...     print(*words, sep=": ")
    torch: process 2 has 2, the others have 1
    speed: process 2 takes 4.0 times as long
    """
    differ = []
    for name in ALIKE:
        values = [str(process[name]) for process in processes]
        usual = max(dict.fromkeys(values), key=values.count)
        odd = []
        for value in dict.fromkeys(v for v in values if v != usual):
            ranks = ", ".join(str(rank) for rank, v in enumerate(values) if v == value)
            odd.append(f"process {ranks} has {value}")
        if odd:
            differ.append((name, f"{', '.join(odd)}, the others have {usual}"))
    seconds = [process["seconds"] for process in processes]
    for rank, own in enumerate(seconds):
        others = seconds[:rank] + seconds[rank + 1 :]
        if others and (ratio := own / statistics.median(others)) > SLOW:
            differ.append(("speed", f"process {rank} takes {ratio:.1f} times as long"))
    return differ


def _print(
    processes: Sequence[Process], seconds: dict[int, float], differ: Sequence[tuple[str, str]]
) -> None:
    rows = [
        (str(rank), p["host"], p["device"], str(p["threads"]), f"{1e3 * p['seconds']:.2g}")
        for rank, p in enumerate(processes)
    ]
    heads = ("process", "host", "device", "threads", "ms of a product")
    out, first = make_console(highlight=False), processes[0]
    out.print(Table(heads, rows, title=f"{len(processes)} processes connected", texts=3).drawn())
    versions = ", ".join(f"{name} {first[name]}" for name in ALIKE if first[name] != "none")
    rate, size = (
        format_quantity(4 * FLOATS / seconds[FLOATS], "B"),
        format_quantity(4 * FLOATS, "B"),
    )
    lines = [
        f"process 0: {versions}",
        f"a mean over all: {1e6 * seconds[1]:.0f} us of one number, {rate}/s of {size}",
    ]
    for name, text in differ:
        lines.append(f"{name}: {text}" + ": runs would be refused or differ" * (name in FATAL))
    out.print("\n".join(lines if differ else [*lines, "all processes are alike"]), markup=False)


# -- records -----------------------------------------------------------------------------------


def check_records(places: Sequence[Path]) -> bool:
    """Print one line per record in or under folders and archives: is it as it was written, by its
    hash chain? True if all are.

    Raises:
        RecordError: a place without a record.
    """
    intact = True
    for place in places:
        with unpack_records(place) as root:
            runs = find_runs(root)
            if not runs:
                raise RecordError(f"no run in or under {place}")
            for run in runs:
                name = str(place / run.relative_to(root))
                what, more = judge_record(run)
                details = f"; {more.replace(str(run), name)}" if more else ""
                print(escape_control(f"{name}: {what}{details}"))
                intact &= what not in ("edited", "unreadable")
    return intact


def judge_record(run: Path) -> tuple[str, str]:
    """Judge a record by its hash chain: (whole, running, starting, broken off, stopped, no chain,
    edited or unreadable; details)."""
    try:
        record = load(run)
        what, more = describe_state(run, record.header, record.rows)
        why = find_edit(run, growing=what in ACTIVE)
    except RecordError as error:
        return "unreadable", str(error)
    if why:
        return "edited", why
    if not (run / "chain.jsonl").exists():
        return "no chain", f"{what}; of an earlier version, or its chain.jsonl was removed"
    return ("whole", "") if what == "finished" else (what, more)
