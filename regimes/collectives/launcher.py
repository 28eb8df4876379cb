"""This process's place in the group that a launcher started, from its environment: torchrun,
``spawn`` of ``regimes.search``, or a plain ``srun``. No torch."""

from __future__ import annotations

import os
import re
import socket
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from regimes.base.errors import require

# the interface of processes of one machine
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


@dataclass(frozen=True)
class LaunchedProcess:
    """Describes one process of a group; by default a process without a launcher.

    Attributes:
        rank, count: this process's rank, and the number of processes.
        local_rank: the rank within the node.
        rendezvous: the URL of ``torch.distributed.rendezvous``.
        restarts: how often the launcher has restarted the whole group.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    rendezvous: str = "env://"
    restarts: int = 0


def read_launch(env: Mapping[str, str] | None = None) -> LaunchedProcess:
    """Read from the environment which process of which group this one is. Where a task of Slurm
    runs torchrun, the processes of torchrun count, not the task. A batch script is not a task and
    counts as one process."""
    env = os.environ if env is None else env
    tasks = 1 if "WORLD_SIZE" in env else _read_number(env, "SLURM_STEP_NUM_TASKS", "1", least=1)
    if tasks > 1:
        return LaunchedProcess(
            _read_rank(env, "SLURM_PROCID", "", tasks),
            tasks,
            _read_number(env, "SLURM_LOCALID", ""),
            _slurm_rendezvous(env),
            _read_number(env, "SLURM_RESTART_COUNT", "0"),
        )
    count = _read_number(env, "WORLD_SIZE", "1", least=1)
    together = count == 1 or "RANK" in env
    require(together, "WORLD_SIZE", count, "RANK beside it, of the same launcher")
    return LaunchedProcess(
        _read_rank(env, "RANK", "0", count),
        count,
        _read_number(env, "LOCAL_RANK", "0"),
        env.get("REGIMES_RENDEZVOUS", "env://"),
        _read_number(env, "TORCHELASTIC_RESTART_COUNT", "0"),
    )


def node_name(env: Mapping[str, str] | None = None) -> str:
    """Name this process's node: the same on all processes of a machine that one launcher
    started."""
    env = os.environ if env is None else env
    return f"{socket.gethostname()}/{env.get('GROUP_RANK', '')}"


def on_one_node(env: Mapping[str, str] | None = None) -> bool:
    """Return whether the launcher says that all processes are on this node."""
    env = os.environ if env is None else env
    return "WORLD_SIZE" in env and env["WORLD_SIZE"] == env.get("LOCAL_WORLD_SIZE")


def _read_number(env: Mapping[str, str], name: str, default: str, least: int = 0) -> int:
    """A variable's value; ConfigError if it is not a number."""
    text = env.get(name, default)
    good = re.fullmatch(r"[0-9]{1,9}", text) is not None and int(text) >= least
    require(good, name, text, f"a whole number from {least} up, of a launcher")
    return int(text)


def _read_rank(env: Mapping[str, str], name: str, default: str, count: int) -> int:
    rank = _read_number(env, name, default)
    require(rank < count, name, rank, f"less than the {count} process{'es' * (count > 1)}")
    return rank


def _slurm_rendezvous(env: Mapping[str, str]) -> str:
    """tcp://HOST:PORT of the first node of the step, where task 0 runs. The port follows from it,
    so that other steps rarely share it, and is below those that systems assign."""
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    port = env.get("MASTER_PORT", str(2**14 + zlib.crc32(step.encode()) % 2**14))
    nodes = env.get("SLURM_STEP_NODELIST", "")
    host = env.get("MASTER_ADDR") or first_host(nodes)
    require(bool(host), "SLURM_STEP_NODELIST", nodes, "the nodes of the step")
    return f"tcp://{host}:{port}"


def first_host(nodes: str) -> str:
    """Return the first node of Slurm's compressed list: "a03-ib" for "a[03-05,9]-ib,b"."""
    first = re.split(r",(?![^[]*\])", nodes)[0]
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)


def attempt_name() -> str:
    """Return a name that changes when torchrun restarts the processes, because torchrun's store
    keeps the addresses of the dead.

    The agents of several nodes count restarts apart: there the environment variable
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 must be set (docs/how-to/cluster.md). The store outlives a
    run as well, so callers add the number of the run within the process.
    """
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return f"regimes/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else 'all'}"
