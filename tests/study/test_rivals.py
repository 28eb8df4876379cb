"""Rivals: other compressors on a run's gradients (oracles: TopK written out in numpy, the run that
uses the compressor itself, sums by hand)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from configs import smoke as config

import regimes
from analysis.plugins.rivals import Rivals
from analysis.tournament import error_per_float
from regimes.base.errors import ConfigError, RecordError
from regimes.collectives.layers import Layer
from regimes.collectives.world import World
from regimes.compression import REGISTRY, make_compressor
from regimes.instruments.base import MeasurementContext
from regimes.instruments.panel import choose_instruments
from regimes.presets import get_grid
from regimes.records import load

LAYERS = [Layer("matrix", (6, 8)), Layer("bias", (5,))]
WORKERS = 3
TABLES = [
    table
    for name in ("smoke-rivals", "smoke-rivals-more")
    for table in get_grid(name)["dense"].instruments["rivals"]["tables"]
]
RIVALS: dict[str, list[Any]] = {}  # levels, by compressor
for table in TABLES:
    RIVALS.setdefault(table["name"], []).append(table["level"])


def context(union: bool = False) -> MeasurementContext:
    model = torch.nn.ParameterList([torch.zeros(6, 8), torch.zeros(5)]).double()
    world = World(WORKERS)
    world.meter.dtype = torch.float64

    def never(*_: Any) -> Any:
        raise AssertionError("rivals look at gradients only")

    return MeasurementContext(model, never, world, LAYERS, 0, union, never, never)


def gradients(steps: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, WORKERS, 53)) + 0.3


def naive_topk(given: np.ndarray, kept: int, feedback: bool) -> np.ndarray:
    """The updates of every step; the bias travels whole."""
    owed, found = np.zeros((WORKERS, 48)), []
    for step in given:
        sent = np.zeros((WORKERS, 48))
        for w in range(WORKERS):
            full = step[w, :48] + (owed[w] if feedback else 0)
            largest = np.argsort(-np.abs(full))[:kept]
            sent[w, largest] = full[largest]
            owed[w] = full - sent[w]
        found.append(np.concatenate([sent.mean(0), step[:, 48:].mean(0)]))
    return np.array(found)


@pytest.mark.parametrize("resumed", [False, True])
def test_topk_against_loops(resumed: bool) -> None:
    table = {"name": "topk", "level": 25}
    gauge = Rivals(tables=(table,)).start(context())
    given, kept = gradients(7), 12  # a quarter of 48
    mean = given.mean(1)
    for epoch in (0, 1):
        span = slice(0, 4) if epoch == 0 else slice(4, 7)
        if resumed:
            before, gauge = gauge, Rivals(tables=(table,)).start(context())
            gauge.load_state_dict(before.state_dict())
        for step in given[span]:
            gauge.step(torch.from_numpy(step), [])
        (found,) = gauge.read(epoch).detail["rivals"]
        lost = mean[span] - naive_topk(given, kept, feedback=False)[span]
        assert found["once"] == pytest.approx(
            np.linalg.norm(lost) / np.linalg.norm(mean[span]), rel=1e-12
        )
        so_far = slice(0, span.stop)
        lost = (mean - naive_topk(given, kept, feedback=True))[so_far].sum(0)
        whole = np.linalg.norm(mean[so_far].sum(0))
        assert found["summed"] == pytest.approx(np.linalg.norm(lost) / whole, rel=1e-12)
    made = make_compressor({"name": "topk"})
    costs = [made.cost(LAYERS[0], 25, WORKERS), made.cost(LAYERS[1], "dense", WORKERS)]
    assert found["floats"] == sum(c.floats for c in costs)
    assert found["bytes"] == sum(c.bytes for c in costs)


def test_what_a_threshold_sends_is_counted_by_hand() -> None:
    """Of the sum, also across a state: each worker's coordinates with their places, the most of any
    worker, and the bias."""
    table, level = {"name": "threshold", "level": 1.0}, 1.0
    gauge = Rivals(tables=(table,)).start(context())
    owed, floats, sent = np.zeros((WORKERS, 48)), 0, 0
    given = gradients(5)
    for t, step in enumerate(given):
        full = step[:, :48] + owed
        large = np.abs(full) >= level
        owed = np.where(large, 0, full)
        most = large.sum(1).max()
        floats += WORKERS * 2 * most + WORKERS + 5
        sent += most * (8 + 4) + 4 + 5 * 8
        gauge.step(torch.from_numpy(step), [])
        if t == 2:
            before, gauge = gauge, Rivals(tables=(table,)).start(context())
            gauge.load_state_dict(before.state_dict())
    (found,) = gauge.read(0).detail["rivals"]
    assert found["bytes"] == sent / 5
    lost = np.linalg.norm(owed.mean(0))
    assert found["summed"] == pytest.approx(lost / np.linalg.norm(given.mean(1).sum(0)), rel=1e-9)
    assert found["floats"] == pytest.approx(floats / 5)


def test_what_sends_all_loses_nothing_and_no_gradient_has_no_error() -> None:
    gauge = Rivals(tables=({"name": "topk", "level": 100},)).start(context())
    for step in gradients(2):
        gauge.step(torch.from_numpy(step), [])
    (found,) = gauge.read(0).detail["rivals"]
    assert (found["once"], found["summed"]) == pytest.approx((0, 0), abs=1e-15)
    fresh = Rivals(tables=({"name": "topk", "level": 100},)).start(context())
    fresh.step(torch.zeros(WORKERS, 53, dtype=torch.float64), [])
    (found,) = fresh.read(0).detail["rivals"]
    assert (found["once"], found["summed"]) == (None, None)


SENT = ["powersgd", "acp-sgd", "topk", "dct-topk", "quantise", "sign", "chunked-topk"]


@pytest.mark.parametrize("name", [*SENT, "quantised-all-reduce"])
def test_the_sum_is_that_of_a_run_with_the_compressor(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run's own compressor among the rivals: the same updates, bit for bit."""
    level = RIVALS[name][0]
    sums = []

    from analysis.plugins import rivals as module

    step = module.RivalsGauge.step

    def watched(self, stack, updates):  # type: ignore[no-untyped-def]
        step(self, stack, updates)
        sums.append((torch.cat([u.flatten() for u in updates]), self.rivals[0].sum.clone()))

    monkeypatch.setattr(module.RivalsGauge, "step", watched)
    run = config("model.width=2", "union_pass=false", epochs=1)
    regimes.run(
        replace(
            run,
            compressor={"name": name},
            levels={"low": level},
            policy={"name": "static", "level": "low"},
            instruments={"rivals": {"tables": [{"name": name, "level": level}]}},
        ),
        tmp_path / "run",
    )
    total = torch.zeros_like(sums[0][1])
    for update, so_far in sums:
        total += update.double()
        assert torch.equal(total, so_far)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ([], "instruments.rivals.tables = []: expected one table or more"),
        ([{"name": "topk"}], "has no level"),
        ([{"name": "topk", "level": 0}], "level of TopK = 0"),
        ([{"name": "topc", "level": 1}], "did you mean 'topk'"),
        ([{"name": "topk", "level": 1, "share": 3}], "share"),
    ],
)
def test_bad_tables(tables: list[dict], sentence: str, tmp_path: Path) -> None:
    run = config("union_pass=false", epochs=1)
    with pytest.raises(ConfigError) as error:
        regimes.run(replace(run, instruments={"rivals": {"tables": tables}}), tmp_path / "run")
    assert sentence in str(error.value)


def test_a_union_pass_has_no_gradients_of_workers() -> None:
    with pytest.raises(ConfigError, match="union_pass"):
        choose_instruments({"rivals": {}}, (), None, context(union=True))


# -- the study -------------------------------------------------------------------------------


def test_every_compressor_is_a_rival() -> None:
    own = {"dct-topk", "threshold"}
    assert set(RIVALS) == set(REGISTRY) - {"dense"} | own  # dense saves nothing
    for name, levels in RIVALS.items():
        for level in levels:
            make_compressor({"name": name}).check(level)


def geometric(values: list[float]) -> float:
    return float(np.prod(values) ** (1 / len(values)))


def test_the_figure_has_the_means_of_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [{"name": "topk", "level": 5}, {"name": "acp-sgd", "iterations": 2, "level": 1}]
    for seed in (0, 1):
        run = config("model.width=2", "union_pass=false", epochs=3)
        run = replace(
            run,
            name="dense",
            seed=seed,
            policy={"name": "static", "level": "dense"},
            instruments={"rivals": {"tables": tables}},
        )
        regimes.run(run, tmp_path / "runs" / f"seed-{seed}")
    runs = [load(tmp_path / "runs" / f"seed-{seed}") for seed in (0, 1)]
    rows = error_per_float.errors(runs).set_index("compressor")
    assert list(rows.index) == ["topk", "acp-sgd, iterations 2"]
    once = [[line["rivals"][0]["once"] for line in run.details] for run in runs]
    assert rows.loc["topk", "once"] == pytest.approx(geometric([np.mean(each) for each in once]))
    summed = [run.details[-1]["rivals"][1]["summed"] for run in runs]
    assert rows.loc["acp-sgd, iterations 2", "summed"] == pytest.approx(geometric(summed))
    share = runs[0].details[0]["rivals"][0]["bytes"] / runs[0].header["per_step"]["dense"]["bytes"]
    assert rows.loc["topk", "bytes"] == share


def test_a_run_without_readings(tmp_path: Path) -> None:
    regimes.run(config("model.width=2", epochs=1), tmp_path / "run")
    with pytest.raises(RecordError, match="no readings of the instrument rivals"):
        error_per_float.main(tmp_path / "run", tmp_path / "out")
