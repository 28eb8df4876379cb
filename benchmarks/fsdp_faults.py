"""Jobs of plain FSDP2, its collectives compressed, killed at random moments and continued.

    python -m benchmarks.fsdp_faults --times 50     # ten minutes on two idle cores

Two processes train a small network in float64 for 24 steps: 8 or 4 bits as ACCORDION decides, with
feedback in 8 bits, or PowerSGD; weights gathered in 8 bits; a record, and a checkpoint of
`torch.distributed.checkpoint` every third step, also within a unit of four. One process is killed
(SIGKILL) at a random step, or while the job starts; what is left after 20 seconds is killed as
well, and the job goes on from its newest whole checkpoint. The weights' bits and the record's bytes
equal the undisturbed job's.

Leaves ``benchmarks/fsdp_faults.json`` and ``fsdp_faults.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.island_faults import ALONE, BATCH, SAVE, STEPS, UNIT, Group, kill, newest
from regimes.records import write_output

PROCESSES = (1, 2)
FEW_BITS = {
    "levels": {"low": 8, "high": 4},
    "block": 16,
    "stochastic": False,
    "error_feedback": True,
    "residual_bits": 8,
}
SCATTERS: dict[str, dict[str, Any]] = {
    "8 and 4 bits, feedback in 8": FEW_BITS,
    "8 and 4 bits at random": {"levels": {"low": 8, "high": 4}, "block": 16},
    "PowerSGD": {"name": "powersgd", "levels": {"low": 2, "high": 1}},
}


def job(
    scatter: str, rank: int, mesh: tuple[int, int], out: str, meet: str, saved: str | None
) -> None:
    """One process: from the newest checkpoint to the last step.

    Args:
        scatter: a key of SCATTERS.
    """
    import warnings

    import torch
    import torch.distributed as dist
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional as F

    import regimes

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", Path(meet).as_uri(), rank=rank, world_size=mesh[1])
    shards = init_device_mesh("cpu", (mesh[1],))
    torch.manual_seed(3)
    layers = [torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 7), torch.nn.Tanh()]
    net: Any = torch.nn.Sequential(*layers, torch.nn.Linear(7, 5)).double()
    for part in (net[0], net[2]):
        fully_shard(part, mesh=shards)
    fully_shard(net, mesh=shards)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    hook = regimes.attach(
        net,
        shards=shards,
        scatter=SCATTERS[scatter],
        gather={"level": 8},
        optimizer=optimizer,
        every=UNIT,
        policy={"name": "accordion", "interval": 1, "eta": 0.1},
        record=f"{out}/run",
        timeout=60,
    )

    def parts() -> dict[str, Any]:
        model, states = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": states, "hook": hook.sharded_state()}

    if first := newest(Path(out)):
        dcp.load(state := parts(), checkpoint_id=Path(out, str(first)))
        model, states = state["model"], state["optimizer"]
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)
    for step in range(first, STEPS):
        if rank == 0:
            Path(out, "step").write_text(str(step))
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 6, generator=draw, dtype=torch.float64).chunk(mesh[1])
        optimizer.zero_grad()
        F.cross_entropy(net(x[rank]), x[rank].argmax(1) % 5).backward()
        optimizer.step()
        if (step + 1) % SAVE == 0:
            dcp.save(parts(), checkpoint_id=Path(out, str(step + 1)))
    hook.close()
    weights = [p.full_tensor().detach() for p in net.parameters()]
    if rank == 0:
        torch.save(weights, Path(out, "weights"))
    dist.destroy_process_group()


def outcome(out: Path, whole: Path) -> str:
    """Is the job that went on the same as the whole one?"""
    import torch

    ours, theirs = (torch.load(folder / "weights") for folder in (out, whole))
    equal = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    lines = [(folder / "run" / "epochs.jsonl").read_bytes() for folder in (out, whole)]
    return "the same bits and bytes" if equal and lines[0] == lines[1] else "OTHER BITS"


def measure(times: int, seed: int, report: Path) -> None:
    """Kill and go on so often, each kind in turn."""
    began, draw = time.monotonic(), random.Random(seed)
    rows = {name: Counter[str]() for name in SCATTERS}
    alone: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(SCATTERS):
            whole = Path(scratch, f"whole-{number}")
            work = partial(job, name)
            assert Group(PROCESSES, whole, work=work).ends() == [0, 0]
            count = missed = 0
            while count < times // len(SCATTERS) + (number < times % len(SCATTERS)):
                out = Path(scratch, f"{number}-{count + missed}")
                group = Group(PROCESSES, out, work=work)
                step = kill(group, draw)
                codes = group.ends(ALONE)
                if step is None:
                    missed += 1
                    continue
                alone["hung" if None in codes else "ended"] += 1
                codes = Group(PROCESSES, out, work=work).ends()
                well = codes == [0, 0]
                found = outcome(out, whole) if well else f"NOT continued: exit codes {codes}"
                rows[name][found] += 1
                count += 1
                print(f"{name}, step {step}: {found}", flush=True)
                write(rows, alone, seed, (time.monotonic() - began) / 60, report)


def write(
    rows: dict[str, Counter[str]], alone: Counter[str], seed: int, minutes: float, report: Path
) -> None:
    """All outcomes so far, as JSON and as a page."""
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "minutes": minutes}
    result = {"seed": seed, "machine": machine, "others": dict(alone)}
    result |= {"outcomes": {name: dict(found) for name, found in rows.items()}}
    write_output(report, json.dumps(result, indent=1) + "\n")
    lines = [
        "This page shows what comes of a job of plain FSDP2, its collectives compressed, that is "
        "killed and continued from torch's distributed checkpoints. `python -m "
        "benchmarks.fsdp_faults` kills one of two processes at a random moment; its docstring "
        "describes the comparison.",
        "",
        "| gradients | kills | outcome |",
        "|---|---:|---|",
    ]
    for name, found in rows.items():
        outcomes = "; ".join(f"{n} {what}" for what, n in found.most_common())
        lines.append(f"| {name} | {found.total()} | {outcomes} |")
    total = sum(found.total() for found in rows.values())
    lines += [
        "",
        f"{total} kills, seed {seed}. After {alone['ended']} of them the other process ended by "
        f"itself within {ALONE:.0f} s; after {alone['hung']} it had to be killed.",
    ]
    write_output(report.with_suffix(".md"), "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=Path("benchmarks/fsdp_faults.json"))
    chosen = parser.parse_args()
    measure(chosen.times, chosen.seed, chosen.report)


if __name__ == "__main__":
    main()
