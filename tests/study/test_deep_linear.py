"""The deep linear network (oracles: gradients and training in numpy, the closed form of Saxe et al.
(2014) for aligned, balanced factors, sums by hand)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import regimes
from analysis.detection import deep_linear
from analysis.plugins.deep_linear import SCALE, DeepLinear
from analysis.plugins.matrix import MatrixTask, OtherMatrix, half_square, low_rank
from regimes.config import ModelConfig, RunConfig, override
from regimes.errors import ConfigError, RecordError
from regimes.models import build_model
from regimes.presets import get_grid, get_preset
from regimes.records import Record, load
from regimes.training import checkpoint

OTHER: dict[str, Any] = {"name": "other-matrix", "rank": 4}


def small(*settings: str, **changes: Any) -> RunConfig:
    made = override(
        get_preset("deep-linear"),
        [
            "data.rows=12",
            "data.rank=2",
            "data.train_size=60",
            "batch_size=60",
            "dtype=float64",
            "epochs=40",
            "unit_steps=10",
            "checkpoint_every=1",
            *settings,
        ],
    )
    return replace(made, **changes)


def factors(model: torch.nn.Module) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for p in model.parameters()]


def product(weights: list[np.ndarray]) -> np.ndarray:
    return reduce(lambda below, above: above @ below, weights)


def gradients(weights: list[np.ndarray], target: np.ndarray, seen: np.ndarray) -> list[np.ndarray]:
    """By the chain rule: (above)' (error) (below)'."""
    error = seen * (product(weights) - target) / seen.sum()
    found = []
    for i in range(len(weights)):
        above = product([np.eye(len(target)), *weights[i + 1 :]])
        below = product([np.eye(len(target)), *weights[:i]])
        found.append(above.T @ error @ below.T)
    return found


def seen_by(task: MatrixTask) -> np.ndarray:
    seen = np.zeros((task.rows, task.rows))
    seen[tuple(task.places.numpy().T)] = 1
    return seen


# -- the data --------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_matrix_has_its_rank_and_entries_of_size_one(rank: int) -> None:
    matrix = low_rank(20, rank).numpy()
    values = np.linalg.svd(matrix, compute_uv=False)
    assert (values > 1e-9).sum() == rank
    assert np.sqrt((matrix**2).mean()) == pytest.approx(1)
    assert np.array_equal(matrix, low_rank(20, rank).numpy())


def test_entries_are_observed_once_and_the_deficit_shows_another_matrix_there() -> None:
    run = small(deficit={**OTHER, "windows": [[1, 3]]})
    task = MatrixTask(run)
    assert len({tuple(place) for place in task.places.tolist()}) == 60
    batches = task.batches(run, torch.device("cpu"), torch.float64)
    for epoch in range(4):
        ((x, y),) = batches.epoch(epoch, [0])
        right = low_rank(12, 4 if epoch in (1, 2) else 2)
        assert torch.equal(y[0], right[x[0, :, 0], x[0, :, 1]])


def test_workers_share_the_entries() -> None:
    run = small("workers=4", "batch_size=15")
    task = MatrixTask(run)
    ((x, _),) = task.batches(run, torch.device("cpu"), torch.float64).epoch(0, range(4))
    assert x.shape == (4, 15, 2)
    assert sorted(x.flatten(0, 1).tolist()) == sorted(task.places.tolist())


def test_the_metric_is_the_mean_squared_error_of_all_entries() -> None:
    task = MatrixTask(small())
    model = task.build(small()).double()
    lost = product(factors(model)) - task.matrix.numpy()
    found = task.evaluate(model, torch.device("cpu"), torch.float64)
    assert found == pytest.approx(((lost**2).mean() / 2, (lost**2).mean()))


# -- the model -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_product_is_small_at_first_whatever_the_depth(depth: int) -> None:
    torch.manual_seed(0)
    made = build_model("deep-linear", classes=1, rows=200, depth=depth)
    assert isinstance(made, DeepLinear)
    size = float(made.product().detach().norm())
    assert size == pytest.approx(SCALE * np.sqrt(200), rel=0.1)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_gradients_are_those_of_the_chain_rule(depth: int) -> None:
    run = small(model=ModelConfig(name="deep-linear", depth=depth, width=12))
    task = MatrixTask(run)
    model = task.build(run).double()
    half_square(model, task.places, task.values(task.matrix)).backward()
    wanted = gradients(factors(model), task.matrix.numpy(), seen_by(task))
    for p, g in zip(model.parameters(), wanted, strict=True):
        assert p.grad is not None
        np.testing.assert_allclose(p.grad.numpy(), g, rtol=1e-12, atol=1e-18)


def test_a_run_is_gradient_descent_through_a_deficit(tmp_path: Path) -> None:
    run = small(deficit={**OTHER, "windows": [[0, 25]]})
    task = MatrixTask(run)
    weights, other = factors(task.build(run).double()), low_rank(12, 4).numpy()
    for step in range(40):
        target = other if step < 25 else task.matrix.numpy()
        steps = gradients(weights, target, seen_by(task))
        weights = [w - 0.2 * g for w, g in zip(weights, steps, strict=True)]
    record = regimes.run(run, tmp_path / "run")
    kept = checkpoint.load(tmp_path / "run")
    assert kept is not None
    state = kept[1]["model"]
    for mine, theirs in zip(weights, state.values(), strict=True):
        np.testing.assert_allclose(theirs.numpy(), mine, rtol=1e-9)
    error = ((product(weights) - task.matrix.numpy()) ** 2).mean()
    assert record.epochs["metric"].iloc[-1] == pytest.approx(error, rel=1e-9)


# -- the closed form -------------------------------------------------------------------------


def saxe(time: float, start: float, end: float, depth: int) -> float:
    """A singular value of the product of balanced, aligned factors after so long a gradient flow:
    ds/dt = depth s^(2 - 2 / depth) (end - s). Depths 1 and 2 are solved by hand, deeper ones by the
    time that it takes to get to s (the integral of dt = ds / ...), inverted by bisection."""
    if depth == 1:
        return end + (start - end) * np.exp(-time)
    if depth == 2:
        grown = np.exp(2 * end * time)
        return end * grown / (grown - 1 + end / start)

    def needed(s: float) -> float:
        grid = np.exp(np.linspace(np.log(start), np.log(s), 20_001))
        rate = depth * grid ** (2 - 2 / depth) * (end - grid)
        return float(np.trapezoid(grid / rate, np.log(grid)))

    low, high = start, end * (1 - 1e-12)
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if needed(middle) < time else (low, middle)
    return low


@pytest.mark.parametrize(
    "depth", [1, 2, *(pytest.param(depth, marks=pytest.mark.slow) for depth in (3, 4))]
)
def test_singular_values_follow_the_closed_form(depth: int) -> None:
    """All entries observed: the loss is |P - M|^2 / (2 n^2), so time runs n^2 times slower."""
    rows, rank, start, rate, steps = 10, 3, 0.05, 0.02, 3000
    run = small(
        "data.rows=10",
        "data.rank=3",
        "data.train_size=100",
        model=ModelConfig(name="deep-linear", depth=depth),
    )
    task = MatrixTask(run)
    u, ends, v = np.linalg.svd(task.matrix.numpy())
    each = start ** (1 / depth)
    bases = [
        v.T,
        *(
            np.linalg.qr(np.random.default_rng(i).normal(size=(rows, rows)))[0]
            for i in range(depth - 1)
        ),
        u,
    ]
    model = task.build(run).double()
    with torch.no_grad():
        for p, below, above in zip(model.parameters(), bases, bases[1:], strict=False):
            p.copy_(torch.from_numpy(above @ (each * np.eye(rows)) @ below.T))
    values = task.values(task.matrix)
    for _ in range(steps):
        model.zero_grad()
        half_square(model, task.places, values).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
    found = np.diag(u.T @ product(factors(model)) @ v.T)
    time = rate * steps / rows**2
    for i in range(rank):
        assert found[i] == pytest.approx(saxe(time, start, ends[i], depth), rel=2e-3)
    between = [saxe(time, start, ends[i], depth) / ends[i] for i in range(rank)]
    assert min(between) < 0.95  # on the way, not at the end


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["data.rank=13"], "data.rank = 13: expected a rank from 1 to 12"),
        (["data.rank=0"], "data.rank = 0: expected a rank from 1 to 12"),
        (["data.rows=0"], "data.rows = 0: expected at least 2"),
        (["data.train_size=200"], "data.train_size = 200: expected at most all 144 entries"),
        (["data.validation_size=5"], "data.validation_size = 5: expected none"),
        (["deficit={name='blur'}"], "'blur': expected \"other-matrix\" or"),
        (["deficit={name='other-matrix', rank=13}"], "deficit.rank = 13"),
        (["model.name=vgg7", "model.depth=none"], "takes images, the data are a matrix"),
        (["model.name=gpt"], "takes text, the data are a matrix"),
    ],
)
def test_what_a_matrix_does_not_have(settings: list[str], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        regimes.run(small(*settings), tmp_path / "run")
    assert sentence in str(error.value)


def test_images_have_no_other_matrix_and_need_another_model(tmp_path: Path) -> None:
    smoke = get_preset("smoke")
    with pytest.raises(ConfigError, match=r"this one is for data\.name = 'matrix'"):
        regimes.run(replace(smoke, deficit={"name": "other-matrix"}), tmp_path / "run")
    with pytest.raises(ConfigError, match="takes a matrix, the data are images"):
        regimes.run(replace(smoke, model=ModelConfig(name="deep-linear")), tmp_path / "run")


# -- the study -------------------------------------------------------------------------------


def test_the_right_matrix_is_trained_as_long_after_every_deficit_and_longest_without() -> None:
    for name in ("deep-linear", "deep-linear-depths"):
        cells = get_grid(name).values()
        firsts = []
        for cell in (cell for cell in cells if cell.deficit):
            ((first, stop),) = cell.deficit["windows"]
            assert cell.epochs - stop == 30_000
            firsts.append(first)
        for cell in (cell for cell in cells if not cell.deficit):
            assert cell.epochs == max(firsts) + 30_000


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    root, found = tmp_path_factory.mktemp("runs"), []
    for seed in (0, 1):
        for window in (None, (0, 20), (10, 30), (0, 10)):
            name = "none" if window is None else f"deficit {window[0]}-{window[1]}"
            deficit = None if window is None else {**OTHER, "windows": [list(window)]}
            run = small(name=name, seed=seed, epochs=60, deficit=deficit)
            folder = root / name / f"seed-{seed}"
            regimes.run(run, folder)
            found.append(load(folder))
    return found


def test_harm_is_the_ratio_of_errors_after_as_many_right_steps(runs: list[Record]) -> None:
    rows = deep_linear.harms(runs).set_index(["first", "stop"])
    assert list(rows.index) == [(0, 10), (0, 20), (10, 30)]
    errors = {(run.name, run.seed): [row["metric"] for row in run.rows] for run in runs}

    def ratio(seed: int, deficit: str, units: int) -> float:
        plain = errors["none", seed][units - 3 : units]
        return float(np.mean(errors[f"deficit {deficit}", seed][-3:]) / np.mean(plain))

    first, second = ([ratio(seed, deficit, 4) for seed in (0, 1)] for deficit in ("0-20", "10-30"))
    assert rows.loc[(0, 20), "harm"] == pytest.approx(np.sqrt(np.prod(first)))
    assert rows.loc[(0, 10), "harm"] == pytest.approx(
        np.sqrt(ratio(0, "0-10", 5) * ratio(1, "0-10", 5))
    )
    later = rows.loc[(10, 30)]
    logs = np.log(np.divide(second, first))
    assert later["later"] == pytest.approx(np.exp(logs.mean()))
    assert later["p"] == pytest.approx(stats.ttest_1samp(logs, 0).pvalue)
    assert later["p_holm"] == later["p"]  # the only one that has an earlier one
    assert rows.drop((10, 30))[["later", "p", "p_holm"]].isna().all(axis=None)


def test_harms_that_cannot_be_told(runs: list[Record]) -> None:
    with pytest.raises(RecordError, match="no seed in common"):
        deep_linear.harms([r for r in runs if (r.name == "none") == (r.seed == 0)])
    short = replace(runs[0], header=runs[0].header | {"units": 3}, rows=runs[0].rows[:3])
    with pytest.raises(RecordError, match=r"3 units, .* on the right matrix: train the first for"):
        deep_linear.harms([short, *runs[1:4]])


def test_a_detector_finds_what_it_calls_critical_where_deficits_harm() -> None:
    harm = pd.DataFrame({"first": [0, 20, 40], "stop": [20, 40, 60], "ci_low": [1.1, 0.9, 1.0]})
    called = {"a": np.array([1.0, 0.5, 0.0, 0.0, 0.5, 0.0]), "b": np.ones(6)}
    rows = deep_linear.finds(harm, called, unit=10).set_index("detector")
    assert rows.loc["a"].to_list() == pytest.approx([0.75, 0.125, 0.625])
    assert rows.loc["b", "finds"] == 0


def test_a_deficit_without_an_interval_is_neither_harmful_nor_harmless(runs: list[Record]) -> None:
    """Of two seeds there are no intervals, and so both columns are empty."""
    harm = deep_linear.harms(runs)
    rows = deep_linear.finds(harm, {"a": np.ones(6)}, unit=10)
    assert harm["ci_low"].isna().all()
    assert rows[["harmful", "harmless", "finds"]].isna().all(axis=None)
    assert list(deep_linear.as_text(harm, rows)[1].rows[0]) == ["a", "", "", ""]
    one = pd.DataFrame({"first": [0, 20], "stop": [20, 40], "ci_low": [1.1, math.nan]})
    found = deep_linear.finds(one, {"a": np.ones(4)}, unit=10)
    assert found["harmful"].to_list() == [1.0]
    assert found["harmless"].isna().all()


def test_a_deficit_without_a_rank_has_the_default(runs: list[Record]) -> None:
    deficit = {"name": "other-matrix", "windows": [[0, 10]]}
    header = runs[1].header | {"config": runs[1].config | {"deficit": deficit}}
    harm, called = deep_linear.harms(runs), {"a": np.zeros(6)}
    drawn, _ = deep_linear.figure([replace(runs[1], header=header)], harm, called)
    rank = OtherMatrix(windows=((0, 10),)).rank
    assert f"of rank {rank};" in " ".join(drawn.get_supxlabel().split())


def test_the_command(runs: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    paths = deep_linear.main(runs[0].folder.parents[1], tmp_path)
    assert {p.name for p in paths} == {
        "deep-linear.png",
        "deep-linear.svg",
        "deep-linear.csv",
        "deep-linear.md",
    }
    said = capsys.readouterr().out
    assert "norm-change" in said
    assert "sharpness-change" not in said  # not recorded here


def test_lengths_that_begin_several_times_are_compared_the_longest_first() -> None:
    spans = [(0, 10), (5, 15), (7, 17), (0, 30), (0, 20), (20, 40), (0, 5), (1, 6)]
    harm = pd.DataFrame(spans, columns=["first", "stop"])
    found = deep_linear.by_length(harm)
    assert [(length, len(rows)) for length, rows in found.items()] == [(20, 2), (10, 3), (5, 2)]
    for length, rows in found.items():
        assert set(rows["stop"] - rows["first"]) == {length}
