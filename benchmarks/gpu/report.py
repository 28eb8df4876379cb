"""The page of a campaign's lines, and the seconds that the next one plans with.

python -m benchmarks.gpu.report benchmarks/gpu/h200.jsonl --estimates
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.gpu.catalogue import ESTIMATES
from benchmarks.gpu.lines import Lines
from benchmarks.gpu.setting import GRID
from regimes.records import write_output

WORDS = """\
`python -m benchmarks.gpu` on one GPU. A step's milliseconds are the median over three units of one
process, between the first launch and the end of the last kernel of a unit, with the least and the
most of the three, which are too few for an interval; *host* is the processor time of all threads
for a step, *kernels* its launches (of a replayed graph, its nodes), *waits* how often the host
waits for the device in a step, *MiB* the most memory that was allocated. Every row computes in
bfloat16 (autocast), with nondeterministic kernels and fused optimisers. The peers train on one
batch that stays on the device, without data, augmentation or record; DDP is a group of one process
over NCCL. *Ratio* is to the plain loop of the same network. Ours is the whole trainer, in which
each worker has BatchNorm statistics of its own, and not the hook of `regimes.attach`, which was not
timed; with TopK, 4 bits and the GPT each worker also has a pass of its own, where the plain loop
has one of four times the batch."""
FINDINGS = "../../docs/findings/paper.md#the-papers-network-and-data-in-a-fifteenth-of-its-epochs"
HEAD = (
    "| row | ms | least to most | host ms | kernels | waits | MiB | ratio |",
    "|---|---:|---:|---:|---:|---:|---:|---:|",
)


def main() -> None:
    """Write the page beside the lines; with --estimates the table of seconds, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lines", type=Path)
    parser.add_argument("--estimates", action="store_true", help="write estimates.json anew")
    chosen = parser.parse_args()
    lines = Lines(chosen.lines)
    write_output(chosen.lines.with_suffix(".md"), page(lines))
    if chosen.estimates:
        known = json.loads(ESTIMATES.read_text())
        write_output(ESTIMATES, json.dumps(estimates(lines, known), indent=1) + "\n")


def estimates(lines: Lines, known: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Seconds by part and row: as measured, else as they were known; of runs the mean."""
    found = {part: dict(table) for part, table in known.items()}
    for part, table in found.items():
        rows = {r["name"]: r["seconds"] for r in lines.rows if r["part"] == part and r["ok"]}
        if part == "setting" and rows:  # side by side or not: what the device takes for one
            ran = [r for r in lines.rows if r["part"] == part and r["ok"]]
            span = max(r["at"] for r in ran) - min(r["at"] - r["seconds"] for r in ran)
            table["usual"] = round(span / len(ran), 1)
        elif part != "setting":
            table.update(rows)
    return found


def page(lines: Lines) -> str:
    """The Markdown."""
    good = {(r["part"], r["name"]): r for r in lines.rows if r.get("ok")}
    checks = {name: row for (part, name), row in good.items() if part == "correct"}
    failed = {
        row["name"]: row["detail"]
        for row in lines.rows
        if row["part"] == "correct" and not row["ok"] and row["name"] not in checks
    }
    device = checks["versions"]["detail"]
    said = [f"# One GPU\n\n{device}.\n\n{WORDS}\n"]
    ceilings = good["speed", "ceilings"]
    said.append(
        f"A copy moves {ceilings['GB_per_s']:,.0f} GB/s, a product in bfloat16 computes "
        f"{ceilings['TFLOP_per_s']:.0f} TFLOP/s.\n"
    )
    images = {k: r for k, r in good.items() if "ms" in r and not k[1].startswith("GPT-2")}
    texts = {k: r for k, r in good.items() if "ms" in r and k[1].startswith("GPT-2")}
    said.append("## ResNet-18, 4 workers x 128 images of 32 x 32\n\n" + table(images))
    said.append("## GPT-2 124M, 4 workers x 4 texts of 1,024 tokens\n\n" + table(texts))
    said.append(added_section(good))
    ours, theirs = (good["speed", f"eigenvalue, {name}"] for name in ("lanczos", "pyhessian"))
    said.append(
        "## Top eigenvalue of the Hessian, ResNet-18, 512 images, strict float32\n\n"
        "| | value | products | s |\n|---|---:|---:|---:|\n"
        f"| ours | {ours['value']:.4f} | {ours['products']} | {ours['s']:.2f} |\n"
        f"| PyHessian | {theirs['value']:.4f} | {theirs['products']} | {theirs['s']:.2f} |\n"
    )
    runs = {name: row for (part, name), row in good.items() if part == "setting"}
    if runs:
        said.append(setting_section(lines, runs))
    said.append("## Checks\n\n| check | result |\n|---|---|")
    said[-1] += "".join(f"\n| {name} | {row['detail']} |" for name, row in checks.items())
    said[-1] += "".join(f"\n| {name} | **failed**: {why} |" for name, why in failed.items()) + "\n"
    return "\n".join(said)


def setting_section(lines: Lines, runs: dict[str, dict[str, Any]]) -> str:
    """The runs of the paper's setting, beside what was predicted of them."""
    prediction = next(r["prediction"] for r in lines.rows if r["part"] == "plan")
    text = (
        f"## ResNet-18 on all of CIFAR-10 (`regimes ablate {GRID}`)\n\n"
        f"Predicted before: {prediction}. Accuracy is the mean of the last three evaluations, of "
        f"one run a row; [the findings]({FINDINGS}) have all seeds, with intervals.\n\n"
        "| schedule | seed | epochs | accuracy % | M floats |\n|---|---:|---:|---:|---:|"
    )
    for name, row in runs.items():
        schedule, _, seed = name.partition("/seed-")
        text += (
            f"\n| {schedule} | {seed} | {row['epochs']} | {100 * row['metric']:.2f} | "
            f"{row['floats'] / 1e6:.1f} |"
        )
    return text + "\n"


ADDED = {  # a network: what PowerSGD adds to, and is added to, of ours and of torch's
    "ResNet-18, PowerSGD 2": (("powersgd 2", "dense"), ("DDP, torch's PowerSGD 2", "DDP")),
    "GPT-2, PowerSGD 4": (
        ("GPT-2, powersgd 4", "GPT-2, dense"),
        ("GPT-2, DDP, torch's PowerSGD 4", "GPT-2, DDP"),
    ),
}


def added_section(good: dict[tuple[str, str], dict[str, Any]]) -> str:
    """What PowerSGD adds to a step of the same kind."""
    text = (
        "## What PowerSGD adds to a dense step of the same kind\n\nMilliseconds: ours to our dense "
        "trainer, torch's hook to DDP; in brackets, the least and the most that the units allow."
        "\n\n"
        "| | ours | torch's hook | ratio |\n|---|---:|---:|---:|"
    )
    for name, kinds in ADDED.items():
        cells, added = [], []
        for pair in kinds:
            whole, base = (good["speed", f"{row}, bfloat16"] for row in pair)
            added.append(whole["ms"] - base["ms"])
            low, high = whole["least"] - base["most"], whole["most"] - base["least"]
            cells.append(f"{added[-1]:.1f} [{low:.1f}, {high:.1f}]")
        text += f"\n| {name} | {' | '.join(cells)} | {added[0] / added[1]:.2f} |"
    return text + "\n"


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Rows of speed, each with its ratio to the plain loop."""
    plain = next(
        row["ms"] for (_, name), row in rows.items() if name.endswith("plain loop, bfloat16")
    )
    lines = [
        f"| {name.removeprefix('GPT-2, ').removesuffix(', bfloat16')} | {row['ms']:.2f} | "
        f"{row['least']:.2f} to {row['most']:.2f} | "
        f"{row['host_ms']:.1f} | {row['kernels']:.0f} | {row['waits']:g} | {row['MiB']:,} | "
        f"{row['ms'] / plain:.2f} |"
        for (_, name), row in rows.items()
    ]
    return "\n".join([*HEAD, *lines, ""])


if __name__ == "__main__":
    main()
