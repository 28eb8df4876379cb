"""How far a gradient and a configuration travel in the toolkit: the files that they pass.

    python -m benchmarks.house   # a minute on two cores

Walks are run-time traces in processes of their own.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


# -- rooms and imports -----------------------------------------------------------------------


def sources(tree: Path) -> dict[str, ast.Module]:
    """The parsed modules of the toolkit, by path in ``regimes/``."""
    paths = sorted((tree / "regimes").rglob("*.py"))
    return {
        path.relative_to(tree / "regimes").as_posix(): ast.parse(path.read_text("utf-8"))
        for path in paths
    }


def heights(tree: Path) -> dict[str, int]:
    """How high each room is in the order of the tree's own pyproject.toml."""
    contracts = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(x["layers"] for x in contracts["contracts"] if x.get("containers") == ["regimes"])
    return {room.strip(): -number for number, row in enumerate(layers) for room in row.split("|")}


def room_of(path: str) -> str:
    """The room of a file, given its path in ``regimes/``."""
    return path.partition("/")[0].removesuffix(".py")


def in_circles(modules: dict[str, ast.Module]) -> list[str]:
    """Modules that import themselves by way of others; imports for types and inside of functions
    count, too."""
    names = {
        path: ".".join(["regimes", *Path(path).with_suffix("").parts]).removesuffix(".__init__")
        for path in modules
    }
    every = {*names.values()}
    arrows = {
        names[path]: {
            name
            for node in ast.walk(module)
            for name in _imported_modules(node, every)
            if name != names[path]
        }
        for path, module in modules.items()
    }

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        todo = [*arrows[start]]
        while todo:
            if (name := todo.pop()) not in found:
                found.add(name)
                todo += arrows[name]
        return found

    return [name for name in arrows if name in reached(name)]


def _imported_modules(node: ast.AST, every: Collection[str]) -> Iterator[str]:
    """The modules that a statement names. ``from regimes.room import module`` names the module,
    and not the room's own names."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regimes."):
        found = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in found if name in every)
        if all(name in every for name in found):
            return
    yield from (name for name in imported(node) if name in every)


def imported(node: ast.AST) -> Iterator[str]:
    """The modules of the toolkit that a statement imports."""
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        base = node.module or ""
        names = [f"{base}.{x.name}" for x in node.names] if base == "regimes" else [base]
    yield from (name for name in names if name.startswith("regimes."))


# -- walks, by run-time traces ---------------------------------------------------------------


@dataclass
class Trace:
    """Calls in the toolkit's files while ``on``, in this thread and those that start after
    ``watch``; calls while a module is imported are none.

    Attributes:
        home: the folder of the toolkit, with a separator at its end.
        height: of each room, in the order of the tree.
        climbs: calls from a room into a higher one: the callers, and what they call.
        until: the trace ends where this function is called.
        handed: of which classes ``holders`` are the functions that take or return one.
    """

    home: str
    height: dict[str, int]
    on: bool = False
    functions: set[tuple[str, str]] = field(default_factory=set)
    climbs: list[str] = field(default_factory=list)
    until: tuple[str, str] | None = None
    handed: tuple[type, ...] = ()
    holders: set[tuple[str, str]] = field(default_factory=set)
    importing: int = 0

    def watch(self) -> None:
        threading.setprofile(self.event)
        sys.setprofile(self.event)

    def event(self, frame: Any, kind: str, argument: Any) -> None:
        code = frame.f_code
        if code.co_name == "<module>":
            self.importing += {"call": 1, "return": -1}.get(kind, 0)
        if not self.on or self.importing or not code.co_filename.startswith(self.home):
            return
        place = code.co_filename.removeprefix(self.home), code.co_qualname
        if kind == "call" and place == self.until:
            self.on = False
            sys.setprofile(None)  # the rest of the run is not looked at, and is slow if it were
        elif kind == "call":
            self._enter(frame, place)
            self._hold(place, map(frame.f_locals.get, _argument_names(code)))
        elif kind == "return":
            self._hold(place, [argument])

    def _enter(self, frame: Any, place: tuple[str, str]) -> None:
        self.functions.add(place)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self.home):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_name != "<module>":
            below = caller.f_code.co_filename.removeprefix(self.home)
            if self.height.get(room_of(place[0]), 0) > self.height.get(room_of(below), 0):
                name = f"{below} {caller.f_code.co_qualname}"
                self.climbs.append(f"{name}: {' '.join(place)}")

    def _hold(self, place: tuple[str, str], values: Iterable[Any]) -> None:
        if self.handed and any(isinstance(value, self.handed) for value in values):
            self.holders.add(place)

    def result(self) -> dict[str, Any]:
        files = sorted({file for file, _ in self.functions})
        return {
            "files": len(files),
            "rooms": len({Path(file).parts[0] for file in files}),
            "functions": len(self.functions),
            "climbs": self.climbs,
            "names": files,
            "handed to": sorted({file for file, _ in self.holders}),
        }


def _argument_names(code: Any) -> Sequence[str]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def walk(route: str) -> dict[str, Any]:
    """One step of a network of six tensors, or what comes before the first one; on each process of
    the route."""
    import torch

    import regimes

    torch.set_num_threads(1)
    home = Path(regimes.__file__).parent
    trace = Trace(str(home) + os.sep, heights(home.parent))
    _import_ahead()
    trace.watch()
    ROUTES[route][1](trace)
    sys.setprofile(None)
    return trace.result()


def _import_ahead() -> None:
    """What walks import on their way: its calls count for nothing, and take twice as long where
    each is looked at."""
    ahead = ("torch._dynamo", "sklearn.datasets", "pandas", "regimes.training.loop")
    for name in (*ahead, "regimes.cli.app"):
        importlib.import_module(name)


def network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    parts = [nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)]
    return nn.Sequential(*parts)


def trace_step(trace: Trace, number: int) -> None:
    """Trace the step of torch's optimisers with this number, from 0: from the first forward pass
    after the step before to its own end."""
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_post_hook

    done = [0]

    def begin(*_: Any) -> None:
        trace.on = done[0] == number

    def end(*_: Any) -> None:
        trace.on = False
        done[0] += 1

    register_module_forward_pre_hook(begin)
    register_optimizer_step_post_hook(end)


def configured(trace: Trace) -> None:
    """From the command to the first step."""
    from regimes import __main__ as command
    from regimes.base.config import RunConfig

    small = ["epochs=1", "optimizer.decay_epochs=[]", "data.train_size=100", "data.test_size=100"]
    short = [word for setting in small for word in ("--set", setting)]
    out = str(Path(os.environ["OUT"], "run"))
    sys.argv = ["regimes", "run", "smoke", *short, "--out", out, "--quiet"]
    trace.handed, trace.until = (RunConfig,), ("training/loop.py", "_train_unit")
    trace.on = True
    try:
        command.main()
    except SystemExit as end:
        if end.code:
            raise
    assert not trace.on, f"{trace.until} was not called"


def simulated(trace: Trace) -> None:
    import torch

    import regimes

    inputs = torch.randn(8 * 16, 8, generator=torch.Generator().manual_seed(0))
    trace_step(trace, 3)  # of eight
    regimes.simulate(
        network,
        (inputs, inputs.argmax(1) % 4),
        (inputs[:4], inputs[:4].argmax(1) % 4),
        out=Path(os.environ["OUT"], "run"),
        workers=4,
        batch_size=4,
        epochs=1,
    )


def steps(net: Any, optimizer: Any, count: int = 5) -> Iterator[int]:
    import torch
    from torch.nn.functional import cross_entropy

    for step in range(count):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        cross_entropy(net(inputs), inputs.argmax(1) % 4).backward()
        optimizer.step()
        yield step


def meet() -> None:
    import torch.distributed as dist

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = os.environ["REGIMES_RENDEZVOUS"]
    dist.init_process_group("gloo", where, world_size=count, rank=rank)


def hooked(trace: Trace) -> None:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import regimes

    meet()
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hook = regimes.attach(net, optimizer)
    trace_step(trace, 3)
    list(steps(net, optimizer))
    hook.close()


def sharded(trace: Trace) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import regimes

    meet()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(network(), mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hook = regimes.attach_replicas(net, mesh["replicate"], optimizer)
    trace_step(trace, 3)
    list(steps(net, optimizer))
    hook.close()


def own_collectives(trace: Trace) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import regimes

    meet()
    mesh = init_device_mesh("cpu", (2,))
    net = fully_shard(network(), mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hook = regimes.attach_shards(net, mesh, optimizer, scatter={"level": 8})
    trace_step(trace, 3)
    list(steps(net, optimizer))
    hook.close()


def synchronised(trace: Trace) -> None:
    import torch

    import regimes

    meet()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    local = regimes.local_steps(net, optimizer, policy=2, outer=outer)
    for step in steps(net, optimizer):
        trace.on = step == 3  # the end of the second round
        local.step()
        trace.on = False
    local.close()


CONFIGURATION = "regimes run smoke, to its first step"
ROUTES: dict[str, tuple[int, Callable[[Trace], None]]] = {  # processes; what each does
    CONFIGURATION: (1, configured),
    "simulated, W = 4": (1, simulated),
    "simulated, W = 4, two processes": (2, simulated),
    "DDP hook": (1, hooked),
    "FSDP2 hook, 2 x 2": (4, sharded),
    "FSDP2's own collectives": (2, own_collectives),
    "DiLoCo synchronisation": (1, synchronised),
}


# -- the page -------------------------------------------------------------------------------


def in_tree(tree: Path, route: str, processes: int = 1) -> Any:
    """The walk of a route on process 0, with the code of a tree."""
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OUT": scratch}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "REGIMES_RENDEZVOUS": Path(scratch, "meet").as_uri()}
        env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        command = [sys.executable, "-P", "-W", "ignore", __file__, "--inside", route]
        started = [
            subprocess.Popen(
                command,
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=scratch,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]
        said = [process.communicate(timeout=240) for process in started]
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode:
            raise SystemExit(f"{tree}: {route}: {errors[-2000:]}")
    return json.loads(said[0][0].splitlines()[-1])


def markdown(walks: dict[str, dict[str, Any]]) -> str:
    """A table of the walks, and the files of each."""
    lines = [
        "| one step | files | rooms | functions | calls into a higher room |",
        "|---|---:|---:|---:|---:|",
    ]
    for route, way in walks.items():
        counts = way["files"], way["rooms"], way["functions"], len(way["climbs"])
        lines.append(f"| {route} | {' | '.join(map(str, counts))} |")
    for route, way in walks.items():
        lines += ["", f"{route}: {', '.join(way['names'])}."]
    holders = walks[CONFIGURATION]["handed to"]
    lines += ["", f"The configuration is handed to {len(holders)} files: {', '.join(holders)}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        print(json.dumps(walk(chosen.inside)))
        return
    print(markdown({route: in_tree(ROOT, route, count) for route, (count, _) in ROUTES.items()}))


if __name__ == "__main__":
    main()
