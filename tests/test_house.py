"""The house: who may import whom, read from the source; what is imported when; the command line."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grimp
import pytest

from benchmarks import house

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = (  # rooms that read, decide and draw, and what starts others
    "base.config",
    "base.console",
    "base.errors",
    "base.statistics",
    "cli",
    "cost",
    "plotting",
    "policies",
    "presets",
    "records",
    "search",
)
WITH_TORCH = {  # time steps, or read the shapes of a model; imported when that is asked for
    *(
        "cost.measure",
        "cost.models",
        "cost.nodes",
        "cost.methods",
        "cost.from_model",
        "cost.recorded",
    ),
    *("cost.advice", "cost.sharded"),
    "cli.links",
    "search.plans",
}


def modules(*rooms: str) -> list[str]:
    """The modules of some rooms, but those that are known to need torch."""
    found = []
    for path in sorted((ROOT / "regimes").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "regimes").with_suffix("").parts)
        name = name.removesuffix(".__init__")
        asked, known = (any(f"{name}.".startswith(f"{x}.") for x in y) for y in (rooms, WITH_TORCH))
        if asked and not known:
            found.append(f"regimes.{name}")
    return found


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", code]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def test_layers_and_circles() -> None:
    """The contracts of pyproject.toml: who may import whom."""
    words = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stdout
    assert "8 kept, 0 broken" in done.stdout


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Nor by way of others, for types, or inside of functions, which the contracts leave out."""
    assert house.in_circles(house.sources(ROOT)) == []


def test_the_study_has_few_rooms_and_arrows() -> None:
    """An arrow: a module of one room imports one of another. The linter sees to their directions,
    not to how many there are."""
    graph = grimp.build_graph("analysis", cache_dir=None)
    room_of = {name: name.split(".")[1] for name in graph.modules if "." in name}
    rooms = {*room_of.values()} - {"__main__"}
    arrows = {
        (room_of[name], room_of[other])
        for name in room_of
        for other in graph.find_modules_directly_imported_by(name) & room_of.keys()
        if room_of[name] != room_of[other] and room_of[name] != "__main__"
    }
    assert len(rooms) <= 12
    assert len(arrows) <= 17  # the findings read each of six rooms


def test_one_room_talks_to_torch_distributed() -> None:
    users = {
        path.relative_to(ROOT / "regimes").as_posix()
        for path in (ROOT / "regimes").rglob("*.py")
        if re.search(r"^\s*(import|from) torch\.distributed\b", path.read_text(), re.MULTILINE)
    }
    names = (
        "processes",
        "process_group",
        "connect",
        "group",
        "claims",
        "lost_processes",
        "call_guard",
        "outside",
        "sharded_models",
    )
    ours = {f"collectives/{name}.py" for name in names}
    # private classes of FSDP2; doctor tries the backends, links times them
    assert users == {*ours, "base/torch_compat.py", "cli/machine.py", "cli/links.py"}


NOT_OF_TORCH = {  # private names of other libraries
    *("_current_frames", "_getframe", "_exit", "_Hash", "_processes"),  # of Python
    *("_fields", "_asdict"),  # of named tuples
    *("_model_mapping", "_subplotspec"),  # of transformers, and of matplotlib
}
Used = dict[str, set[str]]  # private name: where it is used


@functools.cache  # the check below asks eight times for nearly the same modules
def names_in(source: str) -> tuple[set[str], set[str], set[str]]:
    """The names that a module uses, writes as text, and defines."""
    used, written, ours = set(), set(), set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                ours.add(node.name)
            case ast.Name(ctx=ast.Store()):
                ours.add(node.id)
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self")):
                ours.add(node.attr)
            case ast.Attribute():
                used.add(node.attr)
            case ast.ImportFrom(module=str(module)) if module.startswith("torch"):
                used |= {*module.split("."), *(x.name for x in node.names)}
            case ast.Import():
                used |= {*".".join(x.name for x in node.names).split(".")}
            case ast.Constant(value=str(value)) if value.isidentifier():
                written.add(value)
    return used, written, ours


def private_names(sources: dict[str, str]) -> tuple[Used, Used]:
    """The private names that some modules use and none of them defines, and those that they write
    as text: attributes, imports, and words like names."""
    used: Used = defaultdict(set)
    written: Used = defaultdict(set)
    ours: set[str] = set()
    for path, source in sources.items():
        uses, writes, defines = names_in(source)
        ours |= defines
        for names, found in ((uses, used), (writes, written)):
            for name in names:
                found[name].add(path)
    private = [
        {name: paths for name, paths in names.items() if re.match("_[A-Za-z]", name)}
        for names in (used, written)
    ]
    return {name: paths for name, paths in private[0].items() if name not in ours}, private[1]


def torchs_elsewhere(sources: dict[str, str]) -> set[tuple[str, str]]:
    """Where a private name of torch is used outside of the file for them, or one that this file
    has is written as text."""
    here = "base/torch_compat.py"
    used, written = private_names(sources)
    theirs = {name for names in private_names({here: sources[here]}) for name in names}
    found = [(name, used[name]) for name in used.keys() - NOT_OF_TORCH]
    found += [(name, written[name]) for name in written.keys() & theirs]
    return {(path, name) for name, paths in found for path in paths - {here}}


def test_private_names_of_torch_stand_in_one_file() -> None:
    root = ROOT / "regimes"
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    assert torchs_elsewhere(sources) == set()
    for use in (  # the check sees each kind
        "torch._C._current_graph_task_id()",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "getattr(model, '_orig_mod', model)",
        "model._a_name_of_tomorrow",
    ):
        assert torchs_elsewhere(sources | {"job/new.py": use}), use


def test_what_needs_no_torch_imports_none() -> None:
    """In one process, so that what a module imports inside is seen as well."""
    code = f"import importlib, sys\nfor name in {modules(*WITHOUT_TORCH)!r}:\n"
    code += "    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name"
    done = run_python(code)
    assert done.returncode == 0, done.stderr[-500:]


READ = """
import sys
from regimes.__main__ import main
for words in {commands!r}:
    sys.argv = ["regimes", *words]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, (words, stop.code)
    found = {{m for m in sys.modules if m.startswith("analysis.plugins")}}
    assert not found | {{"torch"}} & {{*sys.modules}}, (words, found)
"""


def test_commands_that_read_import_no_torch(tmp_path: Path) -> None:
    """One after the other in one process; the first that imports it is named."""
    small = str(ROOT / "data" / "reference" / "smoke-resnet8.tar.xz")
    commands = [
        ["presets"],
        ["presets", "smoke"],
        ["watch", small, "--once"],
        ["detect", small, "--detectors", "norm-change:interval=3"],
        ["cost", small],
    ]
    done = run_python(READ.format(commands=commands), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-500:]


def test_import_and_presets_do_without_torch() -> None:
    code = "import sys, regimes; regimes.get_preset('smoke'); regimes.RunConfig; regimes.load; "
    code += "assert not {'torch', 'numpy', 'pandas', 'rich', 'analysis.plugins'} "
    code += "& set(sys.modules)"
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    import regimes

    for name in regimes.__all__:
        assert getattr(regimes, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = regimes.trane  # type: ignore[attr-defined]


# -- tests of the rooms -----------------------------------------------------------------------


def test_each_room_has_its_tests() -> None:
    """tests/rooms/NAME tests regimes/NAME; oracles, processes and gpu test rooms too."""
    rooms = {path.parent.name for path in (ROOT / "regimes").glob("*/__init__.py")}
    parts = {path.parent.name for path in (ROOT / "regimes").glob("*/*/__init__.py")}
    tested = {path.name for path in (ROOT / "tests" / "rooms").iterdir() if any(path.glob("*.py"))}
    assert len(rooms) == 16
    assert tested <= rooms | parts
    # these two have their tests in the folders of their parts
    assert rooms - tested <= {"base", "hook"}


# -- the command line ------------------------------------------------------------------------

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_run_resume_watch_and_ablate(command: Command, tmp_path: Path) -> None:
    short = ["--set", "epochs=2", "--set", "data.train_size=100"]
    done = command("run", "smoke", *short, "--seed", "5", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert "runs/smoke/seed-5: accuracy" in done.stdout
    again = command("run", "smoke", *short, "--seed", "5", "--workers", "2")
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    again = command("run", "smoke", *short, "--seed", "5", "--workers", "2", "--resume")
    assert again.returncode == 0, again.stderr
    seen = command("watch", "runs/smoke/seed-5", "--once")
    assert seen.returncode == 0, seen.stderr
    ablate = [
        "ablate",
        "smoke",
        *short,
        "--seeds",
        "2",
        "--schedules",
        "low",
        "--schedules",
        "high",
    ]
    done = command(*ablate)
    assert done.returncode == 0, done.stderr
    assert "4 runs in runs/smoke, 0 already finished" in done.stdout
    (tmp_path / "runs/smoke/low/seed-1/epochs.jsonl").write_text("")
    for name in ("epoch-0001", "epoch-0002"):
        for file in (tmp_path / "runs/smoke/low/seed-1/checkpoints" / name).iterdir():
            file.unlink()
        (tmp_path / "runs/smoke/low/seed-1/checkpoints" / name).rmdir()
    done = command(*ablate)
    assert "4 runs in runs/smoke, 3 already finished" in done.stdout
    assert "[1/1] low/seed-1" in done.stdout


def test_presets_and_doctor(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regimes.cli import machine as doctor

    for slow in ("_torchvision", "_notebooks"):  # test_doctor tries them: six seconds
        monkeypatch.setattr(doctor, slow, lambda: "not tried")
    listed = command("presets")
    assert "paper-vgg19bn-cifar10" in listed.stdout
    toml = command("presets", "smoke/high")
    (tmp_path / "mine.toml").write_text(toml.stdout)
    done = command("run", "mine.toml", "--set", "epochs=1", "--set", "data.train_size=100")
    assert done.returncode == 0, done.stderr
    assert "runs/mine/seed-0" in done.stdout
    checked = command("doctor")
    assert checked.returncode == 0, checked.stdout
    assert "gloo" in checked.stdout


def test_unwritable_folder(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("run", "smoke", "--out", "file/run")
    assert done.returncode == 2
    assert (
        done.stderr == "error: out = 'file/run': expected the name of a folder (Not a directory)\n"
    )


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    words = [
        torchrun,
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "regimes",
        "run",
        "smoke",
        "--set",
        "epochs=2",
        "--out",
        "run",
    ]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "run: accuracy" in done.stdout
    assert len((tmp_path / "run/epochs.jsonl").read_text().splitlines()) == 2
