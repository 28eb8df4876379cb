"""The campaign for a lent GPU, rehearsed on the CPU without what such a machine lacks: the
installed project, its metadata, and the optional packages.

The fast tests measure each check and each kind of row in this process, with forked ones in the
place of children; one calls the command; the slow one is the command whole.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_worker
import pretended
import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group

import regimes
from benchmarks.gpu import catalogue, child, correct, peers, report, setting, speed, timing, worker
from benchmarks.gpu.catalogue import BESIDE, plan, planned
from benchmarks.gpu.lines import ARCHIVE, LINES, Lines, deliver, fetch
from benchmarks.gpu.place import Place, numerics, short
from benchmarks.gpu.worker import Row, Worker, outcome
from regimes.base.config import RunConfig, to_dict
from regimes.compression import REGISTRY
from regimes.data import models
from regimes.records import load
from regimes.training import optimizers
from regimes.training.plug_ins import PlugIns

ROOT = Path(__file__).parents[2]
LACKING = """
import importlib.metadata, sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tyro", "tomli_w", "submitit", "pyhessian"):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Lacking())
known, points = importlib.metadata.distribution, importlib.metadata.entry_points
def distribution(name):
    if name == "regimes":
        raise importlib.metadata.PackageNotFoundError(name)
    return known(name)
importlib.metadata.distribution = distribution
importlib.metadata.entry_points = lambda **given: points(**(given or {"group": "none"}))
"""
SLICES = 450 + 270  # seconds of two calls


def campaign(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of one call that has ended well, in an environment that lacks all of it; every
    process that the call starts runs LACKING first, too."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(LACKING)
    places = ["--work", str(folder / "work"), "--out", str(folder / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *places, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(x) for x in (folder / "out" / LINES).read_text().splitlines()]


CPU = "cpu"


@dataclass
class Ended:
    """In the place of child processes: they have ended, with what the first has said."""

    words: str

    def over(self) -> bool:
        return True

    def kill(self) -> None: ...
    def said(self, seconds: float) -> str:
        return self.words


def forked(what: str, *words: str, processes: int = 1, config: RunConfig | None = None) -> Ended:
    """As ``place.start``, in forked processes, until they have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = json.dumps(None if config is None else to_dict(config))
    lines = group.run(part, processes, what, words, processes, port, settings, timeout=None)
    return Ended(lines[0])


def part(rank: int, what: str, words: Any, processes: int, port: int, settings: str) -> str:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        REGIMES_CONFIG=settings,
        LOCAL_WORLD_SIZE=str(processes),
    )
    if what == "train" and processes == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        getattr(child, what)(*words)
    return said.getvalue()


# one check serves all compressors; the others are rehearsed with the whole
LATER = {f"compressor {x}" for x in REGISTRY if x not in ("powersgd", "topk")} | {"4 processes"}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x in LATER)) for x in correct.CHECKS]
)
def test_each_check_passes_on_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correct, "start", forked)
    place = Place(CPU, tmp_path)
    row = outcome(catalogue.measures(place)["correct", name], place)
    assert row["ok"], row["detail"]
    assert ("not measured" in row["detail"]) == name.startswith("CUDA graphs")  # of a GPU alone


@pytest.mark.parametrize("name", ["compressor powersgd", "compressor acp-sgd"])
def test_what_is_done_differently_on_a_gpu_is_within_the_limit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correct, "short", partial(short, steps=2))
    with pretended.gpu():
        assert "apart" in correct.CHECKS[name](Place("cuda", tmp_path))


@pytest.mark.slow
def test_graphs_on_a_gpu_are_within_the_limit(tmp_path: Path) -> None:
    with pretended.gpu() as diary:
        assert correct.graphs(Place("cuda", tmp_path)) == "equal, bit for bit"
        assert diary.graphs["captured"] == 3  # the passes, and two ranks


@pytest.mark.slow
def test_instruments_on_a_gpu_are_within_the_limit(tmp_path: Path) -> None:
    with pretended.gpu():
        assert "apart" in correct.instruments(Place("cuda", tmp_path))


@pytest.mark.parametrize(("wrong", "limit"), [(3e-10, "1e-10"), (float("nan"), "1e-10")])
def test_a_check_sees_a_difference(wrong: float, limit: str) -> None:
    rows = [{"loss": 1.0, "layers": [2.0, 3.0]}, {"loss": 1.0, "layers": [2.0, 3.0 * (1 + wrong)]}]
    with pytest.raises(correct.Difference, match=rf"\.layers\[1\] is .* limit is {limit}"):
        correct.within(correct.ROUNDED, *rows)
    with pytest.raises(correct.Difference, match=r"only one has \.loss"):
        correct.within(correct.ROUNDED, {"loss": None}, {"loss": 1.0})


def test_muon_has_hidden_matrices_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []

    def trained(config: RunConfig, folder: Path) -> list[dict[str, Any]]:
        configs.append(config)
        return []

    monkeypatch.setattr(correct, "trained", trained)
    correct.CHECKS["optimizer muon"](Place(CPU, tmp_path))
    network = models.build_model(**vars(configs[0].model), classes=256, sequence=8)
    built = optimizers.build_optimizers(configs[0].optimizer, network, 256)
    assert [type(p).__name__ for p in built.parts] == ["Muon", "AdamW"]


class Configured(Exception):
    """A row has come as far as its run."""


@pytest.mark.parametrize("device", [CPU, "cuda"])
def test_each_row_of_speed_has_a_configuration(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those for a real GPU, whose networks and data are larger; all with the kernels and the
    optimisers of the peers."""
    found = []

    def run(config: RunConfig, *_: Any, **__: Any) -> None:
        found.append(config)
        raise Configured

    def simulate(*_: Any, set: dict[str, Any], **__: Any) -> None:
        assert (set["deterministic"], set["evaluate_every"]) == (False, 1000)
        run(RunConfig())

    monkeypatch.setattr(regimes, "run", run)
    monkeypatch.setattr(regimes, "simulate", simulate)
    monkeypatch.setattr(speed, "task", lambda *_: None)
    for place, name in ((peers, "peer"), (speed, "eigenvalue"), (speed, "ceilings")):
        monkeypatch.setattr(place, name, lambda *_: run(RunConfig()))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    place = Place(device, tmp_path)
    tables = catalogue.tables(place)
    for table in ("speed", "graphs", "late"):
        for measure in tables[table].values():
            with pytest.raises(Configured):
                measure()
    ours = [config for config in found if config != RunConfig()]
    assert len(ours) == 2 * len(speed.IMAGES) + 4
    assert {(c.device, c.deterministic, c.evaluate_every) for c in ours} == {(device, False, 1000)}
    assert len({json.dumps(to_dict(config)) for config in ours}) == len(ours)


KINDS = [
    "ceilings",
    "plain loop, bfloat16",
    "DDP, torch's PowerSGD 2, bfloat16",
    "DDP, torch's fp16, bfloat16",
    "dense, bfloat16",
    "topk 10 %, bfloat16",
    "4 bits, bfloat16",
    "GPT-2, plain loop, bfloat16",
    "GPT-2, powersgd 4, bfloat16",
    "eigenvalue, lanczos",
    "eigenvalue, pyhessian",
]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:.*torch.distributed.is_initialized:FutureWarning")
def test_a_row_of_speed_is_measured(name: str, tmp_path: Path) -> None:
    if dist.is_initialized():  # of another test of this process; a lent machine has none
        dist.destroy_process_group()
    place = Place(CPU, tmp_path)
    row = outcome(speed.rows(place)[name], place)
    assert row["ok"], row["detail"]
    assert row.get("ms", row.get("s", row.get("GB_per_s"))) > 0
    if "ms" in row:
        assert row["host_ms"] > 0
        assert row["operations"] > 10


@pytest.mark.parametrize(
    "name",
    [
        "powersgd 2 as graphs, bfloat16",
        pytest.param("GPT-2, dense as graphs, bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_row_of_graphs_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(timing, "KINDS", timing.KINDS[:1])  # a CPU under the name of a GPU
    assert "not measured" in speed.graph_rows(Place(CPU, tmp_path))[name]()["detail"]
    with pretended.gpu() as diary:
        place = Place("cuda", tmp_path, rehearsal=True)
        row = outcome(speed.graph_rows(place)[name], place)
        assert row["ok"], row["detail"]
        assert row["ms"] > 0
        assert diary.graphs["replayed"] > diary.graphs["captured"] > 1


def test_peers_compute_in_the_precision_of_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn, seen = torch.backends.cudnn, {}

    def loop(place: Place, precision: str, *_: Any) -> dict[str, Any]:
        seen[precision] = torch.get_float32_matmul_precision(), cudnn.conv.fp32_precision
        return {}

    monkeypatch.setattr(peers, "loop", loop)
    for precision in ("strict", "tf32", "bfloat16"):
        peers.peer(Place("cuda", tmp_path), "plain loop", precision)
    strict, tf32 = ("highest", "ieee"), ("high", "tf32")
    assert seen == {"strict": strict, "tf32": tf32, "bfloat16": strict}
    with numerics(CPU, "tf32"):
        assert torch.get_float32_matmul_precision() == "highest"  # a CPU's are left alone


# -- the paper's setting ---------------------------------------------------------------------


def test_the_setting_is_the_papers(tmp_path: Path) -> None:
    runs = setting.queue(Place("cuda", tmp_path))
    for _, config in runs:
        PlugIns.from_config(config)
        assert (config.model.name, config.model.width) == ("resnet18-cifar10", None)
        assert (config.workers, config.batch_size, config.precision) == (4, 128, "bfloat16")
        assert (config.evaluate_precision, config.deterministic) == ("training", False)
    names = [name.rpartition("/")[0] for name, _ in runs]
    half = len(names) // len(setting.SEEDS)
    assert names == names[:half] * len(setting.SEEDS)  # seed by seed: balanced at any stop
    assert names[:4] == ["rank 4", "rank 1", "accordion 4-1", "ladder 4-2-1"]
    rates = {(config.optimizer.lr, config.epochs) for _, config in runs}
    assert rates == {(0.4, 20), (0.4, 12), (0.2, 12), (0.1, 12)}


def test_means_are_of_seeds_that_have_all_schedules(tmp_path: Path) -> None:
    lines = Lines(tmp_path / LINES)
    for name, metric in (("a/seed-1", 0.5), ("b/seed-1", 0.7), ("a/seed-2", 0.9)):
        lines.add("setting", name, ok=True, metric=metric)
    names = [f"{name}/seed-{seed}" for seed in setting.SEEDS for name in "ab"]
    assert setting.summary(lines, names) == {"seeds": [1], "a": 0.5, "b": 0.7}


@pytest.mark.parametrize("machine", ["h100", "h200"])
def test_a_committed_page_is_that_of_its_lines(machine: str) -> None:
    lines = ROOT / "benchmarks" / "gpu" / f"{machine}.jsonl"
    page = report.page(Lines(lines))
    assert lines.with_suffix(".md").read_text() == page, f"python -m benchmarks.gpu.report {lines}"


def test_the_plan_has_the_seconds_of_the_last_machine() -> None:
    known = json.loads(catalogue.ESTIMATES.read_text())
    assert report.estimates(Lines(ROOT / "benchmarks" / "gpu" / "h200.jsonl"), known) == known


# -- processes and time ----------------------------------------------------------------------


def test_the_plan_fits_two_calls(tmp_path: Path) -> None:
    """With four of the twelve minutes for a seed of the paper's setting."""
    rows = plan(Place("cuda", tmp_path))
    # the seconds of the first row of a process have its start in them
    checks = planned(rows["correct"]) / BESIDE + max(row.seconds for row in rows["correct"])
    assert checks <= 120
    h200 = Lines(ROOT / "benchmarks" / "gpu" / "h200.jsonl")
    assert max(row["at"] for row in h200.rows if row["part"] == "correct") <= checks
    seed = [row for row in rows["setting"] if row.name.endswith("/seed-1")]
    assert planned(seed) >= 200  # 152 epochs
    measured = planned(rows["speed"]) + planned(rows["graphs"])
    assert checks + measured + planned(seed) <= SLICES


def test_a_row_that_hangs_or_dies_costs_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "serve", gpu_worker.serve)
    one: Any = Worker(SimpleNamespace(out=tmp_path), "rows")  # type: ignore[arg-type]
    try:
        hung = one.measure(Row("part", "sleep", 0.0), limit=1)
        assert (hung["ok"], hung["detail"]) == (False, "still at work after 1 s")
        grandchild = int((tmp_path / "grandchild").read_text())
        assert ended(grandchild)  # and what it has started ends with it
        dead = one.measure(Row("part", "die", 0.0))
        assert (dead["ok"], dead["detail"]) == (False, "its process ended with code 3")
        assert one.measure(Row("part", "answer", 0.0))["ok"]
        first = one.process.pid
        assert one.measure(Row("part", "answer", 0.0))["ok"]
        assert one.process.pid == first
        assert one.measure(Row("part", "answer", 0.0, fresh=True))["ok"]
        assert one.process is None
    finally:
        one.end()


def ended(process: int) -> bool:
    for _ in range(500):
        try:
            os.kill(process, signal.SIG_DFL)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_two_files_come_back_and_continue_elsewhere(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    run = work / "setting" / "grid" / "dense" / "seed-1"
    run.mkdir(parents=True)
    for name in ("run.json", "epochs.jsonl", "checkpoint-1.pt"):
        (run / name).write_text("{}")
    Lines(work / LINES).add("setting", "dense/seed-1", ok=True)
    assert deliver(work, out) == (out / ARCHIVE).stat().st_size
    assert deliver(work, out) < 1000  # again, and not with itself in it
    assert sorted(file.name for file in out.iterdir()) == [ARCHIVE, LINES]
    with tarfile.open(out / ARCHIVE) as archive:
        names = archive.getnames()
    record = "setting/grid/dense/seed-1"
    assert names == [LINES, f"{record}/epochs.jsonl", f"{record}/run.json"]
    fetch(out / ARCHIVE, tmp_path / "other")
    assert Lines(tmp_path / "other" / LINES).has("setting", "dense/seed-1")


@pytest.mark.slow
def test_the_command_with_what_a_lent_machine_has(tmp_path: Path) -> None:
    """A preset of the study as a row of ours, and a run that `regimes report` reads, both by names
    that only metadata gives an installed project."""
    names = ("dense, bfloat16", "accordion 4-1/seed-1")
    words = ("--parts", "speed,setting", "--only", "^dense, |^accordion", "--slice", "280")
    rows = campaign(tmp_path, *words)
    assert [(row["name"], row.get("ok", True)) for row in rows] == [
        *(("header", True), (names[0], True), (names[1], True), ("means", True))
    ]
    record = load(tmp_path / "work" / "setting" / setting.GRID / names[1])
    assert record.epochs["metric"].notna().tolist() == [False, True, True]


def test_what_stands_there_is_not_measured_again(tmp_path: Path) -> None:
    lines = Lines(tmp_path / LINES)
    lines.add("speed", "dense, bfloat16", ok=False)
    assert not lines.has("speed", "dense, bfloat16")
    lines.add("speed", "dense, bfloat16", ok=True, ms=1.0)
    with (tmp_path / LINES).open("a") as file:
        file.write('{"part": "speed", "name": "torn')
    again = Lines(tmp_path / LINES)
    assert again.find("speed", "dense, bfloat16") == lines.rows[-1]
    again.add("speed", "next", ok=True)
    assert Lines(tmp_path / LINES).has("speed", "next")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    rows = campaign(tmp_path, "--slice", "1700", "--parts", "correct,speed,graphs,setting")
    measured = {(row["part"], row["name"]) for row in rows}
    planned = plan(Place(CPU, tmp_path))
    expected = {(r.part, r.name) for part in planned if part != "late" for r in planned[part]}
    assert expected <= measured
    bad = [row for row in rows if not row.get("ok", True)]
    assert not [row for row in bad if "PyHessian is missing" not in row["detail"]], bad
