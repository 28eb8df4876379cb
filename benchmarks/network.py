"""The cost model against reality: training on four nodes with limited links (`benchmarks.nodes`).

    python -m benchmarks.network            # Linux, root, iproute2; 6 min on two idle cores

Four processes of one worker each stay alive and train (`training.loop.run`, gloo over TCP): each
method at each bandwidth, in short epochs that alternate between *unlimited* and limited links. What
is predicted for a limited epoch comes from

- what is no network: the step of the unlimited epochs before and after, less the collectives as
  predicted for unlimited links. Four processes on one machine share its cores and wait for the
  slowest of them, and for whatever else runs there, in neighbouring epochs alike;
- traffic: the record of the limited epoch;
- bandwidth: goodput of plain TCP sockets, all four nodes sending to the next at once;
- latency: an all-reduce of 64 numbers through gloo, divided by its hops; just before each method.

Nothing is fitted to the measured steps. Seconds are process 0's without evaluation and
checkpoints; the error is the median over the limited epochs. At the lowest bandwidth some methods
train from start to end as well, limited throughout.
"""

from __future__ import annotations

import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.link_pages import measure_and_write
from benchmarks.nodes import NODES, Nodes, limit, star
from regimes.base.config import RunConfig, override, to_dict
from regimes.cost.cases import recorded_work
from regimes.cost.network import ALGORITHMS, Network
from regimes.presets import get_preset
from regimes.records import Record, load

RATES = (20, 100, 1000)  # Mbit/s per link and direction
EPOCHS = 10  # limited epochs of 6 steps
WHOLE = {"dense": 1, "rank 4": 3, "ACCORDION": 3}  # trained from start to end, so often
Row = dict[str, Any]


def methods(epochs: int, images: int) -> dict[str, RunConfig]:
    """Digits, VGG-7 of 290 k parameters, steps of 4 workers x 8 images."""
    base = override(
        get_preset("smoke"),
        [
            "model.width=32",
            f"data.train_size={images}",
            "data.test_size=300",
            "optimizer.lr=0.1",
            "optimizer.warmup_from=0.05",
            f"epochs={epochs}",
            f"checkpoint_every={epochs}",
            f"optimizer.decay_epochs=[{2 * epochs // 3}]",
        ],
    )
    static = {
        level: replace(base, policy={"name": "static", "level": level})
        for level in ("dense", "low", "high")
    }
    topk = replace(static["high"], compressor={"name": "topk"}, levels={"low": 10, "high": 1})
    accordion = replace(base, policy={"name": "accordion", "interval": 2})
    return {
        "dense": static["dense"],
        "rank 4": static["low"],
        "rank 1": static["high"],
        "TopK 1 %": topk,
        "ACCORDION": accordion,
    }


# -- measurements ----------------------------------------------------------------------------


def goodput(nodes: Nodes) -> float:
    """Bits per second of each link while all are busy: the median node's."""
    return statistics.median(nodes.ask("goodput", seconds=2.5))


def latency(nodes: Nodes) -> float:
    """Seconds per hop of a short all-reduce."""
    return statistics.median(nodes.ask("echo", times=60, size=64)) / ALGORITHMS["gloo"][
        "mean"
    ].hops(NODES)


def steps(run: Record) -> list[float]:
    """Measured seconds per step in each epoch."""
    parts = run.epochs[["seconds_compute", "seconds_compress", "seconds_communicate"]]
    return (parts.sum(axis=1) / run.epochs["steps"]).tolist()


def compare(rate: int, name: str, run: Record, free: Network, limited: Network) -> Row:
    """One row: limited epochs (1, 3, ...) against predictions from their unlimited neighbours."""
    seconds, works = steps(run), [work for _, work in recorded_work(run)]
    clocks = run.epochs[["seconds_compute", "seconds_compress"]].sum(axis=1) / run.epochs["steps"]
    own = clocks.tolist()
    rest = [
        max(o, s - float(work.communicate(free, NODES, "gloo")))
        for o, s, work in zip(own, seconds, works, strict=True)
    ]
    measured, predicted, bare = [], [], []
    for now in range(3, len(works) - 1, 2):  # the first epochs warm up
        collectives = float(works[now].communicate(limited, NODES, "gloo"))
        measured.append(seconds[now])
        predicted.append(collectives + (rest[now - 1] + rest[now + 1]) / 2)
        bare.append(collectives + (own[now - 1] + own[now + 1]) / 2)
    low, centre, high = statistics.quantiles(measured, n=4)
    return {
        "mbit_per_s": rate,
        "method": name,
        "epochs": len(measured),
        "measured": centre,
        "quartiles": [low, high],
        "predicted": statistics.median(predicted),
        "error": statistics.median(p / m - 1 for p, m in zip(predicted, measured, strict=True)),
        "error_without_waiting": statistics.median(
            b / m - 1 for b, m in zip(bare, measured, strict=True)
        ),
        "communicate": statistics.median(
            float(work.communicate(limited, NODES, "gloo")) for work in works[3::2]
        ),
        "bytes_per_step": statistics.fmean(sum(work.bytes.values()) for work in works[3::2]),
        "unlimited": vars(free),
        "limited": vars(limited),
        "load": os.getloadavg()[0],
    }


def measure(rates: Sequence[int], epochs: int) -> dict[str, Any]:
    """Every method at every bandwidth, then whole trainings at the lowest."""
    rows: list[Row] = []
    accuracy: dict[str, float] = {}
    began = time.monotonic()
    with star() as names, Nodes(names) as nodes, tempfile.TemporaryDirectory() as scratch:

        def train(name: str, config: RunConfig, *links: int | None) -> Record:
            out = f"{scratch}/{name}-{links}-{config.epochs}"
            nodes.ask("train", config=to_dict(config), out=out, names=names, rates=links)
            return load(out)

        for rate in rates:
            bandwidth = {}
            for link in (None, rate):
                limit(names, link)
                bandwidth[link] = goodput(nodes)
            for name, config in methods(2 * epochs + 3, 200).items():
                limit(names, None)
                delay = latency(nodes)
                run = train(name, config, None, rate)
                links = [Network(bandwidth[link], delay) for link in (None, rate)]
                rows.append(compare(rate, name, run, *links))
                print(line(rows[-1]), flush=True)
        times: dict[str, list[float]] = {name: [] for name in WHOLE}
        for again in range(max(WHOLE.values())):  # in turn, because the machine's load changes
            for name in (name for name, repeats in WHOLE.items() if again < repeats):
                run = train(f"{name}-{again}", methods(10, 400)[name], min(rates))
                times[name].append(float((run.epochs["steps"] * steps(run)).sum()))
                accuracy[name] = float(run.epochs["metric"].iloc[-1])
    errors = [abs(row["error"]) for row in rows]
    return {
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "minutes": (time.monotonic() - began) / 60,
        },
        "nodes": NODES,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "rows": rows,
        "whole": [
            {
                "method": name,
                "seconds": statistics.median(each),
                "each": each,
                "accuracy": accuracy[name],
            }
            for name, each in times.items()
        ],
    }


# -- the report ------------------------------------------------------------------------------

HEAD = (
    "| Mbit/s per link | method | kB / step | measured ms / step | quartiles | predicted | error |",
    "|---:|---|---:|---:|---|---:|---:|",
)


def line(row: Row) -> str:
    """A row of the Markdown table."""
    low, high = (f"{1e3 * q:.0f}" for q in row["quartiles"])
    return (
        f"| {row['mbit_per_s']} | {row['method']} | {row['bytes_per_step'] / 1e3:.1f} | "
        f"{1e3 * row['measured']:.1f} | {low} to {high} | {1e3 * row['predicted']:.1f} | "
        f"{100 * row['error']:+.0f} % |"
    )


def markdown(result: dict[str, Any]) -> str:
    """The table, how well the model did, and the whole trainings at the lowest bandwidth."""
    rows, whole = result["rows"], result["whole"]
    bare = statistics.median(abs(row["error_without_waiting"]) for row in rows)
    loads = [row["load"] for row in rows]
    slowest = min(row["mbit_per_s"] for row in rows)
    ours = next(row["seconds"] for row in whole if row["method"] == "ACCORDION")
    text = [
        "This page compares predicted and measured times of a training step on four nodes "
        "with limited links. `python -m benchmarks.network` measures; its docstring describes"
        " the method.",
        "",
        *HEAD,
        *map(line, rows),
        "",
        f"Epochs per row: {rows[0]['epochs']}. Median error "
        f"{100 * result['median_error']:.0f} %, largest {100 * result['largest_error']:.0f} %; "
        f"median {100 * bare:.0f} % if waiting for the slowest worker is left out. Load average "
        f"{min(loads):.1f} to {max(loads):.1f} (4 of it the nodes') on "
        f"{result['machine']['cores']} cores.",
        "",
        f"Training from start to end at {slowest} Mbit/s (120 steps; the same seed, in turn):",
        "",
        "| method | runs | median seconds | range | ACCORDION is faster by | accuracy |",
        "|---|---:|---:|---|---:|---:|",
    ]
    text += [
        f"| {row['method']} | {len(row['each'])} | {row['seconds']:.1f} | {min(row['each']):.1f} "
        f"to {max(row['each']):.1f} | {row['seconds'] / ours:.2f} | {100 * row['accuracy']:.0f} % |"
        for row in whole
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    measure_and_write("network", __doc__, measure, markdown, rates=RATES, epochs=EPOCHS)


if __name__ == "__main__":
    main()
