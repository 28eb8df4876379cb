"""What a launcher has told this process about the group that it started: torchrun, ``spawn`` of
``regimes.launch``, or a plain ``srun``. No torch."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launched:
    """One process of a group; the defaults are those of a process that nobody has launched.

    Attributes:
        rank, count: which of how many processes.
        local_rank: which of its node.
        meeting: where they meet, a URL that ``torch.distributed.rendezvous`` takes.
        restarts: how often the launcher has started the whole group again.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    meeting: str = "env://"
    restarts: int = 0


def launched(env: Mapping[str, str] | None = None) -> Launched:
    """This process, by its environment. A task of Slurm that runs torchrun is not a process of the
    group, the processes that torchrun starts are. A batch script is no task: one, so alone."""
    env = os.environ if env is None else env
    if "WORLD_SIZE" not in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return Launched(
            int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"]),
            _meeting(env), int(env.get("SLURM_RESTART_COUNT", "0")),
        )  # fmt: skip
    return Launched(
        int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1")), int(env.get("LOCAL_RANK", "0")),
        env.get("REGIMES_RENDEZVOUS", "env://"), int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )  # fmt: skip


def _meeting(env: Mapping[str, str]) -> str:
    """On the first node of the step, where task 0 is, at a port that other steps do not share but
    by accident and that no system hands out by itself."""
    step = f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    port = env.get("MASTER_PORT", str(2**14 + zlib.crc32(step.encode()) % 2**14))
    return f"tcp://{env.get('MASTER_ADDR') or first_host(env['SLURM_STEP_NODELIST'])}:{port}"


def first_host(nodes: str) -> str:
    """Of Slurm's short form of a list: "a[03-05,9]-ib,b" begins with "a03-ib"."""
    first = re.split(r",(?![^[]*\])", nodes)[0]
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first)


def attempt() -> str:
    """A name that a restart by torchrun changes, because its store keeps the addresses of the
    dead. Agents of several nodes count restarts apart: there the variable in the README helps.
    (The number of the run within the process is added, because the store outlives a run as well.)
    """
    alone = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return f"regimes/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else 'all'}"
