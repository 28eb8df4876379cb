"""FSDP2 on four slow links: bytes of each collective as the kernel counts them, and seconds.

    python -m benchmarks.fsdp_link            # Linux, root, iproute2

Four processes on four nodes (`benchmarks.nodes`), each behind a link of its own of 100 Mbit/s (or
``--rate``), train a GPT of 4.8 million parameters in float32 that ``fully_shard`` divides among
them: as FSDP2 does, as its HSDP in two islands of two, and with its collectives compressed. All
methods live in the same processes and take their steps in turn, round by round, on unlimited links
and on the slow ones.

Bytes are what the kernel has sent from a node, headers included. A pass under ``no_grad`` gathers
each weight once; a step gathers the blocks' twice, and the rest of a step is its reduce-scatter.

torch's gloo reduces and scatters by an all-reduce, which sends twice what a reduce-scatter needs;
shares are of what it needs. All four processes share the cores of one machine: on one that others
use, start this with `nice -n -15`, so that the links are what a step waits for. Leaves
``benchmarks/fsdp_link.json`` and ``fsdp_link.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from regimes.records import provenance, write_output

PLAIN, HSDP = "dense", "HSDP"
LEVELS: dict[str, tuple[Any, Any]] = {  # of reduced gradients, and of gathered weights
    PLAIN: ("dense", "dense"),
    "scatter:8": (8, "dense"),
    "scatter:4": (4, "dense"),
    "scatter:8+gather:8": (8, 8),
    "scatter:4+gather:8": (4, 8),
}
METHODS = (PLAIN, HSDP, *[method for method in LEVELS if method != PLAIN])
RATE, WARM, STEPS, ROUNDS, NODES = 100, 1, 2, 4, 4
VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 256, 32, 256, 4, 6, 2


def model() -> Any:
    """A GPT with its embedding as its head."""
    from regimes.data.models.transformer import GPT

    return GPT(classes=VOCABULARY, sequence=CONTEXT, width=WIDTH, depth=BLOCKS, heads=HEADS)


# -- on a node -------------------------------------------------------------------------------

_jobs: dict[str, Any] = {}


def take(method: str, steps: int, trains: bool = True) -> dict[str, Any]:
    """Some steps of a method on this process, or passes under ``no_grad``: seconds of one, and what
    it has handed to the collectives, by kind."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    if not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    if method not in _jobs:
        _jobs[method] = _built(method)
    net, optimizer, hook = _jobs[method]
    before = {} if hook is None else dict(hook.world.meter.sent)
    dist.barrier()
    began = time.perf_counter()
    for step in range(steps):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=draw)
        with torch.set_grad_enabled(trains):
            loss = F.cross_entropy(net(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten())
        if trains:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.barrier()
    seconds = (time.perf_counter() - began) / steps
    after = {} if hook is None else hook.world.meter.sent
    return {
        "seconds": seconds,
        "sent": {k: (n - before.get(k, 0)) / steps for k, n in after.items()},
    }


def _built(method: str) -> tuple[Any, Any, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import regimes

    names = ("replicate", "shard")
    islands = method == HSDP
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names) if islands else None
    mesh = mesh or init_device_mesh("cpu", (NODES,))
    torch.manual_seed(0)
    net: Any = model()
    for blocks in [m for m in net.modules() if isinstance(m, torch.nn.ModuleList)]:
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if islands:
        return net, optimizer, None
    scatter, gather = LEVELS[method]
    hook = regimes.attach_shards(
        net,
        mesh,
        optimizer,
        scatter={"level": scatter},
        gather={"level": gather},
        every=10**6,
        record=regimes.RecordOptions(summary=False),
    )
    return net, optimizer, hook


# -- the benchmark ---------------------------------------------------------------------------


def measure(rounds: int, slow: int) -> dict[str, Any]:
    from benchmarks.nodes import Nodes, left, limit, star

    rows: dict[str, dict[str, Any]] = {m: {} for m in METHODS}
    lists: dict[str, dict[str, list[float]]] = {
        m: {"free": [], "slow": [], "bytes": [], "gathers": []} for m in METHODS
    }
    load = [os.getloadavg()[0]]
    with star() as spaces, Nodes(spaces, 900.0) as nodes:
        for method in METHODS:
            nodes.ask("fsdp", method=method, steps=WARM)
        limit(spaces, slow)
        goodput = statistics.median(nodes.ask("goodput", seconds=3.0))
        for turn in range(rounds):
            for rate, kind in ((None, "free"), (slow, "slow")):
                limit(spaces, rate)
                for method in METHODS:
                    if turn == 0 and kind == "slow":
                        before = left(spaces)
                        nodes.ask("fsdp", method=method, steps=1, trains=False)
                        lists[method]["gathers"] += [
                            b - a for a, b in zip(before, left(spaces), strict=True)
                        ]
                    before = left(spaces)
                    answers = nodes.ask("fsdp", method=method, steps=STEPS)
                    rows[method]["counted"] = answers[0]["sent"]
                    lists[method][kind].append(max(answer["seconds"] for answer in answers))
                    if kind == "slow":
                        lists[method]["bytes"] += [
                            (b - a) / STEPS for a, b in zip(before, left(spaces), strict=True)
                        ]
            load.append(os.getloadavg()[0])
            print(f"round {turn}, load {load[-1]:.1f}", flush=True)
    for method in METHODS:
        rows[method] |= lists[method]
    machine = {"cores": os.cpu_count(), "system": platform.platform(), "load": load}
    machine |= {"processor": provenance.processor_name()}
    return {"machine": machine, "goodput": goodput, "rounds": rounds, "rows": rows}


def collectives(row: dict[str, Any], times: float) -> tuple[float, float]:
    """Bytes of a step's all-gathers and of its reduce-scatter, as the kernel has sent them.

    Args:
        times: that a step gathers a weight, in the mean.
    """
    whole, passed = statistics.median(row["bytes"]), statistics.median(row["gathers"])
    return passed * times, whole - passed * times


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """Args: by the rate of the links."""
    text = [
        "This page compares what four processes send in a step of FSDP2 behind slow links, and the "
        "seconds of a step. `python -m benchmarks.fsdp_link` measures; its docstring describes "
        "how.",
        "",
        *_bytes(results[max(results, key=int)]),
    ]
    for rate in sorted(results, key=int, reverse=True):
        text += ["", *_seconds(rate, results[rate])]
    return "\n".join(text) + "\n"


def _bytes(result: dict[str, Any]) -> list[str]:
    rows = result["rows"]
    plain = rows[PLAIN]
    needed = plain["counted"]["scatter"]  # float32 of each weight, as a single gather of it sends
    times = plain["counted"]["weights"] / needed
    gathered, _ = collectives(plain, times)
    text = [
        "| method | MB of a step | of FSDP2's | all-gathers | reduce-scatter |",
        "|---|---:|---:|---:|---:|",
    ]
    for method, row in rows.items():
        whole = statistics.median(row["bytes"])
        cells = [f"{whole / 1e6:.2f}", f"{whole / statistics.median(plain['bytes']):.2f}"]
        if method == HSDP:
            cells += ["", ""]
        else:
            gathers, scatter = collectives(row, times)
            cells += [f"{gathers / gathered:.3f}", f"{scatter / needed:.3f}"]
        text.append(f"| {method} | {' | '.join(cells)} |")
    return [
        *text,
        "",
        "MB: sent by a node, as the kernel counts them, headers and confirmations included. "
        "All-gathers and reduce-scatter: of what FSDP2's all-gathers send, and "
        f"of the {needed / 1e6:.2f} MB that a reduce-scatter in float32 needs. FSDP2's own sends "
        "about twice that, because torch's gloo reduces and scatters by an all-reduce.",
    ]


def _seconds(rate: str, result: dict[str, Any]) -> list[str]:
    rows, machine = result["rows"], result["machine"]
    text = [
        f"| method, at {rate} Mbit/s | s, unlimited | s |",
        "|---|---:|---:|",
    ]
    for method, row in rows.items():
        numbers = (statistics.median(row["free"]), statistics.median(row["slow"]))
        text.append(f"| {method} | {' | '.join(f'{x:.2f}' for x in numbers)} |")
    loads = f"{min(machine['load']):.0f} to {max(machine['load']):.0f}"
    return [
        *text,
        "",
        f"s, unlimited: of a step on unlimited links. Medians of {result['rounds']} rounds of "
        f"{STEPS} steps. A link passes {result['goodput'] / 1e6:.1f} Mbit/s of data. "
        f"{machine['processor']}, {machine['cores']} cores that four processes and other programs "
        f"share (load average {loads}).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    parser.add_argument("--rate", type=int, default=RATE, help="Mbit/s")
    chosen = parser.parse_args()
    path = chosen.out / "fsdp_link.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[str(chosen.rate)] = measure(chosen.rounds, chosen.rate)
    write_output(path, json.dumps(results, indent=1) + "\n")
    write_output(chosen.out / "fsdp_link.md", markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
