"""A policy that follows the link beside every constant level: seconds and loss on changing links.

    python -m benchmarks.link_traces            # Linux, root, iproute2; 20 min

Two processes (gloo), each in a network namespace with a link of its own (`benchmarks.nodes`), train
a GPT of 0.4 million parameters for 200 steps, in 40 units of 5: with PowerSGD at ranks 1, 4 and 16
throughout, and with ``policy = {"name": "link", "exposed": 0.1}`` between the same ranks. While
they train, process 0 replays a trace: it sets both ends of both links by ``tc tbf``, from the
training's first step on, in seconds of the clock. All trainings of a trace have the same seed,
batches and learning rate; a repeat has the next seed. Seconds are of the steps, without evaluation;
the loss is of the test text in bits per byte; "exposed" is what the steps have waited for the
exchange, of all their seconds.

The policy has run here before with another rule, which counted all waiting. It stayed at rank 1:
there a step waits 12 to 18 % already, mostly because two processes on two cores wait for each
other, and rank 4 was about as fast and 0.3 to 0.5 bits better. Now only what a step waits for its
bytes counts. Predictions, written before this rule had trained anywhere:

1. On the constant link the policy changes its level at most twice in 40 decisions, as its rule says
   (one change at the start is allowed before 20 decisions have passed).
2. Beside rank 1, whose bytes take next to no time, it exposes at most 0.1 more on each trace
   without an outage. On the sawtooth that is doubtful: a tooth lasts only a few decisions.
3. It takes at most 1.2 times the seconds of rank 1 on each trace without an outage.
4. Its loss is between rank 16's and rank 1's on each trace without an outage.
5. On the step, the sawtooth and the day no constant rank has both fewer seconds and a lower loss,
   in the mean over repeats. On the constant link rank 4 has: it needs no first units at rank 1.
6. During the outage a step of any arm lasts until its end, so all arms lose about 10 s, and the
   policy's gain is within what repeats differ by.

Leaves ``benchmarks/link_traces.json`` and ``link_traces.md``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.nodes import Nodes, limit, star
from regimes.config import RunConfig, from_dict, override, to_dict
from regimes.presets import get_preset
from regimes.records import load, provenance, write_output

Trace = Sequence[tuple[float, float]]  # seconds, Mbit/s
TRACES: dict[str, Trace] = {
    "constant": [(60, 240)],
    "step": [(5, 800), (600, 80)],
    "sawtooth": [(2, 800), (2, 400), (2, 200), (2, 100), (2, 48)],
    "outage": [(4, 400), (10, 0.05), (600, 400)],
    "day": [(6, 1200), (2, 400), (6, 80), (3, 200), (3, 600)],  # an hour in 0.8 s, from midnight
}
RANKS = (1, 4, 16)
STEPS, UNIT, WORKERS, BATCH, SEQUENCE, RATE, SEED = 200, 5, 2, 8, 64, 0.003, 71000
EXPOSED, LINK = 0.1, "link"
Row = dict[str, Any]


def arms() -> dict[str, RunConfig]:
    """The constant ranks, and the policy between them."""
    names = [f"r{rank}" for rank in RANKS]
    windows = STEPS * WORKERS * BATCH * SEQUENCE
    base = override(
        get_preset("lm-small"),
        [
            f"workers={WORKERS}",
            f"batch_size={BATCH}",
            f"unit_steps={UNIT}",
            f"data.train_size={windows + 1}",
            "model.width=128",
            f"optimizer.lr={RATE}",
            f"optimizer.warmup_steps={STEPS // 10}",
            f"optimizer.decay_steps=[{6 * STEPS // 10},{8 * STEPS // 10}]",
            f"evaluate_every={STEPS // UNIT}",
            f"checkpoint_every={STEPS // UNIT}",
            "levels={" + ", ".join(f"r{rank}={rank}" for rank in RANKS) + "}",
        ],
    )
    policies = {f"rank {rank}": f"{{name='static', level='r{rank}'}}" for rank in RANKS}
    policies[LINK] = f"{{name='link', exposed={EXPOSED}, levels={names}}}"
    return {name: override(base, [f"policy={text}"]) for name, text in policies.items()}


# -- on a node -------------------------------------------------------------------------------


class Replay:
    """A reporter of process 0: sets all links by the seconds of a trace, again and again, from the
    start of the training to its end."""

    def __init__(self, names: Sequence[str], trace: Trace) -> None:
        self.names, self.trace = names, trace
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._replay, daemon=True)

    def _replay(self) -> None:
        due = time.monotonic()
        for lasts, rate in itertools.cycle(self.trace):
            limit(self.names, rate)
            due += lasts
            if self.ended.wait(due - time.monotonic()):
                return

    def start(self, header: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        limit(self.names, self.trace[0][1])
        self.thread.start()

    def step(self, epoch: int, done: int, steps: int) -> None:
        pass

    def epoch(self, row: dict[str, Any], seconds: dict[str, float]) -> None:
        pass

    def stop(self, message: str) -> None:
        self.ended.set()
        self.thread.join()
        limit(self.names, None)


def train(config: dict[str, Any], out: str, names: Sequence[str], trace: Trace) -> None:
    """One training to its end; the record is in ``out``."""
    from regimes.training.loop import run

    run(from_dict(RunConfig, config), out, reporters=[Replay(names, trace)])


# -- the benchmark ---------------------------------------------------------------------------


def measured(out: str) -> Row:
    """What a record says: seconds by name, loss, levels and bytes of the units."""
    record = load(out)
    spent = {x: float(record.epochs[f"seconds_{x}"].sum()) for x in ("compute", "compress")}
    spent["communicate"] = float(record.epochs["seconds_communicate"].sum())
    total = sum(spent.values())
    levels = [next(x for x in row["layers"]["level"] if x != "dense") for row in record.rows]
    return {
        "seconds": total,
        "exposed": spent["communicate"] / total,
        "loss": float(record.epochs["metric"].iloc[-1]),
        "bytes": float(record.epochs["bytes"].sum()),
        "levels": levels,
        "changes": sum(a != b for a, b in itertools.pairwise(levels)),
    }


def measure(traces: Sequence[str], repeats: int) -> dict[str, Any]:
    rows: list[Row] = []
    load_before, began = os.getloadavg()[0], time.monotonic()
    chosen = arms()
    with star(WORKERS) as names, tempfile.TemporaryDirectory() as scratch:
        for again in range(repeats):  # in turn, because the machine's load changes
            for trace in traces:
                for arm, config in chosen.items():
                    out = f"{scratch}/{trace}-{arm}-{again}"
                    seeded = to_dict(override(config, [f"seed={SEED + again}"]))
                    details = {"config": seeded, "out": out, "names": names, "trace": TRACES[trace]}
                    with Nodes(names, 600.0) as nodes:  # processes of their own
                        nodes.ask("traced", **details)
                    limit(names, None)
                    rows.append({"trace": trace, "arm": arm, "seed": SEED + again, **measured(out)})
                    shown = {k: v for k, v in rows[-1].items() if k != "levels"}
                    print(json.dumps(shown), flush=True)
    machine = {"cores": os.cpu_count(), "system": platform.platform()}
    machine |= {
        "processor": provenance.processor_name(),
        "minutes": (time.monotonic() - began) / 60,
    }
    machine |= {"load": [load_before, os.getloadavg()[0]]}
    return {"machine": machine, "repeats": repeats, "traces": TRACES, "rows": rows}


# -- the report ------------------------------------------------------------------------------


def mean(rows: Sequence[Row], trace: str, arm: str, what: str) -> float:
    return statistics.fmean(r[what] for r in rows if (r["trace"], r["arm"]) == (trace, arm))


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What became of each prediction, in the order of the module's."""
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    constants = [f"rank {rank}" for rank in RANKS]
    calm = [trace for trace in traces if trace != "outage"]

    def of(trace: str, what: str, arm: str = LINK) -> float:
        return mean(rows, trace, arm, what)

    def better(trace: str) -> list[str]:
        """Constant ranks with fewer seconds and a lower loss."""
        return [
            arm
            for arm in constants
            if of(trace, "seconds", arm) < of(trace, "seconds")
            and of(trace, "loss", arm) < of(trace, "loss")
        ]

    changes = [r["changes"] for r in rows if (r["trace"], r["arm"]) == ("constant", LINK)]
    more = {trace: of(trace, "exposed") - of(trace, "exposed", "rank 1") for trace in calm}
    ratio = {trace: of(trace, "seconds") / of(trace, "seconds", "rank 1") for trace in calm}
    between = {
        trace: of(trace, "loss", "rank 16") < of(trace, "loss") < of(trace, "loss", "rank 1")
        for trace in calm
    }
    beaten = {trace: better(trace) for trace in traces}
    varied = [trace for trace in calm if trace != "constant"]

    def shown(found: dict[str, float]) -> str:
        return ", ".join(f"{trace} {value:.2f}" for trace, value in found.items())

    def held(good: bool) -> str:
        return "holds" if good else "**does not hold**"

    lost = {
        arm: of("outage", "seconds", arm) - of("constant", "seconds", arm)
        for arm in (*constants, LINK)
    }
    return [
        f"{held(max(changes) <= 2)}: {', '.join(map(str, changes))} changes on the constant link.",
        f"{held(max(more.values()) <= EXPOSED)}: exposed beyond rank 1 {shown(more)}.",
        f"{held(max(ratio.values()) <= 1.2)}: seconds of rank 1's {shown(ratio)}.",
        f"{held(all(between.values()))}: "
        + ", ".join(f"{t} {'between' if x else 'not between'}" for t, x in between.items())
        + ".",
        f"{held(not any(beaten[t] for t in varied) and 'rank 4' in beaten['constant'])}: better in "
        "both are "
        + ", ".join(f"{t}: {' and '.join(x) or 'none'}" for t, x in beaten.items())
        + ".",
        f"seconds on the outage less those on the constant link: {shown(lost)}.",
    ]


def markdown(result: dict[str, Any]) -> str:
    rows, machine = result["rows"], result["machine"]
    text = [
        "This page compares a policy that follows the link with every constant level within the "
        "same bounds, in seconds and in loss, on links that change. `python -m "
        "benchmarks.link_traces` measures; its docstring describes how, and has the predictions.",
        "",
        f"| trace | level | seconds of {STEPS} steps | exposed | bits per byte | MB | changes "
        f"| units at {', '.join(map(str, RANKS))} |",
        "|---|---|---|---|---|---:|---|---|",
    ]
    for trace, arm in dict.fromkeys((row["trace"], row["arm"]) for row in rows):
        own = [r for r in rows if (r["trace"], r["arm"]) == (trace, arm)]
        units = [
            f"{statistics.fmean(r['levels'].count(f'r{rank}') for r in own):.0f}" for rank in RANKS
        ]
        cells = [
            trace,
            f"**{arm}**" if arm == LINK else arm,
            ", ".join(f"{r['seconds']:.1f}" for r in own),
            ", ".join(f"{r['exposed']:.2f}" for r in own),
            ", ".join(f"{r['loss']:.3f}" for r in own),
            f"{statistics.fmean(r['bytes'] for r in own) / 1e6:.0f}",
            ", ".join(str(r["changes"]) for r in own),
            ", ".join(units),
        ]
        text.append("| " + " | ".join(cells) + " |")
    text += ["", "Predictions (means over repeats):", ""]
    text += [f"{i}. {verdict}" for i, verdict in enumerate(verdicts(rows), start=1)]
    before, after = machine["load"]
    text += [
        "",
        "Traces, as seconds x Mbit/s: "
        + "; ".join(
            f"{name} {', '.join(f'{lasts:g} x {rate:g}' for lasts, rate in trace)}"
            for name, trace in result["traces"].items()
        )
        + f". {result['repeats']} repeats, a seed each; {machine['processor']}, {machine['cores']} "
        f"cores that both processes share with others (load average {before:.1f} before, "
        f"{after:.1f} after), {machine['minutes']:.0f} minutes.",
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--traces", nargs="+", default=list(TRACES), choices=list(TRACES))
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    chosen = parser.parse_args()
    result = measure(chosen.traces, chosen.repeats)
    write_output(chosen.out / "link_traces.json", json.dumps(result, indent=1) + "\n")
    write_output(chosen.out / "link_traces.md", markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
