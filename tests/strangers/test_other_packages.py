"""Parts of each kind from another package, ``package.module:Class``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regimes import compression, data, instruments, policies
from regimes.base.errors import ConfigError
from regimes.data import deficits, models
from regimes.policies import detectors
from regimes.records import reporting

ROOT = Path(__file__).parents[2]
SOURCE = """
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from regimes import Compressor, Decision, Traffic
from regimes.data.classification import ImageTask
from regimes.data.deficits import Deficit
from regimes.instruments.base import Reading, StatelessGauge


@dataclass(frozen=True, kw_only=True)
class RowMean(Compressor):
    linear: ClassVar[bool] = True

    def check(self, level): ...

    def exchange(self, bucket, comm):
        rows = [delta.mean(2) for delta in bucket.deltas]
        shapes = [delta.shape[1:] for delta in bucket.deltas]
        updates = [
            mean[:, None].expand(shape).clone() for mean, shape in zip(comm.mean(rows), shapes)
        ]
        bucket.subtract([row[..., None] for row in rows])
        return updates

    def traffic(self, layer, level, workers, itemsize=4):
        return Traffic(layer.matrix[0], layer.matrix[0] * itemsize)


@dataclass(frozen=True)
class Alternate:
    needs, names = (), ("low", "high")

    def decide(self, history, layers):
        return [Decision(self.names[len(history) % 2], {"rule": "alternate"})] * len(layers)


@dataclass(frozen=True)
class Largest:
    every: int = 1

    def start(self, context):
        return LargestGauge()


class LargestGauge(StatelessGauge):
    def step(self, stack, updates):
        self.seen = float(max(update.abs().max() for update in updates))

    def read(self, epoch):
        return Reading(model={"largest": self.seen})


@dataclass(frozen=True)
class Dark(Deficit):
    def inputs(self, x, index, seed, epoch):
        return 0 * x


class Tiny(ImageTask):
    def __init__(self, config):
        super().__init__(replace(config, data=replace(config.data, name="digits")))


def linear(classes, channels, image_size):
    hidden = nn.Linear(channels * image_size**2, 8)
    return nn.Sequential(nn.Flatten(), hidden, nn.Linear(8, classes))
"""
RULES = """
from dataclasses import dataclass

from regimes import Verdict


@dataclass(frozen=True)
class Falls:
    statistic, per_layer = "norm", True

    def __call__(self, values):
        return Verdict(len(values) < 2 or values[-1] < values[-2])
"""
CLASSES = {
    "compressors": "other_parts:RowMean",
    "policies": "other_parts:Alternate",
    "detectors": "other_rules:Falls",
    "instruments": "other_parts:Largest",
    "deficits": "other_parts:Dark",
    "tasks": "other_parts:Tiny",
    "models": "other_parts:linear",
}


def install(site: Path, **modules: str) -> None:
    site.mkdir()
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)


def python(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{site}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=site.parent,
        env=env,
        check=False,
    )


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "site"


CALL = """
import sys
from regimes.__main__ import main
def call(words):
    sys.argv = words
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
"""


def settings(**names: str) -> list[str]:
    """A short run with one plug-in of each kind, by these names."""
    chosen = [
        *("epochs=4", "data.train_size=200", "data.test_size=100", "seed=3"),
        f"data.name={names['tasks']}",
        f"model={{name='{names['models']}'}}",
        f"compressor={{name='{names['compressors']}'}}",
        f"policy={{name='by-layer', groups={{'1.weight'={{name='{names['policies']}'}}}}}}",
        f"policy.otherwise={{name='detected', detector={{name='{names['detectors']}'}}}}",
        f"instruments={{'{names['instruments']}'={{every=1}}}}",
        f"deficit={{name='{names['deficits']}', windows=[[1, 2]]}}",
    ]
    return [word for setting in chosen for word in ("--set", setting)]


def test_a_plug_in_of_each_kind_trains_by_its_class(site: Path) -> None:
    """The study's own parts, which are not used, are not imported."""
    install(site, other_parts=SOURCE, other_rules=RULES)
    words = ["regimes", "run", "smoke", *settings(**CLASSES), "--out", "run"]
    code = f"{CALL}\ncall({words!r})\n"
    code += "found = {m for m in sys.modules if m.startswith('analysis.plug')}\n"
    done = python(site, "-c", code + "assert not found, found\n")
    assert done.returncode == 0, done.stderr
    row = json.loads((site.parent / "run" / "epochs.jsonl").read_bytes().splitlines()[0])
    assert {"largest"} <= {*row["model"]}
    header = json.loads((site.parent / "run" / "run.json").read_text())
    assert {"other_parts.digest", "other_rules.digest"} <= {*header["code"]}
    words = ["regimes", "detect", "run", "--detectors", "other_rules:Falls"]
    done = python(site, "-c", f"{CALL}\ncall({words!r})")
    assert done.returncode == 0, done.stderr
    assert "Falls" in done.stdout


BROKEN = {
    "nowhere_at_all:Thing": "No module named 'nowhere_at_all'",
    "broken_raises:Thing": "RuntimeError('no licence')",
    "broken_rules:Nothing": "has no attribute 'Nothing'",
    "broken_rules:": "has no attribute ''",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_plug_in_that_cannot_be_imported_is_one_sentence(
    name: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, broken_rules=RULES, broken_raises="raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(site)
    for registry in (
        *(room.REGISTRY for room in (compression, policies, detectors, instruments, deficits)),
        *(data.TASKS, models.MODELS, reporting.REPORTERS),
    ):
        with pytest.raises(ConfigError, match=f"^cannot import the .* {name!r}: ") as told:
            registry.load(name)
        assert BROKEN[name] in str(told.value)
        assert "\n" not in str(told.value)
    sys.modules.pop("broken_rules", None)
