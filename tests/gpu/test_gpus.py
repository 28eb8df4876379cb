"""What several GPUs need, on pretended ones (``pretended``): who is where, and what travels."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pretended
import pytest
import torch
from ddp_scripts import gpus as jobs
from ddp_scripts import group

import regimes
from regimes.base.config import RunConfig, override
from regimes.collectives.layers import Layer
from regimes.collectives.process_group import backend_string
from regimes.collectives.world import World
from regimes.compression.background import Background
from regimes.compression.exchange import Exchange
from regimes.compression.reducer import Reducer
from regimes.compression.sparse import TopK
from regimes.records import read_lines
from regimes.search import gpus, sweep

INSTRUMENTS = [
    "curvature={probes=2, images=16, batch=8, max_products=10}",
    "fisher={images=16, batch=8}",
    "noise={}",
    "msdr={}",
    "overlap={batches=[16], count=4}",
    "error={}",
    "moments={}",
    "moments-frozen={batch=8, count=4}",
    "norms={readings=['global', 'worker0']}",
]
TOPK = ["compressor={name='topk'}", "levels={low=10, high=1}", "bucket_mb=0.02"]


def config(*settings: str) -> RunConfig:
    short = ["epochs=1", "data.train_size=64", "device=cuda", "union_pass=false"]
    return override(regimes.get_preset("smoke"), [*short, *settings])


def met(gpu: int) -> list[str]:
    return [f"set_device cuda:{gpu}", f"init cpu:gloo,cuda:nccl cuda:{gpu} 0"]


# -- processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "device", "expected"),
    [
        ("gloo", "cpu", "gloo"),
        ("gloo", "cuda", "gloo"),  # carries both
        ("nccl", "cuda", "cpu:gloo,cuda:nccl"),
        ("mpi", "cpu", "mpi"),
    ],
)
def test_objects_travel_over_gloo_where_the_backend_has_gpu_tensors_only(
    own: str, device: str, expected: str
) -> None:
    assert backend_string(own, torch.device(device)) == expected


@pytest.mark.parametrize(
    "settings", [[], pytest.param(TOPK, marks=pytest.mark.slow)], ids=["powersgd", "topk"]
)
def test_each_process_takes_its_gpu_first_and_only_gpu_tensors_travel(
    settings: list[str], tmp_path: Path
) -> None:
    c = config(*(f"instruments.{line}" for line in INSTRUMENTS), *settings)
    answers: list[dict[str, Any]] = group.run(jobs.trained, 2, c, 2, tmp_path / "run")
    for rank, answer in enumerate(answers):
        assert answer["heard"] == ""
        assert answer["calls"] == [*met(rank), "destroy"]
        assert set(map(tuple, answer["places"].values())) == {
            (f"cuda:{rank}",)
        }  # never from the CPU


@pytest.mark.parametrize(  # several buckets leave in a thread
    ("fails", "heard", "bucket_mb"),
    [
        ("nccl", "(NCCL timeout)", 0.02),
        ("never", "in all_reduce (it has taken longer than 1 s)", 0.02),
        ("never", "in all_reduce (it has taken longer than 1 s)", 25),
        ("memory", "OutOfMemoryError: full", 25),
    ],
)
def test_an_error_of_nccl_is_recorded_and_nobody_is_waited_for(
    fails: str, heard: str, bucket_mb: float, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    c = config(f"bucket_mb={bucket_mb}", "timeout=1" if fails == "never" else "timeout=60")
    answers = group.run(jobs.trained, 2, c, 2, out, fails)
    assert any(heard in answer["heard"] for answer in answers)  # the other may lose the first one
    kind = heard if fails == "memory" else "lost contact with the others in"
    for rank, answer in enumerate(answers):
        assert kind in answer["heard"]
        ends = ["abort"] if fails == "memory" else ["communicator aborted", "abort"]
        assert answer["calls"] == [*met(rank), *ends]
    stopped = read_lines(out / "events.jsonl")[-1]
    assert stopped["event"] == "stopped"
    assert kind.split(":")[0] in stopped["why"]


def test_objects_of_the_hook_do_not_travel_over_the_users_nccl() -> None:
    for answer in group.run(jobs.hooked, 2):
        assert answer["gathered"] == [0, 1]
        assert answer["made"] == ["cpu:gloo,cuda:nccl", "0", "gloo", ""]  # the last for meetings
        assert not answer["after"]  # the user's own groups are as the user wants them


@pytest.mark.parametrize(
    ("gpus", "lacking"),
    [(("a", "b"), None), (("a", "a"), "0, 1"), ((None, None), None)],
    ids=["one each", "one for both", "none"],
)
def test_nccl_if_and_only_if_every_process_has_a_gpu_of_its_own(
    gpus: tuple[str | None, ...], lacking: str | None, tmp_path: Path
) -> None:
    """Each process sees its GPU as the only one, whatever the others see."""
    answers = group.run(jobs.chosen, 2, gpus, (tmp_path / "meet").as_uri())
    expected = "cpu:gloo,cuda:nccl" if gpus == ("a", "b") else "gloo"
    assert [answer["backend"] for answer in answers] == [expected, expected]
    heard = [answer["heard"] for answer in answers]
    assert heard[1] == []
    assert [f"process {lacking}: tensors travel over gloo" in h for h in heard[0]] == (
        [] if lacking is None else [True]
    )


@pytest.mark.parametrize("gpus", [("a", None), (None, "b")], ids=["second", "first"])
def test_a_run_on_cpus_and_gpus_is_refused_on_every_process(
    gpus: tuple[str | None, ...], tmp_path: Path
) -> None:
    answers = group.run(jobs.chosen, 2, gpus, (tmp_path / "meet").as_uri())
    refused = [answer["refused"] for answer in answers]
    assert refused == [mixed("cuda" if gpus[0] else "cpu")] * 2


@pytest.mark.parametrize("call", ["attach()", "local_steps()"])
def test_a_job_on_cpus_and_gpus_is_refused_on_every_process(call: str) -> None:
    assert group.run(jobs.mixed, 3, call) == [mixed("cuda")] * 3


def mixed(first: str) -> str:
    kinds = ["cuda", "cpu"] if first == "cuda" else ["cpu", "cuda"]
    return (
        f"process 0 computes on {kinds[0]!r}, process 1 on {kinds[1]!r}: give every process a "
        'GPU, or set the device "cpu" for all'
    )


# -- TopK ------------------------------------------------------------------------------------


def test_topk_adds_worker_by_worker_on_a_gpu_with_the_numbers_of_the_cpu() -> None:
    """Where several workers meet in one coordinate, the order of adding decides the last bits."""
    expected, _ = topk(pretended.CPU)
    with pretended.gpu():
        found, most = topk(pretended.GPU)
        assert torch.equal(found.cpu(), expected)
    assert most == 1


def topk(device: torch.device) -> tuple[torch.Tensor, int]:
    """An update of six workers, and how often at most one call has added to one coordinate."""
    add, most = torch.Tensor.index_add_, [0]

    def index_add(update: torch.Tensor, dim: int, index: torch.Tensor, *a: Any, **k: Any) -> Any:
        most.append(int(index.cpu().bincount().max()))
        return add(update, dim, index, *a, **k)

    grads = torch.randn(6, 20, 30, generator=torch.Generator().manual_seed(0)).to(device)
    reducer = Reducer(TopK(), [Layer("m", (20, 30))], World(6), seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "index_add_", index_add)
        losses = torch.zeros(6, device=device)
        updates, _ = Exchange(reducer).exchange_step([grads], [40], losses, grads.flatten(1))
    return updates[0], max(most)


# -- runs beside each other ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "found"),
    [("0,2", ["0", "2"]), ("GPU-8a, MIG-7", ["GPU-8a", "MIG-7"]), ("", []), ("1,-1,2", ["1"])],
)
def test_visible_gpus_are_those_of_the_variable(
    variable: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert gpus.visible_gpus() == found


def test_without_the_variable_torch_counts_and_only_where_a_driver_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: None)
    assert gpus.visible_gpus() == ["0", "1", "2"]
    monkeypatch.setattr(gpus.ctypes, "CDLL", Mock(side_effect=OSError))
    assert gpus.visible_gpus() == []


def test_a_device_that_a_configuration_names_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert gpus.share_gpus(3, ["auto", "cuda"]) == ["4", "5", "4"]
    assert gpus.share_gpus(2, ["auto", "cuda:1"]) == [None, None]


def seen(folder: Path, config: RunConfig) -> str:
    """In the place of a run: waits for the others, so that each process has one."""
    folder.touch()
    deadline = time.monotonic() + 60
    while len(list(folder.parent.iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    return f"{os.environ['CUDA_VISIBLE_DEVICES']} {torch.cuda.is_initialized()}"


@pytest.mark.slow
def test_runs_beside_each_other_share_out_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(sweep, "run_cell", seen)
    todo = [(tmp_path / str(i), config()) for i in range(3)]
    answers = sweep.ablate(todo, 3, lambda *_: None)
    found = sorted(answer.partition(": ")[2] for answer in answers)
    assert found == ["GPU-a False", "GPU-a False", "GPU-b False"]


# -- the thread of the exchange ----------------------------------------------------------------


def test_the_thread_of_the_exchange_has_a_context_on_its_own_gpu_alone() -> None:
    with pretended.gpu(2) as diary:
        background = Background(torch.device("cuda", 1))
        background.submit(lambda: None)
        background.synchronize()
        background.close()
        assert diary.contexts == {("regimes", 1)}
