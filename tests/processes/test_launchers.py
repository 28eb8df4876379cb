"""What torchrun, our launcher and a plain srun tell a process. Oracle: their documentation."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
from ddp_scripts import group

from regimes.base.errors import ConfigError, TrainingError
from regimes.collectives.connect import connect_world
from regimes.collectives.launcher import LaunchedProcess, first_host, read_launch

SRUN = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[07-09,12]", "gpu07"),
        ("a[3,5-6]-ib,b", "a3-ib"),
        ("rack[2-3]node[10-11]", "rack2node10"),
        ("x[4],y[1-2]", "x4"),
    ],
)
def test_the_first_host_of_slurms_lists(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_nobody_torchrun_and_our_launcher() -> None:
    assert read_launch({}) == LaunchedProcess(0, 1, 0, "env://", 0)
    assert read_launch(TORCHRUN) == LaunchedProcess(3, 4, 1, "env://", 2)
    ours = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "REGIMES_RENDEZVOUS": "file:///x"}
    assert read_launch(ours) == LaunchedProcess(1, 2, 1, "file:///x", 0)


def test_srun_and_what_is_not_srun() -> None:
    found = read_launch(SRUN | {"SLURM_RESTART_COUNT": "1"})
    assert (found.rank, found.count, found.local_rank, found.restarts) == (5, 8, 1, 1)
    assert found.rendezvous.startswith("tcp://gpu07:")
    assert 2**14 <= int(found.rendezvous.rpartition(":")[2]) < 2**15
    assert (
        read_launch(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).rendezvous
        == found.rendezvous
    )
    assert read_launch(SRUN | {"SLURM_STEP_ID": "1"}).rendezvous != found.rendezvous
    chosen = read_launch(SRUN | {"MASTER_ADDR": "10.0.0.3", "MASTER_PORT": "4000"})
    assert chosen.rendezvous == "tcp://10.0.0.3:4000"
    assert read_launch(SRUN | TORCHRUN) == read_launch(TORCHRUN)  # srun starts torchrun
    batch_script = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
    assert read_launch(batch_script) == LaunchedProcess()
    assert (
        read_launch(SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) == LaunchedProcess()
    )


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (TORCHRUN | {"RANK": "abc"}, "RANK = 'abc': expected a whole number from 0"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE = '': expected a whole number from 1"),
        (TORCHRUN | {"WORLD_SIZE": "-3"}, "WORLD_SIZE = '-3': expected a whole number from 1"),
        (TORCHRUN | {"RANK": "4"}, "RANK = 4: expected less than the 4 processes"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2: expected RANK beside it"),
        ({"RANK": "1"}, "RANK = 1: expected less than the 1 process"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS = 'x': expected a whole"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID = 8: expected less than the 8"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID = '': expected"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_STEP_NODELIST"}, "SLURM_STEP_NODELIST = ''"),
    ],
)
def test_what_no_launcher_says_is_one_sentence(env: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_launch(env)


def test_a_launcher_that_names_no_meeting_place_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "REGIMES_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=r"at the start.*MASTER_ADDR expected, but not set"):
        connect_world(2, torch.device("cpu"), timeout=5)


def tasks(rank: int, port: int) -> list[float]:
    """Two worlds one after the other in the tasks of a step."""
    os.environ.update(
        SRUN,
        SLURM_STEP_NUM_TASKS="2",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    found: list[Any] = []
    for _ in range(2):
        world = connect_world(2, torch.device("cpu"), timeout=30)
        found.append(world.mean_over_workers([torch.tensor([[float(rank)]])])[0].item())
        world.close()
    return found


def test_tasks_of_a_step_meet_twice() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert group.run(tasks, 2, port) == [[0.5, 0.5], [0.5, 0.5]]
