"""Two islands with a slow link: bytes of a step as counted, measured and predicted; seconds saved.

    python -m benchmarks.island_link            # Linux, root, iproute2

Four processes on four nodes (`benchmarks.nodes`), two islands of two with one limited link between
them. A GPT of 2 million parameters is sharded by `fully_shard` within each island: by torch's own
HSDP: its dense gradient crosses the link, and with `regimes.attach(..., replicas=...)`, which
compresses it. All methods live in the same processes and take their steps in turn, round by round.

- *counted*: what the hook's meter says an island has handed to the collectives, as these send it;
- *measured*: what the kernel has sent from an island over the link, headers included;
- *predicted*: `regimes cost --model ... --nodes 2 --gpus 1`, from the shapes alone: a replica of
  two devices sends what one device would.

All four share the cores of one machine, so compute and compression take longer than on nodes of
their own; ratios of seconds are medians over the rounds. Leaves ``benchmarks/island_link.json`` and
``island_link.md``.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.link_pages import measure_and_write
from regimes.records import provenance

HSDP = "HSDP of torch"
METHODS: dict[str, tuple[str, Any]] = {  # compressor and level, as `regimes cost` names them
    "dense": ("dense", "dense"),
    "half": ("cast", "bf16"),
    "8 bits": ("quantised-all-reduce", 8),
    "4 bits": ("quantised-all-reduce", 4),
    "PowerSGD 4": ("powersgd", 4),
    "PowerSGD 1": ("powersgd", 1),
    "TopK 1 %": ("topk", 1),
}
WARM, STEPS, ROUNDS, RATES = 2, 4, 5, (100, 20)
GOAL, BUSY = 0.07, 8
VOCABULARY, CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 256, 32, 192, 4, 4, 2


def model() -> Any:
    """A GPT with its embedding as its head."""
    from regimes.data.models.transformer import GPT

    return GPT(classes=VOCABULARY, sequence=CONTEXT, width=WIDTH, depth=BLOCKS, heads=HEADS)


# -- on a node -------------------------------------------------------------------------------

_jobs: dict[str, Any] = {}


def take(method: str, steps: int) -> dict[str, Any]:
    """Some steps of a method on this process: seconds, and what it has handed to the collectives
    between islands, by kind."""
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
        optimizer.zero_grad()
        F.cross_entropy(net(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten()).backward()
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

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    net: Any = model()
    over = mesh if method == HSDP else mesh["shard"]
    for blocks in [m for m in net.modules() if isinstance(m, torch.nn.ModuleList)]:
        for block in blocks:
            fully_shard(block, mesh=over)
    fully_shard(net, mesh=over)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if method == HSDP:
        return net, optimizer, None
    name, level = METHODS[method]
    hook = regimes.attach_replicas(
        net,
        mesh["replicate"],
        optimizer,
        every=10**6,
        policy="static",
        compressor={"name": name, "levels": {"low": level}},
    )
    return net, optimizer, hook


# -- the benchmark ---------------------------------------------------------------------------


def predictions() -> dict[str, float]:
    """Bytes over the link in a step, by `regimes cost` from the shapes alone."""
    from regimes.cost import from_model, methods
    from regimes.cost.options import JobOptions

    options = JobOptions("benchmarks.island_link:model", step="1s", gpus=1)
    job = from_model.make_job(options, "gloo")
    found = {}
    for method, (name, level) in METHODS.items():
        text = name if level == "dense" else f"{name}:{level}"
        frame = methods.tabulate_methods(job, [methods.parse_method(text)])
        found[method] = float(frame["bytes"].iloc[-1])
    return {HSDP: found["dense"], **found}


def crossing(sent: dict[str, float]) -> float:
    """Bytes over the link, from what the two processes of an island hand to the collectives."""
    from regimes.cost.network import Work

    kinds = {k: n for k, n in sent.items() if n and k not in ("sum", "join")}
    return float(Work(0.0, 0.0, dict.fromkeys(kinds, 1.0), kinds).crossing(2, "gloo"))


def measure(rounds: int, rates: Sequence[int]) -> dict[str, Any]:
    from benchmarks.nodes import Nodes, crossed, islands, limit_trunk

    names = [HSDP, *METHODS]
    rows: dict[str, dict[str, Any]] = {m: {"seconds": {}, "measured": {}} for m in names}
    with islands() as (spaces, hubs), Nodes(spaces, 600.0) as nodes:
        for method in names:
            nodes.ask("island", method=method, steps=WARM)
        for rate in (None, *rates):
            limit_trunk(hubs, rate)
            times: dict[str, list[float]] = {m: [] for m in names}
            for turn in range(rounds):
                for method in names:
                    before = crossed(hubs[0])
                    answers = nodes.ask("island", method=method, steps=STEPS)
                    row = rows[method]
                    sent = (crossed(hubs[0]) - before) / STEPS
                    row["measured"].setdefault(str(rate), []).append(sent)
                    both = [answers[0]["sent"], answers[1]["sent"]]
                    total = {k: sum(sent[k] for sent in both) for k in both[0]}
                    row["counted"] = crossing(total) if total else None
                    row["within"] = sum(total.get(k, 0) for k in ("sum", "join"))
                    times[method].append(max(answer["seconds"] for answer in answers))
                print(f"link {rate}, round {turn}", flush=True)
            for method in names:
                rows[method]["seconds"][str(rate)] = times[method]
    return finished(rows, rounds, rates)


def finished(rows: dict[str, Any], rounds: int, rates: Sequence[int]) -> dict[str, Any]:
    """With the predictions, and the machine."""
    for method, expected in predictions().items():
        rows[method]["predicted"] = expected
    machine = {"cores": os.cpu_count(), "system": platform.platform()}
    machine |= {"processor": provenance.processor_name(), "load": os.getloadavg()[0]}
    return {"machine": machine, "rounds": rounds, "steps": STEPS, "rates": rates, "rows": rows}


def markdown(result: dict[str, Any]) -> str:
    rows, rates, machine = result["rows"], result["rates"], result["machine"]
    link, busy = rates[0], machine["load"] > BUSY * machine["cores"]
    rates = [] if busy else rates  # seconds of a crowded machine show its crowd
    text = [
        "This page compares the bytes of a step between two islands of shards as counted, "
        "measured and predicted, and the seconds of a step. `python -m benchmarks.island_link` "
        "measures; its docstring describes how.",
        "",
        f"| method | kB counted | kB measured, {link} Mbit/s | kB predicted | "
        "measured / counted | predicted / measured |"
        + "".join(f" s at {rate} Mbit/s | saved |" for rate in rates),
        "|---|---:|---:|---:|---:|---:|" + "---:|---:|" * len(rates),
    ]
    for method, row in rows.items():
        counted, measured = row["counted"], statistics.median(row["measured"][str(link)])
        cells = [
            method,
            "" if counted is None else f"{counted / 1e3:.1f}",
            f"{measured / 1e3:.1f}",
            f"{row['predicted'] / 1e3:.1f}",
            "" if counted is None else f"{measured / counted:.3f}",
            f"{row['predicted'] / measured:.3f}",
        ]
        for rate in rates:
            own, dense = row["seconds"][str(rate)], rows[HSDP]["seconds"][str(rate)]
            saved = statistics.median(1 - a / b for a, b in zip(own, dense, strict=True))
            cells += [f"{statistics.median(own):.2f}", f"{100 * saved:.0f} %"]
        text.append("| " + " | ".join(cells) + " |")
    errors = {
        m: abs(row["predicted"] / statistics.median(row["measured"][str(link)]) - 1)
        for m, row in rows.items()
    }
    worst = max(errors, key=lambda m: errors[m])
    within = sum(error <= GOAL for error in errors.values())
    seconds = (
        f"Saved: seconds of a step, of those of {HSDP} in the same round; medians of "
        f"{result['rounds']} rounds of {result['steps']} steps."
    )
    if busy:
        seconds = "Seconds are left out, because other programs had most of the machine."
    text += [
        "",
        f"Predictions within {100 * GOAL:.0f} %: {within} of {len(rows)}; the largest error is "
        f"{100 * errors[worst]:.1f} %, of {worst}. The kernel counts headers and confirmations, "
        f"which no prediction has; small messages have more of them. {seconds} "
        f"{machine['processor']}, {machine['cores']} cores that four processes and others share "
        f"(load average {machine['load']:.0f}).",
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    measure_and_write("island_link", __doc__, measure, markdown, rounds=ROUNDS, rates=RATES)


if __name__ == "__main__":
    main()
