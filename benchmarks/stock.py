"""Three usual DDP scripts, plain and with the hook's three lines: what is sent, what is learnt.

    python -m benchmarks.stock --seeds 3      # an hour on two cores; started again, it goes on

The scripts of ``tests/shared/ddp_scripts/stock`` under torchrun on two processes, with the hook's
own choices: ACCORDION, PowerSGD of ranks 4 and 1. Plain is the same file without the marked lines.
Leaves ``benchmarks/stock.json``, ``stock.md`` and ``docs/stock.png``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regimes.records import read_header, read_lines, write_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "shared" / "ddp_scripts" / "stock"
MARK = "# regimes"
WHAT = {"mnist": "CNN, Adadelta", "words": "LSTM, clipped SGD", "vit": "ViT, AdamW, bfloat16"}
TESTED = {"mnist": "accuracy", "words": "test loss", "vit": "accuracy"}  # %, nats, %
DATA = "mnist.py and vit.py: scikit-learn's digits; words.py: bytes of Python's own library."
WAYS = {"plain": "plain DDP", "hook": "with the hook"}


def source(name: str, hooked: bool) -> str:
    """A script as it is, or without the hook's lines."""
    lines = (SCRIPTS / f"{name}.py").read_text().splitlines(True)
    return "".join(x for x in lines if hooked or not x.rstrip().endswith(MARK))


def printed(words: str, name: str) -> list[float]:
    """A number of each epoch, out of what a script has printed."""
    number = rf"^epoch .*\b{name} ([\d.]+|nan|inf)"
    return [float(x) for x in re.findall(number, words, re.MULTILINE)]


# -- to run ----------------------------------------------------------------------------------


def run(name: str, way: str, seed: int, folder: Path) -> None:
    """One script to its end; what it prints is kept."""
    shutil.rmtree(folder, ignore_errors=True)  # of one that was broken off
    folder.mkdir(parents=True)
    (folder / "script.py").write_text(source(name, way == "hook"))
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [
        str(torchrun),
        "--standalone",
        "--nproc-per-node",
        "2",
        "script.py",
        "--seed",
        str(seed),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / "part.txt").open("w") as out:
        subprocess.run(command, stdout=out, env=env, cwd=folder, check=True)
    (folder / "part.txt").rename(folder / "printed.txt")


# -- to read ---------------------------------------------------------------------------------


def read(name: str, folder: Path) -> dict[str, Any]:
    """The numbers of one run; of a hooked one what it has sent as well, in shares of plain DDP's
    bytes: per unit, and of the whole."""
    words = (folder / "printed.txt").read_text()
    train = printed(words, "train loss")
    found = {"train": train, "trained": train[-1], "tested": printed(words, TESTED[name])[-1]}
    for record in folder.glob("runs/*"):
        per_step = read_header(record)["per_step"]["dense"]["bytes"]
        rows = read_lines(record / "epochs.jsonl")
        sent, plain = ([row["bytes"] for row in rows], [per_step * row["steps"] for row in rows])
        found["shares"] = [round(x / y, 4) for x, y in zip(sent, plain, strict=True)]
        found["share"] = round(sum(sent) / sum(plain), 4)
    return found


def read_all(folder: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Per script and way, each seed's run that has ended."""
    return {
        name: {
            way: [
                read(name, file.parent)
                for file in sorted((folder / name / way).glob("seed-*/printed.txt"))
            ]
            for way in WAYS
        }
        for name in WHAT
    }


# -- to show ---------------------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    """One row per script and way: means over seeds, and their range."""
    lines = [
        "This page compares three common DDP scripts, plain and with the hook's default "
        "settings. `python -m benchmarks.stock` measures; its docstring describes the method.",
        "",
        "| script | way | seeds | training loss at the end | tested | bytes sent |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, ways in found.items():
        for way, runs in ways.items():
            trained, tested = ([r[k] for r in runs] for k in ("trained", "tested"))
            sent = statistics.fmean(run.get("share", 1) for run in runs)
            lines.append(
                f"| {name}.py: {WHAT[name]} | {WAYS[way]} | {len(runs)} | {_spread(trained, 3)} | "
                f"{TESTED[name]} {_spread(tested, 1 if TESTED[name] == 'accuracy' else 3)} | "
                f"{sent:.1%} |"
            )
    return "\n".join(lines) + "\n"


def _spread(values: list[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{statistics.fmean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def figure(found: dict[str, Any]) -> Figure:
    """A panel per script: the training loss of each epoch, mean and range over seeds."""
    from regimes.plotting import style
    from regimes.plotting.looks import LOOKS
    from regimes.plotting.words import add_headline

    looks = {"plain": LOOKS["dense"], "hook": LOOKS["accordion"]}
    with style.theme():
        fig = style.figure(2.7)
        for ax, (name, ways) in zip(fig.subplots(1, len(found)), found.items(), strict=True):
            for way, runs in ways.items():
                losses = list(zip(*(run["train"] for run in runs), strict=True))
                epochs, look = range(1, len(losses) + 1), looks[way]
                ax.fill_between(
                    epochs,
                    *zip(*((min(x), max(x)) for x in losses), strict=True),
                    color=look.colour,
                    alpha=0.2,
                    linewidth=0,
                )
                ax.plot(
                    epochs,
                    [statistics.fmean(x) for x in losses],
                    color=look.colour,
                    linewidth=1.2,
                    linestyle="-" if way == "plain" else (0, (4, 1.5)),
                    label=WAYS[way],
                )
            style.log_axis(ax)
            share = statistics.fmean(run["share"] for run in ways["hook"])
            ax.set(title=f"{name}.py: {WHAT[name]}", xlabel="epoch")
            ax.text(
                0.97,
                0.95,
                f"with the hook: {share:.0%} of the bytes",
                ha="right",
                va="top",
                fontsize=8,
                transform=ax.transAxes,
            )
        fig.axes[0].set_ylabel("training loss (nats)\nlower is better")
        handles = fig.axes[0].get_legend_handles_labels()
        fig.legend(*handles, loc="outside upper left", ncols=2, handlelength=4)
        add_headline(fig, _title(found))
        counts = [len(runs) for ways in found.values() for runs in ways.values()]
        style.add_caption(
            fig,
            f"{DATA} Mean over {style.seeds_in_words(counts)}, band: their range. "
            "Two processes; ACCORDION, PowerSGD ranks 4 and 1; untuned.",
        )
    return fig


def _title(found: dict[str, Any]) -> str:
    """The bytes with the hook, and by how much the last loss differs."""
    shares = [statistics.fmean(run["share"] for run in ways["hook"]) for ways in found.values()]
    gaps = []
    for ways in found.values():
        plain, hook = (
            statistics.fmean(run["trained"] for run in ways[way]) for way in ("plain", "hook")
        )
        gaps.append(100 * (hook / plain - 1))
    return (
        f"Three lines of hook: {100 * min(shares):.0f} to {100 * max(shares):.0f}\xa0% of the "
        f"bytes; the last training loss differs by {min(gaps):+.0f} to {max(gaps):+.0f}\xa0%"
    )


def draw(found: dict[str, Any]) -> None:
    """The table and the figure."""
    write_output(ROOT / "benchmarks" / "stock.md", markdown(found))
    from regimes.plotting import style

    write_output(ROOT / "docs" / "stock.png", style.render_figure(figure(found), "png", 130))


def main() -> None:
    """Run what is missing, then write the numbers, the table and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs", "stock"), help="for the runs")
    parser.add_argument("--draw", action="store_true", help="from stock.json, without a run")
    chosen = parser.parse_args()
    out = ROOT / "benchmarks" / "stock.json"
    if chosen.draw:
        return draw(json.loads(out.read_text()))
    for seed in range(1, chosen.seeds + 1):
        for name in WHAT:
            for way in WAYS:
                folder = chosen.out / name / way / f"seed-{seed}"
                if not (folder / "printed.txt").exists():
                    run(name, way, seed, folder)
                print(folder, flush=True)
    found = read_all(chosen.out)
    write_output(out, json.dumps(found) + "\n")
    return draw(found)


if __name__ == "__main__":
    main()
