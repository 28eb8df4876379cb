"""Plug-ins of each kind that another package offers by entry points, in processes of their own.

Oracle: the same classes, named by ``package.module:Class``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = """
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from regimes import Compressor, Decision, Mean, Traffic
from regimes.data.classification import ImageTask
from regimes.data.deficits import Deficit
from regimes.instruments.base import Reading, StatelessGauge


@dataclass(frozen=True, kw_only=True)
class RowMean(Compressor):
    linear: ClassVar[bool] = True
    level_text: ClassVar[str] = "rows of {}"

    def check(self, level): ...

    def send(self, delta, state, level):
        mean = yield Mean(rows := delta.mean(2))
        return mean[:, None].expand(delta.shape[1:]).clone(), rows[..., None].expand_as(delta)

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
POINTS = {
    "compressors": {"row-mean": "offering_parts:RowMean"},
    "policies": {"alternate": "offering_parts:Alternate"},
    "detectors": {"falls": "offering_rules:Falls"},
    "instruments": {"largest": "offering_parts:Largest"},
    "deficits": {"dark": "offering_parts:Dark"},
    "tasks": {"tiny": "offering_parts:Tiny"},
    "models": {"linear": "offering_parts:linear"},
}
Points = dict[str, dict[str, str]]


def install(site: Path, name: str, points: Points, **modules: str) -> None:
    """A package as pip leaves it: modules, and metadata with entry points."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for kind, offers in points.items():
        lines += [f"[regimes.{kind}]", *(f"{key} = {value}" for key, value in offers.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
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


def test_a_plug_in_of_each_kind_trains_by_its_name(site: Path) -> None:
    """An offer that is not used is not imported: a broken package stands in nobody's way; the
    study's own plug-ins neither."""
    install(site, "offering", POINTS, offering_parts=SOURCE, offering_rules=RULES)
    broken = {kind: {"mine": "third_raises:Thing"} for kind in CLAIMED}
    install(site, "third", broken, third_raises="raise RuntimeError('no licence')\n")
    short = {kind: next(iter(offers)) for kind, offers in POINTS.items()}
    long = {kind: next(iter(offers.values())) for kind, offers in POINTS.items()}
    long["tasks"] = "tiny"  # data have no package.module:Class
    calls = [
        ["regimes", "run", "smoke", *settings(**names), "--out", folder]
        for folder, names in (("short", short), ("long", long))
    ]
    code = f"{CALL}\nfor words in {calls!r}:\n    call(words)\n"
    code += "found = {m for m in sys.modules if m.startswith(('third', 'analysis.plug'))}\n"
    done = python(site, "-c", code + "assert not found, found\n")
    assert done.returncode == 0, done.stderr
    rows = [
        [
            json.loads(line)
            for line in (site.parent / name / "epochs.jsonl").read_bytes().splitlines()
        ]
        for name in ("short", "long")
    ]
    for row in (*rows[0], *rows[1]):
        for measured in [key for key in row if key.startswith("seconds")]:
            del row[measured]
    assert rows[0] == rows[1]
    assert {"largest"} <= {*rows[0][0]["model"]}
    headers = [json.loads((site.parent / x / "run.json").read_text()) for x in ("short", "long")]
    for header in headers:
        code = header["code"]
        assert {"offering_parts.digest", "offering_rules.digest"} <= {*code}
    assert headers[0]["code"] == headers[1]["code"]
    code = "import sys, regimes\nprint(regimes.Falls.__module__, 'torch' in sys.modules)\n"
    code += "from regimes.plotting.looks import level_text\nprint(level_text('row-mean'))\n"
    code += "from regimes.policies import REGISTRY\nprint(REGISTRY.table(regimes.Alternate()))"
    shutil.rmtree(site / "third-1.0.dist-info")  # `regimes detect` uses all detectors
    done = python(site, "-c", f"{code}\n{CALL}\ncall(['regimes', 'detect', 'short'])")
    assert done.returncode == 0, done.stderr
    said = "offering_rules False\nrows of {}\n{'name': 'alternate'}\n"
    assert done.stdout.startswith(said)
    assert "falls" in done.stdout.removeprefix(said)  # without being named


LOADED = """
import importlib
from regimes.data import deficits, sources
from regimes.errors import ConfigError
from regimes import compression, detectors, instruments, models, policies
from regimes.records import reporting
REGISTRIES = {
    "compressors": compression.REGISTRY,
    "policies": policies.REGISTRY,
    "detectors": detectors.REGISTRY,
    "instruments": instruments.REGISTRY,
    "deficits": deficits.REGISTRY,
    "tasks": sources.TASKS,
    "models": models.MODELS,
    "reporters": reporting.load_registry(),
}
def sentence(kind, name):
    try:
        REGISTRIES[kind].load(name)
    except ConfigError as error:
        return str(error)
"""
CLAIMED = {
    "compressors": "powersgd",
    "policies": "accordion",
    "detectors": "norm-change",
    "instruments": "norms",
    "deficits": "blur",
    "tasks": "cifar10",
    "models": "vgg7",
    "reporters": "wandb",
}


BROKEN = {
    "nowhere_at_all:Thing": "No module named 'nowhere_at_all'",
    "broken_raises:Thing": "RuntimeError('no licence')",
    "broken_rules:Nothing": "has no attribute 'Nothing'",
    "broken_rules": "has no attribute ''",
}


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """One process asks for names that two packages claim, for plug-ins that cannot be imported, and
    for a run with one of the first."""
    site = tmp_path_factory.mktemp("wrong") / "site"
    taken = {kind: {name: "offering_rules:Falls"} for kind, name in CLAIMED.items()}
    taken["detectors"]["falls"] = "offering_rules:Falls"
    install(site, "offering", taken, offering_rules=RULES)
    install(site, "third", {"detectors": {"falls": "third:Falls"}}, third=RULES)
    points = {kind: {f"mine{i}": target for i, target in enumerate(BROKEN)} for kind in CLAIMED}
    raises = "raise RuntimeError('no licence')\n"
    install(site, "broken", points, broken_rules=RULES, broken_raises=raises)
    asked = [*CLAIMED.items(), ("detectors", "falls"), ("policies", "static")]
    asked += [(kind, name) for kind, offers in points.items() for name in offers]
    code = f"{LOADED}\nimport json, sys\nfrom regimes.__main__ import main\n"
    code += f"print(json.dumps([sentence(*pair) for pair in {asked!r}]), flush=True)\n"
    return python(site, "-c", f"{code}sys.argv = ['regimes', 'run', 'smoke']\nmain()")


def test_a_name_that_two_packages_claim_is_refused_where_it_is_used(heard: Any) -> None:
    *said, falls, static = json.loads(heard.stdout)[: len(CLAIMED) + 2]
    words = ["policy", "compressor", "detector", "instrument", "deficit", "model", "reporter"]
    for (_, name), sentence in zip(CLAIMED.items(), said, strict=True):
        kind = next((word for word in words if f"the {word} " in sentence), "data set")
        assert sentence == (
            f"the {kind} {name!r} is offered by regimes and by offering: uninstall one of these "
            "packages, or rename its entry point"
        )
    assert falls.startswith("the detector 'falls' is offered by offering and by third: ")
    assert static is None  # another name is as it was
    assert heard.returncode == 2
    assert heard.stderr.startswith("error: the compressor 'powersgd' is offered by regimes and by ")


def test_a_plug_in_that_cannot_be_imported_is_one_sentence(heard: Any) -> None:
    lines = json.loads(heard.stdout)[len(CLAIMED) + 2 :]
    for line, (target, says) in zip(lines, [*BROKEN.items()] * len(CLAIMED), strict=True):
        assert line.startswith("cannot import the ")
        assert f" {target!r}: " in line
        assert says in line
        assert "\n" not in line
