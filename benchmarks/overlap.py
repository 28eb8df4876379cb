"""Seconds per step with gradients reduced during backward, and after it.

    taskset -c 1 python -m benchmarks.overlap     # Linux, root, iproute2; 10 min

Two processes of one worker each (gloo, a network namespace of their own) train digits, all on the
cores that the benchmark is given. The loopback between them is limited by ``tc tbf`` to a rate that
both directions share, or unlimited. ``bucket_mb`` larger than the model: one bucket, reduced after
backward. The settings of a row alternate, run by run; a ratio is of two neighbouring runs, each
with the mean seconds of a step in its second and third epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.trainers import Training
from regimes.config import RunConfig, override
from regimes.presets import get_preset
from regimes.records import load, write_output

AFTER = 1e6  # megabytes: a bucket larger than any model
BASE = [
    "workers=2",
    "epochs=3",
    "data.train_size=160",
    "data.test_size=100",
    "optimizer.decay_epochs=[]",
    "optimizer.warmup_from=none",
    "optimizer.lr=0.01",
    "checkpoint_every=3",
    "batch_size=16",
    "policy=static",
]
MODELS = {  # settings, megabytes of a bucket
    "resnet18 (45 MB)": (["model.name=resnet18-cifar10", "model.width=none"], (25.0,)),
    "vgg7 (0.3 MB)": (["model.name=vgg7", "model.width=16"], (0.05,)),
}
RATES = {"resnet18 (45 MB)": (1000, None), "vgg7 (0.3 MB)": (100,)}  # Mbit/s
Row = dict[str, Any]


def limit(rate: int | None) -> None:
    """Set the loopback of this namespace to a rate in Mbit/s."""
    subprocess.run(["tc", "qdisc", "delete", "dev", "lo", "root"], capture_output=True, check=False)
    if rate is not None:
        words = f"tc qdisc add dev lo root tbf rate {rate}mbit burst {rate * 125} limit 16mb"
        subprocess.run(words.split(), check=True)


def seconds(config: RunConfig, out: Path) -> dict[str, float]:
    """Seconds per step after the first epoch: in all, and what the loop spent in each phase."""
    ends = Training([config] * 2, out).ends()
    assert all(end.code == 0 for end in ends), ends
    epochs = load(out).epochs.iloc[1:]
    phases = {
        name: epochs[f"seconds_{name}"] / epochs["steps"]
        for name in ("compute", "compress", "communicate")
    }
    total = sum(phases.values())
    return {"step": float(total.mean())} | {k: float(v.mean()) for k, v in phases.items()}


def compare(model: str, level: str, rate: int | None, times: int, scratch: Path) -> list[Row]:
    """One row per size of the buckets; the first is the reduction after backward."""
    settings, sizes = MODELS[model]
    limit(rate)
    found: dict[float, list[dict[str, float]]] = {size: [] for size in (AFTER, *sizes)}
    for again in range(times):
        for size in found:
            words = [*BASE, *settings, f"policy.level={level}", f"bucket_mb={size}"]
            out = scratch / f"{model[:4]}-{level}-{rate}-{size}-{again}"
            found[size].append(seconds(override(get_preset("smoke"), words), out))
    return [
        {
            "model": model,
            "level": level,
            "mbit_per_s": rate,
            "bucket_mb": size,
            "runs": times,
            **{name: statistics.median(run[name] for run in runs) for name in runs[0]},
            "ratios": sorted(
                run["step"] / plain["step"] for run, plain in zip(runs, found[AFTER], strict=True)
            ),
        }
        for size, runs in found.items()
    ]


def markdown(rows: list[Row]) -> str:
    text = [
        "This page shows how much time a step saves if gradients are sent during the backward"
        " pass instead of after it. `python -m benchmarks.overlap` measures; its docstring "
        "describes the method.",
        "",
        "| model | sends | Mbit/s | buckets | ms / step | compute | compress | communicate "
        "| ratio to after backward (range) |",
        "|---|---|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        after = row["bucket_mb"] == AFTER
        ratios = row["ratios"]
        text.append(
            f"| {row['model']} | {row['level']} | {row['mbit_per_s'] or 'unlimited'} | "
            f"{'after backward' if after else '{:g} MB'.format(row['bucket_mb'])} | "
            + " | ".join(
                f"{1e3 * row[k]:.0f}" for k in ("step", "compute", "compress", "communicate")
            )
            + (
                " | |"
                if after
                else f" | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
            )
        )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--report", type=Path, default=Path("benchmarks/overlap.json"))
    chosen = parser.parse_args()
    if os.environ.get("REGIMES_OVERLAP") is None:  # once more, in a namespace of its own
        words = ["unshare", "--net", sys.executable, "-m", "benchmarks.overlap", *sys.argv[1:]]
        sys.exit(subprocess.run(words, env={**os.environ, "REGIMES_OVERLAP": "1"}).returncode)
    subprocess.run(["ip", "link", "set", "lo", "mtu", "1500", "up"], check=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for model, rates in RATES.items():
            for rate in rates:
                for level in ("dense", "low"):
                    rows += compare(model, level, rate, chosen.times, Path(scratch))
                    print("\n".join(markdown(rows).splitlines()[4:]), flush=True)
    machine = {"cores": sorted(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    write_output(chosen.report, json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    write_output(chosen.report.with_suffix(".md"), markdown(rows))


if __name__ == "__main__":
    main()
