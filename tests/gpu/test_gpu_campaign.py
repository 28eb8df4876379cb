"""The campaign for a lent GPU, rehearsed on the CPU without the packages that it must not need.

The fast tests run each check and each kind of row in this process, with forked ones in the place of
torchrun; the slow one is the command itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pretended
import pytest
import torch
import torch.distributed as dist
from ddp_scripts import group

import regimes
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import child, correct, speed, study
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.place import Place, numerics, short
from regimes import models
from regimes.config import RunConfig, to_dict
from regimes.training.checks import PlugIns

ROOT = Path(__file__).parents[2]
LACKING = """
import runpy, sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tyro", "tomli_w", "submitit", "pyhessian"):
            raise ImportError(f"No module named {name!r}")
sys.meta_path.insert(0, Lacking())
sys.argv = ["benchmarks.gpu", *sys.argv[1:]]
runpy.run_module("benchmarks.gpu", run_name="__main__")
"""


def campaign(out: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of one call that has ended well."""
    done = subprocess.run(
        [sys.executable, "-c", LACKING, "--out", str(out), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(x) for x in (out / "lines.jsonl").read_text().splitlines()]


CPU = "cpu"


@dataclass
class Ended:
    """In the place of a child process: one that has ended, with what it has said."""

    said: str

    def poll(self) -> int:
        return 0

    def kill(self) -> None: ...
    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        return self.said, None

    returncode = 0


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


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.slow] * (x == "4 processes")) for x in correct.CHECKS],
)
def test_each_check_passes_on_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correct, "start", forked)
    place = Place(CPU, tmp_path)
    row = command.outcome(command.checked(correct.CHECKS[name], place))
    assert row["ok"], row["detail"]
    assert ("not measured" in row["detail"]) == (name == "CUDA graphs")  # of a GPU alone


@pytest.mark.parametrize("name", ["compressor powersgd", "compressor acp-sgd"])
def test_what_is_done_differently_on_a_gpu_is_within_the_limit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(correct, "short", partial(short, steps=2))
    with pretended.gpu():
        assert "apart" in correct.CHECKS[name](Place("cuda", tmp_path))


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


class Configured(Exception):
    """A row has come as far as its run."""


@pytest.mark.parametrize("device", [CPU, "cuda"])
def test_each_row_of_speed_has_a_configuration(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those for a real GPU, whose networks and data are larger."""
    found = []

    def run(config: RunConfig, *_: Any, **__: Any) -> None:
        found.append(config)
        raise Configured

    monkeypatch.setattr(regimes, "run", run)
    monkeypatch.setattr(regimes, "simulate", lambda *_, **__: run(RunConfig()))
    monkeypatch.setattr(speed, "noise", lambda *_: tmp_path)
    for name in ("peer", "eigenvalue"):
        monkeypatch.setattr(speed, name, lambda *_: run(RunConfig()))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for measure in speed.rows(Place(device, tmp_path)).values():
        with pytest.raises(Configured):
            measure()
    ours = [config for config in found if config != RunConfig()]
    assert len(ours) == len([*speed.WAYS, *speed.GRAPHS]) * len(speed.PRECISIONS)
    assert {config.device for config in ours} == {device}
    assert len({json.dumps(to_dict(config)) for config in ours}) == len(ours)


KINDS = [
    "plain loop, strict",
    "plain loop, compiled, tf32",
    "DDP, torch's PowerSGD 2, bfloat16",
    "dense, strict",
    "powersgd 2, tf32",
    "topk 10 %, bfloat16",
    "GPT-2, plain loop, bfloat16",
    "GPT-2, dense, bfloat16",
    "GPT-2, powersgd 4, bfloat16",
    "eigenvalue, lanczos",
    "eigenvalue, pyhessian",
]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:.*torch.distributed.is_initialized:FutureWarning")
def test_a_row_of_speed_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dist.is_initialized():  # of another test of this process; a lent machine has none
        dist.destroy_process_group()
    monkeypatch.setitem(speed.PEERS, "plain loop, compiled", lambda net: net)  # takes half a minute
    row = command.outcome(speed.rows(Place(CPU, tmp_path))[name])
    assert row["ok"], row["detail"]
    assert row.get("ms", row.get("s")) > 0


@pytest.mark.parametrize(
    "name",
    [
        "powersgd 2 as graphs, tf32",
        pytest.param("GPT-2, dense as graphs, bfloat16", marks=pytest.mark.slow),
    ],
)
def test_a_row_of_graphs_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    assert "not measured" in speed.rows(Place(CPU, tmp_path))[name]()["detail"]
    with pretended.gpu() as diary:
        row = command.outcome(speed.rows(Place("cuda", tmp_path, rehearsal=True))[name])
        assert row["ok"], row["detail"]
        assert row["ms"] > 0
        assert diary.graphs["replayed"] > diary.graphs["captured"] > 1


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """What a row asks of torch.cuda beside what is pretended."""
    patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    patch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    profiler = speed.profiler
    patch.setattr(speed, "profiler", lambda place: profiler(Place(CPU, place.out)))


def test_peers_compute_in_the_precision_of_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudnn, seen = torch.backends.cudnn, {}

    def loop(place: Place, precision: str, *_: Any) -> dict[str, Any]:
        seen[precision] = torch.get_float32_matmul_precision(), cudnn.conv.fp32_precision
        return {}

    monkeypatch.setattr(speed, "loop", loop)
    for precision in speed.PRECISIONS:
        speed.peer(Place("cuda", tmp_path), "plain loop", precision)
    strict, tf32 = ("highest", "ieee"), ("high", "tf32")
    assert seen == {"strict": strict, "tf32": tf32, "bfloat16": strict}
    with numerics(CPU, "tf32"):
        assert torch.get_float32_matmul_precision() == "highest"  # a CPU's are left alone


@pytest.mark.parametrize("device", [CPU, "cuda"])
def test_each_run_of_the_study_has_a_configuration(device: str, tmp_path: Path) -> None:
    for model in study.NETWORKS:
        cells = study.base(Place(device, tmp_path), model)
        assert list(cells) == list(study.ARMS)
        assert {config.device for config in cells.values()} == {device}
        for config in cells.values():
            PlugIns.of(config)
        if device != CPU:
            with torch.device("meta"):
                network = models.build(**vars(config.model), classes=256, sequence=64)
            count = sum(p.numel() for p in network.parameters())
            assert 10 * 115_000 < count < 100 * 115_000


def test_a_slice_ends_within_a_call(tmp_path: Path) -> None:
    """A call on a lent machine lasts 600 seconds; a row that begins late ends in it."""
    assert command.SLICE + 120 <= 540
    with pytest.raises(study.SliceOver):
        study.study(Place(CPU, tmp_path), Lines(tmp_path / "lines.jsonl"), end=0.0)


def test_the_command_starts_with_what_a_lent_machine_has(tmp_path: Path) -> None:
    (row,) = campaign(tmp_path, "--parts", "correct", "--only", "versions")
    assert (row["part"], row["name"], row["ok"]) == ("correct", "versions", True)


def test_what_must_come_back_is_one_archive(tmp_path: Path) -> None:
    run = tmp_path / "study" / "dense"
    run.mkdir(parents=True)
    for name in ("run.json", "epochs.jsonl", "checkpoint-1.pt"):
        (run / name).write_text("{}")
    Lines(tmp_path / "lines.jsonl").add("study", "dense", ok=True)
    assert command.pack(tmp_path) == (tmp_path / command.ARCHIVE).stat().st_size
    assert command.pack(tmp_path) < 1000  # again, and not with itself in it
    with tarfile.open(tmp_path / command.ARCHIVE) as archive:
        names = archive.getnames()
    assert names == ["lines.jsonl", "study/dense/epochs.jsonl", "study/dense/run.json"]


@pytest.mark.slow
def test_a_cut_of_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    words = ("--parts", "correct", "--only", "decisions")
    rows = campaign(tmp_path, *words)
    assert [(row["name"], row["ok"]) for row in rows] == [("decisions", True)]
    with (tmp_path / "lines.jsonl").open("a") as lines:
        lines.write('{"part": "correct", "name": "torn')
    again = campaign_lines(tmp_path, *words, "--slice", "1")
    assert again == rows  # not measured again


def campaign_lines(out: Path, *words: str) -> list[dict[str, Any]]:
    subprocess.run([sys.executable, "-c", LACKING, "--out", str(out), *words], cwd=ROOT, check=True)
    lines = (out / "lines.jsonl").read_text().splitlines()
    return [json.loads(x) for x in lines if x.endswith("}")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    rows = campaign(tmp_path, "--slice", "800")
    assert {row["part"] for row in rows} == {"correct", "speed", "tuning", "study"}
    bad = [row for row in rows if not row["ok"] and "ompile" not in row["name"]]
    assert not [row for row in bad if "PyHessian is missing" not in row["detail"]], bad
    arms = {row["name"].rpartition("/")[0] for row in rows if row["part"] == "study"}
    assert len(arms) == 2 * len(study.ARMS)
