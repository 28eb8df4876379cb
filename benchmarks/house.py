"""How many concepts the toolkit has, and how far a gradient travels in it.

    python -m benchmarks.house [--tree PATH] [--json]   # a minute on two cores

Counts are over the syntax trees of PATH/regimes, walks are run-time traces of its code in processes
of their own, so that two trees can be compared. What a concept is, `CONCEPTS` says by rules: names,
and what inherits from them. Each counted definition is listed in ``--json``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
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
# Rooms that neither train nor exchange. All others count as the seams, whatever they are called:
# at first training, ddp, collectives and local.
OTHER_ROOMS = (
    *("base", "cli", "compression", "cost", "data", "instruments", "integrations", "plotting"),
    *("policies", "presets", "records", "search", "__init__", "__main__"),
    # of earlier trees
    *("config", "console", "curvature", "detectors", "launch", "models", "monitor", "precision"),
    *("reduction", "replay", "report", "seeding", "statistics", "errors", "inputs"),
)
REFUSES = (
    "require",
    "require_of",
    "require_reading",
    "refuse",
    "refuse_state",
    "check_bounds",
    "check_needs",
)


# -- definitions, by syntax trees ------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """A class or function, and where it is.

    Attributes:
        name: qualified by its class: "Hook.state_dict".
        bases: of a class, without their modules.
        methods: of a class, its own.
        kind: "class" or "function".
        returns: of a function, the annotation.
        uses: what it calls, and what it assigns to with " =" at the end, as it is written.
        writes_table: a function in which a table with names stands.
    """

    name: str
    place: str
    kind: str
    bases: tuple[str, ...] = ()
    methods: frozenset[str] = frozenset()
    returns: str = ""
    uses: frozenset[str] = frozenset()
    writes_table: bool = False

    @property
    def bare(self) -> str:
        """The name without class and underscores before it."""
        return self.name.rpartition(".")[2].lstrip("_")


def sources(tree: Path) -> dict[str, ast.Module]:
    """The parsed modules of the toolkit, by path in ``regimes/``."""
    paths = sorted((tree / "regimes").rglob("*.py"))
    return {
        path.relative_to(tree / "regimes").as_posix(): ast.parse(path.read_text("utf-8"))
        for path in paths
    }


def definitions(modules: dict[str, ast.Module]) -> list[Definition]:
    found = []

    def visit(node: ast.AST, path: str, above: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, path, above)
                continue
            name, place = f"{above}{child.name}", f"{path}:{child.lineno}"
            if isinstance(child, ast.ClassDef):
                methods = {x.name for x in child.body if isinstance(x, ast.FunctionDef)}
                bases = tuple(ast.unparse(base).rpartition(".")[2] for base in child.bases)
                more: dict[str, Any] = {"bases": bases, "methods": frozenset(methods)}
            else:
                tables = [x for x in ast.walk(child) if isinstance(x, ast.Dict) and x.keys]
                returns = ast.unparse(child.returns) if child.returns else ""
                more = {"returns": returns, "writes_table": bool(tables)}
            kind = "class" if isinstance(child, ast.ClassDef) else "function"
            found.append(Definition(name, place, kind, uses=uses(child), **more))
            visit(child, path, f"{name}.")

    for path, module in modules.items():
        visit(module, path, "")
    return found


def uses(node: ast.AST) -> frozenset[str]:
    """See ``Definition``."""
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            found.add(ast.unparse(child.func))
        elif isinstance(child, ast.Assign):
            found |= {f"{ast.unparse(target)} =" for target in child.targets}
    return frozenset(found)


Rule = Callable[[Sequence[Definition]], list[Definition]]


def family(*roots: str, suffix: str = "", methods: Sequence[str] = ()) -> Rule:
    """Classes of these names, with this end of their name or with all these methods, and all that
    inherit from one of them; tables of a record (TypedDict) are none."""

    def rule(every: Sequence[Definition]) -> list[Definition]:
        classes = [x for x in every if x.kind == "class" and "TypedDict" not in x.bases]
        found = [
            x
            for x in classes
            if x.name in roots
            or (suffix and x.name.endswith(suffix))
            or (methods and {*methods} <= x.methods)
        ]
        while more := [
            x for x in classes if x not in found and {*x.bases} & {y.name for y in found}
        ]:
            found += more
        return found

    return rule


def using(*ends: str) -> Rule:
    """Classes that call, or assign to, what ends so in the text, and what inherits from them."""

    def rule(every: Sequence[Definition]) -> list[Definition]:
        found = [
            x.name for x in every if x.kind == "class" and any(u.endswith(ends) for u in x.uses)
        ]
        return family(*found)(every)

    return rule


def headers(every: Sequence[Definition]) -> list[Definition]:
    """Functions that write entries of a header themselves, not by `build_header`."""
    found = named("header", "local_header", "build_header")(every)
    own = [x for x in found if x.writes_table and "build_header" not in x.uses]
    return [x for x in own if x.returns == "Header"]


def layouts(every: Sequence[Definition]) -> list[Definition]:
    """Writers of saved states that lay it out themselves, and one of those that do it with the
    functions of `regimes.job.state`."""
    found = named(
        "SharedState",  # a run's checkpoint
        "Job.lay_out_state",  # of one process of any job
        *("StateCodec.save", "StateCodec.save_state"),  # of one process of a hook
        *("StateCodec.collect", "StateCodec.collect_states"),  # of all processes, in one file
        "ShardedState",  # in the layout of torch.distributed.checkpoint
        "LocalSteps.state_dict",  # of one process of local steps
        *("ProcessState", "ProcessStates"),  # in the layout of torch.distributed.checkpoint
        # for a replica that joins
        *("HookQuorum.save", "Membership.save", "Membership.save_for_replica"),
    )(every)
    by = {
        "by_layer",
        "own_part",
        "self.lay_out_state",
        *("joined", "join_states"),
        *("packed", "pack_state"),
    }
    common = [x for x in found if x.uses & by]
    if not any("by_layer" in x.uses for x in every):  # a tree without one layout
        return found
    return [x for x in found if x not in common] + common[:1]


def named(*names: str, rooms: Sequence[str] = (), once: bool = False) -> Rule:
    """Classes and functions of these names, qualified or bare, without underscores before them.

    Args:
        rooms: in which they count; none: in all.
        once: several of one name are one.
    """

    def rule(every: Sequence[Definition]) -> list[Definition]:
        found = [x for x in every if x.name in names or x.bare in names]
        found = [x for x in found if not rooms or x.place.partition("/")[0] in rooms]
        return list({x.bare: x for x in found}.values()) if once else found

    return rule


CONCEPTS: dict[str, Rule] = {
    "worlds": family("World", methods=("mean", "gather")),
    # what has layers reduced, or puts other states of the compressors in place
    "exchanges": using("reducer.reduce", "reducer.states ="),
    "origins of gradients": family(suffix="Gradients"),
    "layouts of saved state": layouts,
    "clocks": family(suffix="Clock"),
    "combination matrices": named(
        "check_graphs",
        "check_shards",
        "check_vmap",
        "check_local_steps",
        "check_managed",
        rooms=("training", "hook", "ddp", "local"),
        once=True,
    ),
    "replay of levels": named("replay_levels", "as_decided"),
    "builders of headers": headers,
}


# -- lines, refusals, imports ----------------------------------------------------------------


def lines_by_room(tree: Path) -> dict[str, tuple[int, int]]:
    """(lines, files) of each room; a module beside the rooms is one of its name."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted((tree / "regimes").rglob("*.py")):
        room = path.relative_to(tree / "regimes").parts[0].removesuffix(".py")
        lines, files = found.get(room, (0, 0))
        found[room] = lines + count_lines(path), files + 1
    return found


def folders(rooms: dict[str, Any], tree: Path) -> list[str]:
    """The rooms that are folders."""
    return [room for room in rooms if (tree / "regimes" / room).is_dir()]


def twice(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The names that several classes at the top of modules have, with their places."""
    found: dict[str, list[str]] = {}
    for path, module in modules.items():
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def functions_per_thousand(every: Sequence[Definition], lines: int) -> float:
    """Functions and methods, also those within others, in 1,000 lines."""
    return 1000 * sum(x.kind == "function" for x in every) / lines


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def refusals(modules: dict[str, ast.Module]) -> list[str]:
    """Places that raise an exception of their own choice, or call a function that refuses."""
    found = []
    for path, module in modules.items():
        for node in ast.walk(module):
            if isinstance(node, ast.Raise):
                refuses = node.exc is not None
            elif isinstance(node, ast.Call):
                refuses = ast.unparse(node.func).rpartition(".")[2] in REFUSES
            else:
                continue
            if refuses:
                found.append(f"{path}:{node.lineno}")
    return found


def heights(tree: Path) -> dict[str, int]:
    """How high each room is in the order of the tree's own pyproject.toml."""
    contracts = tomllib.loads((tree / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(x["layers"] for x in contracts["contracts"] if x.get("containers") == ["regimes"])
    return {room.strip(): -number for number, row in enumerate(layers) for room in row.split("|")}


def room_of(path: str) -> str:
    """The room of a file, given its path in ``regimes/``."""
    return path.partition("/")[0].removesuffix(".py")


def against_the_order(tree: Path, modules: dict[str, ast.Module]) -> list[str]:
    """Imports, for types and inside of functions too, of a room that is above in the order of the
    tree's own pyproject.toml, or beside."""
    height, found = heights(tree), []
    for path, module in modules.items():
        room = room_of(path)
        for node in ast.walk(module):
            for name in imported(node):
                other = name.split(".")[1]
                both = other != room and {room, other} <= height.keys()
                if both and height[other] >= height[room]:
                    found.append(f"{path}:{node.lineno} {name}")  # type: ignore[attr-defined]
    return found


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


def loaded_by_attach() -> dict[str, Any]:
    """What the import of the module that has ``attach`` loads; in a fresh process."""
    import regimes

    module = regimes.attach.__module__
    loaded = [x for n, x in sys.modules.items() if n.partition(".")[0] == "regimes"]
    files = {Path(x.__file__) for x in loaded if x.__file__}
    home = Path(regimes.__file__).parent
    rooms = {path.relative_to(home).parts[0] for path in files} - {"__init__.py"}
    whole = sum(count_lines(path) for path in home.rglob("*.py"))
    lines = sum(count_lines(path) for path in files)
    share = lines / whole
    return {
        "module": module,
        "files": len(files),
        "lines": lines,
        "rooms": len(rooms),
        "share": share,
    }


# -- walks, by run-time traces ---------------------------------------------------------------


@dataclass
class Trace:
    """Calls in the toolkit's files while ``on``, in this thread and those that start after
    ``watch``; calls while a module is imported are none.

    Attributes:
        home: the folder of the toolkit, with a separator at its end.
        height: of each room, in the order of the tree.
        last: by thread, the file of its last call.
        moves: calls in another file than the call before, in the same thread.
        climbs: calls from a room into a higher one: the callers, and what they call.
        until: the trace ends where this function is called.
        handed: of which classes ``holders`` are the functions that take or return one.
    """

    home: str
    height: dict[str, int]
    on: bool = False
    functions: dict[tuple[str, str], Any] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)
    moves: int = 0
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
        file, thread = place[0], threading.get_ident()
        self.functions[place] = frame.f_code
        self.moves += self.last.get(thread, file) != file
        self.last[thread] = file
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self.home):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_name != "<module>":
            below = caller.f_code.co_filename.removeprefix(self.home)
            if self.height.get(room_of(file), 0) > self.height.get(room_of(below), 0):
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
            "lines": sum(
                max(line for *_, line in code.co_lines() if line) - code.co_firstlineno + 1
                for code in self.functions.values()
                if not code.co_name.startswith("<")  # whose lines are those of a function
            ),
            "moves": self.moves,
            "climbs": self.climbs,
            "names": files,
            "handed to": sorted({file for file, _ in self.holders}),
        }


def _argument_names(code: Any) -> Sequence[str]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def walk(route: str) -> dict[str, int]:
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
    each is looked at. An earlier tree, or another torch, may lack a module."""
    ahead = ("torch._dynamo", "sklearn.datasets", "pandas", "regimes.training.loop")
    for name in (*ahead, "regimes.cli.app"):
        with contextlib.suppress(ImportError):
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


# -- the house ------------------------------------------------------------------------------


def in_tree(tree: Path, *words: str, processes: int = 1) -> Any:
    """What this module's ``--inside`` prints on process 0, run with the code of a tree."""
    with tempfile.TemporaryDirectory(prefix="regimes-") as scratch:
        env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OUT": scratch}
        env |= {"GLOO_SOCKET_IFNAME": "lo", "REGIMES_RENDEZVOUS": Path(scratch, "meet").as_uri()}
        env |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        command = [sys.executable, "-P", "-W", "ignore", __file__, "--inside", *words]
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
            raise SystemExit(f"{tree}: {' '.join(words)}: {errors[-2000:]}")
    return json.loads(said[0][0].splitlines()[-1])


def measure(tree: Path, routes: Sequence[str] = tuple(ROUTES)) -> dict[str, Any]:
    """All counts of a tree, and the walks that are asked for."""
    modules = sources(tree)
    every, rooms = definitions(modules), lines_by_room(tree)
    concepts = {
        concept: [f"{x.name} ({x.place})" for x in rule(every)]
        for concept, rule in CONCEPTS.items()
    }
    return {
        "concepts": concepts,
        "rooms": rooms,
        "seams": [sum(n) for n in zip(*(rooms[r] for r in seams(rooms)), strict=True)],
        "toolkit": (toolkit := [sum(n) for n in zip(*rooms.values(), strict=True)]),
        "folders": folders(rooms, tree),
        "twice": twice(modules),
        "functions per 1,000 lines": functions_per_thousand(every, toolkit[0]),
        "attach": in_tree(tree, "attach"),
        "refusals": refusals(modules),
        "against the order": against_the_order(tree, modules),
        "in circles": in_circles(modules),
        "walks": {route: in_tree(tree, route, processes=ROUTES[route][0]) for route in routes},
    }


def seams(rooms: dict[str, Any]) -> list[str]:
    return [room for room in rooms if room not in OTHER_ROOMS]


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    attach, lines = found["attach"], ["| | number |", "|---|---:|"]
    lines += [f"| {name} | {len(which)} |" for name, which in found["concepts"].items()]
    lines.append(f"| places that refuse | {len(found['refusals'])} |")
    lines.append(f"| imports upward or sideways | {len(found['against the order'])} |")
    lines.append(f"| modules in circles of imports | {len(found['in circles'])} |")
    lines.append(f"| rooms that are folders | {len(found['folders'])} |")
    lines.append(f"| class names that stand twice or more | {len(found['twice'])} |")
    lines.append(f"| functions per 1,000 lines | {found['functions per 1,000 lines']:.1f} |")
    names = ", ".join(seams(found["rooms"]))
    for name, (count, files) in ((names, found["seams"]), ("toolkit", found["toolkit"])):
        lines.append(f"| {name}: lines / files | {count:,} / {files} |")
    share = f"{attach['share']:.0%} ({attach['lines']:,} / {attach['files']} / {attach['rooms']})"
    lines.append(f"| `import {attach['module']}`: share (lines / files / rooms) | {share} |")
    lines += ["", "| room | lines | files |", "|---|---:|---:|"]
    rooms = sorted(found["rooms"].items(), key=lambda room: -room[1][0])
    lines += [f"| {room} | {count:,} | {files} |" for room, (count, files) in rooms]
    lines += ["", "| class name | times | where |", "|---|---:|---|"]
    lines += [
        f"| {name} | {len(places)} | {', '.join(places)} |"
        for name, places in found["twice"].items()
    ]
    lines += ["", "| one step | files | rooms | functions (their lines) | moves between files |"]
    lines[-1] += " calls into a higher room |"
    lines.append("|---|---:|---:|---:|---:|---:|")
    for route, walk in found["walks"].items():
        functions = f"{walk['functions']} ({walk['lines']})"
        lines.append(
            f"| {route} | {walk['files']} | {walk['rooms']} | {functions} | {walk['moves']} | "
            f"{len(walk['climbs'])} |"
        )
    if (way := found["walks"].get(CONFIGURATION)) is not None:
        holders = way["handed to"]
        lines += ["", f"The configuration is handed to {len(holders)} files: {', '.join(holders)}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="whose regimes/ is measured")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside = chosen.inside
        print(json.dumps(loaded_by_attach() if inside == "attach" else walk(inside)))
        return
    found = measure(chosen.tree.resolve())
    print(json.dumps(found, indent=1) if chosen.json else table(found))


if __name__ == "__main__":
    main()
