"""The pages and the figure of ``benchmarks.kills`` and ``benchmarks.dying``.

python -m benchmarks.replicas_report
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.dying import ARMS, DEATHS, SECONDS, STEP, UNIT
from benchmarks.replicas import HEARTBEAT, LIMIT, read_notes

HERE = Path(__file__).parent


def machine(found: Sequence[dict[str, Any]]) -> str:
    """Which processors have measured."""
    return f"Processor: {', '.join(sorted({f['processor'] for f in found}))}."


def kills_page(found: Sequence[dict[str, Any]]) -> str:
    """What became of the kills, by kind of job."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for f in sorted((f for f in found if "kills" in f), key=lambda f: not f["one at a time"]):
        when = "" if f["one at a time"] else ", several dead together"
        sessions.setdefault(f"{f['kind']}{when}", []).append(f)
    lines = [
        "This page shows what happens to a job of three replicas when one is killed (`kill -9`) at "
        "a random moment and started again at once or within two seconds. `python -m "
        "benchmarks.kills` does it on one machine, with real processes, torchft's lighthouse and "
        "managers. The next kill comes when the last replica has joined again; with *several dead "
        "together* it comes at any time, so that two or three may be dead, and with three the "
        "job's state is lost.",
        "",
        "| | " + " | ".join(sessions) + " |",
        "|---|" + "---:|" * len(sessions),
    ]
    rows = {
        "kills": lambda s: sum(f["kills"] for f in s),
        "jobs": lambda s: len(s),
        "synchronisations": lambda s: sum(f["synchronisations"] for f in s),
        "of these with replicas that differ": lambda s: sum(f["differing"] for f in s),
        "jobs that went on to their end": lambda s: sum(not f["ended badly"] for f in s),
        "jobs whose three replicas are the same at the end": lambda s: sum(
            f["equal at the end"] for f in s
        ),
        "times that a job began again, with no replica left": lambda s: sum(
            f["began again"] for f in s
        ),
        "records that are whole": lambda s: sum(f["record"] == "whole" for f in s),
        "replicas that left, by the records": lambda s: sum(f["left"] for f in s),
        "replicas that joined, by the records": lambda s: sum(f["joined"] for f in s),
        "steps that did not count": lambda s: sum(f["uncommitted"] for f in s),
        "errors by which replicas ended, an equal one once a job": lambda s: sum(
            len(f["errors"]) for f in s
        ),
        "seconds from start to joined, median of the jobs' medians": lambda s: round(
            statistics.median(x for f in s if (x := f["seconds to join, median"])), 2
        ),
        "longest pause between two synchronisations, s": lambda s: max(
            f["longest pause"] for f in s
        ),
    }
    for name, count in rows.items():
        cells = " | ".join(str(count(part)) for part in sessions.values())
        lines.append(f"| {name} | {cells} |")
    lines += [
        "",
        "A kill that hits a replica before it has joined is no replica that left. After a kill the "
        f"lighthouse counts a replica as dead after {HEARTBEAT / 1000:g} s without a sign, and it "
        "forms a quorum only of more than half of the replicas that give signs: a survivor next to "
        "two that start waits for them. A replica that loads its state from one that has just died "
        f"waits for torchft's timeout, {LIMIT.seconds} s here. {machine(found)}",
        "",
    ]
    for dead in (f for f in found if f.get("lighthouse")):
        said = "; ".join(f"`{text}`" for text in dead["said"])
        lines += [
            f"**The lighthouse is killed** ({dead['kind']}): exit codes {dead['codes']} after "
            f"{dead['seconds']} s. They say {said}. The record's last event is "
            f"`{dead['last event']}`.",
            "",
        ]
    return "\n".join(lines)


def steps_by(run: dict[str, Any], second: float) -> int:
    """The newest step by then."""
    moments = zip(run["seconds"], run["steps"], strict=True)
    return max((step for t, step in moments if t <= second), default=0)


def pause(run: dict[str, Any]) -> float:
    """The longest time without a synchronisation, the end of the run included."""
    moments = [0.0, *run["seconds"], SECONDS]
    return max(b - a for a, b in itertools.pairwise(moments))


def dying_page(runs: Sequence[dict[str, Any]]) -> str:
    seeds = sorted({r["seed"] for r in runs})
    whole = [s for s in seeds if sum(r["seed"] == s for r in runs) == len(ARMS)]
    lines = [
        "This page compares two jobs of three replicas, one of which is killed every "
        f"{DEATHS:g} s and started again: one goes on with those present (torchft, "
        "`local_steps(..., manager=manager)`), the other ends and starts again from its last "
        f"checkpoint, at most {UNIT} steps old. Both take local steps and average every 8; a step "
        f"waits {1000 * STEP:g} ms in place of computing. `python -m benchmarks.dying`, "
        f"{SECONDS:g} s each, {len(whole)} seeds.",
        "",
        "![Steps that two jobs are behind an undisturbed one, against seconds](dying.png)",
        "",
        f"Lowest test loss in {SECONDS:g} s, steps before the first death and in all, and the "
        "longest time without a synchronisation:",
        "",
        "| seed | job | loss | steps before a death | steps | longest pause |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    shares: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in whole:
        own = {r["arm"]: r for r in runs if r["seed"] == seed}
        for arm, one in own.items():
            before, after = steps_by(one, DEATHS), max(one["steps"])
            shares[arm].append(after / max(own[ARMS[0]]["steps"]))
            cells = f"{min(one['losses']):.3f} | {before} | {after} | {pause(one):.0f} s"
            lines.append(f"| {seed} | {arm} | {cells} |")
    spread = "; ".join(
        f"{arm} {statistics.mean(shares[arm]):.2f} ({', '.join(f'{x:.2f}' for x in shares[arm])})"
        for arm in ARMS[1:]
        if shares[arm]
    )
    lines += [
        "",
        f"Steps relative to the undisturbed job of the same seed: {spread}.",
        "",
        "Neither is shown to be better here. The job that starts again is favoured: a death is "
        "known at once, all processes start within a second because they are forked from one that "
        f"has torch imported, and a checkpoint is at most {UNIT} steps old, which is "
        f"{UNIT * STEP:g} s. A job whose start takes a minute loses that minute with each death. "
        "The job that goes on pays the time until the lighthouse counts the dead replica as dead "
        f"({HEARTBEAT / 1000:g} s), whatever a start takes, and a step that does not count. "
        f"{machine(runs)}",
        "",
    ]
    return "\n".join(lines)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """How many steps the undisturbed job of the same seed is ahead, each second."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    whole = {run["seed"]: run for run in runs if run["arm"] == ARMS[0]}
    seconds, shares = range(int(SECONDS) + 1), []
    for arm, words, look in (
        (ARMS[1], "goes on with those present", {"color": "tab:blue"}),
        (ARMS[2], "starts again from a checkpoint", {"color": "tab:orange", "linestyle": "--"}),
    ):
        own = [run for run in runs if run["arm"] == arm]
        for number, run in enumerate(own):
            steps = [steps_by(whole[run["seed"]], t) - steps_by(run, t) for t in seconds]
            axes.plot(seconds, steps, linewidth=1.3, label="" if number else words, **look)
        lost = [1 - max(run["steps"]) / max(whole[run["seed"]]["steps"]) for run in own]
        shares.append(f"{100 * statistics.mean(lost):.1f} %")
    for k in range(1, int(SECONDS / DEATHS) + 1):
        axes.axvline(k * DEATHS, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel="seconds (grey lines: a replica dies)", ylabel="steps behind, lower is better")
    axes.set_title(
        f"A death each {DEATHS:g} s costs {' and '.join(shares)} of the steps", loc="left"
    )
    axes.legend(
        frameon=False, title=f"a job of three replicas, {len(whole)} seeds", loc="upper left"
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    if found := read_notes(HERE / "kills.jsonl"):
        (HERE / "kills.md").write_text(kills_page(found))
    if (HERE / "dying.json").exists():
        runs = json.loads((HERE / "dying.json").read_text())
        (HERE / "dying.md").write_text(dying_page(runs))
        draw(runs, HERE / "dying.png")


if __name__ == "__main__":
    main()
