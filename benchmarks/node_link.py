"""Four nodes of two processes with slow links between: bytes and seconds of a step of DDP.

    python -m benchmarks.node_link [--nodes 2]           # Linux, root, iproute2

Two processes (`benchmarks.nodes`) stand for the devices of each node. The link of each node to the
others is limited in both directions; within a node nothing is limited. A GPT of 2 million
parameters is trained with DistributedDataParallel: by DDP's own all-reduce, by torch's hooks, and
by `regimes.attach`, once with each process as a worker (``nodes=False``, "flat") and once with each
node (``nodes=4``). All methods live in the same processes and take their steps in turn, round by
round.

- *measured*: what the kernel has sent from the first node over its link, headers included;
- *predicted*: `regimes cost --nodes 4 --gpus 2`, with ``--worker device`` or ``node``: bytes from
  the shapes alone; seconds from the step as it was measured on a link without a limit.

All of them share the cores of one machine, so that a step takes longer than on nodes of their own.
Leaves ``benchmarks/node_link.json`` and ``node_link.md``.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.link_pages import measure_and_write
from regimes.records import provenance

DDP = "DDP of torch"
HALF = "fp16 hook of torch"  # its PowerSGD hook leaves the order of collectives to callbacks
METHODS: dict[str, tuple[str, Any]] = {  # compressor and level, as `regimes cost` names them
    "dense": ("dense", "dense"),
    "8 bits": ("quantised-all-reduce", 8),
    "4 bits": ("quantised-all-reduce", 4),
    "PowerSGD 4": ("powersgd", 4),
}
WAYS = {"flat": "device", "nodes": "node"}  # the worker, as `regimes cost` names it
WARM, STEPS, ROUNDS, RATES = 3, 4, 5, (1000, 100)
NODES, EACH, GOAL = 4, 2, 0.10
SEQUENCE, BATCH, VOCABULARY = 32, 2, 256


def rows_of() -> list[str]:
    """The names of all methods."""
    return [DDP, HALF, *(f"{method}, {way}" for method in METHODS for way in WAYS)]


# -- on a process ----------------------------------------------------------------------------

_jobs: dict[str, Any] = {}


def take(method: str, steps: int, nodes: int = NODES) -> tuple[float, float]:
    """Some steps of a method on this process: seconds of one, and CPU seconds of this process."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    if not dist.is_initialized():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    if method not in _jobs:
        _jobs[method] = _built(method, nodes)
    net, optimizer = _jobs[method][:2]
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    for step in range(steps):
        draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=draw)
        optimizer.zero_grad()
        F.cross_entropy(net(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
    worked = time.process_time() - worked  # the barrier may spin
    dist.barrier()
    return (time.perf_counter() - began) / steps, worked / steps


def _built(method: str, nodes: int) -> tuple[Any, ...]:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    import regimes
    from benchmarks.island_link import model

    torch.manual_seed(0)
    net = DistributedDataParallel(model())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if method == HALF:
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    name, _, way = method.partition(", ")
    if name not in METHODS:
        return net, optimizer
    compressor, level = METHODS[name]
    hook = regimes.attach(
        net,
        optimizer,
        compressor={"name": compressor, **({} if level == "dense" else {"level": level})},
        policy="static" if level == "dense" else None,
        every=10**6,
        nodes=nodes if way == "nodes" else False,
        record=regimes.RecordOptions(summary=False),
    )
    return net, optimizer, hook


# -- the benchmark ---------------------------------------------------------------------------


def predict(rows: dict[str, dict[str, Any]], nodes: int) -> None:
    """Bytes over the link in a step, and seconds at each rate, by `regimes cost`."""
    from regimes.cost import from_model, methods
    from regimes.cost.network import Network
    from regimes.cost.options import JobOptions

    for method, (name, level) in METHODS.items():
        parsed = methods.parse_method(name if level == "dense" else f"{name}:{level}")
        for way, worker in WAYS.items():
            row = rows[f"{method}, {way}"]
            options = JobOptions(
                "benchmarks.island_link:model",
                step="1s",
                nodes=nodes,
                gpus=EACH,
                worker=worker,  # type: ignore[arg-type]
            )
            job = replace(from_model.make_job(options, "gloo"), within=Network(1e12))
            free = statistics.median(row["seconds"]["None"])
            work = replace(methods.method_work(job, parsed), compute=free, compress=0.0)
            row["predicted"] = float(job.bytes(work))
            row["expected"] = {
                rate: float(replace(job, between=Network(1e6 * float(rate))).seconds(work))
                for rate in row["seconds"]
                if rate != "None"
            }


def measure(rounds: int, rates: Sequence[int], nodes: int) -> dict[str, Any]:
    from benchmarks.nodes import Nodes, crossed, islands, limit_trunk

    names = rows_of()
    rows: dict[str, dict[str, Any]] = {m: {"seconds": {}, "cpu": {}, "measured": {}} for m in names}
    with islands(0.0, nodes, EACH) as (spaces, hubs), Nodes(spaces, 600.0) as running:
        for method in names:
            running.ask("node_link", method=method, steps=WARM, nodes=nodes)
        for rate in (None, *rates):
            limit_trunk(hubs, rate)
            for turn in range(rounds):
                for method in names:
                    before = crossed(hubs[0])
                    taken = running.ask("node_link", method=method, steps=STEPS, nodes=nodes)
                    sent = (crossed(hubs[0]) - before) / STEPS
                    rows[method]["measured"].setdefault(str(rate), []).append(sent)
                    rows[method]["seconds"].setdefault(str(rate), []).append(
                        max(x[0] for x in taken)
                    )
                    rows[method]["cpu"].setdefault(str(rate), []).append(sum(x[1] for x in taken))
                print(f"link {rate}, round {turn}", flush=True)
    predict(rows, nodes)
    machine: dict[str, Any] = {"cores": os.cpu_count(), "system": platform.platform()}
    machine |= {"processor": provenance.processor_name(), "load": os.getloadavg()[0]}
    shape = {"nodes": nodes, "each": EACH, "rounds": rounds, "steps": STEPS, "rates": rates}
    return {"machine": machine, **shape, "rows": rows}


def markdown(result: dict[str, Any]) -> str:
    rows, rates, machine = result["rows"], result["rates"], result["machine"]
    slow = str(rates[-1])
    text = [
        f"This page compares DDP on {result['nodes']} nodes of {result['each']} processes: with "
        "each process as a worker (flat) and with each node, beside DDP and torch's hooks. "
        "`python -m benchmarks.node_link` measures; its docstring describes how.",
        "",
        f"| method | kB over the link, {slow} Mbit/s | kB predicted | predicted / measured "
        "| CPU, of DDP's |"
        + "".join(f" ms at {rate} Mbit/s | of DDP's | predicted |" for rate in rates),
        "|---|---:|---:|---:|---:|" + "---:|---:|---:|" * len(rates),
    ]
    errors: dict[str, float] = {}
    for method, row in rows.items():
        measured = statistics.median(row["measured"][slow])
        known = "predicted" in row
        errors |= {method: row["predicted"] / measured - 1} if known else {}
        cells = [method, f"{measured / 1e3:.0f}"]
        cells += [f"{row['predicted'] / 1e3:.0f}" if known else "", ""]
        cells[-1] = f"{row['predicted'] / measured:.3f}" if known else ""
        cpu = statistics.median(
            a / b for a, b in zip(row["cpu"][slow], rows[DDP]["cpu"][slow], strict=True)
        )
        cells.append(f"{cpu:.2f}")
        for rate in map(str, rates):
            own, dense = row["seconds"][rate], rows[DDP]["seconds"][rate]
            share = statistics.median(a / b for a, b in zip(own, dense, strict=True))
            cells += [f"{1e3 * statistics.median(own):.0f}", f"{share:.2f}"]
            cells.append(f"{1e3 * row['expected'][rate]:.0f}" if known else "")
        text.append("| " + " | ".join(cells) + " |")
    worst = max(errors, key=lambda m: abs(errors[m]))
    within = sum(abs(error) <= GOAL for error in errors.values())
    text += [
        "",
        f"Predicted bytes are within {100 * GOAL:.0f} % for {within} of {len(errors)} methods; the "
        f"largest difference is {100 * errors[worst]:+.1f} %, of {worst}. The kernel counts "
        "headers and confirmations, which no prediction has. CPU: seconds of all processes in a "
        f"step at {slow} Mbit/s, divided by those of {DDP} in that round. Seconds are medians of "
        f"{result['rounds']} rounds of {result['steps']} steps; predicted ones add the link to "
        "the step as it was on a link without a limit. "
        f"{machine['processor']}, {machine['cores']} cores that all processes share "
        f"(load average {machine['load']:.0f}).",
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    measure_and_write(
        "node_link", __doc__, measure, markdown, rounds=ROUNDS, rates=RATES, nodes=NODES
    )


if __name__ == "__main__":
    main()
