"""Tables 1-6 against the paper's printed numbers and its parameter counts (oracle: print), and the
columns of our own runs against arithmetic over synthetic records."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic import make

from analysis.common import compare
from analysis.paper import figures, published, table_rules, tables
from analysis.rates import collapse, usable
from regimes.base.config import to_dict
from regimes.base.errors import RecordError
from regimes.plotting.looks import find_metric
from regimes.presets import get_grid
from regimes.records import Record, load, load_all, summary

STATIC = [row for row in published.tables().to_dict("records") if row["level"] != "accordion"]
COUNTS = {  # parameters, Tables 8 and 9
    ("cifar10", "resnet18"): 11_173_962,
    ("cifar10", "googlenet"): 6_166_250,
    ("cifar10", "densenet"): 1_000_618,
    ("cifar100", "resnet18"): 11_220_132,
    ("cifar100", "googlenet"): 6_258_500,
    ("cifar100", "densenet"): 1_035_268,
}


def name(row: dict[str, Any]) -> str:
    return f"{row['table']}-{row['model']}-{row['level']}"


@pytest.mark.parametrize("row", STATIC, ids=name)
def test_every_static_row_comes_out_to_the_printed_digits(row: Any) -> None:
    """By its own rule; or by the explained one, and then by no other, and in words."""
    plain, chosen = table_rules.rule(row), table_rules.explained(row)
    assert table_rules.agrees(chosen.floats, row["printed"], row["unit"])
    differs = not table_rules.agrees(plain.floats, row["printed"], row["unit"])
    assert bool(chosen.why) == differs
    assert (chosen == plain) == (not differs)


def test_which_rows_need_an_explanation() -> None:
    """Those of the reading notes: 1 and 3 SENet, 99 % of ResNet-18, 6, and all of batch 4096."""
    found = {(r["table"], r["model"], r["level"]) for r in STATIC if table_rules.explained(r).why}
    assert found == set(table_rules.EXPLAINED)
    assert len(STATIC) == 36
    assert len(found) == 2 + 2 + 2 + 1 + 3 + 6


def test_batch_rows_are_parameters_times_steps() -> None:
    """By hand, without a network: epochs of 98 steps (97 in Table 6) at 512, of 12 at 4096."""
    for row in STATIC:
        if row["compressor"] == "batch":
            count = COUNTS[row["data"], row["model"]]
            steps = 12 if row["level"] == "4096" else 97 if row["data"] == "cifar100" else 98
            if (row["table"], row["model"], row["level"]) == (5, "resnet18", "512"):
                count, steps = COUNTS["cifar100", "resnet18"], 97
            assert table_rules.explained(row).floats == 300 * steps * count, name(row)


def test_accordions_batch_rows_are_a_fixed_window() -> None:
    """By hand: parameters times 20 x 97 + 280 x 12 steps; no other length of the window gives five
    of the six, and no window at a decay is left over."""
    rows = [
        row
        for row in published.tables().to_dict("records")
        if row["level"] == "accordion" and row["compressor"] == "batch"
    ]
    assert len(rows) == 6

    def fit(epochs: int) -> list[tuple[int, str]]:
        steps = epochs * 97 + (300 - epochs) * 12
        return [
            (row["table"], row["model"])
            for row in rows
            if not table_rules.agrees(
                COUNTS[row["data"], row["model"]] * steps, row["printed"], row["unit"]
            )
        ]

    assert fit(20) == [(6, "resnet18")]
    assert min(len(fit(epochs)) for epochs in range(301) if epochs != 20) > 1
    for row in rows:
        assert table_rules.window(row).floats == 5300 * COUNTS[row["data"], row["model"]]
    found = tables.table()
    odd = found[(found["level"] == "accordion") & (found["agrees"] == False)]  # noqa: E712
    assert odd["printed"].to_list() == ["54.96"]
    assert odd["floats"].to_list() == [59466699600.0]
    assert "59.47 G" in odd["why"].iloc[0]


def test_agreement_is_to_one_unit_of_the_last_digit() -> None:
    for printed, same, other in (
        ("2418.4", (2418.44, 2418.49, 2418.31), (2418.5, 2418.3)),
        ("30.126", (30.1263,), (30.1275,)),
    ):
        assert all(table_rules.agrees(x * 1e6, printed, "M") for x in same)
        assert not any(table_rules.agrees(x * 1e6, printed, "M") for x in other)


# -- our runs --------------------------------------------------------------------------------


def paper_run(root: Path, policy: dict[str, Any], seed: int, **changes: Any) -> Path:
    """A synthetic run at the paper's scale: 6 epochs are written, and called all there are."""
    parts = {"data": {"name": "cifar10"}, "model": {"name": "resnet18-cifar10"}, "policy": policy}
    scale = {"planned": 300, "batch_size": 128, "levels": {"low": 2, "high": 1}}
    budget = {"budget": 1 if changes.pop("finished", True) else None}  # spent at once
    name = policy.get("level", policy["name"])
    return make(root, name, seed, header=budget, **{**parts, **scale, **changes})


ACCORDION = {"name": "accordion", "interval": 10}


def test_accordions_row_is_the_mean_of_its_runs(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        paper_run(tmp_path, ACCORDION, seed)
    paper_run(tmp_path, {"name": "static", "level": "high"}, 0)
    rows = tables.table(load_all(tmp_path))
    ours = rows[rows["n"] > 0].set_index("level")
    assert list(ours.index) == ["rank 1", "accordion"]
    assert set(ours["table"]) == {1}
    runs = [run for run in load_all(tmp_path) if run.name == "accordion"]
    last = [sum(100 * r["metric"] for r in run.rows[-3:]) / 3 for run in runs]
    row = ours.loc["accordion"]
    assert row["n"] == 3
    assert row["ours"] == pytest.approx(sum(last) / 3)
    assert row["sd"] == pytest.approx(pd.Series(last).std())
    sent = [sum(r["floats"] for r in run.rows) for run in runs]
    assert row["ours_floats"] == pytest.approx(sum(sent) / 3)
    assert row["ours_seconds"] == pytest.approx(6 * 0.1)
    assert math.isnan(ours.loc["rank 1", "sd"])


@pytest.mark.parametrize(
    "changes",
    [
        {"planned": 299},
        {"batch_size": 64},
        {"data": {"name": "cifar10", "train_size": 5000}},
        {"data": {"name": "folder"}},
        {"levels": {"low": 4, "high": 1}},
        {"workers": 8},
        {"model": {"name": "vgg7"}},
        {"compressor": {"name": "topk"}},
    ],
    ids=str,
)
def test_runs_of_another_setting_are_no_row(tmp_path: Path, changes: dict[str, Any]) -> None:
    paper_run(tmp_path, ACCORDION, 0, **changes)
    assert (tables.table(load_all(tmp_path))["n"] == 0).all()


def test_batch_sizes_are_levels_of_all_workers(tmp_path: Path) -> None:
    static = {"name": "static", "level": "dense"}
    common = {"batch_levels": {"low": 128, "high": 1024}, "compressor": {"name": "dense"}}
    for seed, rule in enumerate(({"name": "static", "level": "high"}, {"name": "accordion-batch"})):
        paper_run(tmp_path, static, seed, batch_policy=rule, levels={}, **common)
    rows = tables.table(load_all(tmp_path))
    found = rows[rows["n"] > 0][["table", "level"]].itertuples(index=False, name=None)
    assert [*found] == [(5, "4096"), (5, "accordion")]


def test_the_senet_of_the_tables_goes_before_table_8s(tmp_path: Path) -> None:
    levels = {"low": 4, "high": 1}
    for network, seed in (("senet18", 0), ("se-resnet18", 0), ("se-resnet18", 1)):
        model = {"name": f"{network}-cifar10"}
        paper_run(tmp_path / network, ACCORDION, seed, model=model, levels=levels)
    rows = tables.table(load_all(tmp_path))
    assert rows[rows["n"] > 0]["n"].tolist() == [2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"seed": 1, "optimizer": {"lr": 9.0}},
            r"would be averaged, but differ in .*optimizer\.lr",
        ),
        ({"seed": 0, "finished": False}, "accordion/seed-0 is not finished"),
    ],
)
def test_a_row_is_one_finished_experiment(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    paper_run(tmp_path, ACCORDION, 2)
    paper_run(tmp_path, ACCORDION, changes.pop("seed"), **changes)
    with pytest.raises(RecordError, match=words):
        tables.table(load_all(tmp_path))


def test_the_command_writes_all_rows_and_counts_the_runs_that_no_row_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another rank, other levels of ACCORDION, a network that Table 1 does not have; they need be
    neither finished nor of one experiment."""
    runs, other = tmp_path / "runs", {"levels": {"low": 4, "high": 1}}
    paper_run(runs, ACCORDION, 0)
    paper_run(runs, {"name": "static", "level": "low"}, 0, levels={"low": 8, "high": 1})
    paper_run(runs, ACCORDION, 1, **other)
    paper_run(runs, ACCORDION, 2, **other, optimizer={"lr": 9.0})
    paper_run(runs, ACCORDION, 3, model={"name": "densenet-cifar10"}, finished=False)
    paths = tables.main((runs,), tmp_path / "out")
    rows, text = pd.read_csv(paths[0]), paths[1].read_text()
    assert (len(rows), rows["n"].sum()) == (54, 1)
    assert (text.count("agrees"), text.count("DIFFERS")) == (36 + 5, 1)  # 54.96
    assert "4 of 5 runs are at no row's setting and were left out." in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write"):
        tables.main((), tmp_path / "file" / "out")


@pytest.mark.parametrize("number", range(12, 18))
def test_the_grids_of_figures_12_to_17_train_the_rows_of_tables_1_to_6(number: int) -> None:
    """Each configuration is a row, and each row has one."""
    rows = published.tables()
    mine: list[Any] = rows[rows["table"] == number - 11].to_dict("records")
    wanted = [tables.keys(row, rows) for row in mine]
    figure = figures.FIGURES[str(number)]
    cells = [get_grid(grid)[name] for grid in figure.paper for name in figure.schedules]
    found = [tables.row_of(to_dict(cell)) for cell in cells]
    assert len(found) == len(wanted) == 9
    assert all(any(key in keys for key in found) for keys in wanted)


# -- the end of a run ------------------------------------------------------------------------


ENDS: dict[str, Callable[[Record], float]] = {
    "summary": lambda run: summary([run])["metric"].item(),
    "schedules": lambda run: compare.table([run], ())[0]["accuracy"].item() / 100,
    "paper": lambda run: tables.table([run])["ours"].dropna().mean() / 100,
    "mechanism": lambda run: (
        usable.entries([run.called("dense at 0.4")], find_metric("accuracy"))["accuracy"].item()
        / 100
    ),
    "collapse": lambda run: collapse.entries([run])["accuracy"].item() / 100,
}


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("reader", ENDS)
def test_the_end_of_a_run_is_the_tests_of_its_last_units_or_undefined(
    reader: str, lost: bool, tmp_path: Path
) -> None:
    """Of a run that is tested after every second unit, the last time perhaps not finite."""
    run = load(paper_run(tmp_path, ACCORDION, 0, evaluate_every=2))
    tested = {1: 0.5, 3: 0.6, 5: None if lost else 0.7}
    rows = [{**row, "metric": tested.get(row["epoch"])} for row in run.rows]
    header = run.header | {"data": {**run.header["data"], "classes": ["a", "b"]}}
    found = ENDS[reader](replace(run, rows=rows, header=header))
    assert found == pytest.approx(math.nan if lost else 0.65, nan_ok=True)
