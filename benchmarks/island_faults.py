"""Islands of shards killed at random moments and continued from torch's distributed checkpoints.

    python -m benchmarks.island_faults --times 25   # 100 kills; half an hour on two idle cores

Two islands of two processes train a small network in float64 for 24 steps: PowerSGD, ACCORDION,
a record, and `torch.distributed.checkpoint` every third step, also within a unit of four. One
process is killed (SIGKILL) at a random step, or while the job starts; after the others have ended,
or after 20 seconds, all that is left is killed, as torchrun does. The job is then continued from
its newest whole checkpoint

- on the same mesh: equal bits of the weights and equal bytes of the record as without the kill;
- on another number of shards (two islands of one, two of three): equal weights to 1e-10;
- on another number of islands (four, one or three): before the first step, the mean over islands of
  the residuals is the undisturbed job's at that checkpoint, to 1e-12.

Leaves ``benchmarks/island_faults.json`` and ``island_faults.md``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from regimes.records import write_output

STEPS, UNIT, SAVE, BATCH = 24, 4, 3, 24
HERE = (2, 2)  # islands, shards
MESHES = {  # where the job goes on
    "the same mesh": [HERE],
    "another number of shards": [(2, 1), (2, 3)],
    "another number of islands": [(4, 1), (1, 2), (3, 1)],
}
ALONE = 20.0  # seconds in which the others may end by themselves
PATIENCE = 400.0
PRELOAD = ["torch.distributed.checkpoint.state_dict", "torch._dynamo", "regimes.hook.ddp"]
PRELOAD += ["torch.distributed.fsdp"]


# -- the job ---------------------------------------------------------------------------------


def job(rank: int, mesh: tuple[int, int], out: str, meet: str, saved: str | None) -> None:
    """One process: from the newest checkpoint to the last step.

    Args:
        saved: the folder of the checkpoints of another mesh, which are only read.
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
    dist.init_process_group("gloo", Path(meet).as_uri(), rank=rank, world_size=mesh[0] * mesh[1])
    both = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(3)
    net: Any = torch.nn.Sequential(
        torch.nn.Linear(6, 10),
        torch.nn.Tanh(),
        torch.nn.Linear(10, 7),
        torch.nn.Tanh(),
        torch.nn.Linear(7, 5),
    ).double()
    for part in (net[0], net[2]):
        fully_shard(part, mesh=both["shard"])
    fully_shard(net, mesh=both["shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    hook = regimes.attach_replicas(
        net,
        both["replicate"],
        optimizer,
        every=UNIT,
        policy={"name": "accordion", "interval": 1, "eta": 0.1},
        record=f"{out}/run",
        timeout=60,
        compressor=regimes.PowerSGD(rank={"low": 2, "high": 1}),
    )

    def parts(folder: Path | None = None) -> dict[str, Any]:
        model, states = get_state_dict(net, optimizer)
        own = hook.sharded_state(saved=folder if saved else None)
        return {"model": model, "optimizer": states, "hook": own}

    def means(done: int) -> None:
        """The mean over islands of what this process has of the residuals."""
        found = []
        for state in hook.reducer.states:
            if state.residual is not None:
                mean = state.residual[0].clone()
                dist.all_reduce(mean, group=both["replicate"].get_group())
                found.append(mean / mesh[0])
        torch.save(found, Path(out, f"means-{done}-{both['shard'].get_local_rank()}"))

    first = newest(Path(saved or out))
    if first:
        folder = Path(saved or out, str(first))
        dcp.load(state := parts(folder), checkpoint_id=folder)
        model, states = state["model"], state["optimizer"]
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)
        if saved:
            means(first)
    if rank == 0:
        Path(out, "first").write_text(str(first))
    for step in range(first, STEPS):
        if rank == 0:
            Path(out, "step").write_text(str(step))
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, 6, generator=draw, dtype=torch.float64).chunk(dist.get_world_size())
        optimizer.zero_grad()
        F.cross_entropy(net(x[rank]), x[rank].argmax(1) % 5).backward()
        optimizer.step()
        if (step + 1) % SAVE == 0 and not saved:
            if mesh == HERE and out.endswith("whole"):
                means(step + 1)
            dcp.save(parts(), checkpoint_id=Path(out, str(step + 1)))
    hook.close()
    weights = [p.full_tensor().detach() for p in net.parameters()]
    if rank == 0:
        torch.save(weights, Path(out, "weights"))
    dist.destroy_process_group()


def newest(folder: Path) -> int:
    """Steps of the newest whole checkpoint; the metadata is written last."""
    return max((int(f.parent.name) for f in folder.glob("*/.metadata")), default=0)


class Group:
    """The processes of a job."""

    def __init__(self, mesh: tuple[int, int], out: Path, saved: Path | None = None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "step").unlink(missing_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.out, meet = out, tempfile.mktemp(dir=out)
        rest = (mesh, str(out), meet, None if saved is None else str(saved))
        ranks = range(mesh[0] * mesh[1])
        self.processes = [context.Process(target=job, args=(rank, *rest)) for rank in ranks]
        for process in self.processes:
            process.start()

    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def step(self) -> int:
        """The step under way; -1 before the first."""
        try:
            return int((self.out / "step").read_text())
        except (FileNotFoundError, ValueError):
            return -1

    def ends(self, seconds: float = PATIENCE) -> list[int | None]:
        """Exit codes once all have ended, or after so many seconds, when they are killed."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
            process.join()
        return codes


# -- kills -----------------------------------------------------------------------------------


def kill(group: Group, draw: random.Random) -> int | None:
    """Kill one process at a random moment; the step, or None if the job had ended."""
    step = draw.randrange(-1, STEPS)
    while group.alive() and group.step() < step:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 1.0 if step < 0 else 0.05))
    victim = draw.choice(group.processes)
    if not victim.is_alive() or victim.pid is None:
        return None
    os.kill(victim.pid, signal.SIGKILL)
    return step


def continued(out: Path, whole: Path, mesh: tuple[int, int]) -> str:
    """What came of going on."""
    import torch

    saved = None if mesh == HERE else out
    place = out if saved is None else out / "-".join(map(str, mesh))
    begun = newest(out)
    codes = Group(mesh, place, saved).ends()
    if any(code != 0 for code in codes):
        return f"NOT continued: exit codes {codes}"
    ours, theirs = (torch.load(folder / "weights") for folder in (place, whole))
    if mesh == HERE:
        equal = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        lines = [(folder / "run" / "epochs.jsonl").read_bytes() for folder in (out, whole)]
        return "the same bits and bytes" if equal and lines[0] == lines[1] else "OTHER BITS"
    if mesh[0] == HERE[0] or not begun:  # from the start: no residual to divide
        near = all(
            torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(ours, theirs, strict=True)
        )
        if mesh[0] == HERE[0]:
            return "the same numbers" if near else "OTHER NUMBERS"
        return "from the start: no residual yet"
    mine, before = (
        joined([torch.load(folder / f"means-{begun}-{i}") for i in range(n)])
        for folder, n in ((place, mesh[1]), (whole, HERE[1]))
    )
    near = all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(mine, before, strict=True))
    return "the same mean of residuals" if near and mine else "ANOTHER MEAN"


def joined(by_shard: list[list[Any]]) -> list[Any]:
    """Whole residuals, from the rows of each shard."""
    import torch

    return [torch.cat(rows) for rows in zip(*by_shard, strict=True)]


def measure(times: int, seed: int, report: Path) -> None:
    """Kill and go on so often on each kind of mesh; twice as often on the same one."""
    began, rows = time.monotonic(), dict[str, Counter[str]]()
    alone: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch, "whole")
        assert Group(HERE, whole).ends() == [0] * 4
        for name, meshes in MESHES.items():
            draw, rows[name] = random.Random(f"{seed} {name}"), Counter()
            number = missed = 0
            while rows[name].total() < times * (2 if meshes == [HERE] else 1):
                out = Path(scratch, f"{len(rows)}-{number + missed}")
                group = Group(HERE, out)
                step = kill(group, draw)
                codes = group.ends(ALONE)
                if step is None:
                    assert codes == [0] * 4, codes
                    missed += 1
                    continue
                hung = "hung later" if step >= 0 else "hung at the start"
                alone[hung if None in codes else "ended"] += 1
                outcome = continued(out, whole, meshes[number % len(meshes)])
                number += 1
                rows[name][outcome] += 1
                print(f"{name}, step {step}: {outcome}", flush=True)
                write(rows, alone, seed, (time.monotonic() - began) / 60, report)


def write(
    rows: dict[str, Counter[str]], alone: Counter[str], seed: int, minutes: float, report: Path
) -> None:
    """All outcomes so far, as JSON and as a page."""
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "minutes": minutes}
    result = {"seed": seed, "machine": machine, "others": dict(alone)}
    result |= {"outcomes": {name: dict(found) for name, found in rows.items()}}
    write_output(report, json.dumps(result, indent=1) + "\n")
    total = sum(found.total() for found in rows.values())
    hung = alone["hung at the start"] + alone["hung later"]
    lines = [
        "This page shows what comes of a sharded job that is killed and continued from torch's "
        "distributed checkpoints. `python -m benchmarks.island_faults` kills one of four processes "
        "at a random moment; its docstring describes the comparisons.",
        "",
        "| continued on | kills | outcome |",
        "|---|---:|---|",
    ]
    for name, found in rows.items():
        outcomes = "; ".join(f"{n} {what}" for what, n in found.most_common())
        lines.append(f"| {name} | {found.total()} | {outcomes} |")
    lines += [
        "",
        f"{total} kills, seed {seed}. After {alone['ended']} of them the other processes ended by "
        f"themselves within {ALONE:.0f} s; after {hung} they had to be killed "
        f"({alone['hung at the start']} of these kills came before the first step).",
    ]
    write_output(report.with_suffix(".md"), "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, default=Path("benchmarks/island_faults.json"))
    chosen = parser.parse_args()
    measure(chosen.times, chosen.seed, chosen.report)


if __name__ == "__main__":
    main()
