"""The counts of `benchmarks.house`: of a small toolkit whose parts are known, and of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import house

ROOT = Path(__file__).parents[1]
FILES = {
    "__init__.py": "from regimes.exchange.worlds import attach\n",
    "records/schema.py": "class World(TypedDict):\n    workers: int\n",
    "exchange/worlds.py": """
import regimes.records.schema

class World: ...
class Group(World): ...
class Managed(Group): ...
class Answers:
    def mean(self): ...
    def gather(self): ...
class UnitClock: ...

def attach():
    if not World:
        raise ValueError("none")
    require(True)

def header() -> Header:
    return {"config": {}}
def _header() -> Header:
    return build_header({"more": 1})
def read_header() -> Header: ...
class Exchange:
    def add(self):
        self.reducer.reduce()
class Client:
    def step(self):
        self.exchange.add()
""",
    "training/checks.py": "def _check_shards(): ...\n",
    "records/reader.py": "def load():\n    from regimes.exchange import worlds\n",
}
PYPROJECT = """
[[tool.importlinter.contracts]]
containers = ["regimes"]
layers = ["exchange", "training", "records"]
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "regimes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    return tmp_path


def counted(tree: Path) -> dict[str, list[str]]:
    every = house.definitions(house.sources(tree))
    return {name: [x.name for x in rule(every)] for name, rule in house.CONCEPTS.items()}


def test_what_inherits_is_counted_and_what_is_removed_is_not(tree: Path) -> None:
    found = counted(tree)
    assert found["worlds"] == ["World", "Answers", "Group", "Managed"]
    assert found["clocks"] == ["UnitClock"]
    assert found["combination matrices"] == ["_check_shards"]
    assert found["builders of headers"] == ["header"]
    assert found["exchanges"] == ["Exchange"]
    path = tree / "regimes/exchange/worlds.py"
    path.write_text(path.read_text().replace("class Group(World): ...", ""))
    assert counted(tree)["worlds"] == ["World", "Answers"]


def test_lines_refusals_and_imports(tree: Path) -> None:
    modules, rooms = house.sources(tree), house.lines_by_room(tree)
    assert rooms["records"] == (4, 2)
    assert house.seams(rooms) == ["exchange", "training"]
    assert house.refusals(modules) == ["exchange/worlds.py:14", "exchange/worlds.py:15"]
    (upward,) = house.against_the_order(tree, modules)
    assert upward == "records/reader.py:2 regimes.exchange"
    assert house.in_circles(modules) == []
    (tree / "regimes/records/schema.py").write_text("import regimes.exchange.worlds\n")
    circle = ["regimes.exchange.worlds", "regimes.records.schema"]
    assert house.in_circles(house.sources(tree)) == circle


def test_folders_names_that_stand_twice_and_functions(tree: Path) -> None:
    modules = house.sources(tree)
    assert house.twice(modules) == {
        "World": ["exchange/worlds.py:4", "records/schema.py:1"],
    }
    rooms = house.lines_by_room(tree)
    assert house.folders(rooms, tree) == ["exchange", "records", "training"]
    lines = sum(count for count, _ in rooms.values())
    # eight of worlds.py, _check_shards, load
    assert house.functions_per_thousand(house.definitions(modules), lines) == 1000 * 10 / lines


@pytest.mark.slow
def test_this_house_is_measured() -> None:
    """Its own modules, imported and traced in processes of their own."""
    found = house.measure(ROOT, routes=["DDP hook"])
    attach, walk = found["attach"], found["walks"]["DDP hook"]
    lines, files = found["toolkit"]
    assert files == len([*(ROOT / "regimes").rglob("*.py")])
    assert attach["share"] == pytest.approx(attach["lines"] / lines)
    assert walk["files"] == len(walk["names"]) <= walk["functions"] <= walk["lines"]
    assert {"compression/powersgd.py", "compression/kernels.py"} <= {*walk["names"]}
    assert not any(name.startswith("data/") for name in walk["names"])
    assert all(found["concepts"][name] for name in ("worlds", "layouts of saved state"))
    text = house.table(found)
    assert f"| DDP hook | {walk['files']} |" in text
    assert f"| places that refuse | {len(found['refusals'])} |" in text
