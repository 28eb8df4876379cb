"""Curvature and Fisher as instruments of a run: no trace, any number of processes, exact resume.

Their values are checked against closed forms and other libraries in test_curvature and test_hvp.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from configs import smoke as config
from runs import break_off, resumed_alike, rows, same_bits, same_weights, weights
from torch import nn

import regimes
from analysis.paper import figure3
from analysis.plugins.ladders import ErrorLadder
from regimes.base.config import RunConfig
from regimes.base.errors import ConfigError
from regimes.data import classification
from regimes.instruments.compression_loss import CompressionLossGauge
from regimes.instruments.hessian import HessianProduct, eigenvalues
from regimes.policies.replay.replay import signal_cost
from regimes.records import read_lines
from regimes.training import build

PROBE = {"images": 8, "batch": 4}
UNION = {  # what needs no gradient of one worker
    "msdr": {},
    "error": {"stride": 1},
    "cosine": {"stride": 2},
    "overlap": {"batches": [8, 30], "every": 2},
    "moments": {},
    "moments-frozen": {"count": 6},
    "fisher": PROBE,
    "sharpness": PROBE,
}
RIVALS = {
    "tables": [
        {"name": "topk", "level": 5},
        {"name": "powersgd", "level": 1},
        {"name": "quantise", "level": 4},
    ]
}
APART: dict[str, Any] = {
    **UNION,
    "residual": {},  # of a joint pass it is that of the mean
    "norms": {"readings": ["update", "global", "local-mean", "worker0", "movement"]},
    "noise": {},
    "rivals": RIVALS,
    "curvature": {
        **PROBE,
        "modes": ["eval", "batch-statistics"],
        "probes": 2,
        "layers": True,
        "smallest": 1,
        "max_products": 6,
    },
}
EVERYTHING = {"union": UNION, "apart": APART}


def small(**changes: object) -> RunConfig:
    c = config("model.width=2", "dtype=float32", "union_pass=false", epochs=3)
    return replace(c, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=EVERYTHING)
def measured(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A run with every instrument on, in float64."""
    union = request.param == "union"
    c = small(instruments=EVERYTHING[request.param], dtype="float64", union_pass=union)
    out = tmp_path_factory.mktemp("measured")
    regimes.run(c, out / "whole")
    return c, out / "whole"


def test_every_instrument_on_ends_in_the_same_bits(
    measured: tuple[RunConfig, Path], tmp_path: Path
) -> None:
    c, folder = measured
    regimes.run(replace(c, instruments={}), tmp_path)
    same_weights(tmp_path, folder)  # BatchNorm buffers are among them
    for mine, theirs in zip(rows(tmp_path), rows(folder), strict=True):
        for key in ("train_loss", "test_loss", "metric", "floats"):
            assert mine[key] == theirs[key], key
        for key in ("level", "why", "floats"):
            assert mine["layers"][key] == theirs["layers"][key], key
    every = regimes.load(folder)
    for name in c.instruments:
        assert SHOWN.get(name, name) in {*every.epochs, *every.layers}, name


SHOWN = {  # a column of an instrument
    "norms": "norm:worker0",
    "noise": "noise_scale",
    "overlap": "overlap:b8",
    "moments": "moments:null-top1",
    "moments-frozen": "moments-frozen:null-top1",
    "curvature": "eigenvalue:batch",
    "fisher": "fisher_trace",
    "error": "error:low",
    "sharpness": "critical_sharpness",
    "rivals": "seconds_rivals",
}


def test_two_processes_measure_the_union(measured: tuple[RunConfig, Path], tmp_path: Path) -> None:
    c, folder = measured
    forked.train(c, tmp_path, 2)
    sizes = [math.prod(layer["shape"]) for layer in regimes.load(folder).header["layers"]]
    gathered = 8 * sum(sizes) if "rivals" in c.instruments else 0  # by `rivals`, of real processes
    for mine, theirs in zip(rows(folder), rows(tmp_path), strict=True):
        assert mine["bytes"] + mine["steps"] * gathered == theirs["bytes"]
        for key in ("model", "statistics"):
            assert close(mine[key], theirs[key]), (key, mine[key], theirs[key])
    ours, others = (read_lines(path / "instruments.jsonl") for path in (folder, tmp_path))
    for one, other in zip(ours, others, strict=True):
        assert close(one, other), (one, other)


def close(one: Any, other: Any) -> bool:
    """Equal tables; their numbers but for rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return bool(
        other == (pytest.approx(one, rel=1e-4, abs=1e-8) if isinstance(one, float) else one)
    )


def test_warm_starts_survive_a_resume(measured: tuple[RunConfig, Path], tmp_path: Path) -> None:
    c, folder = measured
    break_off(c, tmp_path, 2)
    regimes.run(c, tmp_path, resume=True)
    same_bits(folder, tmp_path)


def test_the_recorded_eigenvalue_is_that_of_the_last_weights(tmp_path: Path) -> None:
    c = small(instruments={"curvature": {"images": 40, "batch": 20, "tolerance": 1e-6}})
    record = regimes.run(c, tmp_path / "run")
    parts = build.prepare_run(c)
    parts.model.load_state_dict(weights(tmp_path / "run"))
    hessian = HessianProduct(
        parts.model,
        lambda m, b: classification.classification_loss(m, *b),
        parts.context.probe(40, 20),
        mode="eval",
    )
    found = eigenvalues(hessian, tolerance=1e-6)
    last = record.epochs["eigenvalue"].iloc[-1]
    assert last == pytest.approx(float(found.largest[0]), rel=1e-4)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("error", {"stride": 2}),
        ("cosine", {"stride": 5}),  # of three epochs of three steps the second has one
        ("rivals", RIVALS),
    ],
)
def test_a_reading_is_of_its_epoch_also_where_not_every_epoch_is_read(
    name: str, fields: dict, tmp_path: Path
) -> None:
    always, seldom = (small(instruments={name: {**fields, "every": n}}) for n in (1, 2))
    regimes.run(always, tmp_path / "always")
    resumed_alike(seldom, tmp_path, 2)  # the second epoch is not read
    for file in ("epochs", "instruments"):
        paths = [tmp_path / run / f"{file}.jsonl" for run in ("always", "whole", "broken")]
        lines = [read_lines(path) if path.exists() else [] for path in paths]
        read = [[line for line in run if line["epoch"] != 1] for run in lines]
        assert read[0] == read[1] == read[2]


def test_what_an_instrument_does_in_steps_is_on_its_own_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the cost of a policy's signal is not only that of reading it."""
    measure = CompressionLossGauge.measure

    def slow(self: CompressionLossGauge, stack: torch.Tensor) -> None:
        time.sleep(0.02)
        measure(self, stack)

    monkeypatch.setattr(CompressionLossGauge, "measure", slow)
    c = small(instruments={"error": {"stride": 1}}, epochs=1)
    record = regimes.run(c, tmp_path / "run")
    slept = 0.02 * len(record.rows) * record.rows[0]["steps"]
    assert record.epochs["seconds_error"].sum() >= slept
    assert record.epochs["seconds_instruments"].sum() < slept
    seconds, _ = signal_cost(record, ErrorLadder(levels=("high", "low")))
    assert seconds >= slept


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"curvature": {"images": 30, "batch": 20}}, "expected a multiple of 20"),
        ({"curvature": {"images": 0}}, "a probe of 0 in"),
        ({"curvature": {"images": 1000, "batch": 500}}, "the training set"),
        ({"curvature": {"probes": 1}}, "0 or at least 2"),
        ({"curvatur": {}}, "did you mean 'curvature'"),
    ],
)
def test_bad_instruments(table: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        regimes.run(small(instruments=table), tmp_path / "run")
    assert sentence in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "detector",
    [
        {"name": "eigenvalue-change", "interval": 1},
        pytest.param(
            {"name": "change", "statistic": "eigenvalue:batch", "per_layer": False, "interval": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param({"name": "fisher-change", "interval": 1}, marks=pytest.mark.slow),
        {"name": "trace-cusum", "warmup": 2},
        pytest.param({"name": "msdr-fall"}, marks=pytest.mark.slow),
    ],
)
def test_a_policy_has_what_it_needs_measured(detector: dict, tmp_path: Path) -> None:
    c = small(policy={"name": "detected", "detector": detector})  # a probe is 200 images
    record = regimes.run(replace(c, data=replace(c.data, train_size=240)), tmp_path / "run")
    whys = [why for why in record.layers["why"] if why and why["rule"] != "start"]
    assert any(why["new"] is not None for why in whys)


def test_a_configured_instrument_that_lacks_what_the_policy_needs(tmp_path: Path) -> None:
    policy = {"name": "detected", "detector": {"name": "trace-cusum"}}
    c = small(policy=policy, instruments={"curvature": {"images": 40, "batch": 20}})
    with pytest.raises(ConfigError, match=r"'hessian_trace', which the instrument 'curvature' as"):
        regimes.run(c, tmp_path / "run")


MODELS = {  # of two classes of four numbers; has it running statistics?
    "linear": (lambda: nn.Linear(4, 2), False),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)), False),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2)), False),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), True),
    "without running statistics": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        False,
    ),
}
ASKED = {"usual": None, "batch": ["batch-statistics"], "both": ["eval", "batch-statistics"]}


@pytest.mark.filterwarnings("ignore:policy. accordion")
def test_an_eigenvalue_that_has_not_converged_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the model and of four parameters, in each of two epochs."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = x, (x[:, 0] > 0).long()
    few = {"images": 32, "batch": 16, "layers": True, "max_products": 3, "modes": ["eval"]}
    regimes.simulate(
        lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)),
        *(data, data),
        out=tmp_path / "run",
        epochs=2,
        batch_size=8,
        set={"instruments.curvature": few},
    )
    assert len(re.findall(r"\d of 5 searches for eigenvalues have ended", caplog.text)) == 1


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *[("batch norm", asked) for asked in ASKED],
        *[(name, "usual") for name, (_, apart) in MODELS.items() if not apart],
        *[("without running statistics", asked) for asked in ("batch", "both")],
    ],
)
@pytest.mark.filterwarnings("ignore:policy. accordion")
def test_without_running_statistics_one_eigenvalue_has_both_names(
    name: str, asked: str, tmp_path: Path
) -> None:
    """So that Figure 3 is drawn; where they are two numbers, the one that is asked for is."""
    make, apart = MODELS[name]
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    data = x, (x[:, 0] > 0).long()
    curvature = {"images": 32, "batch": 16, "layers": True, "probes": 2}
    modes = ASKED[asked]
    record = regimes.simulate(
        make,
        data,
        data,
        out=tmp_path / "run",
        epochs=3,
        batch_size=8,
        set={"instruments.curvature": curvature | ({"modes": modes} if modes else {})},
    )
    found = {key: record.epochs.get(key) for key in ("eigenvalue", "eigenvalue:batch")}
    if not apart:
        for value in ("eigenvalue", "hessian_trace"):
            for table in (record.epochs, record.layers):
                assert table[value].tolist() == table[f"{value}:batch"].tolist()
        assert figure3.agreement([record], 1, 0.5)[0]["n"].tolist() == [1] * 4
        counted = [key for line in record.details for key in line if key.startswith("products")]
        assert len(counted) == 3  # one a unit
        return
    assert (found["eigenvalue"] is not None) == (asked != "batch")
    assert (found["eigenvalue:batch"] is not None) == (asked != "usual")
    if asked == "both":
        assert found["eigenvalue"].iloc[-1] != found["eigenvalue:batch"].iloc[-1]  # type: ignore[union-attr]
