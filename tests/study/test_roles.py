"""Figures from a grid with names of its own (oracle: the same runs under the names of the paper).

A grid is trained once, for four of the paper's figures.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from synthetic import POLICIES, make

from analysis.common import compare
from analysis.paper import figure2, figure3, figures
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError, LackingError, RecordError
from regimes.plotting import lacking, offered, style
from regimes.plotting.groups import in_roles
from regimes.plotting.needs import Needs
from regimes.presets import get_grid
from regimes.records import Record, load_all, select_while_loading
from regimes.search import sweep

GRID = """
base = "smoke"
set = [
  "epochs=4", "optimizer.decay_epochs=[3]", "optimizer.warmup_epochs=1", "data.train_size=64",
  "data.test_size=64", "workers=2",
]

[schedules.four]
policy = { name = "static", level = "low" }
role = "low"
statistics = ["eigenvalue", "eigenvalue:batch"]
instruments.curvature = { images = 32, batch = 32, tolerance = 0.1, max_products = 20 }
instruments.overlap = { batches = [8, 32], every = 2 }

[schedules.one]
policy = { name = "static", level = "high" }
role = "high"
"""
MINE = {role: f"my {len(role)} {role[::-1]}" for role in POLICIES}  # names that no figure knows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    root = tmp_path_factory.mktemp("runs")
    for name in POLICIES:
        for seed in (0, 1, 2):
            make(root, name, seed)
    return load_all(root)


def renamed(runs: list[Record], **changes: Any) -> list[Record]:
    """The runs under names of their own, with the roles that a grid has given them."""
    mine = []
    for run in runs:
        role = run.config["name"]
        config = run.config | {"name": MINE[role], "role": role} | changes
        mine.append(run._changed(header=run.header | {"config": config}))
    return mine


def test_a_grid_of_ones_own_names_gives_the_same_numbers(runs: list[Record]) -> None:
    mine = renamed(runs)
    for one, other in zip(compare.table(mine), compare.table(runs), strict=True):
        pd.testing.assert_frame_equal(one, other)
    own, theirs = figure2.figure2a(mine), figure2.figure2a(runs)
    pd.testing.assert_frame_equal(own.data, theirs.data)
    by_name = compare.group_runs(mine, [MINE["low"], MINE["high"]], only=True)
    assert {*by_name} == {MINE["low"], MINE["high"]}  # asked for by their names, they keep them
    assert {*compare.group_runs(mine)} == {*MINE.values()}


def test_a_role_may_be_chosen_when_a_figure_is_drawn(tmp_path: Path) -> None:
    for name in ("low", "four", "one"):
        make(tmp_path, name, 0, role="high" if name == "one" else None)
    with select_while_loading(roles=["low=four"]) as notes:
        drawn = in_roles(load_all(tmp_path), ["low", "high"])
    assert {(run.name, run.folder.parent.name) for run in drawn} == {
        ("low", "four"),
        ("high", "one"),
    }
    assert "the schedule one is drawn as high, its role" in notes
    with select_while_loading(roles=["high=four"]):
        assert {run.name for run in in_roles(load_all(tmp_path), ["high"])} == {
            "low",
            "high",
            "one",
        }
    with (
        select_while_loading(roles=["low=five"]),
        pytest.raises(RecordError, match="no run of schedule 'five'"),
    ):
        load_all(tmp_path)
    with (
        pytest.raises(ConfigError, match="--role low: expected ROLE=SCHEDULE"),
        select_while_loading(roles=["low"]),
    ):
        pass


def test_two_schedules_of_one_role_are_an_error_where_it_is_needed(runs: list[Record]) -> None:
    low = [run for run in runs if run.name == "low"]
    both = [*low, *renamed(low)]
    with pytest.raises(RecordError, match=rf"low, {MINE['low']}: each is 'low'.* --role low='low'"):
        compare.group_runs(both, ["low"])
    assert {*compare.group_runs(both, [MINE["low"]])} == {"low", MINE["low"]}


def test_what_a_grid_lacks_is_said_with_the_key_that_sets_it(tmp_path: Path) -> None:
    figure = Needs(("low", "high"), ("mid",), ("norm", "eigenvalue", "eigenvalue:batch"))
    text = '[schedules.a]\nROLE\n[schedules.b]\nrole = "high"\nSTATISTICS\n'

    def keys(**settings: str) -> list[str]:
        path = tmp_path / "grid.toml"
        filled = text
        for word in ("ROLE", "STATISTICS"):
            filled = filled.replace(word, settings.get(word, ""))
        path.write_text(settings.get("FIRST", "") + "\n" + filled)
        rows = lacking.compare_needs(figure, get_grid(str(path)))
        return list(dict.fromkeys(row.key for row in rows if row.key))

    role, statistics = keys()
    assert role.startswith('role = "low", in the table [schedules.NAME]')
    assert statistics == 'statistics = ["eigenvalue", "eigenvalue:batch"]'
    role = role.partition(",")[0]
    assert keys(ROLE=role) == [statistics]
    assert keys(FIRST=statistics, ROLE=role) == []
    assert keys(ROLE=role, STATISTICS=statistics) == [statistics]  # of one of two
    assert keys(ROLE='role = "high"', FIRST=statistics)[1] == 'role = "high" in one of a, b alone'
    plain = lacking.compare_needs(figure, {"low": RunConfig(), "high": RunConfig()}, in_file=False)
    assert {row.key for row in plain if row.key} == {
        '--set \'instruments.curvature.modes=["eval","batch-statistics"]\''
    }


def test_windows_of_another_grid_are_shown_in_the_epochs_of_ones_own() -> None:
    """Of 24 epochs, [[0, 6], [12, 14]]. The grids that the list of figures names lack nothing."""
    from analysis.__main__ import offers

    wanted = {number: offer.needs for number, offer in offers().items() if offer.needs}
    for epochs, windows in ((12, "[[0, 3], [6, 7]]"), (48, "[[0, 12], [24, 28]]")):
        grid = {"mine": RunConfig(epochs=epochs)}
        text = "".join(row.key for row in lacking.compare_needs(wanted["1"], grid))
        assert f"windows = {windows}" in text
    for number in ("2", "3", "4a", "8", "agreement"):
        known = figures.FIGURES.get(number)
        for name in known.grids if known else ("detection-smoke",):
            rows = lacking.compare_needs(wanted[number], get_grid(name))
            assert [row for row in rows if row.key] == [], (number, name)


def test_statistics_of_a_small_training_set_are_of_probes_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    text = 'set = ["data.train_size={}"]\nstatistics = ["eigenvalue", "overlap"]\n[schedules.a]\n'
    for size, images, batches in (
        (96, 96, [6, 24, 48]),
        (100, 100, [6, 25, 50]),
        (400, 200, [32, 128]),
    ):
        path.write_text("base = 'smoke'\n" + text.format(size))
        tables = get_grid(str(path))["a"].instruments
        assert tables["curvature"].get("images", 200) == images <= size
        assert images % tables["curvature"].get("batch", 50) == 0
        assert all(2 * batch <= size for batch in batches)
        assert tables["overlap"].get("batches") == batches
    path.write_text("base = 'smoke'\n" + text.format(96) + "instruments.curvature.images = 48\n")
    assert get_grid(str(path))["a"].instruments["curvature"]["images"] == 48


def test_keys_of_a_grid_are_checked(tmp_path: Path) -> None:
    for key, says in (
        ('role = "lo"', "role = 'lo': did you mean 'low'"),
        ('statistics = ["eigenvalues"]', "no instrument measures the statistic 'eigenvalues'"),
        ('statistics = "norm"', "schedules.a: statistics = 'norm': expected a list of texts"),
    ):
        path = tmp_path / "grid.toml"
        path.write_text(f"[schedules.a]\n{key}\n")
        with pytest.raises(ConfigError, match=re.escape(says)):
            get_grid(str(path))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Figure, pd.DataFrame]]:
    """What is drawn, in place of its files."""
    found: dict[str, tuple[Figure, pd.DataFrame]] = {}

    def save(figure: Figure, stem: Path, table: pd.DataFrame) -> list[Path]:
        found[stem.name] = figure, table
        return []

    monkeypatch.setattr(style, "save", save)
    return found


def test_a_grid_of_ones_own_gives_figures_3_and_4a_at_the_first_attempt(
    drawn: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the error of a figure that it does not give names the command that says what it lacks."""
    path, out = tmp_path / "own.toml", tmp_path / "runs"
    path.write_text(GRID)
    words = ("--out", str(tmp_path / "figures"))
    for number in ("3", "4a"):
        assert offered.begin_figure(number, ("--needs", str(path)))
        assert "Nothing is lacking" in capsys.readouterr().out
    cells = sweep.list_cells(get_grid(str(path)), [0], out)
    assert sweep.ablate(cells, 1, lambda folder, error: None) == []
    for number in ("3", "4a"):
        offered.begin_figure(number, (str(out), *words))
    assert {*drawn} == {"figure3-low", "figure4a-four"}
    with pytest.raises(LackingError, match=r"'eigenvalue'.*`regimes figure 3 --needs GRID`"):
        offered.begin_figure("3", (str(out), "--role", "low=one", *words))
    with pytest.raises(LackingError, match=r"no run of .*adaqs.*`regimes figure 7 --needs"):
        offered.begin_figure("7", (str(out), *words))


SPEEDRUN = {  # cifar10-fast: names of its own, roles for most
    "rank 4": ("low", "low"),
    "rank 1": ("high", "high"),
    "dense": ("dense", "dense"),
    "accordion": ("accordion", "accordion"),
    "critical 8": ("low-in-critical", "low-in-critical"),
    "last 8": ("low-late", "low-late"),
    "rank 1 longer": ("high-stretched", "high"),
    "ladder 4-2-1": (None, "low"),
}


def test_a_grid_with_ranks_as_names_gives_figures_1_2_and_8_by_its_roles(
    drawn: dict[str, Any], tmp_path: Path
) -> None:
    """Not by the names that a tournament has alone: these do not have the last 8. Figure 8 takes
    the longer training with stretched decays where it has no other."""
    for name, (role, policy) in SPEEDRUN.items():
        make(tmp_path / "runs", name, 0, role=role, policy=POLICIES[policy])
    for number in ("1", "2", "8"):
        figures.draw(number, tmp_path / "runs", tmp_path)
    names = {name: {*drawn[name][1]["schedule"]} for name in ("figure1", "figure2b", "figure8")}
    assert names["figure1"] == {"low", "high", "low-in-critical"}
    roles = {role for role, _ in SPEEDRUN.values() if role}
    assert names["figure2b"] == roles - {"high-stretched"}
    assert names["figure8"] == {"low", "high", "accordion", "high-stretched"}
    wanted = figures.FIGURES["8"].needs
    assert wanted is not None
    grid = {name: RunConfig(role=role) for name, (role, _) in SPEEDRUN.items()}
    assert [row.key for row in lacking.compare_needs(wanted, grid) if row.key] == []
    del grid["rank 1 longer"]
    (key,) = (row.key for row in lacking.compare_needs(wanted, grid) if row.key)
    assert 'role = "high-longer"' in key


def test_figure_3_takes_the_one_schedule_that_was_measured(runs: list[Record]) -> None:
    """Whatever it is called, if none is low by its name or role."""
    (low,) = (run for run in runs if run.name == "low" and run.seed == 0)
    values = [{**row, "model": {"eigenvalue": 2.0, "eigenvalue:batch": 3.0}} for row in low.rows]
    header = low.header | {"config": low.config | {"name": "mine"}}
    measured = low._changed(header=header, rows=values)
    vars(measured).pop("epochs", None)
    dense = [run for run in runs if run.name == "dense"]
    assert [run.name for run in figure3.only_measured([measured, *dense], "low")] == ["low"]
    assert figure3.only_measured([low, measured], "low") == [low, measured]
    assert figure3.only_measured(dense, "low") == dense
